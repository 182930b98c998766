"""A driver of jobs whose executors die: classic Spark or Connect, with the server at the driver or in the cluster.

``python cluster_job.py FOLDER classic|connect MASTER NAME …`` runs one job for each name. The part before the "@"
says what is killed ("meeting": nothing, but workers of two executors wait for each other). The part after it says
where the server runs, "driver" or "cluster", or, with the server at the driver, "estimator" or "resources" (a profile
of two cores a task). The program prints a line of JSON for each job. A process can have classic Spark or Connect, and
one context at most; so tests `start` the program, and read its `outcomes`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import keras
import psutil
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import DataFrame, SparkSession

from distkeras import Checkpoint, KerasEstimator, Trainer
from distkeras.ps.checkpoint.ownership import Name, parsed
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.rules import make
from distkeras.settings import grouped
from support.patience import until
from support.training.spark_jobs import (
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

#: The import path of drivers and executors: these tests, and this process's own path.
PYTHONPATH = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
ROWS, EPOCHS, BATCH = 240, 3, 8
#: The step of a worker at which the fault happens; a worker has 45 steps.
STEP = 12


def nothing(folder: str) -> None:
    """Kill no process."""


def worker(folder: str) -> None:
    """Kill this Python process of a worker."""
    os.kill(os.getpid(), signal.SIGKILL)


def executor(folder: str) -> None:
    """Kill the executor of this worker, and this worker."""
    _jvm_of(psutil.Process()).kill()
    os.kill(os.getpid(), signal.SIGKILL)


def server(folder: str) -> None:
    """Kill the process of the task that is the server."""
    _server_of(folder).kill()


def server_executor(folder: str) -> None:
    """Kill the executor of the server's task, and the server."""
    process = _server_of(folder)
    _jvm_of(process).kill()
    process.kill()


def _jvm_of(process: psutil.Process) -> psutil.Process:
    return next(parent for parent in process.parents() if parent.name() == "java")


def _server_of(folder: str) -> psutil.Process:
    """Return the server's process, once a snapshot contains commits."""
    store = Store(folder)

    def named(kind: str) -> list[Name]:
        return [name for name in map(parsed, store.names()) if name is not None and name.kind == kind]

    until(lambda: any(name.number > 0 for name in named("snapshot")))
    owner = max(named("owner"), key=lambda name: name.claim)
    return psutil.Process(store.load(str(owner))[0]["pid"])


KILLS: dict[str, Callable[[str], None]] = {
    kill.__name__: kill for kill in (nothing, worker, executor, server, server_executor)
}


def meeting(marker: Path) -> Callable[[int], None]:
    """Return an action for `step_callback_layer` that waits until workers of two executors have reached the step."""

    def action(now: int) -> None:
        if now == STEP:
            Path(f"{marker} {_jvm_of(psutil.Process()).pid}").write_text(os.environ["OMP_NUM_THREADS"])
            until(lambda: len(list(marker.parent.glob(f"{marker.name} *"))) == 2)

    return action


def trained(frame: DataFrame, place: str, checkpoint: Checkpoint, *hooks: keras.Layer) -> tuple[keras.Model, Any]:
    """Run a job; return its model, and the object that has its tables."""
    model, rule = counting_model(ROWS, *hooks), make("downpour", window=2)
    options: dict[str, Any] = {"server": "cluster"} if place == "cluster" else {"host": "127.0.0.1"}
    options |= {"worker_optimizer": keras.optimizers.SGD(1.0), "loss": total}
    if place == "resources":  # A worker takes both cores of an executor.
        options |= {"resources": ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build}
    options |= {"num_workers": 2, "batch_size": BATCH, "num_epoch": EPOCHS}
    if place == "estimator":
        options |= {"custom_objects": {"total": total}, "checkpoint": checkpoint}
        fitted = KerasEstimator(model, rule, **grouped(options)).fit(frame)
        return fitted.keras_model, fitted.summary
    trainer = Trainer(model, rule, **grouped(options))
    return trainer.train(frame, checkpoint=checkpoint), trainer


def run(spark: SparkSession, folder: Path, name: str, path: str) -> dict[str, Any]:
    """Run one job; return its outcome."""
    kill, place = name.split("@")
    checkpoint, marker = str(folder / f"checkpoint of {name}"), folder / f"marker of {name}"
    act = meeting(marker) if kill == "meeting" else once_at_step(marker, STEP, partial(KILLS[kill], checkpoint))
    hook = step_callback_layer(act)
    model, made = trained(spark.read.parquet(path), place, Checkpoint(checkpoint, every=5), hook)
    ledger, history = made.ledger.toPandas(), made.history.toPandas()
    sizes = history[history.epoch == 0].groupby("worker").samples.sum().to_dict()
    assert_nothing_left()
    return {
        "name": name,
        "fired": any(folder.glob(f"{marker.name}*")),
        "counts": sorted(set(counts(model))),
        "exact": committed(made) == expected_ranges(sizes, EPOCHS, BATCH),
        "samples": int(history.samples.sum()),
        "attempts": sorted(map(int, ledger.groupby("worker").attempt.nunique())),
        "incarnations": int(ledger.incarnation.nunique()),
        "events": sorted({(row["source"], row["kind"]) for row in made.events.collect()}),
        "threads": [path.read_text() for path in folder.glob(f"{marker.name} *")],
        "seconds": made.timings["total"],
    }


def start(folder: Path, kind: str, master: str, *names: str, **environment: str) -> subprocess.Popen[str]:
    """Start this program as a process of its own."""
    return subprocess.Popen(
        [sys.executable, __file__, str(folder), kind, master, *names],
        env={
            **os.environ,
            "PYTHONPATH": PYTHONPATH,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_TESTING": "1",  # Connect may use any free port.
            **environment,
        },
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcomes(started: subprocess.Popen[str], timeout: float) -> dict[str, dict[str, Any]]:
    """Return the outcome of each job by its name, and check that each was exact."""
    try:
        out, err = started.communicate(timeout=timeout)
    finally:
        started.kill()
    lines = [
        line for line in err.splitlines() if not re.match(r"\s*at |\d\d/.* (WARN|ERROR) ", line)
    ]  # Without the lines of the JVM.
    assert started.returncode == 0, "\n".join(lines[-80:])
    found = {one["name"]: one for one in (json.loads(line) for line in out.splitlines() if line.startswith("{"))}
    for one in found.values():
        assert one["fired"]
        assert one["counts"] == [EPOCHS]
        assert one["exact"]
        assert one["samples"] == EPOCHS * ROWS
    return found


def main() -> None:
    """Run all jobs on executors of their own."""
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
    # The rows are in a file because rows of the driver would always return in their order.
    path = str(Path(folder, "rows"))
    counting_rows(spark, ROWS).repartition(4).write.parquet(path)
    for name in names:
        print(json.dumps(run(spark, Path(folder), name, path)), flush=True)  # noqa: T201 - read by the test
    spark.stop()


if __name__ == "__main__":
    main()
