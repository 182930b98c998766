"""Relays on Spark: the workers of a host send one commit, and invalid combinations of options are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession
from support.training.daso_jobs import BATCH, ROWS, linear_model, partitions
from support.training.spark_jobs import assert_nothing_left, committed, expected_ranges

from distkeras import Network, Trainer
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import Rule, make


def trained(spark: SparkSession, relays: str | int) -> tuple[np.ndarray, Trainer]:
    trainer = Trainer(
        linear_model(),
        make("dynsgd", window=2),
        num_workers=2,
        batch_size=BATCH,
        num_epoch=3,
        partitioned_already=True,
        network=Network(relays=relays),
    )
    return trainer.train(partitions(spark, 2)).get_weights()[0], trainer


def test_the_workers_of_one_host_send_one_commit_per_round(spark: SparkSession) -> None:
    by_host, trainer = trained(spark, "host")
    commits = trainer.commits.orderBy("clock").toPandas()
    assert committed(trainer) == expected_ranges({0: ROWS, 1: ROWS}, 3, BATCH)
    assert commits.clock.tolist() == list(range(12))
    assert (commits.bytes > 0).sum() == 6
    assert commits.worker.tolist() == [0, 1] * 6
    assert commits.staleness.tolist() == [0] * 12
    in_one, _ = trained(spark, 1)
    np.testing.assert_array_equal(by_host, in_one)  # a group's sums do not depend on the order of its workers
    assert_nothing_left()


REFUSED: list[tuple[Rule, dict[str, Any], dict[str, Any], str]] = [
    (make("aeasgd"), {}, {}, "`relays` must be None unless the rule adds up movements, which adag, agn, .*'aeasgd'"),
    (make("daso"), {}, {}, "`relays` must be None .*'daso'"),
    (make("ssgd"), {}, {"learning_rate": 0.1}, "`relays` must be None .*'ssgd'"),
    (make("adag", algorithm=13), {}, {}, "`relays` must be None .*'adag' and its hyper-parameters"),
    (make("agn", window="auto"), {}, {}, "`window` must be a number or None with `relays`"),
    (make("downpour"), {"overlap": True}, {}, "`overlap` must be False"),
    (make("downpour"), {"wire_format": "int8"}, {}, "`wire_format` must be 'float32'"),
    (make("downpour"), {}, {"staleness_bound": 1}, "`staleness_bound` must be None"),
]


@pytest.mark.parametrize(("rule", "network", "options", "message"), REFUSED, ids=str)
def test_options_that_relays_exclude_are_refused_by_the_constructor(
    rule: Rule, network: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Trainer(linear_model(), rule, network=Network(relays="host", **network), **options)


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        ({"relays": 3}, {}, "`relays` must be at most `num_workers`, 2"),
        pytest.param({"relays": "host", "tls": True}, {}, "`tls` must be False", marks=pytest.mark.slow),
        pytest.param(
            {"relays": "host"},
            {"num_workers": 9},
            "`num_workers` must be at most 2.*`relays` needs all workers",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"relays": "host"},
            {"tables": "embedding"},
            "`relays` must be None with tables by rows",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_options_that_do_not_fit_the_job_are_refused_before_work_starts(
    spark: SparkSession, network: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    trainer = Trainer(linear_model(), "downpour", network=Network(**network), **{"num_workers": 2, **options})
    with pytest.raises(ConfigurationError, match=message):
        trainer.train(partitions(spark, 2))


def test_a_stream_is_refused_before_work_starts(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    stream = spark.readStream.schema(partitions(spark, 2).schema).parquet(str(tmp_path / "in"))
    trainer = Trainer(linear_model(), "downpour", network=Network(relays="host"), num_workers=2)
    with pytest.raises(ConfigurationError, match="`df` must not be a stream"):
        trainer.train_stream(stream, checkpoint=tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
