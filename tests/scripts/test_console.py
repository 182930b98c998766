"""Tests of what `distkeras train` and `distkeras score` print on the console."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import keras
import numpy as np
import pytest
from pyspark.sql import SparkSession
from support.patience import patience
from support.training.spark_jobs import assert_nothing_left

from distkeras.commands.main import main
from distkeras.data.datasets import write_parquet

LOSS = "sparse_categorical_crossentropy"
#: A line of this project's log: time, name, level.
LINE = re.compile(r"\d\d:\d\d:\d\d distkeras (INFO|WARNING) ")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    features = np.random.default_rng(0).random((2000, 4)).astype(np.float32)
    write_parquet(folder / "data.parquet", features, (features.sum(axis=1) > 2).astype(np.int64))
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")]).save(folder / "model.keras")
    return folder


def command(files: Path, *words: str) -> list[str]:
    options = ["--rule", "agn", "--workers", "2", "--optimizer", "adam", "--loss", LOSS, "--metrics", "accuracy"]
    where = ["--data", str(files / "data.parquet"), "--model", str(files / "model.keras")]
    return [sys.executable, "-m", "distkeras", "train", *where, *options, *words]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=patience(240))


# The tables and the report are tested in test_train.py, and the terminal's output below.
@pytest.mark.slow
def test_train_prints_nothing_but_its_log_and_report(files: Path, tmp_path: Path) -> None:
    trained = run(command(files, "--out", "out", "--epochs", "2"), tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert all(LINE.match(line) for line in trained.stderr.splitlines()), trained.stderr
    first, head, *rows, last = trained.stdout.splitlines()
    assert first.startswith("agn: 4,000 samples and ")
    assert head.split() == ["epoch", "samples", "loss", "accuracy"]
    assert [row.split()[:2] for row in rows] == [["1", "2,000"], ["2", "2,000"]]
    assert last == "Model, history and commits are in out"


@pytest.mark.slow
def test_score_prints_nothing_but_its_log_and_report(files: Path, tmp_path: Path) -> None:
    data, model = str(files / "data.parquet"), str(files / "model.keras")
    words = [sys.executable, "-m", "distkeras", "score", "--data", data, "--model", model, "--out", "scored"]
    scored = run([*words, "--thresholds", "0.9", "0.1"], tmp_path)
    assert (scored.returncode, scored.stderr) == (0, "")
    assert scored.stdout == "Predictions are in scored\n"


@pytest.mark.slow
def test_debug_shows_the_traceback_and_the_logs_of_libraries(files: Path, tmp_path: Path) -> None:
    ended = run(command(files, "--out", "out", "--features", "pixels", "--debug"), tmp_path)
    assert ended.returncode != 0
    assert "Traceback" in ended.stderr
    assert "log4j" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("saved", [True, False])
def test_ctrl_c_prints_the_progress_and_how_to_continue(
    train: ModuleType,
    spark: SparkSession,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    saved: bool,
) -> None:
    """A real SIGINT is sent when the job makes progress, in this process, which already has Spark and Keras."""

    class Interrupt(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "samples/s" in record.getMessage():
                log.removeHandler(self)
                os.kill(os.getpid(), signal.SIGINT)

    log = logging.getLogger("distkeras")
    log.addHandler(Interrupt())
    # The session must survive the command.
    monkeypatch.setattr(train, "spark_session", lambda: contextlib.nullcontext(spark))
    words = ["--out", str(tmp_path / "out"), "--epochs", "1000000", "--log-every", "0.5"]
    words += ["--checkpoint", str(tmp_path / "checkpoint")] if saved else []
    assert main(command(files, *words)[3:]) == 130
    *_, last = capsys.readouterr().err.splitlines()
    assert_interrupted(last, saved)
    assert not list((tmp_path / "out").iterdir())
    assert_nothing_left()


def assert_interrupted(line: str, saved: bool) -> None:
    assert re.match(r"distkeras train: interrupted\. [\d,]+ commits were applied; the latest are of epoch \d+\. ", line)
    assert ("with --resume continues from" in line) == saved
