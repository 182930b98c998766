"""How vectors and tables are divided among the shards of a center.

A vector is cut into slices at multiples of `BLOCK`, so that a kernel, a wire format and a checksum work on the same
blocks as on one server. A row of a table belongs to the shard that its number hashes to, so that ranges of rows that
are used often are spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.protocol.compression import Codec
from distkeras.ps.protocol.tables import Ids, mixed
from distkeras.ps.rules.base import BLOCK, Vector
from distkeras.ps.validate import require_integer

#: Rows whose shards are computed at a time, so that this takes little memory.
_ROWS = 1 << 20


class Cut:
    """The division of a vector of ``size`` elements, and of all rows, among ``shards`` shards.

    Args:
        size: elements of the vector.
        shards: number of shards, at least 1; those beyond the number of blocks have no element of the vector.
        block: elements of a block, which is not cut.
    """

    def __init__(self, size: int, shards: int, block: int = BLOCK) -> None:
        require_integer("shards", shards)
        blocks = -(-size // block)
        ends = [min(size, blocks * shard // shards * block) for shard in range(shards + 1)]
        self.size, self.shards = size, shards
        #: The elements of each shard.
        self.slices = tuple(slice(start, stop) for start, stop in pairwise(ends))

    def parts(self, vectors: Sequence[Vector], shard: int) -> tuple[Vector, ...]:
        """Return the elements of ``shard`` in each vector; views, not copies."""
        return tuple(vector[self.slices[shard]] for vector in vectors)

    def packed(self, arrays: Sequence[np.ndarray], shard: int, codec: Codec) -> tuple[np.ndarray, ...]:
        """Return the bytes of ``shard`` in each vector that ``codec``, whose blocks are `BLOCK`, has encoded; views."""
        span = codec.span(self.slices[shard])
        return tuple(array[span] for array in arrays)

    def owners(self, ids: Ids) -> np.ndarray:
        """Return the shard of each row, int64 ``(len(ids),)``."""
        return (mixed(np.asarray(ids).astype(np.uint64)) % np.uint64(self.shards)).astype(np.int64)

    def rows(self, ids: Ids, shard: int) -> np.ndarray:
        """Return the places in ``ids`` of the rows that belong to ``shard``, int64, ascending."""
        return np.flatnonzero(self.owners(ids) == shard)

    def split(self, several: Sequence[Ids]) -> list[list[np.ndarray]]:
        """Return `rows` of each shard, for each of several tables."""
        owners = [self.owners(ids) for ids in several]
        return [[np.flatnonzero(own == shard) for own in owners] for shard in range(self.shards)]

    def own(self, rows: int, shard: int) -> Ids:
        """Return the numbers of the rows of ``shard`` in a table of ``rows`` rows, ascending."""
        blocks = (np.arange(start, min(rows, start + _ROWS)) for start in range(0, rows, _ROWS))
        return np.concatenate([block[self.rows(block, shard)] for block in blocks])

    def require_own(self, several: Sequence[Ids], shard: int) -> None:
        """Raise a RemoteProtocolError unless all these rows belong to ``shard``."""
        for ids in several:
            strange = ids[self.owners(ids) != shard]
            if strange.size:
                raise RemoteProtocolError(
                    f"the rows that shard {shard} of {self.shards} receives must be its own. "
                    f"Received: {strange.size} others, the first of which is {strange[0]}"
                )
