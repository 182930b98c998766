"""A driver of jobs whose executors die: classic Spark or Connect, the server beside the driver or in the cluster.

``python cluster_job.py FOLDER classic|connect MASTER NAME …``, with a name for each job: what is killed in it before
the "@"; behind it where the server runs, "driver" or "cluster", or "estimator", which has it beside the driver. Prints
a line of JSON for each.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import psutil
from pyspark.sql import DataFrame, SparkSession

from distkeras import Checkpoint, KerasEstimator, Trainer
from distkeras.ps.checkpoint.names import Name, parsed
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.rules import make
from support.patience import until
from support.spark_jobs import (
    assert_nothing_left,
    committed,
    counting_model,
    counting_rows,
    counts,
    expected_ranges,
    once_at_step,
    step_callback_layer,
    total,
)

ROWS, EPOCHS, BATCH = 240, 3, 8


def nothing(folder: str) -> None:
    """Nobody dies."""


def worker(folder: str) -> None:
    """The Python process of the worker that comes here."""
    os.kill(os.getpid(), signal.SIGKILL)


def executor(folder: str) -> None:
    """The executor of the worker that comes here, and that worker."""
    _jvm_of(psutil.Process()).kill()
    os.kill(os.getpid(), signal.SIGKILL)


def server(folder: str) -> None:
    """The process of the task that is the server."""
    _server_of(folder).kill()


def server_executor(folder: str) -> None:
    """The executor of the server's task, and the server."""
    process = _server_of(folder)
    _jvm_of(process).kill()
    process.kill()


def _jvm_of(process: psutil.Process) -> psutil.Process:
    return next(parent for parent in process.parents() if parent.name() == "java")


def _server_of(folder: str) -> psutil.Process:
    """Its process, once there is a snapshot with commits in it."""
    store = Store(folder)

    def named(kind: str) -> list[Name]:
        return [name for name in map(parsed, store.names()) if name is not None and name.kind == kind]

    until(lambda: any(name.number > 0 for name in named("snapshot")))
    owner = max(named("owner"), key=lambda name: name.claim)
    return psutil.Process(store.load(str(owner))[0]["pid"])


KILLS: dict[str, Callable[[str], None]] = {
    kill.__name__: kill for kill in (nothing, worker, executor, server, server_executor)
}


def by_value(kill: Callable[[str], None], folder: str) -> Callable[[], None]:
    """``kill(folder)``, for workers that know nothing of this module."""
    kill.__module__ = "__main__"
    return lambda: kill(folder)


def trained(frame: DataFrame, place: str, checkpoint: Checkpoint, *hooks: keras.Layer) -> tuple[keras.Model, Any]:
    """The model that a job ends with, and what has its tables."""
    model, rule = counting_model(ROWS, *hooks), make("downpour", window=2)
    options: dict[str, Any] = {"server": "cluster"} if place == "cluster" else {"host": "127.0.0.1"}
    options |= {"worker_optimizer": keras.optimizers.SGD(1.0), "loss": total}
    options |= {"num_workers": 2, "batch_size": BATCH, "num_epoch": EPOCHS}
    if place == "estimator":
        options |= {"custom_objects": {"total": total}, "checkpoint": checkpoint}
        fitted = KerasEstimator(model, rule, **options).fit(frame)
        return fitted.keras_model, fitted.summary
    trainer = Trainer(model, rule, **options)
    return trainer.train(frame, checkpoint=checkpoint), trainer


def run(spark: SparkSession, folder: Path, name: str, path: str) -> dict[str, Any]:
    """One job."""
    kill, place = name.split("@")
    checkpoint, marker = str(folder / f"checkpoint of {name}"), folder / f"marker of {name}"
    hook = step_callback_layer(once_at_step(marker, 12, by_value(KILLS[kill], checkpoint)))
    model, made = trained(spark.read.parquet(path), place, Checkpoint(checkpoint, every=5), hook)
    ledger, history = made.ledger.toPandas(), made.history.toPandas()
    sizes = history[history.epoch == 0].groupby("worker").samples.sum().to_dict()
    assert_nothing_left()
    return {
        "name": name,
        "fired": marker.exists(),
        "counts": sorted(set(counts(model))),
        "exact": committed(made) == expected_ranges(sizes, EPOCHS, BATCH),
        "samples": int(history.samples.sum()),
        "attempts": sorted(map(int, ledger.groupby("worker").attempt.nunique())),
        "incarnations": int(ledger.incarnation.nunique()),
        "events": sorted({(row["source"], row["kind"]) for row in made.events.collect()}),
        "seconds": made.timings["total"],
    }


def main() -> None:
    """All jobs, on executors of their own."""
    folder, kind, master, *names = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    builder: Any = SparkSession.builder
    builder = builder.remote(master) if kind == "connect" else builder.master(master)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.executor.memory": "1g",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    if kind == "classic":
        spark.sparkContext.setLogLevel("OFF")
    # From a file, as in real life: rows that the driver holds would come back in their order anyway.
    path = str(Path(folder, "rows"))
    counting_rows(spark, ROWS).repartition(4).write.parquet(path)
    for name in names:
        print(json.dumps(run(spark, Path(folder), name, path)), flush=True)  # noqa: T201 - for the test
    spark.stop()


if __name__ == "__main__":
    main()
