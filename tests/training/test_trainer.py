"""The trainer on Spark, compared with plain Keras and with exact counts."""

from __future__ import annotations

import dataclasses
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.patience import PATIENT, brief, patience
from support.training.small_jobs import BATCH, EPOCHS, ROWS, SPARSE, counter, deep_model, sgd
from support.training.spark_jobs import (
    accuracy,
    batches_of,
    blobs,
    committed,
    counting_rows,
    counts,
    expected_ranges,
    wrong_model,
)

from distkeras import Trainer
from distkeras.callbacks import Callback, TrainingSetup
from distkeras.data.batches import DataSpec
from distkeras.data.columns import Column
from distkeras.data.ordering import partitioned
from distkeras.ps.errors import ConfigurationError, DeadlineError, LocalProtocolError
from distkeras.ps.protocol.framing import KEY_BYTES
from distkeras.ps.rules import Rule, all_rules, make
from distkeras.settings import grouped
from distkeras.spark.cluster import SparkFacts

pytestmark = pytest.mark.usefixtures("nothing_left")


class TestEqualToPlainKeras:
    """One worker trains on the mini-batches of the data plane in their order, with the steps that Keras makes.

    Tolerance: each commit rounds the center to float32; over about 50 steps the difference was below 1e-6.
    """

    SPEC = DataSpec(
        features=(Column("features", (2,)),),
        labels=(Column("label", (), "int32"),),
        batch_size=24,  # 256 rows: the last batch of an epoch has 16
        epochs=3,
        seed=11,
    )

    def plain(self, df: DataFrame, optimizer: keras.optimizers.Optimizer) -> keras.Model:
        model = deep_model()
        model.compile(optimizer, SPARSE)
        losses = [model.train_on_batch(batch.x[0], batch.y[0]) for batch in batches_of(df, self.SPEC)]
        assert len(losses) == 3 * 11
        return model

    def trained(self, df: DataFrame, rule: str | Rule, optimizer: Any = "sgd", **options: Any) -> list[np.ndarray]:
        spec = self.SPEC
        trainer = Trainer(
            deep_model(),
            rule,
            worker_optimizer=optimizer,
            loss=SPARSE,
            num_workers=1,
            batch_size=spec.batch_size,
            num_epoch=spec.epochs,
            seed=spec.seed,
            **grouped(options),
        )
        return trainer.train(df).get_weights()

    def assert_close(self, weights: list[np.ndarray], model: keras.Model) -> None:
        start = deep_model().get_weights()
        for got, expected, before in zip(weights, model.get_weights(), start, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
            assert np.abs(got - before).max() > 1e-3  # the weights have moved

    @pytest.mark.slow
    def test_downpour_equals_keras_with_an_optimizer_that_has_state(self, clouds: DataFrame) -> None:
        adam = keras.optimizers.Adam
        self.assert_close(self.trained(clouds, "downpour", adam(0.01)), self.plain(clouds, adam(0.01)))

    @pytest.mark.slow
    def test_gradients_that_the_server_applies_equal_keras(self, clouds: DataFrame) -> None:
        self.assert_close(self.trained(clouds, "asgd", learning_rate=0.1), self.plain(clouds, sgd(0.1)))

    @pytest.mark.slow
    def test_another_order_gives_other_weights(self, clouds: DataFrame) -> None:
        """The weights that the tests above compare depend on the order of the mini-batches."""
        model = deep_model()
        model.compile(sgd(0.1), SPARSE)
        for batch in reversed(list(batches_of(clouds, self.SPEC))):
            model.train_on_batch(batch.x[0], batch.y[0])
        kernel = self.plain(clouds, sgd(0.1)).get_weights()[0]
        assert np.abs(kernel - model.get_weights()[0]).max() > 1e-4


class TestEveryRowOnce:
    @pytest.mark.parametrize(("workers", "window"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 3)])
    def test_downpour_trains_each_row_once_per_epoch(self, ones: DataFrame, workers: int, window: int) -> None:
        assert counts(counter(make("downpour", window=window), workers=workers).train(ones)) == [EPOCHS] * ROWS

    @pytest.mark.slow
    def test_more_workers_than_slots_train_in_waves(self, ones: DataFrame) -> None:
        trainer = counter(workers=5)
        assert counts(trainer.train(ones)) == [EPOCHS] * ROWS
        assert {row["worker"] for row in trainer.commits.collect()} == set(range(5))

    def test_partitions_without_rows_or_smaller_than_a_batch_train(self, spark: SparkSession) -> None:
        trainer = counter(rows=3, workers=4, batch_size=64, num_epoch=2)
        assert counts(trainer.train(counting_rows(spark, 3))) == [2, 2, 2]

    @pytest.mark.parametrize("bound", [0, pytest.param(2, marks=pytest.mark.slow)])
    def test_bounded_staleness_limits_the_lead_of_a_worker(self, ones: DataFrame, bound: int) -> None:
        trainer = counter(staleness_bound=bound)
        assert counts(trainer.train(ones)) == [EPOCHS] * ROWS
        started: dict[int, int] = {0: 0, 1: 0}
        rows = trainer.commits.orderBy("clock").collect()
        ends = {worker: max(row["clock"] for row in rows if row["worker"] == worker) for worker in (0, 1)}
        for row in rows:
            worker = row["worker"]
            started[worker] += 1
            if row["clock"] < min(ends.values()):
                assert started[worker] - started[1 - worker] <= bound + 1

    @pytest.mark.slow
    def test_rows_that_are_partitioned_already_train_once_per_epoch(self, ones: DataFrame) -> None:
        spec = DataSpec(features=(Column("features", (ROWS,)),), labels=(Column("label"),), batch_size=BATCH)
        laid_out = partitioned(ones, spec, 2).cache()
        assert counts(counter(partitioned_already=True).train(laid_out)) == [EPOCHS] * ROWS

    @pytest.mark.slow
    def test_overlapped_commits_train_each_row_once_per_epoch(self, ones: DataFrame) -> None:
        trainer = counter(make("downpour", window=2), overlap=True)
        assert counts(trainer.train(ones)) == [EPOCHS] * ROWS

    @pytest.mark.slow
    def test_a_window_of_auto_is_measured_and_used(self, ones: DataFrame) -> None:
        trainer = counter(make("agn", window="auto"), num_epoch=12, overlap=True)
        trainer.train(ones)
        assert trainer.history.count() == 12 * 2 * 4
        rows = trainer.events.where("kind = 'window'").collect()
        assert len(rows) == 2
        # The chosen windows follow six windows of the rule's 10 steps; epochs of four mini-batches limit all of them.
        chosen = [int(row["text"].split()[-2]) for row in sorted(rows, key=lambda row: row["text"])]
        for worker, window in enumerate(chosen):
            commits = trainer.commits.where(f"worker = {worker}").orderBy("sequence").collect()
            assert [row["steps"] for row in commits[:6]] == [4] * 6
            assert max(row["steps"] for row in commits[8:]) == min(window, 4)

    @pytest.mark.slow
    @pytest.mark.parametrize("overlap", [False, True])
    def test_windows_by_speed_train_each_row_once_per_epoch(self, ones: DataFrame, overlap: bool) -> None:
        rule = make("downpour", window="by_speed", window_max=3)
        trainer = counter(rule, num_epoch=6, overlap=overlap)
        assert counts(trainer.train(ones)) == [6] * ROWS
        rows = trainer.commits.orderBy("clock").collect()
        for worker in (0, 1):
            steps = [row["steps"] for row in rows if row["worker"] == worker]
            assert sum(steps) == 6 * 4
            assert steps[0] == 3
            assert set(steps) <= {1, 2, 3}


