"""Several scalar columns as the one input of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distkeras.data.columns import quoted
from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The column that scalar columns become.
ASSEMBLED = "distkeras_features"


def assembled(df: DataFrame, features: Sequence[str], inputs: int) -> tuple[DataFrame, list[str]]:
    """``df`` and the names of its columns that feed a model with so many ``inputs``, one each.

    Several columns for one input must hold one number each; they fill it together, in their order.

    Raises:
        ConfigurationError: one of several columns for one input is no number.
    """
    if inputs != 1 or len(features) == 1:
        return df, list(features)
    from pyspark.sql import functions as F
    from pyspark.sql.types import BooleanType, NumericType

    kinds = {field.name: field.dataType for field in df.schema.fields}
    for name in features:
        if name in kinds and not isinstance(kinds[name], NumericType | BooleanType):
            raise ConfigurationError(
                "several columns for one input of the model must hold one number each. "
                f"Received: {kinds[name].simpleString()}",
                column=name,
            )
    numbers = [F.col(quoted(name)).cast("float") for name in features]
    return df.withColumn(ASSEMBLED, F.array(*numbers)), [ASSEMBLED]
