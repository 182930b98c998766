"""The trainer on real Spark tasks, against plain Keras and against exact counts."""

from __future__ import annotations

import dataclasses
import datetime
import socket
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.patience import PATIENT, brief, patience
from support.spark_jobs import (
    accuracy,
    assert_nothing_left,
    batches_of,
    blobs,
    committed,
    counting_model,
    counting_rows,
    counts,
    expected_ranges,
    table,
    total,
    wrong_model,
)

from distkeras import Trainer
from distkeras.data.columns import Column
from distkeras.data.ordering import partitioned
from distkeras.data.spec import DataSpec
from distkeras.ps.errors import ConfigurationError, DeadlineError, LocalProtocolError
from distkeras.ps.rules import Rule, all_rules, make

ROWS, BATCH, EPOCHS = 61, 8, 3
SPARSE = "sparse_categorical_crossentropy"


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert_nothing_left()


@pytest.fixture(scope="module")
def ones(spark: SparkSession) -> DataFrame:
    return counting_rows(spark, ROWS).cache()


@pytest.fixture(scope="module")
def clouds(spark: SparkSession) -> DataFrame:
    return table(spark, *blobs()).cache()


def sgd(rate: float = 1.0, **options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(rate, **options)


def counter(rule: str | Rule = "downpour", *, workers: int | None = 2, rows: int = ROWS, **options: Any) -> Trainer:
    options = {"batch_size": BATCH, "num_epoch": EPOCHS} | options
    return Trainer(counting_model(rows), rule, worker_optimizer=sgd(), loss=total, num_workers=workers, **options)


def deep_model() -> keras.Model:
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2, activation="softmax")]
    )


