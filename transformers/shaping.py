"""Labels and shapes: one-hot, class index, nested arrays, dense vectors, on the JVM."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from distkeras.data.column_kinds import VECTOR, vector_of
from distkeras.data.schema import NumericColumn, quoted
from distkeras.ps.errors import BadValueError, ConfigurationError, MissingColumnError, ShapeError
from distkeras.spark.failures import short_errors
from distkeras.transformers.expressions import (
    check_new_columns,
    class_of_scores,
    error_expression,
)
from distkeras.transformers.params import (
    ColumnTransformer,
    HasActivationThreshold,
    HasOutputDim,
    HasOutputType,
    StageTransformer,
    column_name,
    integer_from,
    param,
)


class OneHotTransformer(ColumnTransformer, HasOutputDim, HasOutputType):
    """Turns a class number into ``output_dim`` numbers: 1 at that place, 0 elsewhere.

    Null stays null. A job fails with a BadValueError in the text of Spark's own error when it reads a number that
    is not a class: a fraction, NaN, or outside ``[0, output_dim)``.

    Args:
        output_dim: number of classes.
        input_col: numbers, counted from 0.
        output_col: new column.
        output_type: "vector" (the default): a dense vector; "array": ``array<float>``, half as large.

    Raises:
        ConfigurationError: The input is not a number, or ``output_col`` already exists.
        MissingColumnError, ColumnTypeError: A column does not exist, or has no numbers.
    """

    @short_errors
    def __init__(
        self,
        output_dim: int | None = None,
        input_col: str | None = None,
        output_col: str | None = None,
        output_type: str | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(output_type="vector")
        self._set_given(output_dim=output_dim, input_col=input_col, output_col=output_col, output_type=output_type)

    def _column(self, source: NumericColumn) -> Column:
        classes = self._required("output_dim")
        if source.depth:
            raise ConfigurationError(
                "`input_col` must hold one number a row. Received: an array or vector", column=source.name
            )
        label = source.column.cast("double")
        hot = F.transform(F.sequence(F.lit(0), F.lit(classes - 1)), lambda i: (i == label).cast("float"))
        known = (label >= 0) & (label < classes) & (label == F.floor(label))
        wrong = error_expression(
            BadValueError, source.name, f"labels must be whole numbers in [0, {classes})", source.column
        )
        encoded = F.when(label.isNull(), None).when(known, hot).otherwise(wrong)
        return vector_of(encoded) if self._required("output_type") == "vector" else encoded


class LabelIndexTransformer(ColumnTransformer, HasOutputDim, HasActivationThreshold):
    """Turns a prediction into the number of its class, as a double, which is what Spark's evaluators read.

    Of several scores, the class is the place of the largest, or of the first of equal ones. A single score (a sigmoid's
    output, as a number, an array or a vector of one) is class 1 from ``activation_threshold`` on, 0 below. Null stays
    null. A job fails with a BadValueError or ShapeError in the text of Spark's own error when it reads NaN, a null
    among the scores, no scores, or another number of them than ``output_dim``.

    With a ``default_index``, the class is chosen as in dist-keras: the first score of at least
    ``activation_threshold``, else the largest if it is above 0, else ``default_index``. For probabilities that sum to 1
    that is also the largest.

    Args:
        output_dim: expected number of scores; None does not check it.
        input_col: scores; default ``"prediction"``.
        output_col: new column; default ``"prediction_index"``.
        default_index: the class if no score is above 0; default: none, the largest score decides.
        activation_threshold: least single score of class 1; default 0.5.

    Raises:
        ConfigurationError: The scores are nested arrays, or ``output_col`` already exists.
        MissingColumnError, ColumnTypeError: A column does not exist, or has no numbers.
    """

    default_index = param(
        "default_index", "the class where no score is above 0", integer_from(0), "an integer from 0 on"
    )

    @short_errors
    def __init__(
        self,
        output_dim: int | None = None,
        input_col: str | None = None,
        output_col: str | None = None,
        default_index: int | None = None,
        activation_threshold: float | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(input_col="prediction", output_col="prediction_index", activation_threshold=0.5)
        self._set_given(
            output_dim=output_dim,
            input_col=input_col,
            output_col=output_col,
            default_index=default_index,
            activation_threshold=activation_threshold,
        )

    def _column(self, source: NumericColumn) -> Column:
        threshold = self._required("activation_threshold")
        default = self._required("default_index") if self.isDefined("default_index") and source.depth else None
        index = class_of_scores(source, threshold, default)
        if source.depth and self.isDefined("output_dim"):
            dim = self._required("output_dim")
            wrong_length = error_expression(
                ShapeError, source.name, f"predictions must hold {dim} scores", F.size(source.column)
            )
            index = F.when(source.column.isNotNull() & (F.size(source.column) != dim), wrong_length).otherwise(index)
        return index

    def get_index(self, vector: Any) -> int:
        """Return the class of the scores ``vector``, as `transform` does with a ``default_index``; 0 if it is unset."""
        threshold = self._required("activation_threshold")
        default = self._required("default_index") if self.isDefined("default_index") else 0
        scores = [float(score) for score in vector]
        largest = max(range(len(scores)), key=scores.__getitem__)
        fallback = largest if scores[largest] > 0 else default
        return next((place for place, score in enumerate(scores) if score >= threshold), fallback)


def _to_extents(value: Any) -> list[int]:
    extents = [int(extent) for extent in value]
    if extents != list(value) or not extents or sum(e == -1 for e in extents) > 1:
        raise ValueError
    if any(extent < 1 and extent != -1 for extent in extents):
        raise ValueError
    return extents


class ReshapeTransformer(ColumnTransformer):
    """Arranges the numbers of an array (nested or flat) or vector as arrays nested by ``shape``, row-major.

    Null stays null. A job fails with a ShapeError in the text of Spark's own error when it reads a row whose count
    of numbers does not fill ``shape``.

    Args:
        input_col: arrays or vectors.
        output_col: new column: arrays with one level for each axis of ``shape``; ``array<double>`` from a vector.
        shape: extents, all positive; one may be -1 and is then computed for each row.

    Raises:
        ConfigurationError: The input is a plain number, or ``output_col`` already exists.
        MissingColumnError, ColumnTypeError: A column does not exist, or has no numbers.
    """

    shape = param("shape", "extents of one row's value", _to_extents, "positive integers, at most one of them -1")

    @short_errors
    def __init__(
        self,
        input_col: str | None = None,
        output_col: str | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self._set_given(input_col=input_col, output_col=output_col, shape=shape)

    def _column(self, source: NumericColumn) -> Column:
        shape = self._required("shape")
        if not source.depth:
            raise ConfigurationError(
                "`input_col` must hold arrays or vectors. Received: one number a row", column=source.name
            )

        def shaped(values: Column) -> Column:
            size, known = F.size(values), math.prod(extent for extent in shape if extent != -1)
            fits = (size % known == 0) & (size > 0) if -1 in shape else size == known
            nested = values
            for extent in reversed(shape[1:]):
                nested = _split_into(nested, size / known if extent == -1 else F.lit(extent))
            wrong_length = error_expression(ShapeError, source.name, f"values must fill the shape {tuple(shape)}", size)
            return F.when(values.isNull(), None).when(fits, nested).otherwise(wrong_length)

        return _computed_once(source.flat, shaped)


def _split_into(values: Column, length: Column) -> Column:
    length = length.cast("int")

    def runs(values: Column) -> Column:
        starts = F.sequence(F.lit(1), F.size(values), length)
        return F.transform(starts, lambda start: F.slice(values, start, length))

    return _computed_once(values, runs)


def _computed_once(value: Column, body: Callable[[Column], Column]) -> Column:
    # Spark computes an expression at each use, unless it is the variable of a lambda: without this, a vector is read
    # again for each of its elements, at each level of nesting.
    return F.transform(F.array(value), body).getItem(0)


class DenseTransformer(ColumnTransformer):
    """Turns vectors, sparse or dense, into dense vectors. Arrays are dense already and are refused.

    Args:
        input_col: vectors; null stays null.
        output_col: new column.

    Raises:
        ConfigurationError: The input is not a vector, or ``output_col`` already exists.
        MissingColumnError, ColumnTypeError: A column does not exist, or has no numbers.
    """

    @short_errors
    def __init__(self, input_col: str | None = None, output_col: str | None = None) -> None:
        super().__init__()
        self._set_given(input_col=input_col, output_col=output_col)

    def _column(self, source: NumericColumn) -> Column:
        if source.kind is not VECTOR:
            raise ConfigurationError("`input_col` must hold vectors. Received: numbers or arrays", column=source.name)
        return vector_of(source.column)


def _label(value: Any) -> Any:
    if not isinstance(value, str | numbers.Number):
        raise TypeError
    return value


class BinaryLabelTransformer(StageTransformer):
    """Turns a column into the vector [1, 0] where it is ``label``, else into [0, 1]; also where it is null.

    Args:
        input_column: any column that can be compared with ``label``.
        output_column: new column of dense vectors.
        label: a string or a number.

    Raises:
        MissingColumnError: no such column.
        ConfigurationError: ``output_column`` is there already.
    """

    input_column = param("input_column", "column to read", column_name, "the name of a column")
    output_column = param("output_column", "new column to write", column_name, "the name of a new column")
    label = param("label", "the value of [1, 0]", _label, "a string or a number")

    @short_errors
    def __init__(
        self, input_column: str | None = None, output_column: str | None = None, label: Any | None = None
    ) -> None:
        super().__init__()
        self._set_given(input_column=input_column, output_column=output_column, label=label)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        name, new = self._required("input_column"), self._required("output_column")
        if name not in dataset.columns:
            raise MissingColumnError(
                f"the DataFrame must have the column {name!r}. Received: columns={dataset.columns}", column=name
            )
        check_new_columns(dataset, new)
        hit = F.col(quoted(name)).eqNullSafe(F.lit(self._required("label")))
        yes, no = (F.array(F.lit(first), F.lit(1.0 - first)) for first in (1.0, 0.0))
        return dataset.withColumn(new, vector_of(F.when(hit, yes).otherwise(no)))


class Transformer:
    """The base of dist-keras' transformers, whose subclasses override `transform`. New ones extend Spark's own."""

    def transform(self, dataframe: DataFrame) -> DataFrame:
        """Written by subclasses."""
        raise ConfigurationError(
            f"`{type(self).__name__}.transform` must be written, or the class extend `pyspark.ml.Transformer`. "
            "Received: a call of the base"
        )
