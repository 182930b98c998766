"""Several scalar columns as the one input of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distkeras.data.binding import GivenColumns, names_of
from distkeras.data.columns import quoted
from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Types whose numbers all others but booleans hold.
_SMALL = {"boolean", "byte", "short"}
#: The column that scalar columns become.
ASSEMBLED = "distkeras_features"


def assembled(df: DataFrame, features: GivenColumns, inputs: int) -> tuple[DataFrame, GivenColumns]:
    """Return ``df`` and its columns that feed a model with so many ``inputs``, one each.

    Several columns for one input must hold one number each; they fill it together, in their order. Their type is one
    that holds every number of theirs as well as a single column would: integers stay integers.

    Raises:
        ConfigurationError: one of several columns for one input is no number.
    """
    given = names_of(features, "features_col")
    if inputs != 1 or len(given) == 1 or isinstance(given, Mapping):
        return df, given
    from pyspark.sql import functions as F
    from pyspark.sql.types import BooleanType, NumericType

    kinds = {field.name: field.dataType for field in df.schema.fields}
    for name in given:
        if name in kinds and not isinstance(kinds[name], NumericType | BooleanType):
            raise ConfigurationError(
                "several columns for one input of the model must hold one number each. "
                f"Received: {kinds[name].simpleString()}",
                column=name,
            )
    kind = _common({kinds[name].typeName() for name in given if name in kinds})
    numbers = [F.col(quoted(name)).cast(kind) for name in given]
    return df.withColumn(ASSEMBLED, F.array(*numbers)), (ASSEMBLED,)


def _common(kinds: set[str]) -> str:
    """Return the smallest type that holds the numbers of all these types; of integers next to fractions, double."""
    if kinds <= _SMALL:
        return "short"
    if kinds <= {*_SMALL, "integer"}:
        return "int"
    if kinds <= {*_SMALL, "integer", "long"}:
        return "bigint"
    return "float" if kinds <= {*_SMALL, "float"} else "double"
