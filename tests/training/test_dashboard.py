"""The page of a trainer that trains on Spark: it shows the same numbers as the job's tables."""

from __future__ import annotations

import gc
import http.client
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pyspark.sql import DataFrame, SparkSession
from support.patience import patience, until
from support.training.spark_jobs import (
    assert_nothing_left,
    counting_model,
    counting_rows,
    once_at_step,
    step_callback_layer,
    total,
    wrong_model,
)

from distkeras import Callback, Dashboard, EarlyStopping, Trainer
from distkeras.callbacks import CallbackContext
from distkeras.dashboard.dashboard import watch_of
from distkeras.dashboard.watch import read_since
from distkeras.ps.errors import WorkerError
from distkeras.ps.rules import make
from distkeras.settings import grouped

SPARSE = "sparse_categorical_crossentropy"


def trainer_of(**options: Any) -> Trainer:
    given: dict[str, Any] = {
        "num_workers": 2,
        "batch_size": 8,
        "num_epoch": 3,
        "measure_gap": True,
        "metrics": ["accuracy"],
    }
    return Trainer(wrong_model(), make("downpour", window=2), loss=SPARSE, **grouped(given | options))


def messages(trainer: Trainer) -> list[dict[str, Any]]:
    return [json.loads(entry.data) for entry in read_since(watch_of(trainer).path)]


@pytest.mark.slow
def test_the_page_shows_the_numbers_of_the_tables(spark: SparkSession, clouds: DataFrame, tmp_path: Path) -> None:
    trainer = trainer_of()
    with Dashboard.of(trainer) as dashboard:
        assert messages(trainer) == []
        stopping = EarlyStopping(clouds, "loss", every_commits=5)
        trainer.train(clouds, callbacks=[stopping])
        whole = messages(trainer)[-1]
        history, commits = trainer.history.toPandas(), trainer.commits.toPandas()
        assert whole["now"]["state"] == "done"
        assert (whole["now"]["commits"], whole["now"]["samples"]) == (len(commits), history["samples"].sum())
        assert whole["workers"]["commits"] == commits.groupby("worker").size().tolist()
        assert whole["metrics"] == ["loss", "accuracy"]
        facts = whole["facts"]
        assert (facts["model"], facts["columns"], facts["monitor"]) == (
            trainer.model.name,
            ["features", "label"],
            "loss",
        )
        assert facts["parameters"] == sum(weights.size for weights in trainer.model.get_weights())
        assert whole["now"]["rows"] == clouds.count()
        assert sum(whole["job"]["commits"]) == len(commits)
        assert sum(whole["staleness"]["counts"]) == len(commits)
        assert [row[1] for row in whole["evaluations"]] == [int(row["clock"]) for row in stopping.evaluations]
        assert "done" in dashboard.save(tmp_path / "job.html").read_text()
    assert dashboard.closed
    assert_nothing_left()


@pytest.mark.slow
def test_a_dashboard_is_a_callback(clouds: DataFrame, tmp_path: Path) -> None:
    trainer = trainer_of(num_epoch=1)
    with Dashboard() as dashboard:
        stopping = EarlyStopping(clouds, "loss", every_commits=5)
        trainer.train(clouds, callbacks=[dashboard, stopping])
        whole = json.loads(read_since(dashboard.watches[0].path)[-1].data)
        assert whole["now"]["state"] == "done"
        assert whole["now"]["commits"] == trainer.commits.count()
        assert [row[1] for row in whole["evaluations"]] == [int(row["clock"]) for row in stopping.evaluations]
        assert "done" in dashboard.save(tmp_path / "job.html").read_text()
    assert trainer.observers == []
    assert_nothing_left()


@pytest.mark.slow
def test_a_page_that_is_opened_after_training_shows_the_whole_job(clouds: DataFrame, tmp_path: Path) -> None:
    trainer = trainer_of()
    trainer.train(clouds)
    dashboard = Dashboard.of(trainer)
    assert Dashboard.of(trainer) is dashboard
    assert messages(trainer)[-1]["now"]["commits"] == trainer.commits.count()
    other = trainer_of()
    both = Dashboard.of(trainer, other)
    assert dashboard.closed
    assert len(both.watches) == 2
    del trainer, dashboard
    gc.collect()
    assert both.closed, "the page was not closed with its trainer"
    assert_nothing_left()


@pytest.mark.slow
def test_a_second_job_of_a_trainer_has_the_same_page(clouds: DataFrame) -> None:
    trainer = trainer_of(num_epoch=1)
    with Dashboard.of(trainer):
        trainer.train(clouds)
        first = messages(trainer)[-1]["now"]["commits"]
        trainer.train(clouds)
        assert messages(trainer)[-1]["now"]["commits"] == first
        assert messages(trainer)[-1]["now"]["state"] == "done"


class _UntilShown(Callback):
    """A callback that ends the job once the page has shown training and the takeover of a partition."""

    every_seconds = 0.1

    def __init__(self, shown: list[dict[str, Any]]) -> None:
        super().__init__()
        self.shown = shown

    def on_center(self, context: CallbackContext) -> None:
        training = any(message["now"]["state"] == "training" for message in self.shown)
        if training and any(message.get("kinds", {}).get("takeover") for message in self.shown):
            context.stop("the page has shown it")


@pytest.mark.slow
def test_an_open_page_shows_the_takeover_after_a_worker_died(spark: SparkSession, tmp_path: Path) -> None:
    """A browser that connected before training receives the takeover event before training ends."""
    rows = 64
    hook = step_callback_layer(once_at_step(tmp_path / "killed", 5, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    trainer = Trainer(
        counting_model(rows, hook),
        make("downpour", window=1),
        worker_optimizer="sgd",
        loss=total,
        num_workers=2,
        batch_size=2,
        num_epoch=1_000_000,
    )
    with Dashboard.of(trainer) as dashboard:
        parts = urlsplit(dashboard.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=patience(60))
        connection.request("GET", parts.path + "jobs/0")
        answer = connection.getresponse()
        received: list[dict[str, Any]] = []

        def listen() -> None:
            for line in iter(answer.readline, b""):
                if line.startswith(b"data: "):
                    received.append(json.loads(line[6:]))

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        trainer.train(counting_rows(spark, rows), callbacks=[_UntilShown(received)])
        until(lambda: received and received[-1]["now"]["state"] == "stopped")
        assert received[-1]["kinds"]["takeover"] == 1
        assert sum(received[-1]["workers"]["retries"]) == 1
    listener.join(patience(10))
    connection.close()


@pytest.mark.slow
def test_the_page_shows_the_error_of_a_failed_job(clouds: DataFrame, spark: SparkSession) -> None:
    def fail(step: int) -> None:
        raise ValueError("<b>no</b> more")

    trainer = Trainer(
        counting_model(8, step_callback_layer(fail)), "downpour", worker_optimizer="sgd", loss=total, num_workers=1
    )
    with Dashboard.of(trainer):
        with pytest.raises(WorkerError):
            trainer.train(counting_rows(spark, 8))
        now = messages(trainer)[-1]["now"]
        assert now["state"] == "failed"
        assert "<b>no</b> more" in now["why"]
