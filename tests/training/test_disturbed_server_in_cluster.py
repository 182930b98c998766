"""The server as a task on executors of two hosts: Spark runs a second attempt of it, or it is suspended."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.patience import brief, patience
from support.programs import output_of
from support.training.standalone import two_hosts

DRIVER = """
import json, logging, os, signal, sys, threading
from dataclasses import replace
from pathlib import Path
import keras
from pyspark.sql import SparkSession
from support.training.cluster_job import _server_of
from support.patience import PATIENT
from support.training.spark_jobs import *
from distkeras import Checkpoint, Network, Trainer

master, directory, kind, standstill = sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
logging.basicConfig(level=logging.INFO)
rows, epochs = 24, 3
builder = (
    SparkSession.builder.master(master)
    .config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
    .config("spark.executor.memory", "512m").config("spark.executor.cores", "3").config("spark.cores.max", "6")
    .config("spark.scheduler.minRegisteredResourcesRatio", "1.0")
)
if kind == "speculation":
    builder = (
        builder.config("spark.speculation", "true").config("spark.speculation.interval", "100ms")
        .config("spark.speculation.task.duration.threshold", "1s")
    )
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
counting_rows(spark, rows).repartition(2).write.parquet(str(directory / "rows"))
twice, over, seen = {}, threading.Event(), directory / "seen"


def count_second_attempts():
    tracker = spark.sparkContext.statusTracker()
    while not over.wait(0.2):
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is not None and info.numTasks == 1 and info.numActiveTasks > 1:
                twice[stage] = twice.get(stage, 0) + 1
                if twice[stage] * 0.2 > 2:
                    seen.touch()


folder = str(directory / "checkpoint")
if kind == "speculation":
    act = wait_at_step(4, seen)
else:
    act = once_at_step(directory / "marker", 4, lambda: _server_of(folder).suspend())
counter = threading.Thread(target=count_second_attempts)
counter.start()
trainer = Trainer(
    counting_model(rows, step_callback_layer(act)), "downpour", worker_optimizer=keras.optimizers.SGD(1.0), loss=total,
    num_workers=2, batch_size=2, num_epoch=epochs, network=Network(server="cluster"),
    deadlines=replace(PATIENT, handshake=standstill / 2, standstill=standstill),
)
try:
    model = trainer.train(spark.read.parquet(str(directory / "rows")), checkpoint=Checkpoint(folder, every=1))
finally:
    over.set()
counter.join()
history = trainer.history.toPandas()
sizes = history[history.epoch == 0].groupby("worker").samples.sum().to_dict()
print(json.dumps({
    "counts": sorted(set(counts(model))), "exact": committed(trainer) == expected_ranges(sizes, epochs, 2),
    "incarnations": sorted(set(trainer.ledger.toPandas().incarnation.tolist())),
    "kinds": sorted({row["kind"] for row in trainer.events.collect()}),
    "speculated": seen.exists(),
}))
spark.stop()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address"),
]


def outcome(folder: Path, kind: str, standstill: float) -> dict[str, Any]:
    """Return the outcome of a job on executors of two hosts, which here are two loopback addresses."""
    with two_hosts(folder, cores=3) as url:
        words = ("-c", DRIVER, url, folder, kind, standstill)
        printed = output_of(*words, seconds=240, cwd=folder, SPARK_LOCAL_IP="127.0.0.1")
    (found,) = (json.loads(line) for line in printed.splitlines() if line.startswith("{"))
    assert found["counts"] == [3.0]
    assert found["exact"]
    return dict(found)


@pytest.fixture(autouse=True)
def executors_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def test_a_speculative_second_attempt_does_not_take_over(tmp_path: Path) -> None:
    found = outcome(tmp_path, "speculation", patience(60))
    assert found["speculated"], "Spark ran no speculative attempt"
    assert found["incarnations"] == [1]


def test_a_suspended_server_is_restarted_and_every_mini_batch_counts_once(tmp_path: Path) -> None:
    found = outcome(tmp_path, "standstill", brief(4))
    assert "standstill" in found["kinds"]
    assert len(found["incarnations"]) > 1
