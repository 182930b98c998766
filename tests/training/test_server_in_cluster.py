"""The parameter server as a Spark task, for drivers that executors cannot reach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
from pyspark.sql import SparkSession
from support.training.spark_jobs import (
    assert_no_jobs,
    assert_nothing_left,
    committed,
    counting_model,
    counting_rows,
    counts,
    expected_ranges,
    total,
)

from distkeras import Network, Trainer
from distkeras.ps.errors import BadValueError, ConfigurationError, DifferentJobError
from distkeras.settings import grouped

ROWS, BATCH, EPOCHS = 41, 4, 2


def trainer(**options: Any) -> Trainer:
    given = {"loss": total, "worker_optimizer": keras.optimizers.SGD(1.0), "num_workers": 1, "batch_size": BATCH}
    return Trainer(
        counting_model(ROWS), "downpour", **grouped(given | {"server": "cluster", "num_epoch": EPOCHS} | options)
    )


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "spark" in request.fixturenames:
        spark = request.getfixturevalue("spark")
        assert_nothing_left()
        assert_no_jobs(spark)


def test_a_job_with_its_server_in_the_cluster_trains_every_mini_batch_once(spark: SparkSession, tmp_path: Path) -> None:
    made = trainer()
    model = made.train(counting_rows(spark, ROWS), checkpoint=tmp_path / "new")
    assert counts(model) == [EPOCHS] * ROWS
    assert committed(made) == expected_ranges({0: ROWS}, EPOCHS, BATCH)
    names = {path.name.partition("-")[0] for path in (tmp_path / "new").iterdir()}
    assert names == {"owner", "server", "snapshot", "log"}


@pytest.mark.slow
def test_a_job_with_its_server_in_the_cluster_resumes(spark: SparkSession, tmp_path: Path) -> None:
    trainer(num_epoch=1).train(counting_rows(spark, ROWS), checkpoint=tmp_path)
    made = trainer()
    with pytest.raises(ConfigurationError, match="must be an empty directory"):
        made.train(counting_rows(spark, ROWS), checkpoint=tmp_path)
    with pytest.raises(DifferentJobError, match="batch_size"):
        trainer(batch_size=5).train(counting_rows(spark, ROWS), checkpoint=tmp_path, resume=True)
    model = made.train(counting_rows(spark, ROWS), checkpoint=tmp_path, resume=True)
    assert made.resumed is not None
    assert made.resumed.exact
    assert counts(model) == [EPOCHS] * ROWS


@pytest.mark.slow
def test_a_worker_that_fails_ends_the_job_with_its_error(spark: SparkSession, tmp_path: Path) -> None:
    def broken(value: Any) -> Any:
        raise RuntimeError("it is broken")

    with pytest.raises(BadValueError, match="RuntimeError: it is broken") as failure:
        trainer(decode=broken).train(counting_rows(spark, ROWS), checkpoint=tmp_path)
    assert failure.value.worker == 0


@pytest.mark.slow
def test_invalid_options_are_refused_before_any_work(spark: SparkSession, tmp_path: Path) -> None:
    rows = counting_rows(spark, ROWS)
    with pytest.raises(ConfigurationError, match=r"`checkpoint` must be a folder that every executor reaches.*None"):
        trainer().train(rows)
    with pytest.raises(ConfigurationError, match=r"`num_workers` must be at most 1, .* at once next to the server"):
        Trainer(counting_model(ROWS), "ssgd", loss=total, network=Network(server="cluster"), num_workers=2).train(
            rows, checkpoint=tmp_path
        )
    with pytest.raises(ConfigurationError, match="needs 4 slots for the server and its shards and one for a worker"):
        trainer(shards=3).train(rows, checkpoint=tmp_path)
    with pytest.raises(ConfigurationError, match="`host` must be None with server='cluster'"):
        trainer(host="127.0.0.1")
