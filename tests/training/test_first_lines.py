"""How much of an error is shown, and that its first line says it."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from support.present import present
from support.spark_jobs import wrong_model

from distkeras import Trainer
from distkeras.ps.errors import BadValueError, ConfigurationError

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(120)]

GOOD = [([float(number), 1.0], number % 2) for number in range(20)]


def train(spark: SparkSession, rows: list[Any]) -> None:
    trainer = Trainer(wrong_model(), "downpour", loss="sparse_categorical_crossentropy", num_workers=1)
    trainer.train(spark.createDataFrame(rows, "features array<float>, label int"))


class TestWhatIsShown:
    def lines(self, error: BaseException) -> list[str]:
        return "".join(traceback.format_exception(error)).splitlines()

    def test_a_bad_row(self, spark: SparkSession) -> None:
        with pytest.raises(BadValueError) as caught:
            train(spark, [*GOOD, (None, 0)])
        shown = self.lines(caught.value)
        assert len(shown) <= 15
        assert shown[-1].startswith("distkeras.ps.errors.BadValueError: values must not be null.")
        assert "_flatten" in present(caught.value.remote_traceback)

    def test_a_python_without_distkeras(
        self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """As where the interpreter of `PYSPARK_PYTHON` has nothing installed."""
        bare = tmp_path / "bare-python"
        bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        bare.chmod(0o755)
        monkeypatch.setattr(spark.sparkContext, "pythonExec", str(bare))
        text = r"^the executors' Python must .*No module named.*bare-python"
        with pytest.raises(ConfigurationError, match=text) as caught:
            train(spark, GOOD)
        assert len(self.lines(caught.value)) <= 15
