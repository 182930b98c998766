"""Parameters of the stages: one mixin a concept, each value checked when it is set.

Parameter names are the constructors' keyword names. An invalid value is refused when it is set, by the constructor,
`set`, `copy` and `load` alike, since all of them use the converters below.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.ml import Transformer
from pyspark.ml.evaluation import Evaluator
from pyspark.ml.param import Param, Params
from pyspark.ml.util import DefaultParamsReadable
from pyspark.sql import Column, DataFrame

from distkeras.data.padding import paddings_of
from distkeras.data.schema import NumericColumn, numeric_column, require_dataframe
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import (
    invalid,
    require_boolean,
    require_choice,
    require_integer,
    require_number,
    require_text,
)
from distkeras.spark.failures import short_errors
from distkeras.transformers.expressions import check_new_columns
from distkeras.transformers.files import ParamsWritable

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap

_S = TypeVar("_S")
_R = TypeVar("_R")


def param(name: str, doc: str, convert: Callable[[Any], Any], expected: str, *, keyword: str = "") -> Param[Any]:
    """Return a parameter whose converter raises ConfigurationError for an invalid value.

    Args:
        doc: one line for `explainParams`.
        convert: returns the value to store; it raises TypeError or ValueError for an invalid one.
        expected: completes "`keyword` must be …".
        keyword: keyword of the constructor, if it differs from ``name``.
    """

    def checked(value: Any) -> Any:
        try:
            return convert(value)
        except (TypeError, ValueError):
            raise invalid(keyword or name, value, expected) from None

    return Param(Params._dummy(), name, doc, checked)  # noqa: SLF001 - the owner in Spark ML's own mixins


def column_name(value: Any) -> str:
    """Return a string that is not empty; ConfigurationError for anything else."""
    return require_text("column", value, "the name of a column")


def text_or_empty(value: Any) -> str:
    """Return a string, which may be empty; TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError
    return value


def column_names(value: Any) -> list[str]:
    """Return a list of unique names; a single name becomes a list of one."""
    names = [value] if isinstance(value, str) else list(value)
    if not names or len(set(names)) != len(names):
        raise ValueError
    return [column_name(name) for name in names]


def columns_by_name(value: Mapping[str, Any]) -> dict[str, str]:
    """Return a mapping from names of a model's inputs or outputs to unique columns."""
    names = [column_name(name) for name in value]
    return dict(zip(names, column_names(value.values()), strict=True))


def names_or_mapping(value: Any) -> list[str] | dict[str, str]:
    """Return a list of column names, or a mapping to column names; a single name becomes a list of one."""
    return columns_by_name(value) if isinstance(value, Mapping) else column_names(value)


def finite_float(value: Any) -> float:
    """Return a finite number as a float; ConfigurationError for anything else."""
    return float(require_number("value", value, -math.inf))


def integer_from(minimum: int) -> Callable[[Any], int]:
    """Return a converter of integers of at least ``minimum``; it raises ConfigurationError for anything else."""
    return lambda value: require_integer("value", value, minimum)


def one_of(*choices: str) -> Callable[[Any], str]:
    """Return a converter that accepts only ``choices``; it raises ConfigurationError for anything else."""
    return lambda value: str(require_choice("value", value, choices))


#: Converters of parameters, each with a description of valid values.
COLUMN = column_name, "the name of a column"
NEW_COLUMN = column_name, "the name of a new column"
COLUMN_OR_NONE = text_or_empty, "a column name"
POSITIVE_INTEGER = integer_from(1), "a positive integer"
FINITE = finite_float, "a finite number"
BOOLEAN = functools.partial(require_boolean, "value"), "True or False"
INVALID = one_of("error", "skip", "keep"), "one of 'error', 'skip' and 'keep'"


class Stage(Params, DefaultParamsReadable[Any], ParamsWritable):
    """A stage has keyword constructors, checks its parameters before a job starts, and can be saved."""

    def _set_given(self, **keywords: Any) -> None:
        self._set(**{name: value for name, value in keywords.items() if value is not None})

    def _required(self, name: str) -> Any:
        if not self.isDefined(name):
            raise ConfigurationError(f"`{name}` must be set. Received: {type(self).__name__} without {name}")
        return self.getOrDefault(name)


