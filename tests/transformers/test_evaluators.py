"""Accuracy and loss: the values are those of Keras, and invalid rows are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession

from distkeras.ps.errors import (
    BadValueError,
    ColumnTypeError,
    ConfigurationError,
    DistkerasError,
    EmptyDataError,
    MissingColumnError,
    ShapeError,
)
from distkeras.transformers import AccuracyEvaluator, LossEvaluator, ModelPredictor

N = 40
RNG = np.random.default_rng(1)
SCORES = RNG.dirichlet(np.ones(3), N)
LABELS = RNG.integers(0, 3, N)
SIGMOID = RNG.random(N)
TARGETS = RNG.normal(size=(N, 2))


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    data = [
        (
            SCORES[i].tolist(),
            Vectors.dense(SCORES[i]),
            float(SCORES[i].argmax()),
            int(LABELS[i]),
            np.eye(3)[LABELS[i]].tolist(),
            [float(SIGMOID[i])],
            int(LABELS[i] > 0),
            TARGETS[i].tolist(),
            (TARGETS[i] + i % 3).tolist(),
            "word",
        )
        for i in range(N)
    ]
    names = ["scores", "vector", "index", "label", "hot", "sigmoid", "binary", "target", "guess", "word"]
    return spark.createDataFrame(data, names).repartition(3).cache()


@pytest.mark.parametrize(
    ("prediction", "label"),
    [
        ("scores", "hot"),
        pytest.param("vector", "label", marks=pytest.mark.slow),
        pytest.param("index", "label", marks=pytest.mark.slow),
    ],
)
def test_the_accuracy_of_each_kind_of_column_is_that_of_keras(rows: DataFrame, prediction: str, label: str) -> None:
    expected = (SCORES.argmax(axis=1) == LABELS).mean()
    assert AccuracyEvaluator(label, prediction).evaluate(rows) == pytest.approx(expected)


@pytest.mark.slow
def test_a_single_score_is_compared_with_the_threshold(rows: DataFrame) -> None:
    for threshold in (0.5, 0.8):
        evaluator = AccuracyEvaluator("binary", "sigmoid", activation_threshold=threshold)
        expected = ((threshold <= SIGMOID) == (LABELS > 0)).mean()
        assert evaluator.evaluate(rows) == pytest.approx(expected)
    assert evaluator.isLargerBetter()


@pytest.mark.parametrize(
    ("loss", "prediction", "label", "expected"),
    [
        ("categorical_crossentropy", "scores", "hot", (np.eye(3)[LABELS], SCORES)),
        pytest.param("sparse_categorical_crossentropy", "vector", "label", (LABELS, SCORES), marks=pytest.mark.slow),
        pytest.param(
            "binary_crossentropy", "sigmoid", "binary", (LABELS[:, None] > 0, SIGMOID[:, None]), marks=pytest.mark.slow
        ),
        pytest.param("binary_crossentropy", "scores", "hot", (np.eye(3)[LABELS], SCORES), marks=pytest.mark.slow),
        pytest.param("mse", "guess", "target", (TARGETS, TARGETS + np.arange(N)[:, None] % 3), marks=pytest.mark.slow),
        pytest.param(
            "mae", "index", "label", (LABELS[:, None], SCORES.argmax(axis=1)[:, None]), marks=pytest.mark.slow
        ),
    ],
)
def test_losses_equal_those_of_keras(
    rows: DataFrame, loss: str, prediction: str, label: str, expected: tuple[np.ndarray, np.ndarray]
) -> None:
    evaluator = LossEvaluator(loss, prediction, label)
    true, predicted = (keras.ops.convert_to_tensor(values.astype("float32")) for values in expected)
    reference = float(keras.ops.mean(keras.losses.get(loss)(true, predicted)))
    assert evaluator.evaluate(rows) == pytest.approx(reference, rel=1e-4)
    assert not evaluator.isLargerBetter()


@pytest.mark.slow
def test_extreme_probabilities_have_the_loss_of_keras(spark: SparkSession) -> None:
    # The second row has probabilities of a model in half precision; Keras divides them by their sum.
    df = spark.createDataFrame([([1.0, 0.0], 1), ([0.249, 0.747], 0)], ["prediction", "label"])
    assert LossEvaluator().evaluate(df) == pytest.approx(-(math.log(1e-7) + math.log(0.25)) / 2, rel=1e-6)


#: Nulls and NaN are found when the columns are read, in the same way for each evaluator.
BROKEN = [
    (AccuracyEvaluator(), (None, 1), BadValueError),
    pytest.param(AccuracyEvaluator(), ([0.1, 0.9], None), BadValueError, marks=pytest.mark.slow),
    pytest.param(AccuracyEvaluator(), ([0.1, math.nan], 1), BadValueError, marks=pytest.mark.slow),
    pytest.param(LossEvaluator(), (None, 1), BadValueError, marks=pytest.mark.slow),
    pytest.param(LossEvaluator(), ([0.1, 0.9], None), BadValueError, marks=pytest.mark.slow),
    pytest.param(LossEvaluator(), ([0.1, 0.9], 2), BadValueError, marks=pytest.mark.slow),
    pytest.param(LossEvaluator(), ([-3.0, 4.0], 1), BadValueError, marks=pytest.mark.slow),
    pytest.param(LossEvaluator(), ([0.5, 0.4], 1), BadValueError, marks=pytest.mark.slow),
    pytest.param(LossEvaluator("mse"), ([0.5, 0.4], 1), ShapeError, marks=pytest.mark.slow),
    pytest.param(LossEvaluator("mse"), ([math.nan], 1), BadValueError, marks=pytest.mark.slow),
    pytest.param(LossEvaluator("mse"), (None, 1), BadValueError, marks=pytest.mark.slow),
    pytest.param(LossEvaluator("binary_crossentropy"), ([1.5], 1), BadValueError, marks=pytest.mark.slow),
    pytest.param(LossEvaluator("binary_crossentropy"), ([0.5], 2), BadValueError, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("evaluator", "row", "kind"), BROKEN)
def test_invalid_rows_raise_one_typed_error(
    spark: SparkSession, evaluator: AccuracyEvaluator | LossEvaluator, row: tuple[Any, ...], kind: type[DistkerasError]
) -> None:
    good = ([0.3, 0.7], 1) if row[0] is None or len(row[0]) == 2 else ([0.3], 1)
    if evaluator.hasParam("loss") and evaluator.getOrDefault("loss") == "mse":
        good = ([0.3], 1)
    df = spark.createDataFrame([good, row], "prediction array<double>, label int")
    with pytest.raises(kind) as caught:
        evaluator.evaluate(df)
    assert caught.value.column in ("prediction", "label")
    assert caught.value.remote_traceback


@pytest.mark.slow
def test_labels_that_are_not_one_hot_are_refused(spark: SparkSession) -> None:
    df = spark.createDataFrame([([0.5, 0.5], [0.4, 0.6])], ["prediction", "label"])
    with pytest.raises(BadValueError, match="one-hot"):
        LossEvaluator().evaluate(df)


@pytest.mark.parametrize(
    "evaluator",
    [AccuracyEvaluator(prediction_col="index"), LossEvaluator("mse", "index"), LossEvaluator(prediction_col="scores")],
)
def test_empty_dataframes_missing_columns_and_text_are_refused(
    rows: DataFrame, evaluator: AccuracyEvaluator | LossEvaluator
) -> None:
    with pytest.raises(EmptyDataError):
        evaluator.evaluate(rows.limit(0))
    with pytest.raises(MissingColumnError):
        evaluator.evaluate(rows.drop("label"))
    with pytest.raises(ColumnTypeError):
        evaluator.evaluate(rows, {evaluator.prediction_col: "word"})


def test_losses_that_do_not_fit_are_refused(rows: DataFrame) -> None:
    with pytest.raises(ConfigurationError, match="`loss` must be"):
        LossEvaluator("hinge")
    with pytest.raises(ConfigurationError, match="`prediction_col`"):
        LossEvaluator(prediction_col="index").evaluate(rows)


@pytest.mark.slow
def test_the_error_of_a_failing_prediction_is_raised_unchanged(spark: SparkSession) -> None:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2, "softmax")])
    df = spark.createDataFrame([([1.0, None], 0)], "features array<float>, label int").coalesce(1)
    with pytest.raises(BadValueError, match="null") as caught:
        AccuracyEvaluator().evaluate(ModelPredictor(model).transform(df))
    assert caught.value.column == "features"
    assert caught.value.worker == 0


@pytest.mark.slow
def test_evaluators_are_saved_and_loaded(spark: SparkSession, tmp_path: Path) -> None:
    LossEvaluator("mse", "p", "t").write().save(str(tmp_path / "loss"))
    again = LossEvaluator.load(str(tmp_path / "loss"))
    assert [again.getOrDefault(name) for name in ("loss", "prediction_col", "label_col")] == ["mse", "p", "t"]
    AccuracyEvaluator(activation_threshold=0.9).write().save(str(tmp_path / "accuracy"))
    assert AccuracyEvaluator.load(str(tmp_path / "accuracy")).getOrDefault("activation_threshold") == 0.9
