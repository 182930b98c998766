"""Scaling of numbers, arrays and vectors, element by element, on the JVM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from pyspark.ml.stat import Summarizer
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

import distkeras.transformers.expressions as expressions
from distkeras.data.column_kinds import VECTOR, vector_of
from distkeras.data.schema import NumericColumn, numeric_column, quoted
from distkeras.ps.errors import BadValueError, ConfigurationError, EmptyDataError, ShapeError
from distkeras.spark.failures import short_errors
from distkeras.transformers.expressions import error_expression, typed_errors
from distkeras.transformers.params import (
    BOOLEAN,
    FINITE,
    ColumnTransformer,
    StageTransformer,
    column_name,
    column_names,
    finite_float,
    on_dataframe,
    param,
)


class MinMaxTransformer(ColumnTransformer):
    r"""Maps the range ``[o_min, o_max]`` linearly onto ``[n_min, n_max]``.

    .. math:: y = \frac{x - o_{min}}{o_{max} - o_{min}} (n_{max} - n_{min}) + n_{min}

    Values outside the old range land outside the new one. Null stays null. A vector gives a dense vector; an
    array gives an array and a number a number, of doubles if the input is double and of floats otherwise.

    Args:
        o_min: lower end of the old range.
        o_max: upper end of the old range; above ``o_min``.
        n_min: lower end of the new range; default 0.
        n_max: upper end of the new range; not below ``n_min``; default 1.
        input_col: numbers, arrays of numbers, or vectors.
        output_col: new column.
        is_vector: whether ``input_col`` must hold vectors or arrays (True) or numbers (False). Default: either.

    Raises:
        ConfigurationError: a range is empty, ``input_col`` is not as ``is_vector`` says, or ``output_col`` already
            exists.
        MissingColumnError, ColumnTypeError: A column does not exist, or has no numbers.
    """

    o_min = param("o_min", "lower end of the old range", *FINITE)
    o_max = param("o_max", "upper end of the old range", *FINITE)
    n_min = param("n_min", "lower end of the new range", *FINITE)
    n_max = param("n_max", "upper end of the new range", *FINITE)
    is_vector = param("is_vector", "vectors or arrays, not numbers", *BOOLEAN)

    @short_errors
    def __init__(
        self,
        o_min: float | None = None,
        o_max: float | None = None,
        n_min: float | None = None,
        n_max: float | None = None,
        input_col: str | None = None,
        output_col: str | None = None,
        is_vector: bool | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(n_min=0.0, n_max=1.0)
        self._set_given(o_min=o_min, o_max=o_max, n_min=n_min, n_max=n_max, input_col=input_col, output_col=output_col)
        self._set_given(is_vector=is_vector)

    def _column(self, source: NumericColumn) -> Column:
        low, high = self._required("n_min"), self._required("n_max")
        old_low, old_high = self._required("o_min"), self._required("o_max")
        if old_high <= old_low:
            raise ConfigurationError(f"`o_max` must be above o_min={old_low}. Received: o_max={old_high}")
        if high < low:
            raise ConfigurationError(f"`n_max` must not be below n_min={low}. Received: n_max={high}")
        if self.isDefined("is_vector") and self._required("is_vector") != bool(source.depth):
            held = "arrays or vectors" if source.depth else "numbers"
            raise ConfigurationError(
                f"`is_vector` must be as the column is. Received: is_vector={self._required('is_vector')} for {held}",
                column=source.name,
            )

        def scaled(value: Column) -> Column:
            # Dividing first maps the ends of the old range exactly onto those of the new one.
            result: Column = (value.cast("double") - old_low) / (old_high - old_low) * (high - low) + low
            return result

        return source.each(scaled)


def _moments(value: Any) -> list[list[float]]:
    return [[finite_float(element) for element in column] for column in value]


class StandardScaleTransformer(StageTransformer):
    r"""Shifts and scales each element of each column to mean 0 and sample standard deviation 1.

    .. math:: y = (x - \mu) / \sigma

    An element that does not vary (:math:`\sigma = 0`) is only shifted. Without ``means`` and ``stddevs``, each
    `transform` computes them from its own DataFrame, in a separate job: use `fit` on the training data to
    standardize test data by the same moments.

    Args:
        columns: columns of numbers, arrays of one length, or vectors; null stays null and is not counted.
        suffix: appended to the columns' names for the new ones.
        means: one list a column, one number an element (a list of one for a column of numbers).
        stddevs: sample standard deviations (divisor n - 1), in the same form.

    Raises:
        ConfigurationError: ``means`` and ``stddevs`` do not fit ``columns``, or a new column already exists.
        MissingColumnError, ColumnTypeError: A column does not exist, or has no numbers.
        EmptyDataError: There are no values.
        BadValueError: The values include a NaN or infinity.
    """

    columns = param("columns", "columns to standardize", column_names, "a list of distinct column names")
    suffix = param("suffix", "added to each column's name", column_name, "a non-empty string")
    means = param("means", "means, one list a column", _moments, "one list of finite numbers a column")
    stddevs = param("stddevs", "deviations, one list a column", _moments, "one list of finite numbers a column")

    @short_errors
    def __init__(
        self,
        columns: Sequence[str] | None = None,
        suffix: str | None = None,
        means: Sequence[Sequence[float]] | None = None,
        stddevs: Sequence[Sequence[float]] | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(suffix="_normalized")
        self._set_given(columns=columns, suffix=suffix, means=means, stddevs=stddevs)

    @on_dataframe
    def fit(self, dataset: DataFrame) -> StandardScaleTransformer:
        """Return a copy that standardizes by the moments of ``dataset``. It runs one job."""
        sources = [numeric_column(dataset.schema.fields, name) for name in self._required("columns")]
        moments = [_moments_expression(source) for source in sources]
        with typed_errors():
            row = dataset.agg(*(moment.alias(f"m{i}") for i, moment in enumerate(moments))).first()
        assert row is not None
        pairs = [_read_moments(source, row[f"m{i}"]) for i, source in enumerate(sources)]
        means, stddevs = ([list(moments) for moments in each] for each in zip(*pairs, strict=True))
        return self.copy({self.means: means, self.stddevs: stddevs})

    def _transform(self, dataset: DataFrame) -> DataFrame:
        names, suffix = self._required("columns"), self._required("suffix")
        sources = [numeric_column(dataset.schema.fields, name) for name in names]
        expressions.check_new_columns(dataset, *(name + suffix for name in names))
        if self.isDefined("means") != self.isDefined("stddevs"):
            raise ConfigurationError("`means` and `stddevs` must be given together. Received: one of them")
        if not self.isDefined("means"):
            return self.fit(dataset).transform(dataset)
        means, deviations = self._required("means"), self._required("stddevs")
        lengths = [len(mean) for mean in means]
        if lengths != [len(deviation) for deviation in deviations] or len(means) != len(names):
            raise ConfigurationError(
                f"`means` and `stddevs` must each hold one list for each of columns={names}, equally long. "
                f"Received: {lengths} and {[len(deviation) for deviation in deviations]} numbers"
            )
        wrong = [s.name for s, n in zip(sources, lengths, strict=True) if n < 1 or (s.depth == 0 and n != 1)]
        if wrong:
            raise ConfigurationError(f"`means` must hold one number an element. Received: {lengths} for {wrong}")
        if any(deviation < 0 for column in deviations for deviation in column):
            raise ConfigurationError(f"`stddevs` must not be negative. Received: stddevs={deviations}")
        new = {
            source.name + suffix: _standardize(source, mean, deviation)
            for source, mean, deviation in zip(sources, means, deviations, strict=True)
        }
        return dataset.withColumns(new)


def _moments_expression(source: NumericColumn) -> Column:
    """Return a struct of ``mean`` and ``std``: numbers, or vectors for arrays and vectors."""
    if source.depth == 0:
        value = source.column.cast("double")
        return F.struct(F.mean(value).alias("mean"), F.stddev_samp(value).alias("std"))
    vector = source.each(lambda value: value)
    if source.kind is not VECTOR:
        vector = vector_of(vector)
    # Summarizer fails on null, but ignores rows of weight 0.
    nothing = vector_of(F.array().cast("array<double>"))
    weight = source.column.isNotNull().cast("double")
    return Summarizer.metrics("mean", "std").summary(F.coalesce(vector, nothing), weight)


def _read_moments(source: NumericColumn, row: Row) -> tuple[list[float], list[float]]:
    if row["mean"] is None:
        raise EmptyDataError("a column to standardize must hold a value. Received: none", column=source.name)
    if source.depth == 0:
        # A single value has no deviation.
        mean, deviation = [float(row["mean"])], [0.0 if row["std"] is None else float(row["std"])]
    else:
        mean, deviation = ([float(element) for element in row[name]] for name in ("mean", "std"))
    if not all(map(math.isfinite, mean + deviation)):
        raise BadValueError(
            f"values to standardize must be finite. Received: mean={mean}, deviation={deviation}",
            column=source.name,
        )
    return mean, deviation


def _standardize(source: NumericColumn, mean: list[float], deviation: list[float]) -> Column:
    divisor = [value or 1.0 for value in deviation]
    if source.depth == 0:
        return source.each(lambda value: (value.cast("double") - mean[0]) / divisor[0])
    column = source.column
    centered = F.zip_with(column, F.lit(np.array(mean)), lambda value, mu: value.cast("double") - mu)
    scaled = F.zip_with(centered, F.lit(np.array(divisor)), lambda value, sigma: (value / sigma).cast(source.element))
    result = source.kind.written(scaled)
    # zip_with would fill the shorter side with nulls.
    wrong_length = error_expression(
        ShapeError, source.name, f"arrays must hold {len(mean)} values each", F.size(column)
    )
    return F.when(column.isNotNull() & (F.size(column) != len(mean)), wrong_length).otherwise(result)


class StandardTransformer(StandardScaleTransformer):
    """`StandardScaleTransformer` with the deviation of a whole population, divisor n, as dist-keras took it."""

    def fit(self, dataset: DataFrame) -> StandardTransformer:
        """Return a copy that standardizes by the moments of ``dataset``; this runs two jobs."""
        fitted = super().fit(dataset)
        names = self._required("columns")
        counts = dataset.agg(*(F.count(F.col(quoted(name))) for name in names)).first()
        assert counts is not None
        stddevs = [
            [value * math.sqrt((count - 1) / count) for value in column]
            for column, count in zip(fitted.getOrDefault("stddevs"), counts, strict=True)
        ]
        return self.copy({self.means: fitted.getOrDefault("means"), self.stddevs: stddevs})
