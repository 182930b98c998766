"""Output columns of a fitted model, custom classes, and concurrent fits."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit
from pyspark.sql import DataFrame, SparkSession
from support.training.spark_jobs import column

from distkeras import Callback, EarlyStopping, KerasEstimator, KerasModel

ROWS = 80


@pytest.fixture(scope="module")
def df(spark: SparkSession) -> DataFrame:
    draw = np.random.default_rng(8).normal(size=(ROWS, 2))
    rows = [(i, [float(a), float(b)], float(a - b), int(a > b)) for i, (a, b) in enumerate(draw)]
    return spark.createDataFrame(rows, "id int, features array<double>, target double, label int").cache()


def linear(*layers: keras.Layer, units: int = 1) -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(units)])


def estimator(model: keras.Model, **keywords: Any) -> KerasEstimator:
    given = {"loss": "mse", "label_col": "target", "num_workers": 1, "worker_optimizer": keras.optimizers.SGD(0.1)}
    return KerasEstimator(model, "downpour", **given | keywords)


class TestColumns:
    @pytest.mark.slow
    def test_predictions_are_vectors_on_request(self, df: DataFrame) -> None:
        fitted = KerasModel(linear(units=3), output_type="vector")
        out = fitted.transform(df)
        assert out.schema["prediction"].dataType.simpleString() == "vector"
        np.testing.assert_allclose(
            column(out, "prediction"), fitted.keras_model.predict(column(df, "features"), verbose=0), atol=1e-6
        )

    @pytest.mark.slow
    def test_each_output_has_its_own_columns(self, df: DataFrame) -> None:
        inputs = keras.Input((2,))
        outputs = [
            keras.layers.Dense(3, "softmax", name="kind")(inputs),
            keras.layers.Dense(1, name="size")(inputs),
            keras.layers.Dense(1, "sigmoid", name="sign")(inputs),
        ]
        model = keras.Model(inputs, outputs)
        model.compile(loss=["sparse_categorical_crossentropy", "mse", "binary_crossentropy"])
        out = KerasModel(model, raw_prediction_col="").transform(df)
        assert out.columns[len(df.columns) :] == [
            "prediction_kind", "prediction_size", "prediction_sign", "probability_kind", "probability_sign",
        ]  # fmt: skip
        kind, size, sign = model.predict(column(df, "features"), verbose=0)
        np.testing.assert_allclose(column(out, "probability_kind"), kind, atol=1e-6)
        np.testing.assert_array_equal(column(out, "prediction_kind"), kind.argmax(axis=1))
        np.testing.assert_allclose(column(out, "prediction_size"), size[:, 0], atol=1e-6)
        np.testing.assert_allclose(column(out, "probability_sign"), np.hstack([1 - sign, sign]), atol=1e-6)


class TestCustomObjects:
    @pytest.mark.slow
    def test_unregistered_classes_are_passed_as_custom_objects(self, df: DataFrame) -> None:
        class Halved(keras.layers.Layer):
            def call(self, x: Any) -> Any:
                return 0.5 * x

        fitted = estimator(linear(Halved()), custom_objects={"Halved": Halved}).fit(df)
        expected = fitted.keras_model.predict(column(df, "features"), verbose=0)
        np.testing.assert_allclose(column(fitted.transform(df), "prediction"), expected[:, 0], atol=1e-6)
        assert fitted.evaluate(df)["loss"] == pytest.approx(np.mean((expected[:, 0] - column(df, "target")) ** 2), 1e-4)


class Counting(Callback):
    """A callback that counts the ends of its job."""

    def on_begin(self, setup: Any) -> None:
        self.ended = 0

    def on_end(self, context: Any) -> None:
        self.ended += 1


class TestFits:
    @pytest.mark.slow
    def test_each_fit_has_its_own_callbacks(self, df: DataFrame) -> None:
        given = [Counting(), EarlyStopping(df)]
        made = estimator(linear(), callbacks=given)
        fits: dict[int, Any] = dict(
            made.fitMultiple(df, [{made.getParam("num_epoch"): 1}, {made.getParam("num_epoch"): 3}])
        )
        counts = {tuple(type(one).__name__ for one in fit.summary.callbacks) for fit in fits.values()}
        assert counts == {("Counting", "EarlyStopping")}
        assert [fit.summary.callbacks[0].ended for fit in fits.values()] == [1, 1]
        last = [fit.summary.callbacks[1].evaluations[-1]["clock"] for _, fit in sorted(fits.items())]
        assert last[0] < last[1]
        assert not hasattr(given[0], "ended")

    @pytest.mark.slow
    def test_a_search_fits_several_models_concurrently(self, df: DataFrame, tmp_path: Any) -> None:
        made = estimator(linear(), checkpoint=str(tmp_path / "saved"))
        grid = ParamGridBuilder().addGrid(made.getParam("num_epoch"), [1, 6]).build()
        evaluator = RegressionEvaluator(labelCol="target")
        search = TrainValidationSplit(
            estimator=made, estimatorParamMaps=grid, evaluator=evaluator, trainRatio=0.7, parallelism=2, seed=1
        )
        fitted = search.fit(df)
        assert fitted.validationMetrics[1] < fitted.validationMetrics[0]
        # There is one folder for each of three fits.
        assert {folder.name for folder in tmp_path.iterdir()} == {"saved", "saved-2", "saved-3"}
