"""Speculative attempts, on executors of two hosts, of workers that compute for longer than a lease."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.patience import brief
from support.programs import output_of
from support.training.standalone import two_hosts

DRIVER = """
import json, sys, time
from dataclasses import replace
from pathlib import Path
import keras, pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from support.patience import PATIENT
from support.training.spark_jobs import *
from distkeras import Trainer

master, directory, lease = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
rows, epochs = 12, 2
spark = (
    SparkSession.builder.master(master)
    .config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
    .config("spark.executor.memory", "512m").config("spark.executor.cores", "2").config("spark.cores.max", "4")
    .config("spark.scheduler.minRegisteredResourcesRatio", "1.0")
    .config("spark.speculation", "true").config("spark.speculation.interval", "100ms")
    .config("spark.speculation.task.duration.threshold", "1s")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("OFF")
counting_rows(spark, rows).repartition(2).write.parquet(str(directory / "rows"))
attempts, speculated = directory / "attempts", directory / "speculated"
attempts.mkdir()


def marked(records):
    context = TaskContext.get()
    (attempts / f"{context.partitionId()}-{context.taskAttemptId()}").touch()
    if len(list(attempts.iterdir())) > 2:
        speculated.touch()
    yield from records


wait_in_last_step = wait_at_step(3, speculated)


def longer_than_a_lease(step):
    time.sleep(1.5 * lease)
    wait_in_last_step(step)


frame = spark.read.parquet(str(directory / "rows")).coalesce(2)
trainer = Trainer(
    counting_model(rows, step_callback_layer(longer_than_a_lease)), "downpour",
    worker_optimizer=keras.optimizers.SGD(1.0), loss=total, num_workers=2, batch_size=4, num_epoch=epochs,
    partitioned_already=True, deadlines=replace(PATIENT, lease=lease),
)
model = trainer.train(frame.mapInArrow(marked, frame.schema))
history = trainer.history.toPandas()
sizes = history[history.epoch == 0].groupby("worker").samples.sum().to_dict()
assert_nothing_left()
print(json.dumps({
    "counts": sorted(set(counts(model))), "exact": committed(trainer) == expected_ranges(sizes, epochs, 4),
    "attempts": sorted(path.name for path in attempts.iterdir()),
}))
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_the_first_attempt_keeps_its_partition_and_every_mini_batch_counts_once(tmp_path: Path) -> None:
    """Spark runs speculative attempts only on another host, which here is another loopback address."""
    with two_hosts(tmp_path, cores=2) as url:
        printed = output_of(
            "-c", DRIVER, url, tmp_path, brief(2.0), seconds=240, cwd=tmp_path, SPARK_LOCAL_IP="127.0.0.1"
        )
    (result,) = (json.loads(line) for line in printed.splitlines() if line.startswith("{"))
    assert result["counts"] == [2.0]
    assert result["exact"]
    assert len(result["attempts"]) > 2, "Spark ran no speculative attempt"
