"""Accuracy and loss of predictions, on top of Spark ML's evaluators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from pyspark.ml.evaluation import Evaluator, MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

import distkeras.transformers.expressions as expressions
from distkeras.data.column_kinds import vector_of
from distkeras.data.schema import NumericColumn, numeric_column
from distkeras.ps.errors import BadValueError, ConfigurationError, EmptyDataError, ShapeError
from distkeras.ps.validate import require_choice
from distkeras.spark.failures import short_errors
from distkeras.transformers.expressions import error_expression, null_or_nan, typed_errors
from distkeras.transformers.params import HasActivationThreshold, StageEvaluator, param

#: Keras clips probabilities by this much before it takes their logarithm.
_EPSILON = 1e-7
#: The tolerance of the sum of a row's probabilities, which should be 1: half precision rounds each of them.
_SUM_TOLERANCE = 1e-2


class AccuracyEvaluator(StageEvaluator, HasActivationThreshold):
    """Compute the accuracy: the share of rows whose predicted class equals the label, in [0, 1].

    Args:
        label_col: class numbers, or one-hot arrays or vectors. Default ``"label"``.
        prediction_col: class numbers, or scores (arrays, vectors) as `ModelPredictor` writes them: the class is that
            of the largest, or of a single one by ``activation_threshold``. Default ``"prediction"``.
        activation_threshold: least single score of class 1; default 0.5.

    Raises:
        ConfigurationError: A column has nested arrays.
        MissingColumnError, ColumnTypeError: A column does not exist, or has no numbers.
        EmptyDataError: There are no rows.
        BadValueError: A value is null, NaN or not a class; or a prediction in the same job has failed.
    """

    @short_errors
    def __init__(
        self,
        label_col: str | None = None,
        prediction_col: str | None = None,
        activation_threshold: float | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(prediction_col="prediction", label_col="label", activation_threshold=0.5)
        self._set_given(prediction_col=prediction_col, label_col=label_col, activation_threshold=activation_threshold)

    def _evaluate(self, dataset: DataFrame) -> float:
        prediction = numeric_column(dataset.schema.fields, self._required("prediction_col"))
        label = numeric_column(dataset.schema.fields, self._required("label_col"))
        threshold = self._required("activation_threshold") if prediction.depth else None
        pairs = dataset.select(
            _not_null(prediction, expressions.class_of_scores(prediction, threshold)).alias("prediction"),
            _not_null(label, expressions.class_of_scores(label, None)).alias("label"),
        )
        return _evaluate_pairs(MulticlassClassificationEvaluator(metricName="accuracy"), pairs)

    def isLargerBetter(self) -> bool:
        """Return True."""
        return True


class LossEvaluator(StageEvaluator):
    """Compute the mean loss over the rows, equal to Keras' loss of that name with default arguments.

    | ``loss`` | predictions | labels |
    |---|---|---|
    | ``categorical_crossentropy`` | probabilities of each class, summing to 1 | class numbers, or one-hot |
    | ``sparse_categorical_crossentropy`` | probabilities of each class, summing to 1 | class numbers, or one-hot |
    | ``binary_crossentropy`` | probabilities, any number of them | 0 or 1, as many |
    | ``mean_squared_error`` | numbers, any number of them | numbers, as many |
    | ``mean_absolute_error`` | numbers, any number of them | numbers, as many |

    Args:
        loss: a name above, or another that Keras has for one of them, such as ``"bce"``; default
            ``"categorical_crossentropy"``.
        prediction_col: default ``"prediction"``.
        label_col: default ``"label"``.

    Raises:
        ConfigurationError: The loss is unknown, or does not fit the columns.
        MissingColumnError, ColumnTypeError: A column does not exist, or has no numbers.
        EmptyDataError: There are no rows.
        BadValueError: a null, a NaN, a probability outside [0, 1], a label out of range or not one-hot; also
            what a prediction in the same job raised.
        ShapeError: A prediction and its label differ in length.
    """

    loss = param(
        "loss",
        "name of a Keras loss",
        lambda name: require_choice("loss", _function_name(name), tuple(_LOSSES)),
        "the name of a supported loss",
    )

    @short_errors
    def __init__(
        self, loss: str | None = None, prediction_col: str | None = None, label_col: str | None = None
    ) -> None:
        super().__init__()
        self._setDefault(loss="categorical_crossentropy", prediction_col="prediction", label_col="label")
        self._set_given(loss=loss, prediction_col=prediction_col, label_col=label_col)

    def _evaluate(self, dataset: DataFrame) -> float:
        prediction = numeric_column(dataset.schema.fields, self._required("prediction_col"))
        label = numeric_column(dataset.schema.fields, self._required("label_col"))
        return _LOSSES[self._required("loss")](dataset, prediction, label)

    def isLargerBetter(self) -> bool:
        """Return False."""
        return False


def _function_name(name: Any) -> Any:
    """Return the name of the function that Keras knows by ``name``, such as "bce"; ``name`` itself if there is none."""
    if name in _LOSSES or not isinstance(name, str):
        return name
    import keras

    try:
        loss = keras.losses.get(name)
    except ValueError:
        return name
    return loss.name if isinstance(loss, keras.losses.Loss) else loss.__name__


def _evaluate_pairs(evaluator: Evaluator, pairs: DataFrame) -> float:
    with typed_errors():
        value = evaluator.evaluate(pairs)
    if math.isnan(value):
        raise EmptyDataError("the DataFrame must have rows to evaluate. Received: none")
    return value


def _not_null(source: NumericColumn, value: Column) -> Column:
    return F.coalesce(value, error_expression(BadValueError, source.name, "values must not be null", F.lit(None)))


def _no_probability(value: Column) -> Column:
    """Return whether a number is not a probability; a softmax in float32 may slightly exceed 1."""
    return null_or_nan(value) | (value < 0) | (value > 1 + 1e-5)


def _sum(values: Column) -> Column:
    return F.aggregate(values.cast("array<double>"), F.lit(0.0), lambda total, value: total + value)


def _categorical(dataset: DataFrame, prediction: NumericColumn, label: NumericColumn) -> float:
    if prediction.depth != 1:
        raise ConfigurationError(
            "`prediction_col` must hold the probabilities of each class. Received: numbers or nested arrays",
            column=prediction.name,
        )
    scores, target = prediction.column, expressions.class_of_scores(label, None)
    broken = error_expression(BadValueError, prediction.name, "probabilities must be in [0, 1] and sum to 1", scores)
    total = _sum(scores)
    fine = ~F.exists(scores, _no_probability) & (F.abs(total - 1) < _SUM_TOLERANCE)
    if label.depth:
        hot = (F.array_max(label.column) == 1) & (F.array_min(label.column) == 0) & (_sum(label.column) == 1)
        wrong = error_expression(BadValueError, label.name, "arrays of labels must be one-hot", label.column)
        target = F.when(hot, target).otherwise(wrong)
    outside = error_expression(BadValueError, label.name, "labels must be below the number of classes", target)
    target = F.when(_not_null(label, target) < F.size(scores), target).otherwise(outside)
    # Keras divides by the sum, too: in half precision it differs from 1 by rounding errors.
    share = F.element_at(_not_null(prediction, scores), (target + 1).cast("int")).cast("double") / total
    share = F.when(fine, share).otherwise(broken.cast("double"))
    pairs = dataset.select(
        vector_of(F.array(1 - share, share)).alias("probability"),
        F.lit(1.0).alias("label"),
        F.lit(1.0).alias("prediction"),
    )
    return _log_loss(pairs)


def _binary(dataset: DataFrame, prediction: NumericColumn, label: NumericColumn) -> float:
    score, target = F.col("prediction"), F.col("label")
    outside = error_expression(BadValueError, prediction.name, "probabilities must be in [0, 1]", score)
    unknown = error_expression(BadValueError, label.name, "labels must be 0 or 1", target)
    target = F.when(target.isin(0, 1), target).otherwise(unknown)
    score = F.when(_no_probability(score), outside).otherwise(score)
    # Spark's loss does not check for values above 1.
    score = F.least(score, F.lit(1.0))
    pairs = _pairs_of_elements(dataset, prediction, label).select(
        vector_of(F.array(1 - score, score)).alias("probability"),
        target.alias("label"),
        target.alias("prediction"),
    )
    return _log_loss(pairs)


def _log_loss(pairs: DataFrame) -> float:
    metric: Any = "logLoss"  # missing in pyspark's type of metric names
    return _evaluate_pairs(MulticlassClassificationEvaluator(metricName=metric, eps=_EPSILON), pairs)


def _regression(metric: Literal["mse", "mae"]) -> _LossFunction:
    def measure(dataset: DataFrame, prediction: NumericColumn, label: NumericColumn) -> float:
        return _evaluate_pairs(RegressionEvaluator(metricName=metric), _pairs_of_elements(dataset, prediction, label))

    return measure


def _pairs_of_elements(dataset: DataFrame, prediction: NumericColumn, label: NumericColumn) -> DataFrame:
    """Return columns of doubles, ``prediction`` and ``label``, with one row for each element of each row."""
    flat = []
    for source in (prediction, label):
        values = source.flat
        missing = error_expression(BadValueError, source.name, "values must be neither null nor NaN", values)
        flat.append(F.when(values.isNull() | F.exists(values, null_or_nan), missing).otherwise(values))
    values, targets = (column.cast("array<double>") for column in flat)
    unequal = error_expression(
        ShapeError, label.name, f"labels must be as many as in {prediction.name!r}", F.size(targets)
    )
    zipped = F.when(F.size(values) == F.size(targets), F.arrays_zip(values, targets)).otherwise(unequal)
    pairs = dataset.select(F.explode(zipped).alias("pair"))
    return pairs.select("pair.*").toDF("prediction", "label")


_LossFunction = Callable[[DataFrame, NumericColumn, NumericColumn], float]

_LOSSES: dict[str, _LossFunction] = {
    "categorical_crossentropy": _categorical,
    "sparse_categorical_crossentropy": _categorical,
    "binary_crossentropy": _binary,
    "mean_squared_error": _regression("mse"),
    "mse": _regression("mse"),
    "mean_absolute_error": _regression("mae"),
    "mae": _regression("mae"),
}