#: Rates of rules whose steps at the server are as long as their rate; the tests have few steps.
SERVER_RATES = {"fadas": {"server_rate": 0.5}, "fedopt": {"server_rate": 0.5}}
#: Workers that send gradients to a server with a state for each of them. In most other tests, workers send the sum of
#: their steps; `compat/test_ancestor_programs` trains with workers that keep their own parameters.
FEW = ("dana_dc",)


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in all_rules()]
)
def test_every_rule_learns(clouds: DataFrame, name: str) -> None:
    # Scale gradients below 1: delay compensation with its default weight diverges on steep losses.
    clouds = clouds.selectExpr("transform(features, x -> x / 6) as features", "label")
    x, y = blobs(seed=1)
    x = x / 6
    model = wrong_model()
    assert accuracy(model, x, y) < 0.1
    rule = make(name, **SERVER_RATES.get(name, {}))
    trainer = Trainer(model, rule, worker_optimizer=sgd(0.1), loss=SPARSE, num_workers=2, batch_size=8, num_epoch=4)
    trained = trainer.train(clouds)
    assert accuracy(trained, x, y) > 0.95
    history = trainer.history.orderBy("worker", "iteration").toPandas()
    first = history.sort_values("timestamp").loss.iloc[0]  # a worker that starts later pulls a trained center
    assert history.groupby("worker").loss.last().max() < first
    sizes = history[history.epoch == 0].groupby("worker").samples.sum().to_dict()
    assert sum(sizes.values()) == 256
    assert committed(trainer) == expected_ranges(sizes, 4, 8)


