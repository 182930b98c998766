"""Layers of this package, and a hash from strings and integers to their ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkeras.keras_model.wide_embedding import WideEmbedding
from distkeras.ps.validate import require_integer

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["WideEmbedding", "hashed_ids"]


def hashed_ids(column: str | Column, rows: int) -> Column:
    """Return a column of ids from 0 to ``rows - 1``, made of strings or integers by a hash that never changes.

    ::

        df = df.withColumn("user_id", hashed_ids("user", 2**40))

    The hash is Spark's ``xxhash64``: XXH64 with seed 42, over the bytes of the text in UTF-8, modulo ``rows``. Integers
    are taken as their decimal digits, so that their type does not matter. A null stays null. Of ``n`` values, about
    ``n**2 / (2 * rows)`` pairs share an id.

    Args:
        column: strings or integers.
        rows: number of rows of the table, at most 2**63 - 1.

    Raises:
        ConfigurationError: that is no number of rows.
    """
    from pyspark.sql import functions as F

    rows = require_integer("rows", rows, 1, (1 << 63) - 1)
    value = F.col(column) if isinstance(column, str) else column
    ids = F.pmod(F.xxhash64(value.cast("string")), F.lit(rows).cast("bigint"))
    return F.when(value.isNotNull(), ids)
