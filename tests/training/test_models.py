"""Models, optimizers, losses and labels that a trainer accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.training.small_jobs import SPARSE, deep_model, sgd
from support.training.spark_jobs import accuracy, batches_of, blobs, counting_model, counts, wrong_model

from distkeras import Trainer
from distkeras.data.batches import DataSpec
from distkeras.data.columns import Column
from distkeras.ps.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("nothing_left")


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

    @pytest.mark.slow
    def test_training_continues_from_the_optimizers_state(self, clouds: DataFrame) -> None:
        """One worker makes the next steps that Keras itself would have made."""
        x, y = blobs(32)
        model = wrong_model()
        model.compile(keras.optimizers.Adam(0.01), SPARSE)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        trained = Trainer(model, "downpour", num_workers=1, batch_size=16, shuffle=False).train(clouds)
        columns = (Column("features", (2,)),), (Column("label", (), "int32"),)
        for batch in batches_of(clouds, DataSpec(*columns, batch_size=16, shuffle=False)):
            model.train_on_batch(batch.x[0], batch.y[0])
        for found, expected in zip(trained.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
        assert int(trained.optimizer.iterations) == 0  # each worker has its own state

    @pytest.mark.slow
    @pytest.mark.parametrize("rule", ["downpour", "averaging"])
    def test_moving_statistics_reach_the_trained_model(self, clouds: DataFrame, rule: str) -> None:
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

    @pytest.mark.slow
    def test_sample_weights_scale_the_loss(self, spark: SparkSession) -> None:
        rows = spark.createDataFrame(
            [(np.eye(8)[number].tolist(), 0.0, float(number)) for number in range(8)],
            "features array<float>, label float, heft float",
        )
        # Keras averages over the mini-batch of 8, but the counting model's loss is a sum: use a plain output instead.
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

    @pytest.mark.slow
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

    @pytest.mark.slow
    def test_a_registered_custom_layer_trains(self, clouds: DataFrame) -> None:
        @keras.saving.register_keras_serializable("notebook")
        class Double(keras.layers.Layer):
            def call(self, x: Any) -> Any:
                return 2 * x

        model = keras.Sequential([keras.Input((2,)), Double(), keras.layers.Dense(2, activation="softmax")])
        x, y = blobs(seed=1)
        assert accuracy(self.train(clouds, model), x, y) > 0.95

    @pytest.mark.slow
    def test_workers_read_frozen_weights_from_their_file(self, clouds: DataFrame, tmp_path: Path) -> None:
        base = keras.Sequential([keras.Input((2,)), keras.layers.Dense(16384, "tanh")], name="base")
        base.trainable = False
        model = keras.Sequential([base, keras.layers.Dense(2, "softmax")])
        base.save_weights(path := tmp_path / "base.weights.h5")
        trained = self.train(clouds, model, frozen_weights=str(path))
        np.testing.assert_array_equal(trained.layers[0].layers[-1].kernel, base.layers[-1].kernel)
        assert not np.array_equal(trained.layers[1].kernel, model.layers[1].kernel)

        options = {"worker_optimizer": sgd(0.1), "loss": SPARSE, "num_workers": 2}
        trainer = Trainer(model, "agn", frozen_weights=str(path), **options)
        path.unlink()
        with pytest.raises(ConfigurationError, match=r"frozen_weights=.*base\.weights\.h5"):
            trainer.train(clouds)

    @pytest.mark.slow
    def test_ml_vectors_and_a_boolean_label_train(self, spark: SparkSession) -> None:
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
    """Return a loss that is each row's own output."""

    def output(y_true: Any, y_pred: Any) -> Any:
        return y_pred[:, 0]

    return output
