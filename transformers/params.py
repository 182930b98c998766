"""Parameters of the stages: one mixin a concept, each value checked when it is set.

Parameter names are the constructors' keyword names. A value that cannot work is refused where it is given, by
the constructor, `set`, `copy` and `load` alike, since all of them go through the converters below.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pyspark.ml.param import Param, Params

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import require_boolean, require_integer, require_number, require_text


def param(name: str, doc: str, convert: Callable[[Any], Any], expected: str) -> Param[Any]:
    """A parameter whose converter refuses in this project's words.

    Args:
        name: its keyword.
        doc: one line for `explainParams`.
        convert: returns the value to keep; TypeError or ValueError (a ConfigurationError is one) where it cannot work.
        expected: completes "`name` must be …".
    """

    def checked(value: Any) -> Any:
        try:
            return convert(value)
        except (TypeError, ValueError):
            raise ConfigurationError(f"`{name}` must be {expected}. Received: {name}={value!r}") from None

    return Param(Params._dummy(), name, doc, checked)  # noqa: SLF001 - the owner that Spark ML's own mixins give


def column_name(value: Any) -> str:
    """A string that is not empty; ConfigurationError for anything else."""
    return require_text("column", value, "the name of a column")


def column_names(value: Any) -> list[str]:
    """A list of names; one name alone is a list of one."""
    found = [value] if isinstance(value, str) else list(value)
    if not found or len(set(found)) != len(found):
        raise ValueError
    return [column_name(name) for name in found]


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


class HasInputCol(Params):
    """``input_col``: the column to read."""

    input_col = param("input_col", "column to read", column_name, "the name of a column")


class HasOutputCol(Params):
    """``output_col``: the new column."""

    output_col = param("output_col", "new column to write", column_name, "the name of a new column")


class HasOutputType(Params):
    """``output_type``: arrays of floats, or ML vectors, which hold doubles and which Spark ML's own stages read."""

    output_type = param("output_type", "arrays or ML vectors", one_of("array", "vector"), 'one of "array", "vector"')


class HasPredictionCol(Params):
    """``prediction_col``: the column of predictions."""

    prediction_col = param("prediction_col", "column of predictions", column_name, "the name of a column")


class HasLabelCol(Params):
    """``label_col``: the column of true labels or targets."""

    label_col = param("label_col", "column of true labels or targets", column_name, "the name of a column")


class HasOutputDim(Params):
    """``output_dim``: the number of classes."""

    output_dim = param("output_dim", "number of classes", integer_from(1), "a positive integer")