class TestEqualToPlainKeras:
    """One worker sees the batches that the data plane gives, in their order, and makes the steps that Keras makes.

    Tolerance: float32 rounding of some 50 steps, as each commit rounds the center once more; measured below 1e-6.
    """

    SPEC = DataSpec(
        features=(Column("features", (2,)),),
        labels=(Column("label", (), "int32"),),
        batch_size=24,  # 256 rows: the last batch of an epoch has 16
        epochs=3,
        seed=11,
    )

    def plain(self, df: DataFrame, optimizer: keras.optimizers.Optimizer) -> list[dict[str, float]]:
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
            **options,
        )
        return trainer.train(df).get_weights()

    def assert_close(self, weights: list[np.ndarray], model: keras.Model) -> None:
        start = deep_model().get_weights()
        for got, expected, before in zip(weights, model.get_weights(), start, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
            assert np.abs(got - before).max() > 1e-3  # it went somewhere

    @pytest.mark.parametrize("window", [1, 5])
    def test_downpour(self, clouds: DataFrame, window: int) -> None:
        self.assert_close(self.trained(clouds, make("downpour", window=window), sgd(0.1)), self.plain(clouds, sgd(0.1)))

    def test_downpour_with_an_optimizer_that_has_state(self, clouds: DataFrame) -> None:
        adam = keras.optimizers.Adam
        self.assert_close(self.trained(clouds, "downpour", adam(0.01)), self.plain(clouds, adam(0.01)))

    def test_gradients_applied_at_the_server(self, clouds: DataFrame) -> None:
        self.assert_close(self.trained(clouds, "asgd", learning_rate=0.1), self.plain(clouds, sgd(0.1)))

    @pytest.mark.parametrize("window", [1, 5])
    def test_downpour_that_computes_while_commits_travel(self, clouds: DataFrame, window: int) -> None:
        # A lone worker knows what is under way: it is missing in no step.
        overlapped = self.trained(clouds, make("downpour", window=window), sgd(0.1), overlap=True)
        self.assert_close(overlapped, self.plain(clouds, sgd(0.1)))

    def test_agn_of_window_1_is_downpour_to_the_bit(self, clouds: DataFrame) -> None:
        weights = [self.trained(clouds, make(name, window=1), sgd(0.1)) for name in ("agn", "downpour")]
        for one, other in zip(*weights, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_another_order_gives_other_weights(self, clouds: DataFrame) -> None:
        """What the tests above compare is not the same whatever one does."""
        model = deep_model()
        model.compile(sgd(0.1), SPARSE)
        for batch in reversed(list(batches_of(clouds, self.SPEC))):
            model.train_on_batch(batch.x[0], batch.y[0])
        kernel = self.trained(clouds, "downpour", sgd(0.1))[0]
        assert np.abs(kernel - model.get_weights()[0]).max() > 1e-4


class TestEveryRowOnce:
    @pytest.mark.parametrize(("workers", "window"), [(1, 1), (2, 1), (2, 3)])
    def test_downpour_counts(self, ones: DataFrame, workers: int, window: int) -> None:
        assert counts(counter(make("downpour", window=window), workers=workers).train(ones)) == [EPOCHS] * ROWS

    def test_agn_of_window_1_counts_with_two_workers_as_downpour_does(self, ones: DataFrame) -> None:
        # The numbers are exact in float32, so that the workers' turns, which nobody can repeat, play no part.
        assert counts(counter(make("agn", window=1)).train(ones)) == [EPOCHS] * ROWS

    def test_zealous_downpour(self, ones: DataFrame) -> None:
        assert counts(counter(make("zealous_downpour", window=3)).train(ones)) == [EPOCHS] * ROWS

    def test_more_workers_than_slots_train_in_waves(self, ones: DataFrame) -> None:
        trainer = counter(workers=5)
        assert counts(trainer.train(ones)) == [EPOCHS] * ROWS
        assert {row["worker"] for row in trainer.commits.collect()} == set(range(5))

    def test_a_partition_smaller_than_a_batch_trains(self, spark: SparkSession) -> None:
        trainer = counter(rows=3, workers=2, batch_size=64, num_epoch=2)
        assert counts(trainer.train(counting_rows(spark, 3))) == [2, 2, 2]

    def test_a_worker_without_rows_is_no_trouble(self, spark: SparkSession) -> None:
        trainer = counter(rows=2, workers=4, num_epoch=2)
        assert counts(trainer.train(counting_rows(spark, 2))) == [2, 2]

    @pytest.mark.parametrize("bound", [0, 2])
    def test_bounded_staleness(self, ones: DataFrame, bound: int) -> None:
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

    def test_partitioned_already(self, ones: DataFrame) -> None:
        spec = DataSpec(features=(Column("features", (ROWS,)),), labels=(Column("label"),), batch_size=BATCH)
        laid_out = partitioned(ones, spec, 2).cache()
        assert counts(counter(partitioned_already=True).train(laid_out)) == [EPOCHS] * ROWS

    def test_commits_that_overlap_with_compute(self, ones: DataFrame) -> None:
        trainer = counter(make("downpour", window=2), overlap=True)
        assert counts(trainer.train(ones)) == [EPOCHS] * ROWS

    def test_a_window_that_is_measured(self, ones: DataFrame) -> None:
        rule = make("agn", window=1)
        trainer = counter(rule, communication_window="auto", communication_share=0.5, num_epoch=12)
        trainer.train(ones)
        assert trainer.history.count() == 12 * 2 * 4
        rows = trainer.events.where("kind = 'window'").collect()
        assert len(rows) == 2
        # After six windows of one step come the chosen ones, cut at the end of each epoch of four batches.
        chosen = [int(row["text"].split()[-2]) for row in sorted(rows, key=lambda row: row["text"])]
        for worker, window in enumerate(chosen):
            commits = trainer.commits.where(f"worker = {worker}").orderBy("sequence").collect()
            assert [row["steps"] for row in commits[:6]] == [1] * 6
            assert max(row["steps"] for row in commits[8:]) == min(window, 4)

    def test_spooled_to_a_file(self, ones: DataFrame) -> None:
        assert counts(counter(spool_bytes=0).train(ones)) == [EPOCHS] * ROWS


@pytest.mark.parametrize("name", list(all_rules()))
def test_every_rule_learns(clouds: DataFrame, name: str) -> None:
    # Gradients below 1: delay compensation with its default weight diverges on steep losses.
    clouds = clouds.selectExpr("transform(features, x -> x / 6) as features", "label")
    x, y = blobs(seed=1)
    x = x / 6
    model = wrong_model()
    assert accuracy(model, x, y) < 0.1
    trainer = Trainer(model, name, worker_optimizer=sgd(0.1), loss=SPARSE, num_workers=2, batch_size=8, num_epoch=4)
    trained = trainer.train(clouds)
    assert accuracy(trained, x, y) > 0.95
    history = trainer.history.orderBy("worker", "iteration").toPandas()
    assert history.groupby("worker").loss.last().max() < history.groupby("worker").loss.first().min()
    sizes = history[history.epoch == 0].groupby("worker").samples.sum().to_dict()
    assert sum(sizes.values()) == 256
    assert committed(trainer) == expected_ranges(sizes, 4, 8)


def test_a_synchronous_rule_with_more_workers_than_slots_names_the_missing(ones: DataFrame) -> None:
    trainer = counter("averaging", workers=3, deadlines=dataclasses.replace(PATIENT, gather=brief(3)))
    with pytest.raises(DeadlineError, match="2 of 3 got a slot; missing: ") as caught:
        trainer.train(ones)
    assert caught.value.worker in (0, 1, 2)


class TestRecords:
    @pytest.fixture(scope="class")
    def began(self) -> float:
        return datetime.datetime.now(datetime.UTC).timestamp()

    @pytest.fixture(scope="class")
    def trainer(self, began: float, spark: SparkSession, clouds: DataFrame) -> Trainer:
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

    def test_history_columns(self, trainer: Trainer) -> None:
        assert dict(trainer.history.dtypes) == {
            "worker": "int",
            "epoch": "int",
            "iteration": "bigint",
            "timestamp": "timestamp",
            "loss": "double",
            "accuracy": "double",
            "samples": "bigint",
        }

    def test_commit_columns(self, trainer: Trainer) -> None:
        assert trainer.commits.dtypes == [
            ("clock", "bigint"),
            ("worker", "int"),
            ("timestamp", "timestamp"),
            ("staleness", "bigint"),
            ("gap", "double"),
            ("scale", "double"),
            ("bytes", "bigint"),
            ("wait", "double"),
            ("attempt", "bigint"),
            ("sequence", "bigint"),
            ("epoch", "int"),
            ("first_batch", "bigint"),
            ("last_batch", "bigint"),
            ("steps", "int"),
            ("learning_rate", "double"),
        ]

    def test_ledger_columns(self, trainer: Trainer) -> None:
        assert set(trainer.ledger.columns) == {
            "worker", "attempt", "sequence", "epoch", "first_batch", "last_batch", "clock", "incarnation", "applied",
        }  # fmt: skip

    def test_one_history_row_a_mini_batch(self, trainer: Trainer, began: float) -> None:
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

    def test_ledger_is_exact(self, trainer: Trainer) -> None:
        history = trainer.history.toPandas()
        sizes = history[history.epoch == 0].groupby("worker").samples.sum().to_dict()
        assert committed(trainer) == expected_ranges(sizes, 2, 20)

    def test_gap_is_null_unless_measured(self, trainer: Trainer, ones: DataFrame) -> None:
        assert trainer.commits.where("gap is not null").count() == 0
        measured = counter(measure_gap=True, num_epoch=1)
        measured.train(ones)
        commits = measured.commits.toPandas()
        assert commits.gap.notna().all()
        assert (commits.gap[commits.staleness == 0] == 0).all()
        assert (commits.gap[commits.staleness > 0] > 0).all()

    def test_they_need_a_training(self, ones: DataFrame) -> None:
        trainer = counter()
        for name in ("history", "commits", "ledger", "model"):
            with pytest.raises(LocalProtocolError, match="after `train`"):
                getattr(trainer, name)

    def test_timings(self, trainer: Trainer) -> None:
        parts = [trainer.timings[name] for name in ("start", "spark", "finish")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(trainer.timings["total"], abs=2)


class TestSeveralTrainers:
    def test_one_after_the_other_on_one_port(self, ones: DataFrame) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        for _ in range(2):
            assert counts(counter(port=port, num_epoch=1).train(ones)) == [1] * ROWS
        with socket.create_server(("127.0.0.1", port)):
            pass  # free again

    def test_a_taken_port_is_an_error(self, ones: DataFrame) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigurationError, match="in use"):
            counter(port=taken.getsockname()[1]).train(ones)

    def test_two_at_once_do_not_meet(self, spark: SparkSession) -> None:
        frames = [table(spark, *blobs(rows, seed=rows)).cache() for rows in (120, 200)]

        def train(df: DataFrame, results: dict[int, Any], number: int) -> keras.Model:
            model = deep_model_of(number)
            trainer = Trainer(model, "downpour", worker_optimizer=sgd(0.1), loss=SPARSE, num_workers=1, num_epoch=2)
            results[number] = trainer.train(df).get_weights(), trainer.history.count()

        models = [deep_model(), deep_model()]  # seeding is global: not in two threads

        def deep_model_of(number: int) -> keras.Model:
            return models[number]

        alone: dict[int, Any] = {}
        for number, df in enumerate(frames):
            train(df, alone, number)
        together: dict[int, Any] = {}
        threads = [threading.Thread(target=train, args=(df, together, number)) for number, df in enumerate(frames)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience(120))
        assert [together[number][1] for number in (0, 1)] == [2 * 4, 2 * 7]
        for number in (0, 1):
            for one, other in zip(alone[number][0], together[number][0], strict=True):
                np.testing.assert_array_equal(one, other)
        assert np.abs(together[0][0][0] - together[1][0][0]).max() > 1e-3

    def test_a_trainer_trains_again_from_the_start(self, ones: DataFrame) -> None:
        trainer = counter(num_epoch=1)
        for _ in range(2):
            assert counts(trainer.train(ones)) == [1] * ROWS

    def test_workers_keep_no_thread(self, spark: SparkSession, ones: DataFrame) -> None:
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


class TestModels:
    def train(self, df: DataFrame, model: keras.Model, rule: str = "downpour", **options: Any) -> keras.Model:
        options = {"worker_optimizer": sgd(0.1), "loss": SPARSE, "num_workers": 2, "batch_size": 16} | options
        return Trainer(model, rule, **options).train(df)

    def test_the_model_passed_in_is_not_changed_and_the_returned_one_is_ready(self, clouds: DataFrame) -> None:
        model = deep_model()
        before = [weights.copy() for weights in model.get_weights()]
        trained = self.train(clouds, model, metrics=["accuracy"])
        assert trained is not model
        assert not model.compiled
        for weights, kept in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(weights, kept)
        x, y = blobs(seed=1)
        figures = trained.evaluate(x, y, verbose=0, return_dict=True)
        assert figures["accuracy"] > 0.9
        assert trained.optimizer.get_config()["learning_rate"] == pytest.approx(0.1)

    def test_what_the_model_is_compiled_with_is_the_default(self, clouds: DataFrame) -> None:
        model = wrong_model()
        model.compile(sgd(0.1), SPARSE, metrics=["accuracy"])
        trainer = Trainer(model, "downpour", num_workers=2)
        x, y = blobs(seed=1)
        assert accuracy(trainer.train(clouds), x, y) > 0.95
        assert "accuracy" in trainer.history.columns

    @pytest.mark.parametrize("rule", ["downpour", "averaging"])
    def test_moving_statistics_arrive(self, clouds: DataFrame, rule: str) -> None:
        inputs = keras.Input((2,))
        normalized = keras.layers.BatchNormalization(momentum=0.5)(inputs)
        model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(normalized))
        shifted = clouds.selectExpr("transform(features, x -> cast(x + 10 as float)) as features", "label")
        trained = self.train(shifted, model, rule, num_epoch=3)
        x, y = blobs(seed=1)
        moving_mean, moving_variance = trained.layers[1].get_weights()[2:]
        np.testing.assert_allclose(moving_mean, x.mean(0) + 10, atol=2.0)
        np.testing.assert_allclose(moving_variance, x.var(0), rtol=0.4)
        assert accuracy(trained, x + 10, y) > 0.95

    def test_frozen_layers_stay(self, clouds: DataFrame) -> None:
        model = deep_model()
        model.layers[0].trainable = False
        before = model.layers[0].get_weights()
        trained = self.train(clouds, model)
        for weights, kept in zip(trained.layers[0].get_weights(), before, strict=True):
            np.testing.assert_array_equal(weights, kept)
        assert not trained.layers[0].trainable
        assert np.abs(trained.layers[1].get_weights()[0] - model.layers[1].get_weights()[0]).max() > 1e-3

    def test_several_inputs_and_outputs(self, spark: SparkSession) -> None:
        x, y = blobs()
        df = spark.createDataFrame(
            [(float(a), [float(b)], int(c), [float(a + b)]) for (a, b), c in zip(x, y, strict=True)],
            "a float, b array<float>, cloud int, both array<float>",
        )
        one, two = keras.Input((1,), name="one"), keras.Input((1,), name="two")
        joined = keras.layers.Concatenate()([one, two])
        cloud = keras.layers.Dense(2, activation="softmax", name="cloud")(joined)
        both = keras.layers.Dense(1, name="both")(joined)
        trainer = Trainer(
            keras.Model([one, two], [cloud, both]),
            "downpour",
            worker_optimizer=sgd(0.02),
            loss=[SPARSE, "mse"],
            loss_weights=[1.0, 0.5],
            features_col=["a", "b"],
            label_col=["cloud", "both"],
            num_workers=2,
            num_epoch=4,
        )
        trained = trainer.train(df)
        classes, sums = trained.predict([x[:, :1], x[:, 1:]], verbose=0)
        assert (classes.argmax(-1) == y).mean() > 0.95
        assert np.abs(sums.ravel() - x.sum(1)).mean() < 1.0  # 6 before it learns

    def test_sample_weights(self, spark: SparkSession) -> None:
        rows = spark.createDataFrame(
            [(np.eye(8)[number].tolist(), 0.0, float(number)) for number in range(8)],
            "features array<float>, label float, heft float",
        )
        # Keras means over the batch of 8: the counting model's loss is the sum, so weigh by a plain output instead.
        trainer = Trainer(
            counting_model(8),
            "downpour",
            worker_optimizer=sgd(8.0),
            loss=each(),
            sample_weight_col="heft",
            num_workers=1,
            batch_size=8,
        )
        assert counts(trainer.train(rows)) == list(range(8))

    def test_class_weights_multiply_sample_weights(self, spark: SparkSession) -> None:
        rows = spark.createDataFrame(
            [(np.eye(8)[number].tolist(), number % 2, 2.0) for number in range(8)],
            "features array<float>, label int, heft float",
        )
        for column, factor in ((None, 1), ("heft", 2)):
            trainer = Trainer(
                counting_model(8),
                "downpour",
                worker_optimizer=sgd(8.0),
                loss=each(),
                sample_weight_col=column,
                class_weight={1: 3.0},
                num_workers=1,
                batch_size=8,
            )
            assert counts(trainer.train(rows)) == [factor, 3 * factor] * 4

    def test_a_registered_layer_of_the_users_own(self, clouds: DataFrame) -> None:
        @keras.saving.register_keras_serializable("notebook")
        class Double(keras.layers.Layer):
            def call(self, x: Any) -> Any:
                return 2 * x

        model = keras.Sequential([keras.Input((2,)), Double(), keras.layers.Dense(2, activation="softmax")])
        x, y = blobs(seed=1)
        assert accuracy(self.train(clouds, model), x, y) > 0.95

    @pytest.mark.parametrize(
        ("label", "loss"),
        [
            ("cast(label as long)", SPARSE),
            ("cast(label as double)", SPARSE),
            ("array(cast(1 - label as float), cast(label as float))", "categorical_crossentropy"),
            ("array(1 - label, label)", "mse"),
        ],
    )
    def test_kinds_of_labels(self, clouds: DataFrame, label: str, loss: str) -> None:
        x, y = blobs(seed=1)
        trained = self.train(clouds.selectExpr("features", f"{label} as label"), wrong_model(), loss=loss, num_epoch=2)
        assert accuracy(trained, x, y) > 0.95

    def test_ml_vectors_and_a_boolean_label(self, spark: SparkSession) -> None:
        from pyspark.ml.linalg import Vectors

        x, y = blobs()
        df = spark.createDataFrame(
            [(Vectors.dense(point), bool(label)) for point, label in zip(x.tolist(), y, strict=True)],
            ["features", "label"],
        )
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation="sigmoid")])
        trained = self.train(df, model, loss="binary_crossentropy", num_epoch=2)
        assert ((trained.predict(x, verbose=0).ravel() > 0.5) == y).mean() > 0.95


def each() -> Any:
    """A loss of each row's own output."""

    def output(y_true: Any, y_pred: Any) -> Any:
        return y_pred[:, 0]

    return output


def test_default_workers_are_sparks_parallelism(ones: DataFrame) -> None:
    trainer = counter(workers=None, num_epoch=1)
    trainer.train(ones)
    assert {row["worker"] for row in trainer.commits.collect()} == {0, 1}


def test_a_job_over_tls_trains_every_row_and_shows_no_secret(
    ones: DataFrame, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[bytes] = []

    def token(size: int) -> bytes:
        made.append(bytes(range(48, 48 + size)))  # printable: it would show as it is
        return made[-1]

    monkeypatch.setattr("distkeras.ps.server.process.secrets.token_bytes", token)
    trainer = counter(tls=True)
    with caplog.at_level("DEBUG", "distkeras"):
        assert counts(trainer.train(ones)) == [EPOCHS] * ROWS
    tables = [trainer.history, trainer.commits, trainer.ledger]
    shown = caplog.text + repr(trainer) + "".join(str(row) for table in tables for row in table.collect())
    assert made
    assert not [key for key in made if key.hex() in shown or key.decode() in shown]