@pytest.mark.slow
def test_the_error_for_too_few_slots_names_the_missing_workers(
    ones: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of slots is not known before the job; the second worker may join too late for the first."""
    monkeypatch.setattr(SparkFacts, "slots", lambda *_: {})
    trainer = counter("averaging", workers=3, deadlines=dataclasses.replace(PATIENT, gather=brief(3)))
    with pytest.raises(DeadlineError, match=r"[12] of 3 got a slot; missing: ") as caught:
        trainer.train(ones)
    count, missing = re.findall(r"(\d) of 3 got a slot; missing: \[(.*?)\]", str(caught.value))[0]
    assert len(missing.split(", ")) == 3 - int(count)
    assert str(caught.value.worker) in {"0", "1", "2"} - set(missing.split(", "))


class TestSeveralTrainers:
    @pytest.mark.slow
    def test_a_trainer_trains_again_from_the_start_on_its_port(self, ones: DataFrame) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        trainer = counter(port=port, num_epoch=1)

        class AnotherCall(Callback):
            def on_begin(self, setup: TrainingSetup) -> None:
                with pytest.raises(LocalProtocolError, match="a trainer must train one job at a time"):
                    trainer.train(ones)

        for _ in range(2):
            assert counts(trainer.train(ones, callbacks=[AnotherCall(every_commits=1)])) == [1] * ROWS
        with socket.create_server(("127.0.0.1", port)):
            pass  # the port is free again

    def test_a_taken_port_is_an_error(self, ones: DataFrame) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigurationError, match="in use"):
            counter(port=taken.getsockname()[1]).train(ones)

    def test_two_concurrent_trainers_do_not_affect_each_other(self, spark: SparkSession) -> None:
        sizes = (30, 41)  # so that no trainer's model fits the other's server
        outcomes: dict[int, Any] = {}

        def train(rows: int) -> None:
            trainer = counter(workers=1, rows=rows)
            outcomes[rows] = counts(trainer.train(counting_rows(spark, rows))), trainer.history.count()

        threads = [threading.Thread(target=train, args=(rows,), daemon=True) for rows in sizes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience(120))
        assert outcomes == {rows: ([EPOCHS] * rows, EPOCHS * -(-rows // BATCH)) for rows in sizes}

    @pytest.mark.slow
    def test_workers_leave_no_thread_behind(self, spark: SparkSession, ones: DataFrame) -> None:
        counter(num_epoch=1).train(ones)

        def look(batches: Iterator[Any]) -> Iterator[Any]:
            import threading

            import pyarrow as pa

            for _ in batches:
                pass
            names = [thread.name for thread in threading.enumerate() if thread.name.startswith("distkeras")]
            yield pa.RecordBatch.from_pydict({"names": [",".join(names)]})

        found = spark.range(4).repartition(2).mapInArrow(look, "names string").collect()
        assert [row["names"] for row in found] == ["", ""]


@pytest.mark.slow
def test_default_workers_are_sparks_parallelism(ones: DataFrame) -> None:
    trainer = counter(workers=None, num_epoch=1)
    trainer.train(ones)
    assert {row["worker"] for row in trainer.commits.collect()} == {0, 1}


def test_a_job_over_tls_trains_every_row_and_shows_no_secret(
    ones: DataFrame, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[bytes] = []

    def token(size: int) -> bytes:
        made.append(bytes(range(48, 48 + size)))  # printable, so a leak would be readable
        return made[-1]

    monkeypatch.setattr("distkeras.ps.world.world.World.token", staticmethod(token))
    trainer = counter(tls=True)
    with caplog.at_level("DEBUG", "distkeras"):
        assert counts(trainer.train(ones)) == [EPOCHS] * ROWS
    tables = [trainer.history, trainer.commits, trainer.ledger]
    shown = caplog.text + repr(trainer) + "".join(str(row) for table in tables for row in table.collect())
    keys = [token for token in made if len(token) == KEY_BYTES]
    assert keys
    assert not [key for key in keys if key.hex() in shown or key.decode() in shown]
