"""The tables of a job: their columns, their rows and the sums of these."""

from __future__ import annotations

import datetime

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.training.small_jobs import SPARSE, counter, sgd
from support.training.spark_jobs import wrong_model

from distkeras import Trainer
from distkeras.ps.errors import LocalProtocolError
from distkeras.ps.rules import make

pytestmark = pytest.mark.usefixtures("nothing_left")


class TestRecords:
    @pytest.fixture(scope="class")
    @classmethod
    def began(cls) -> float:
        return datetime.datetime.now(datetime.UTC).timestamp()

    @pytest.fixture(scope="class")
    @classmethod
    def trainer(cls, began: float, spark: SparkSession, clouds: DataFrame) -> Trainer:
        trainer = Trainer(
            wrong_model(),
            make("dynsgd", window=3),
            worker_optimizer=sgd(0.1),
            loss=SPARSE,
            metrics=["accuracy"],
            num_workers=2,
            batch_size=20,
            num_epoch=2,
        )
        trainer.train(clouds)
        return trainer

    def test_the_history_has_these_columns(self, trainer: Trainer) -> None:
        expected = {"worker": "int", "epoch": "int", "iteration": "bigint", "timestamp": "timestamp"}
        expected |= {"loss": "double", "accuracy": "double", "samples": "bigint"}
        assert dict(trainer.history.dtypes) == expected

    def test_the_commits_have_these_columns(self, trainer: Trainer) -> None:
        assert ", ".join(f"{name} {kind}" for name, kind in trainer.commits.dtypes) == (
            "clock bigint, worker int, timestamp timestamp, staleness bigint, gap double, scale double, bytes bigint, "
            "wait double, attempt bigint, sequence bigint, epoch int, first_batch bigint, last_batch bigint, "
            "trained_by int, steps int, learning_rate double, refusals bigint, table_rows bigint, table_bytes bigint, "
            "table_rows_back bigint"
        )

    def test_the_ledger_has_these_columns(self, trainer: Trainer) -> None:
        assert set(trainer.ledger.columns) == {
            "worker", "attempt", "sequence", "epoch", "first_batch", "last_batch", "trained_by", "clock", "incarnation",
            "applied",
        }  # fmt: skip

    def test_the_history_has_one_row_for_each_mini_batch(self, trainer: Trainer, began: float) -> None:
        history = trainer.history.toPandas()
        assert history.samples.sum() == 256 * 2
        assert set(history.samples.unique()) >= {20}
        for _, own in history.groupby("worker"):
            assert sorted(own.iteration) == list(range(len(own)))
            rows = own[own.epoch == 0].samples.sum()
            assert len(own) == 2 * -(-rows // 20)
            ordered = own.sort_values("iteration")
            assert ordered.epoch.is_monotonic_increasing
            assert ordered.timestamp.is_monotonic_increasing
            short = ordered[ordered.samples != 20]
            assert len(short) == (2 if rows % 20 else 0)
        assert history.accuracy.between(0, 1).all()
        stamps = [row["timestamp"].timestamp() for row in trainer.history.select("timestamp").collect()]
        assert began < min(stamps)
        assert max(stamps) < began + 300

    def test_commits_cover_the_history(self, trainer: Trainer) -> None:
        commits = trainer.commits.orderBy("clock").toPandas()
        assert commits.clock.tolist() == list(range(len(commits)))
        assert (commits.steps == commits.last_batch - commits.first_batch + 1).all()
        assert commits.steps.max() == 3
        assert commits.steps.sum() == trainer.history.count()
        assert (commits.bytes == 4 * (2 * 2 + 2)).all()
        assert commits.staleness.min() >= 0
        assert np.allclose(commits.scale, 1 / (commits.staleness + 1))  # DynSGD
        assert np.allclose(commits.learning_rate, 0.1)
        assert (commits.wait >= 0).all()
        for _, own in commits.groupby("worker"):
            assert own.sequence.tolist() == list(range(1, len(own) + 1))
            assert own.attempt.nunique() == 1

    @pytest.mark.slow
    def test_the_gap_is_null_unless_it_is_measured(self, trainer: Trainer, ones: DataFrame) -> None:
        assert trainer.commits.where("gap is not null").count() == 0
        measured = counter(measure_gap=True, num_epoch=1)
        measured.train(ones)
        commits = measured.commits.toPandas()
        assert commits.gap.notna().all()
        assert (commits.gap[commits.staleness == 0] == 0).all()
        assert (commits.gap[commits.staleness > 0] > 0).all()

    def test_the_tables_are_an_error_before_training(self, ones: DataFrame) -> None:
        trainer = counter()
        for name in ("history", "commits", "ledger", "model"):
            with pytest.raises(LocalProtocolError, match="after `train`"):
                getattr(trainer, name)

    def test_the_timings_add_up(self, trainer: Trainer) -> None:
        parts = [trainer.timings[name] for name in ("start", "spark", "finish")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(trainer.timings["total"], abs=2)