def on_dataframe(function: Callable[[_S, DataFrame], _R]) -> Callable[[_S, DataFrame], _R]:
    """Make a method of a stage refuse anything but a DataFrame, and shorten the tracebacks of its errors."""

    @short_errors
    @functools.wraps(function)
    def call(stage: _S, dataset: DataFrame) -> _R:
        require_dataframe("dataset", dataset)
        return function(stage, dataset)

    return call


class StageTransformer(Transformer, Stage, ABC):
    """A stage that adds columns."""

    @short_errors
    def transform(
        self, dataset: DataFrame | None = None, params: ParamMap | None = None, *, dataframe: DataFrame | None = None
    ) -> DataFrame:
        """Return the rows with further columns.

        Args:
            dataset: the rows.
            params: in place of the parameters that are set, this time.
            dataframe: what dist-keras called ``dataset``.
        """
        return super().transform(one_dataframe(dataset, dataframe), params)


class StageEvaluator(Evaluator, Stage, ABC):
    """A stage that compares a column of predictions with a column of labels."""

    prediction_col = param("prediction_col", "column of predictions", *COLUMN)
    label_col = param("label_col", "column of true labels or targets", *COLUMN)

    @short_errors
    def evaluate(
        self, dataset: DataFrame | None = None, params: ParamMap | None = None, *, dataframe: DataFrame | None = None
    ) -> float:
        """Return the measure over all rows.

        Args:
            dataset: the rows.
            params: in place of the parameters that are set, this time.
            dataframe: what dist-keras called ``dataset``.
        """
        return super().evaluate(one_dataframe(dataset, dataframe), params)


def one_dataframe(dataset: DataFrame | None, dataframe: DataFrame | None) -> DataFrame:
    """Return the DataFrame given under one of two names; ConfigurationError for none, both, or another object."""
    if dataset is not None and dataframe is not None:
        raise ConfigurationError("`dataset` must be given once. Received: dataset and dataframe")
    frame = dataset if dataframe is None else dataframe
    require_dataframe("dataset", frame)
    assert frame is not None
    return frame


class ColumnTransformer(StageTransformer, ABC):
    """A stage that computes one new column from one column of numbers, arrays or vectors."""

    input_col = param("input_col", "column to read", *COLUMN)
    output_col = param("output_col", "new column to write", *NEW_COLUMN)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        source = numeric_column(dataset.schema.fields, self._required("input_col"))
        output = self._required("output_col")
        check_new_columns(dataset, output)
        return dataset.withColumn(output, self._column(source))

    @abstractmethod
    def _column(self, source: NumericColumn) -> Column:
        """Return the new column for ``input_col``."""


class HasOutputType(Params):
    """``output_type`` selects arrays of floats, or ML vectors, which hold doubles and which Spark ML's stages read."""

    output_type = param("output_type", "arrays or ML vectors", one_of("array", "vector"), 'one of "array", "vector"')


class HasDecode(Params):
    """``decode`` says how executors make arrays of encoded columns."""

    decode: Param[Any] = Param(
        Params._dummy(),  # noqa: SLF001 - as Spark ML's own mixins
        "decode",
        "function from the value of the column of features to an array, or a dictionary of them: column to function",
    )


class HasPadding(Params):
    """``padding`` says how rows of any length are cut, and to which lengths they are padded."""

    padding = param("padding", "of rows of any length", paddings_of, "a `distkeras.Padding`, or one for each column")


class HasOutputDim(Params):
    """``output_dim`` is the number of classes."""

    output_dim = param("output_dim", "number of classes", *POSITIVE_INTEGER)


class HasActivationThreshold(Params):
    """``activation_threshold`` is the least single score of class 1."""

    activation_threshold = param("activation_threshold", "least single score of class 1", *FINITE)
