"""A driver of jobs whose executors die: classic Spark or Connect, with the server at the driver or in the cluster.

``python cluster_job.py FOLDER classic|connect MASTER NAME …`` runs one job for each name. The part before the "@"
says what is killed ("blocks": an executor that held blocks; "orphan": an executor, which its worker outlives;
"meeting": nothing, but workers of two executors wait for each other). The part after it says where the server runs,
"driver" or "cluster" or "shards" (in the cluster, with two shards), or, with the server at the driver, "estimator" or
"resources" (a profile of two cores a task).
The program prints a line of JSON for each job. A process can have classic Spark or Connect, and one context at most;
so tests `start` the program, and read its `outcomes`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
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
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import make
from distkeras.settings import grouped
from support.patience import until
from support.programs import environment, without_frames_of_java
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
    wait_at_step,
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


def shard(folder: str) -> None:
    """Kill the process of the task that is a shard of the server."""
    _shard_of(folder).kill()


def shard_executor(folder: str) -> None:
    """Kill the executor of a shard's task, and the shard."""
    process = _shard_of(folder)
    _jvm_of(process).kill()
    process.kill()


def outlive_executor(next_runs: Path) -> None:
    """Kill the executor of this worker, which itself ends only when Spark runs the next attempt."""
    os.setpgid(0, 0)  # An executor's daemon ends its process group when the executor is gone.
    _jvm_of(psutil.Process()).kill()
    wait_at_step(0, next_runs)(0)
    os.kill(os.getpid(), signal.SIGKILL)


def announce_next_attempt(spark: SparkSession, next_runs: Path) -> None:
    """Make the file ``next_runs`` once another attempt of a task runs."""
    tracker = spark.sparkContext.statusTracker()

    def runs() -> bool:
        stage = max(tracker.getActiveStageIds(), default=None)
        info = None if stage is None else tracker.getStageInfo(stage)
        if info is None or not (info.numFailedTasks or info.currentAttemptId):
            return False
        return bool(info.numActiveTasks + info.numCompletedTasks == info.numTasks)

    until(runs)
    next_runs.touch()


def executors() -> set[int]:
    """Return the process ids of the executors of a local cluster."""
    return {
        process.pid
        for process in psutil.Process().children(recursive=True)
        if process.name() == "java" and any("CoarseGrainedExecutorBackend" in part for part in process.cmdline())
    }


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


def _shard_of(folder: str) -> psutil.Process:
    """Return the process of a shard: it listens at a port to which this worker is connected, as the server does."""
    server = _server_of(folder)
    connected = psutil.Process().net_connections("tcp")
    ports = {connection.raddr.port for connection in connected if connection.status == psutil.CONN_ESTABLISHED}
    driver = [parent for parent in psutil.Process().parents() if parent.name() == "java"][-1]
    for process in driver.children(recursive=True):
        if process == server or process.name() == "java":
            continue
        listening = (at for at in process.net_connections("tcp") if at.status == psutil.CONN_LISTEN)
        if any(at.laddr.port in ports for at in listening):
            return process
    raise AssertionError("no shard runs")


KILLS: dict[str, Callable[[str], None]] = {
    "blocks": executor,
    **{kill.__name__: kill for kill in (nothing, worker, executor, server, server_executor, shard, shard_executor)},
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
    options: dict[str, Any] = {"server": "cluster"} if place in ("cluster", "shards") else {"host": "127.0.0.1"}
    options |= {"shards": 2} if place == "shards" else {}
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
    next_runs, frame = folder / "next attempt", spark.read.parquet(path)
    if kill == "orphan":
        threading.Thread(target=announce_next_attempt, args=(spark, next_runs), daemon=True).start()
        act = once_at_step(marker, STEP, partial(outlive_executor, next_runs))
    else:
        act = meeting(marker) if kill == "meeting" else once_at_step(marker, STEP, partial(KILLS[kill], checkpoint))
    if kill == "blocks":  # A shuffle's blocks and cached ones, on both executors.
        frame = frame.repartition(4).cache()
        frame.count()
    before = executors()
    model, made = trained(frame, place, Checkpoint(checkpoint, every=5), step_callback_layer(act))
    ledger, history = made.ledger.toPandas(), made.history.toPandas()
    sizes = history[history.epoch == 0].groupby("worker").samples.sum().to_dict()
    assert_nothing_left()
    return {
        "name": name,
        "lost": len(before - executors()),
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


def start(folder: Path, kind: str, master: str, *names: str, **more: str) -> subprocess.Popen[str]:
    """Start this program as a process of its own."""
    return subprocess.Popen(
        [sys.executable, __file__, str(folder), kind, master, *names],
        env=environment(**{"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_TESTING": "1", **more}),  # Connect may use any port.
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
    assert started.returncode == 0, without_frames_of_java(err)
    found = {one["name"]: one for one in (json.loads(line) for line in out.splitlines() if line.startswith("{"))}
    for one in found.values():
        assert one["fired"]
        assert one["counts"] == [EPOCHS]
        assert one["exact"]
        assert one["samples"] == EPOCHS * ROWS
        one["shared"] = err.count("exchange vectors through shared memory")
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
    rows = spark.read.parquet(path)
    spark.stop()
    try:
        Trainer(counting_model(ROWS), "downpour", loss=total, num_workers=1).train(rows)
    except ConfigurationError as error:
        assert "`df` must be of a running Spark session" in str(error)  # noqa: PT017 - this program has no pytest
    else:
        raise AssertionError("a stopped session was accepted")


if __name__ == "__main__":
    main()
