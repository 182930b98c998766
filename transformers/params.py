"""Parameters of the stages: one mixin a concept, each value checked when it is set.

Parameter names are the constructors' keyword names. A value that cannot work is refused where it is given, by
the constructor, `set`, `copy` and `load` alike, since all of them go through the converters below.
"""

from __future__ import annotations

import functools
import math
from abc import ABC
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.ml import Transformer
from pyspark.ml.evaluation import Evaluator
from pyspark.ml.param import Param, Params
from pyspark.sql import DataFrame

from distkeras.data.schema import require_dataframe
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import invalid, require_boolean, require_integer, require_number, require_text
from distkeras.spark.failures import short_errors

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap

_S = TypeVar("_S")
_R = TypeVar("_R")


def param(name: str, doc: str, convert: Callable[[Any], Any], expected: str, *, keyword: str = "") -> Param[Any]:
    """A parameter whose converter refuses in this project's words.

    Args:
        name: of the parameter.
        doc: one line for `explainParams`.
        convert: returns the value to keep; TypeError or ValueError (a ConfigurationError is one) where it cannot work.
        expected: completes "`keyword` must be …".
        keyword: of the constructor, if that is another one.
    """

    def checked(value: Any) -> Any:
        try:
            return convert(value)
        except (TypeError, ValueError):
            raise invalid(keyword or name, value, expected) from None

    return Param(Params._dummy(), name, doc, checked)  # noqa: SLF001 - the owner that Spark ML's own mixins give


def column_name(value: Any) -> str:
    """A string that is not empty; ConfigurationError for anything else."""
    return require_text("column", value, "the name of a column")


def text_or_empty(value: Any) -> str:
    """The name of a column; "" for none."""
    if not isinstance(value, str):
        raise TypeError
    return value


def column_names(value: Any) -> list[str]:
    """A list of names; one name alone is a list of one."""
    names = [value] if isinstance(value, str) else list(value)
    if not names or len(set(names)) != len(names):
        raise ValueError
    return [column_name(name) for name in names]


def columns_by_name(value: Mapping[str, Any]) -> dict[str, str]:
    """Return a mapping from names of a model's inputs or outputs to distinct columns."""
    names = [column_name(name) for name in value]
    return dict(zip(names, column_names(value.values()), strict=True))


def names_or_mapping(value: Any) -> list[str] | dict[str, str]:
    """Return a list of column names, of one where it is a name alone; or a mapping to column names."""
    return columns_by_name(value) if isinstance(value, Mapping) else column_names(value)


def finite_float(value: Any) -> float:
    """A finite number as a float; ConfigurationError for anything else."""
    return float(require_number("value", value, -math.inf))


def integer_from(minimum: int) -> Callable[[Any], int]:
    """A converter of integers of at least ``minimum``; it raises ConfigurationError for anything else."""
    return lambda value: require_integer("value", value, minimum)


def true_or_false(value: Any) -> bool:
    """A bool; ConfigurationError for anything else."""
    return require_boolean("value", value)


def one_of(*choices: str) -> Callable[[Any], str]:
    """A converter that takes ``choices`` only; it raises ValueError for anything else."""

    def convert(value: Any) -> str:
        if value not in choices:
            raise ValueError
        return str(value)

    return convert


class Stage(Params):
    """Keyword constructors, and parameters that must be there before a job starts."""

    def _set_given(self, **keywords: Any) -> None:
        self._set(**{name: value for name, value in keywords.items() if value is not None})

    def _required(self, name: str) -> Any:
        """The value of parameter ``name``.

        Raises:
            ConfigurationError: it was never set and has no default.
        """
        if not self.isDefined(name):
            raise ConfigurationError(f"`{name}` must be set. Received: {type(self).__name__} without {name}")
        return self.getOrDefault(name)


def on_dataframe(function: Callable[[_S, DataFrame], _R]) -> Callable[[_S, DataFrame], _R]:
    """Makes what a stage does with a DataFrame refuse anything else, and say in short what it cannot do."""

    @short_errors
    @functools.wraps(function)
    def call(stage: _S, dataset: DataFrame) -> _R:
        require_dataframe("dataset", dataset)
        return function(stage, dataset)

    return call


class StageTransformer(Transformer, Stage, ABC):
    """A stage that adds columns, and says in short what it cannot do."""

    @short_errors
    def transform(
        self, dataset: DataFrame | None = None, params: ParamMap | None = None, *, dataframe: DataFrame | None = None
    ) -> DataFrame:
        """The rows with further columns.

        Args:
            dataset: the rows.
            params: in place of the parameters that are set, this time.
            dataframe: what dist-keras called ``dataset``.
        """
        return super().transform(one_dataframe(dataset, dataframe), params)


class StageEvaluator(Evaluator, Stage, ABC):
    """A number that rows are worth; it says in short what it cannot do."""

    @short_errors
    def evaluate(
        self, dataset: DataFrame | None = None, params: ParamMap | None = None, *, dataframe: DataFrame | None = None
    ) -> float:
        """The number.

        Args:
            dataset: the rows.
            params: in place of the parameters that are set, this time.
            dataframe: what dist-keras called ``dataset``.
        """
        return super().evaluate(one_dataframe(dataset, dataframe), params)


def one_dataframe(dataset: DataFrame | None, dataframe: DataFrame | None) -> DataFrame:
    """The DataFrame that is given, under either name.

    Raises:
        ConfigurationError: none or both are given, or something else, or its session has ended.
    """
    if dataset is not None and dataframe is not None:
        raise ConfigurationError("`dataset` must be given once. Received: dataset and dataframe")
    frame = dataset if dataframe is None else dataframe
    require_dataframe("dataset", frame)
    assert frame is not None
    return frame


class HasInputCol(Params):
    """``input_col``: the column to read."""

    input_col = param("input_col", "column to read", column_name, "the name of a column")


class HasOutputCol(Params):
    """``output_col``: the new column."""

    output_col = param("output_col", "new column to write", column_name, "the name of a new column")


class HasOutputType(Params):
    """``output_type``: arrays of floats, or ML vectors, which hold doubles and which Spark ML's own stages read."""

    output_type = param("output_type", "arrays or ML vectors", one_of("array", "vector"), 'one of "array", "vector"')


class HasDecode(Params):
    """``decode``: how executors make arrays of encoded columns."""

    decode: Param[Any] = Param(
        Params._dummy(),  # noqa: SLF001 - as Spark ML's own mixins
        "decode",
        "function from the value of the column of features to an array, or a dictionary of them: column to function",
    )


class HasPredictionCol(Params):
    """``prediction_col``: the column of predictions."""

    prediction_col = param("prediction_col", "column of predictions", column_name, "the name of a column")


class HasLabelCol(Params):
    """``label_col``: the column of true labels or targets."""

    label_col = param("label_col", "column of true labels or targets", column_name, "the name of a column")


class HasOutputDim(Params):
    """``output_dim``: the number of classes."""

    output_dim = param("output_dim", "number of classes", integer_from(1), "a positive integer")
