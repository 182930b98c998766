"""The page of a trainer that trains on Spark: it gets what the job's own tables have."""

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
from distkeras.dashboard.journal import read_since
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


def told(trainer: Trainer) -> list[dict[str, Any]]:
    return [json.loads(entry.data) for entry in read_since(watch_of(trainer).path)]


def test_the_page_tells_what_the_tables_have(spark: SparkSession, clouds: DataFrame, tmp_path: Path) -> None:
    trainer = trainer_of()
    with trainer.dashboard() as dashboard:
        assert told(trainer) == []
        stopping = EarlyStopping(clouds, "loss", every_commits=5)
        trainer.train(clouds, callbacks=[stopping])
        whole = told(trainer)[-1]
        history, commits = trainer.history.toPandas(), trainer.commits.toPandas()
        assert whole["now"]["state"] == "done"
        assert (whole["now"]["commits"], whole["now"]["samples"]) == (len(commits), history["samples"].sum())
        assert whole["workers"]["commits"] == commits.groupby("worker").size().tolist()
        assert whole["metrics"] == ["loss", "accuracy"]
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
def test_a_page_that_is_asked_for_afterwards_has_it_all(clouds: DataFrame, tmp_path: Path) -> None:
    trainer = trainer_of()
    trainer.train(clouds)
    dashboard = trainer.dashboard()
    assert trainer.dashboard() is dashboard
    assert told(trainer)[-1]["now"]["commits"] == trainer.commits.count()
    other = trainer_of()
    both = trainer.dashboard(other)
    assert dashboard.closed
    assert len(both.watches) == 2
    del trainer, dashboard
    gc.collect()
    assert both.closed, "a page ends with its trainer"
    assert_nothing_left()


@pytest.mark.slow
def test_a_second_job_takes_the_page_over(clouds: DataFrame) -> None:
    trainer = trainer_of(num_epoch=1)
    with trainer.dashboard():
        trainer.train(clouds)
        first = told(trainer)[-1]["now"]["commits"]
        trainer.train(clouds)
        assert told(trainer)[-1]["now"]["commits"] == first
        assert told(trainer)[-1]["now"]["state"] == "done"


class _UntilShown(Callback):
    """Ends the job once the page shows that it trains, and that a worker was replaced."""

    every_seconds = 0.1

    def __init__(self, shown: list[dict[str, Any]]) -> None:
        super().__init__()
        self.shown = shown

    def on_center(self, context: CallbackContext) -> None:
        training = any(message["now"]["state"] == "training" for message in self.shown)
        if training and any(message.get("kinds", {}).get("takeover") for message in self.shown):
            context.stop("the page has shown it")


def test_the_page_is_live_and_tells_of_a_worker_that_died(spark: SparkSession, tmp_path: Path) -> None:
    """A browser's connection, open from before the training on, hears of the takeover before the end."""
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
    with trainer.dashboard() as dashboard:
        parts = urlsplit(dashboard.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=patience(60))
        connection.request("GET", parts.path + "jobs/0")
        answer = connection.getresponse()
        heard: list[dict[str, Any]] = []

        def listen() -> None:
            for line in iter(answer.readline, b""):
                if line.startswith(b"data: "):
                    heard.append(json.loads(line[6:]))

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        trainer.train(counting_rows(spark, rows), callbacks=[_UntilShown(heard)])
        until(lambda: heard and heard[-1]["now"]["state"] == "stopped")
        assert heard[-1]["kinds"]["takeover"] == 1
        assert sum(heard[-1]["workers"]["retries"]) == 1
    listener.join(patience(10))
    connection.close()


@pytest.mark.slow
def test_a_job_that_fails_says_why(clouds: DataFrame, spark: SparkSession) -> None:
    def fail(step: int) -> None:
        raise ValueError("<b>no</b> more")

    trainer = Trainer(
        counting_model(8, step_callback_layer(fail)), "downpour", worker_optimizer="sgd", loss=total, num_workers=1
    )
    with trainer.dashboard():
        with pytest.raises(WorkerError):
            trainer.train(counting_rows(spark, 8))
        now = told(trainer)[-1]["now"]
        assert now["state"] == "failed"
        assert "<b>no</b> more" in now["why"]
