"""Failures: each becomes one typed error that says where it occurred, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from support.present import present
from support.training.labeled_rows import BATCH, GOOD, SCHEMA, frame, train
from support.training.spark_jobs import (
    assert_no_jobs,
    assert_nothing_left,
    blobs,
    committed,
    counting_model,
    counting_rows,
    counts,
    expected_ranges,
    once_at_step,
    step_callback_layer,
    total,
)

from distkeras import Network, Trainer
from distkeras.ps.errors import (
    BadValueError,
    EmptyDataError,
    LedgerError,
    LocalProtocolError,
    NonFiniteError,
    ServerLostError,
    ShapeError,
    WorkerError,
)
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.training.progress import Progress

# No test here takes longer than the start of a worker; a test that hangs has failed.
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def nothing_left(spark: SparkSession) -> Iterator[None]:
    yield
    assert_nothing_left()
    assert_no_jobs(spark)


@pytest.mark.parametrize("rule", ["downpour", pytest.param("averaging", marks=pytest.mark.slow)])
def test_an_empty_dataframe_is_an_error(spark: SparkSession, rule: str) -> None:
    with pytest.raises(EmptyDataError, match="`df` must have rows"):
        train(frame(spark, []), rule=rule)


BAD_ROWS = {
    "null feature": ((None, 0), SCHEMA, BadValueError, "features", "must not be null"),
    "NaN": (([float("nan"), 1.0], 0), SCHEMA, BadValueError, "features", "finite.*nan"),
    "ragged": (([1.0, 2.0, 3.0], 0), SCHEMA, ShapeError, "features", "2 values each.*3 values"),
    "null label": (([1.0, 1.0], None), SCHEMA, BadValueError, "label", "must not be null"),
    "label above": (([1.0, 1.0], 2), SCHEMA, BadValueError, "label", r"integers in \[0, 2\).*2 in row.*loss='sparse"),
    "label between": (
        ([1.0, 1.0], 0.5),
        "features array<float>, label double",
        BadValueError,
        "label",
        r"must be exact|must be integers",
    ),
}


#: The unit tests of columns and mini-batches contain the other kinds of bad rows.
FIRST = {"label above"}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in FIRST else pytest.mark.slow) for k in BAD_ROWS])
def test_a_bad_row_is_an_error_that_names_its_place(spark: SparkSession, kind: str) -> None:
    row, schema, error, column, text = BAD_ROWS[kind]
    good = [(x, float(y)) for x, y in GOOD] if "double" in schema else GOOD
    with pytest.raises(error, match=text) as caught:
        train(frame(spark, [*good, row], schema), num_workers=1)
    assert type(caught.value) is error
    assert caught.value.column == column
    assert caught.value.worker == 0
    assert caught.value.step in range(6)
    assert "Traceback (most recent call last)" in present(caught.value.remote_traceback)
    assert "to_numpy" in present(caught.value.remote_traceback)


class TestInsideATask:
    def test_an_exception_in_a_step_is_an_error_that_names_the_step(self, spark: SparkSession) -> None:
        def fail(step: int) -> None:
            if step == 3:
                raise RuntimeError("fails on purpose")

        model = counting_model(41, step_callback_layer(fail))
        with pytest.raises(WorkerError, match="fails on purpose") as caught:
            train(counting_rows(spark, 41), model, loss=total)
        assert type(caught.value) is WorkerError
        assert caught.value.worker in (0, 1)
        assert caught.value.step == 3
        assert "Traceback (most recent call last)" in present(caught.value.remote_traceback)
        assert "distkeras/training/task.py" in present(caught.value.remote_traceback)

    @pytest.mark.slow
    def test_the_center_of_a_failed_job_is_available(self, spark: SparkSession) -> None:
        def fail(step: int) -> None:
            if step == 3:
                raise RuntimeError("fails on purpose")

        trainer = Trainer(
            counting_model(41, step_callback_layer(fail)),
            "downpour",
            worker_optimizer=keras.optimizers.SGD(1.0),
            loss=total,
            num_workers=1,
            batch_size=BATCH,
        )
        with pytest.raises(WorkerError):
            trainer.train(counting_rows(spark, 41))
        assert sum(counts(trainer.model)) == 3 * BATCH
        assert trainer.history.count() == 3
        assert trainer.commits.count() == 3

    @pytest.mark.slow
    def test_a_loss_that_raises_only_on_the_worker_is_an_error(self, spark: SparkSession) -> None:
        driver = os.getpid()

        def picky(y_true: Any, y_pred: Any) -> Any:
            if os.getpid() != driver:
                raise KeyError("not here")
            return keras.ops.sum(y_pred)

        with pytest.raises(WorkerError, match="not here") as caught:
            train(counting_rows(spark, 9), counting_model(9), loss=picky)
        assert caught.value.step == 0
        assert "picky" in present(caught.value.remote_traceback)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("rule", "text"),
        [
            ("downpour", "a commit holds"),
            # The server makes the steps: its own arithmetic overflows, with gradients that are finite.
            ("asgd", "rule 'asgd' made the center non-finite"),
        ],
    )
    def test_a_diverging_model_is_an_error(self, spark: SparkSession, rule: str, text: str) -> None:
        x, _ = blobs(64)
        rows = frame(spark, [(point, [1.0]) for point in x.tolist()], "features array<float>, label array<float>")
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        with pytest.raises(NonFiniteError, match=text) as caught:
            train(rows, model, rule, loss="mse", worker_optimizer=keras.optimizers.SGD(1e30), num_epoch=5)
        assert type(caught.value) is NonFiniteError
        assert caught.value.worker in (0, 1)
        assert caught.value.step is not None
        assert "Traceback" in present(caught.value.remote_traceback)

    @pytest.mark.slow
    def test_a_rule_that_raises_at_the_server_is_an_error(
        self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A defect in a rule is reported as such, and not as an unreachable server."""
        site = tmp_path / "sitecustomize.py"
        site.write_text(
            textwrap.dedent(
                """
                import sys
                if sys.argv[0] == "-m":
                    from distkeras.ps.rules.downpour import Downpour
                    Downpour.apply = lambda self, chunk, scalars: chunk.nothing
                """
            )
        )
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        with pytest.raises(LocalProtocolError, match=r"AttributeError.*nothing") as caught:
            train(counting_rows(spark, 9), counting_model(9), loss=total)
        assert caught.value.worker in (0, 1)
        assert "sitecustomize" in present(caught.value.remote_traceback)

    @pytest.mark.slow
    def test_rows_that_spark_cannot_compute_are_an_error(self, spark: SparkSession) -> None:
        """Spark reports the reason; the worker sees only the end of its stream."""
        rows = spark.range(0, 24, 1, 2).selectExpr(
            "array(cast(id as float), 1f) as features",
            "if(id = 20, cast(raise_error('no such row') as int), 0) as label",
        )
        with pytest.raises(WorkerError, match="no such row"):
            train(rows, partitioned_already=True)

    def test_a_job_without_a_checkpoint_ends_when_its_server_is_lost(
        self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without a snapshot the job cannot continue, and the error says so."""
        started: list[ServerProcess] = []

        class RecordedServerProcess(ServerProcess):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                started.append(self)

        monkeypatch.setattr("distkeras.training.run.ServerProcess", RecordedServerProcess)
        real = Progress.update

        def update(self: Any, status: Any) -> None:
            os.kill(started[0].pid, signal.SIGKILL)
            real(self, status)

        monkeypatch.setattr(Progress, "update", update)
        with pytest.raises(ServerLostError, match="has no `checkpoint` to restart it from"):
            train(counting_rows(spark, 41), counting_model(41), loss=total, num_epoch=10_000)


class TestKilledWorkers:
    @pytest.mark.parametrize(
        ("rule", "window", "relays"),
        [
            ("downpour", 3, None),
            pytest.param("averaging", 2, None, marks=pytest.mark.slow),
            pytest.param("downpour", 2, "host", marks=pytest.mark.slow),
        ],
    )
    def test_a_killed_python_worker_is_replaced_and_nothing_counts_twice(
        self, spark: SparkSession, tmp_path: Path, rule: str, window: int, relays: str | None
    ) -> None:
        rows, epochs = 41, 2
        marker = tmp_path / "killed"
        hook = step_callback_layer(once_at_step(marker, 4, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        trainer = Trainer(
            counting_model(rows, hook),
            make(rule, window=window),
            worker_optimizer=keras.optimizers.SGD(1.0),
            loss=total,
            num_workers=2,
            batch_size=BATCH,
            num_epoch=epochs,
            network=Network(relays=relays),
        )
        model = trainer.train(counting_rows(spark, rows))
        assert marker.exists()
        if rule == "downpour":
            assert counts(model) == [epochs] * rows
        ledger = trainer.ledger.toPandas()
        assert sorted(ledger.groupby("worker").attempt.nunique()) == [1, 2]
        (event,) = trainer.events.where("kind = 'takeover'").collect()
        assert (event["source"], event["attempt"]) == ("server", ledger[ledger.worker == event["worker"]].attempt.max())
        history = trainer.history.toPandas()
        assert history.samples.sum() == rows * epochs
        sizes = history[history.epoch == 0].groupby("worker").samples.sum().to_dict()
        assert committed(trainer) == expected_ranges(sizes, epochs, BATCH)
        for _, own in history.groupby("worker"):
            assert own.iteration.tolist() == list(range(len(own)))

    @pytest.mark.slow
    def test_a_source_that_yields_other_rows_the_second_time_is_named(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        def unordered(records: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for record in records:
                yield record.take(pa.array(np.random.default_rng().permutation(record.num_rows)))

        rows = 41
        hook = step_callback_layer(once_at_step(tmp_path / "killed", 4, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        df = counting_rows(spark, rows)
        trainer = Trainer(
            counting_model(rows, hook),
            "downpour",
            worker_optimizer=keras.optimizers.SGD(1.0),
            loss=total,
            num_workers=1,
            batch_size=BATCH,
            partitioned_already=True,
        )
        with pytest.raises(LedgerError, match="has not returned the same rows as before: checksum") as caught:
            trainer.train(df.coalesce(1).mapInArrow(unordered, df.schema))
        assert (caught.value.partition, caught.value.step) == (0, 4)
