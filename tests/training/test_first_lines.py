"""The text of an error as a user sees it: few lines, of which the first one states the problem."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import keras
import pytest
from pyspark.sql import SparkSession
from support.cases import rest_slow
from support.present import present
from support.training.spark_jobs import wrong_model

from distkeras import DOWNPOUR, EnsembleTrainer, KerasEstimator, KerasModel, Trainer
from distkeras.ps.errors import BadValueError, ConfigurationError, DistkerasError
from distkeras.transformers import (
    AccuracyEvaluator,
    LossEvaluator,
    MinMaxTransformer,
    ModelPredictor,
    OneHotTransformer,
    StandardScaleTransformer,
)

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(120)]

GOOD = [([float(number), 1.0], number % 2) for number in range(20)]


def train(spark: SparkSession, rows: list[Any]) -> None:
    trainer = Trainer(wrong_model(), "downpour", loss="sparse_categorical_crossentropy", num_workers=1)
    trainer.train(spark.createDataFrame(rows, "features array<float>, label int"))


SPARSE = "sparse_categorical_crossentropy"
#: Calls with an argument that is not a DataFrame, and what the error of each names.
CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a transformer's constructor": (lambda df: OneHotTransformer(0), "output_dim"),
    "transform": (lambda df: MinMaxTransformer(0.0, 1.0, input_col="gone", output_col="x").transform(df), "gone"),
    "fit": (lambda df: StandardScaleTransformer(["gone"]).fit(df), "gone"),
    "an evaluator's constructor": (lambda df: LossEvaluator("krossentropy"), "loss"),
    "evaluate": (lambda df: AccuracyEvaluator(prediction_col="gone").evaluate(df), "gone"),
    "evaluate, in a job": (lambda df: AccuracyEvaluator(prediction_col="nan").evaluate(df), "nan"),
    "a predictor's constructor": (lambda df: ModelPredictor("model"), "keras_model"),
    "a predictor": (lambda df: ModelPredictor(wrong_model(), "gone").transform(df), "gone"),
    "a predictor without a model": (lambda df: ModelPredictor().transform(df), "keras_model"),
    "an estimator's constructor": (lambda df: KerasEstimator(wrong_model(), batch_size=0), "batch_size"),
    "an estimator": (lambda df: KerasEstimator(wrong_model(), loss=SPARSE, features_col="gone").fit(df), "gone"),
    "an estimator without a model": (lambda df: KerasEstimator(loss=SPARSE).fit(df), "model"),
    "a fitted model": (lambda df: KerasModel(wrong_model(), features_col="gone").transform(df), "gone"),
    "a fitted model's evaluation": (lambda df: KerasModel(wrong_model()).evaluate(df), "compile"),
    "saving": (lambda df: KerasModel().save("nowhere"), "keras_model"),
    "a name of dist-keras": (lambda df: DOWNPOUR(wrong_model(), "sgd", SPARSE, num_workers=0), "num_workers"),
    "its training": (lambda df: DOWNPOUR(wrong_model(), "sgd", SPARSE, features_col="gone").train(df), "gone"),
    "several models": (lambda df: EnsembleTrainer(wrong_model(), "sgd", SPARSE, num_ensembles=0), "num_ensembles"),
    "their training": (lambda df: EnsembleTrainer(wrong_model(), "sgd", SPARSE, label_col="gone").train(df), "gone"),
    "no DataFrame to transform": (lambda df: MinMaxTransformer(0.0, 1.0).transform(df.toPandas()), "dataset"),
    "no DataFrame to fit": (lambda df: KerasEstimator(wrong_model(), loss=SPARSE).fit(cast("Any", [1])), "dataset"),
    "no DataFrame to evaluate": (lambda df: LossEvaluator().evaluate(cast("Any", "rows.parquet")), "dataset"),
}
#: One call of each kind of object.
CALLS_BY_DEFAULT = (
    "transform",
    "evaluate, in a job",
    "a predictor's constructor",
    "an estimator",
    "saving",
    "a name of dist-keras",
    "no DataFrame to evaluate",
)


class TestWhatIsShown:
    @pytest.mark.parametrize("name", rest_slow(CALLS, *CALLS_BY_DEFAULT))
    def test_the_error_of_an_invalid_call_is_short(self, spark: SparkSession, name: str) -> None:
        call, argument = CALLS[name]
        df = spark.createDataFrame(GOOD, "features array<float>, label int").selectExpr("*", "double('nan') as nan")
        with pytest.raises(DistkerasError) as caught:
            call(df)
        assert argument in str(caught.value).partition("\n")[0]
        assert len(self.lines(caught.value)) <= 15

    def lines(self, error: BaseException) -> list[str]:
        return "".join(traceback.format_exception(error)).splitlines()

    @pytest.mark.slow
    def test_the_error_of_a_bad_row_is_short(self, spark: SparkSession) -> None:
        with pytest.raises(BadValueError) as caught:
            train(spark, [*GOOD, (None, 0)])
        shown = self.lines(caught.value)
        assert len(shown) <= 15
        assert shown[-1].startswith("distkeras.ps.errors.BadValueError: values must not be null.")
        assert "_flatten" in present(caught.value.remote_traceback)

    @pytest.mark.slow
    def test_the_error_of_a_python_without_distkeras_is_short(
        self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """The interpreter of `PYSPARK_PYTHON` may have nothing installed."""
        bare = tmp_path / "bare-python"
        bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        bare.chmod(0o755)
        monkeypatch.setattr(spark.sparkContext, "pythonExec", str(bare))
        text = r"^the executors' Python must .*No module named.*bare-python"
        with pytest.raises(ConfigurationError, match=text) as caught:
            train(spark, GOOD)
        assert len(self.lines(caught.value)) <= 15


def of_two_columns(**options: Any) -> KerasModel:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation="softmax")])
    model.compile("sgd", SPARSE, metrics=options.pop("metrics", None))
    return KerasModel(model, **{"features_col": ["a", "b"], **options})


class TestWhatIsNamed:
    """Errors name the user's columns and keywords, none that this package has made."""

    @pytest.mark.parametrize(
        ("call", "expected"),
        [
            (lambda df: of_two_columns(features_col=["a", "b", "c"]).transform(df), r"3 columns, \['a', 'b', 'c'\]"),
            pytest.param(
                lambda df: of_two_columns(features_col=["a", "b", "c"]).evaluate(df),
                r"3 columns, \['a', 'b', 'c'\]",
                marks=pytest.mark.slow,
            ),
            (lambda df: of_two_columns(prediction_col="a").transform(df), "^`prediction_col` must name a new column"),
            pytest.param(
                lambda df: of_two_columns(probability_col="a").transform(df),
                "^`probability_col` must name a new column",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                lambda df: of_two_columns(probability_col="prediction").transform(df),
                "not that of another new one",
                marks=pytest.mark.slow,
            ),
            (lambda df: of_two_columns(decode={"a": abs}).evaluate(df), r"must be of the columns \['a, b', 'label'\]"),
            pytest.param(
                lambda df: of_two_columns(metrics=["AUC"]).evaluate(df),
                "must have a loss and metrics that fit the data",
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_an_error_names_what_the_user_wrote(
        self, spark: SparkSession, call: Callable[[Any], Any], expected: str
    ) -> None:
        df = spark.createDataFrame([(0.0, 1.0, 2.0, 1)], "a double, b double, c double, label int")
        with pytest.raises(DistkerasError, match=expected) as caught:
            call(df)
        assert "distkeras_features" not in str(caught.value)
        assert "output_col" not in str(caught.value)

    @pytest.mark.slow
    def test_outputs_of_a_layer_that_is_called_twice_are_numbered(self, spark: SparkSession) -> None:
        inputs, score = [keras.Input((1,)), keras.Input((1,))], keras.layers.Dense(1, name="score")
        model = keras.Model(inputs, [score(one) for one in inputs])
        model.compile("sgd", "mse", metrics=[["mae"], ["mae"]])
        fitted = KerasModel(model, features_col=["a", "b"], label_col=["c", "c"])
        df = spark.createDataFrame([(0.0, 1.0, 2.0)], "a double, b double, c double")
        assert fitted.transform(df).columns == ["a", "b", "c", "prediction_score", "prediction_score_1"]
        assert {"score_mae", "score_mae_1"} <= fitted.evaluate(df).keys()
