"""Jobs on two executor JVMs. A process has at most one Spark context, so the driver runs in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.patience import patience

DRIVER = """
import json, logging, os, signal, sys, threading
from pathlib import Path
import keras, numpy as np, psutil
from support.patience import until
from support.training.spark_jobs import *
from distkeras import Trainer
from distkeras.data.datasets import write_parquet
from distkeras.ps.rules import make
from distkeras.spark import session

directory, rows, epochs = Path(sys.argv[1]), 240, 3
spark = session("local-cluster[2,1,1024]", config={
    "spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.sql.shuffle.partitions": "2",
    "spark.executor.memory": "1g",
})
spark.sparkContext.setLogLevel("OFF")


class Sharing(logging.Handler):
    said = []

    def emit(self, record):
        self.said.append(record.getMessage())


log = logging.getLogger("distkeras.ps.transport.handshakes")
log.setLevel(logging.INFO)
log.addHandler(Sharing())


def executors():
    return {
        process.pid for process in psutil.Process().children(recursive=True)
        if process.name() == "java" and any("CoarseGrainedExecutorBackend" in part for part in process.cmdline())
    }


def kill_executor():
    import psutil
    next(process for process in psutil.Process().parents() if process.name() == "java").kill()


def end_with_executor():
    kill_executor()
    os.kill(os.getpid(), signal.SIGKILL)


def outlive_executor(next_runs):
    def act():
        os.setpgid(0, 0)  # an executor's daemon ends its process group when the executor is gone
        kill_executor()
        wait_at_step(0, next_runs)(0)
        os.kill(os.getpid(), signal.SIGKILL)

    return act


def announce_next_attempt(next_runs):
    tracker = spark.sparkContext.statusTracker()

    def runs():
        stage = max(tracker.getActiveStageIds(), default=None)
        info = None if stage is None else tracker.getStageInfo(stage)
        again = info is not None and (info.numFailedTasks or info.currentAttemptId)
        return again and info.numActiveTasks + info.numCompletedTasks == info.numTasks

    until(runs)
    next_runs.touch()


# From files, as in real life: rows that the driver holds would come back in their order anyway.
path = write_parquet(directory / "rows", np.eye(rows, dtype=np.float32), np.zeros(rows, np.int64), files=4)
for name in sys.argv[2:]:
    marker, next_runs = directory / name, directory / "next_runs"
    act = outlive_executor(next_runs) if name == "orphan" else end_with_executor
    trainer = Trainer(
        counting_model(rows, step_callback_layer(once_at_step(marker, 12, act))), make("downpour", window=2),
        worker_optimizer=keras.optimizers.SGD(1.0), loss=total, num_workers=2, batch_size=8, num_epoch=epochs,
    )
    frame, cached = spark.read.parquet(path), 0
    if name == "blocks":
        frame = frame.repartition(4).cache()  # a shuffle's blocks and cached ones, on both executors
        frame.count()
        cached = sum(rdd.numCachedPartitions() for rdd in spark.sparkContext._jsc.sc().getRDDStorageInfo())
    before = executors()
    if name == "orphan":
        threading.Thread(target=announce_next_attempt, args=(next_runs,), daemon=True).start()
    model = trainer.train(frame)
    ledger, history = trainer.ledger.toPandas(), trainer.history.toPandas()
    sizes = history[history.epoch == 0].groupby("worker").samples.sum().to_dict()
    assert_nothing_left()
    shared = sum("exchange vectors through shared memory" in text for text in Sharing.said)
    print(json.dumps({
        "shared": shared,
        "name": name, "cached": cached, "executors": len(before), "lost": len(before - executors()),
        "fired": marker.exists(), "next_runs": next_runs.exists(), "counts": sorted(set(counts(model))),
        "exact": committed(trainer) == expected_ranges(sizes, epochs, 8),
        "attempts": sorted(map(int, ledger.groupby("worker").attempt.nunique())), "samples": int(history.samples.sum()),
    }))
spark.stop()
try:
    trainer.train(frame)
except Exception as error:
    print(type(error).__name__, error)
"""


def run(directory: Path, *names: str) -> list[dict[str, Any]]:
    script = directory / "driver.py"
    script.write_text(DRIVER)
    support = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(script), str(directory), *names],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([support, os.environ.get("PYTHONPATH", "")]),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_WORKER_DIR": str(directory / "work"),
        },
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=patience(280),
    )
    assert done.returncode == 0, done.stderr[-8000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["name"] for result in results] == list(names)
    assert "ConfigurationError `df` must be of a running Spark session" in done.stdout
    for result in results:
        assert result["executors"] == 2
        assert result["fired"]
        assert result["counts"] == [3.0]
        assert result["exact"]
        assert result["samples"] == 3 * 240
        if hasattr(os, "memfd_create"):
            assert result["shared"] > 2  # the workers of two executors, and a next attempt
    return results


def test_a_job_on_two_executors_survives_a_killed_executor(tmp_path: Path) -> None:
    (killed,) = run(tmp_path, "executor")
    assert (killed["lost"], killed["attempts"]) == (1, [1, 2])


@pytest.mark.slow
def test_a_job_survives_a_killed_executor_that_held_blocks(tmp_path: Path) -> None:
    """Spark computes the blocks again in another order; each worker's rows and their order stay the same."""
    (result,) = run(tmp_path, "blocks")
    assert (result["cached"], result["lost"], result["attempts"]) == (4, 1, [1, 2])


@pytest.mark.slow
def test_only_one_attempt_counts_when_a_worker_outlives_its_executor(tmp_path: Path) -> None:
    """The worker holds the partition's lease until it ends, while Spark runs the next attempt, which then continues."""
    (orphan,) = run(tmp_path, "orphan")
    assert (orphan["lost"], orphan["next_runs"], orphan["attempts"]) == (1, True, [1, 2])
