"""Which rows are there to train on, and which to validate on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from distkeras.data.columns import quoted
from distkeras.ps.errors import MissingColumnError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def split(
    df: DataFrame, columns: Iterable[str], indicator: str | None, share: float, seed: int
) -> tuple[DataFrame, DataFrame | None]:
    """The rows to train on, and those to validate on, if any.

    Args:
        df: the data.
        columns: names of those whose values a row is known by.
        indicator: boolean column that is true for rows to validate on.
        share: of the rows to validate on, where there is no ``indicator``: by a hash of a row's values, so that it is
            the same row again whenever Spark computes it.
        seed: enters the hash.

    Raises:
        MissingColumnError: no such column, or one that is not boolean.
    """
    from pyspark.sql import functions as F

    if indicator is not None:
        kinds = {field.name: field.dataType.simpleString() for field in df.schema.fields}
        if kinds.get(indicator) != "boolean":
            raise MissingColumnError(
                f"`validation_indicator_col` must be a boolean column. Received: {kinds.get(indicator)}",
                column=indicator,
            )
        chosen = F.coalesce(F.col(quoted(indicator)), F.lit(False))
        return df.where(~chosen), df.where(chosen)
    if not share:
        return df, None
    values = [F.col(quoted(name)) for name in columns]
    # Another seed than that of the row order, whose hash decides which partition a row goes to.
    chosen = F.pmod(F.xxhash64(F.lit(f"validation {seed}"), *values), F.lit(1 << 30)) < int(share * (1 << 30))
    return df.where(~chosen), df.where(chosen)
