"""Several columns of numbers as one input of a model.

Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distkeras.data.binding import GivenColumns, names_of
from distkeras.data.column_kinds import common_type, is_scalar
from distkeras.data.columns import Part
from distkeras.data.schema import PARTS, field_of, numeric_column
from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


#: The column that scalar columns become.
ASSEMBLED = "distkeras_features"


def assembled(df: DataFrame, features: GivenColumns, dtypes: Sequence[str]) -> tuple[DataFrame, GivenColumns]:
    """Return ``df`` and its columns that feed a model, one for each input.

    Several columns for one input must hold one number each; they fill it together, in their order. Their type is one
    that holds every number of theirs as well as a single column would: integers stay integers.

    Args:
        dtypes: the numpy names of the inputs' dtypes.

    Raises:
        MissingColumnError: there is no such column.
        ConfigurationError: one of several columns for one input is no number, or no type holds the decimals of all.
    """
    names = names_of(features, "features_col")
    if len(dtypes) != 1 or len(names) == 1 or isinstance(names, Mapping):
        return df, names
    from pyspark.sql import functions as F

    parts = [(name, field_of(df.schema.fields, name).dataType) for name in names]
    for name, kind in parts:
        if not is_scalar(kind):
            raise ConfigurationError(
                "several columns for one input of the model must hold one number each. "
                f"Received: {kind.simpleString()}",
                column=name,
            )
    together_kind = common_type(dict(parts), whole="float" not in dtypes[0])
    numbers = [numeric_column(df.schema.fields, name).column.cast(together_kind) for name in names]
    metadata = {PARTS: [Part(name, kind.typeName())._asdict() for name, kind in parts]}
    together = F.array(*numbers).alias(ASSEMBLED, metadata=metadata)
    return df.select("*", together), (ASSEMBLED,)
