"""A center that is divided among processes next to the driver, on Spark: the numbers are those of one server."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pyspark.sql import SparkSession
from support.patience import patience, until
from support.programs import output_of
from support.training.small_jobs import EPOCHS, ROWS, SPARSE, counter, sgd, wide_model
from support.training.spark_jobs import blobs, counting_rows, counts, servers, table
from support.training.streams import arrive, arriving

from distkeras import Trainer
from distkeras.callbacks import Callback, CallbackContext
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import Rule, make
from distkeras.settings import grouped

pytestmark = pytest.mark.usefixtures("nothing_left")


def trained(spark: SparkSession, rule: Rule, shards: int, **options: Any) -> Trainer:
    """Train with one worker, whose numbers do not depend on the order of workers."""
    given = {"num_workers": 1, "batch_size": 32, "num_epoch": 2, "shards": shards, "seed": 3} | options
    if rule.traits.gradient:
        given["learning_rate"] = 0.05
    trainer = Trainer(wide_model(), rule, worker_optimizer=sgd(0.05), loss=SPARSE, **grouped(given))
    trainer.train(table(spark, *blobs()).coalesce(1))
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        make("adag", window=3, normalize=False),
        make("easgd", window=2),
        make("fedopt", window=4),
        make("dc_asgd"),
        make("smega2"),
        make("fadas", window=2),
    ],
    ids=lambda rule: rule.name,
)
def test_the_weights_are_those_of_one_server(spark: SparkSession, rule: Rule) -> None:
    one, several = trained(spark, rule, 1), trained(spark, rule, 3)
    for expected, received in zip(one.model.get_weights(), several.model.get_weights(), strict=True):
        np.testing.assert_array_equal(received, expected)
    columns = ["worker", "epoch", "first_batch", "last_batch", "clock", "staleness", "bytes"]
    assert several.commits.select(columns).collect() == one.commits.select(columns).collect()


@pytest.mark.slow
def test_shards_in_the_cluster_have_the_weights_of_one_server(tmp_path: Path) -> None:
    output = output_of("-m", "support.training.equal_shards", tmp_path, seconds=200, SPARK_LOCAL_IP="127.0.0.1")
    found = json.loads(output.splitlines()[-1])
    assert found["equal"] == found["all"] > 2 << 16


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"wire_format": "bfloat16"}, marks=pytest.mark.slow),
        {"overlap": True},
        pytest.param({"tls": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_row_counts_once(spark: SparkSession, options: dict[str, Any]) -> None:
    rule = make("downpour", window=2)
    trainer = counter(rule, shards=2, **options)
    assert counts(trainer.train(counting_rows(spark, ROWS))) == [EPOCHS] * ROWS


@pytest.mark.slow
def test_a_stream_continues_with_another_number_of_shards(spark: SparkSession, tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "rows", tmp_path / "checkpoint"
    folder.mkdir()
    for batch, shards in enumerate((2, 1, 3)):
        arrive(folder, batch, range(batch * 10, batch * 10 + 10), ROWS)
        trainer = counter(num_epoch=1, shards=shards)
        training = trainer.train_stream(arriving(spark, folder), checkpoint=checkpoint, trigger={"availableNow": True})
        assert training.awaitTermination(patience(120))
        expected = [float(row < batch * 10 + 10) for row in range(ROWS)]
        assert counts(training.model()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"lends": True, "num_epoch": 20}, {"resume": True}], ids=str)
def test_lent_rows_and_a_resumed_job_count_once(spark: SparkSession, options: dict[str, Any], tmp_path: Path) -> None:
    resume = options.pop("resume", False)
    epochs = options.get("num_epoch", EPOCHS)
    rule = make("downpour", window=2)
    if resume:
        counter(rule, shards=3, num_epoch=1).train(counting_rows(spark, ROWS), checkpoint=str(tmp_path))
    trainer = counter(rule, shards=2, **options)
    model = trainer.train(counting_rows(spark, ROWS), checkpoint=str(tmp_path), resume=resume)
    assert counts(model) == [epochs] * ROWS


class KillOnce(Callback):
    """Kills a process of the server at the first commits: a shard, or the sequencer."""

    every_commits = 20

    def __init__(self, shard: int | None) -> None:
        super().__init__()
        self.shard, self.killed = shard, False

    def on_center(self, context: CallbackContext) -> None:
        if not self.killed:
            self.killed = True
            (sequencer,) = [pid for pid in servers() if psutil.Process(pid).ppid() == os.getpid()]
            children = psutil.Process(sequencer).children()
            pid = sequencer if self.shard is None else sorted(child.pid for child in children)[self.shard]
            os.kill(pid, signal.SIGKILL)
            until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.slow
@pytest.mark.parametrize("shard", [None, 0, 1], ids=["sequencer", "shard 0", "shard 1"])
def test_a_killed_process_loses_no_row(spark: SparkSession, shard: int | None, tmp_path: Path) -> None:
    kill = KillOnce(shard)
    trainer = counter(make("downpour", window=1), shards=2, num_epoch=20)
    checkpoint = Checkpoint(str(tmp_path), every=5)
    model = trainer.train(counting_rows(spark, ROWS), callbacks=[kill], checkpoint=checkpoint)
    assert kill.killed
    assert counts(model) == [20] * ROWS
    assert [row["kind"] for row in trainer.events.collect()].count("restart") >= 1


@pytest.mark.parametrize(
    ("rule", "options", "text"),
    [
        ("daso", {}, "`shards` must be 1 under rule 'daso'"),
        ("downpour", {"relays": 1}, "`relays` must be None with shards"),
        ("downpour", {"measure_gap": True}, "`measure_gap` must be False with shards"),
    ],
)
def test_what_shards_exclude_is_refused_before_work(
    spark: SparkSession, rule: Any, options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        counter(rule, shards=2, **options).train(counting_rows(spark, ROWS), checkpoint=str(tmp_path))
