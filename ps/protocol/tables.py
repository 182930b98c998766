"""Tables: sections of the center whose rows travel one by one, next to its dense vector."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np

from distkeras.ps.validate import check_field, invalid, require_integer, require_text

#: Row numbers of one table: int64 ``(count,)``, strictly ascending.
Ids = Annotated[np.ndarray, np.dtype("<i8")]

NO_IDS = np.empty(0, np.int64)

#: The largest number of rows, and the largest seed: numbers of rows are int64.
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True)
class TableShape:
    """A table of float32 rows.

    Args:
        name: of the layer that it belongs to; for errors.
        most: rows that one window can touch at most.
        seed: of the initial rows, where only touched rows are kept: see `touched_rows.initial_rows`. None: the table is
            kept whole, and its initial rows are published.
        scale: of the initial rows, whose numbers are from minus this to this.

    Raises:
        ConfigurationError: a number is not positive, ``most`` is above ``rows``, the seed is negative, or the scale.
    """

    name: str
    rows: int
    width: int
    most: int
    seed: int | None = None
    scale: float = 0.0

    def __post_init__(self) -> None:
        require_text("name", self.name, "the name of a layer")
        for name in ("rows", "width"):
            check_field(self, name, require_integer)
        check_field(self, "most", require_integer, 1, self.rows)
        if self.seed is not None:
            check_field(self, "seed", require_integer, 0, _LARGEST)
        if not 0 <= self.scale < np.inf:
            raise invalid("scale", self.scale, "a finite number that is not negative")
        if self.rows > _LARGEST:
            raise invalid("rows", self.rows, f"at most {_LARGEST}")

    @property
    def partial(self) -> bool:
        """Return whether only the touched rows of the table are kept."""
        return self.seed is not None


def describe(shapes: Sequence[TableShape]) -> str:
    """Return the shapes as text, which is the same for the same tables; empty where there are none."""
    return json.dumps([dataclasses.astuple(shape) for shape in shapes]) if shapes else ""


#: A driver sends or reads rows in blocks of that many bytes, or of one row: the server copies them under its lock.
_BLOCK_BYTES = 4 << 20


def block_rows(shape: TableShape) -> int:
    """Return how many rows a driver sends or reads at a time."""
    return max(1, _BLOCK_BYTES // (4 * shape.width))


def block_bytes(shape: TableShape) -> int:
    """Return the bytes of `block_rows`, and of their numbers where these travel with them."""
    return (4 * shape.width + 8 * shape.partial) * block_rows(shape)


class Span(NamedTuple):
    """Where a small table lies in a worker's vector: elements ``start`` to ``stop``, rows of ``width``."""

    start: int
    stop: int
    width: int


def row_elements(shapes: Sequence[TableShape]) -> tuple[int, ...]:
    """Return how many elements the rows of each table have that a window touches, at most."""
    return tuple(shape.most * shape.width for shape in shapes)


def spans(dense: int, shapes: Sequence[TableShape]) -> tuple[Span, ...]:
    """Return where the small tables, of ``most`` rows each, lie behind the ``dense`` elements of a worker's vector."""
    found, start = [], dense
    for shape, elements in zip(shapes, row_elements(shapes), strict=True):
        found.append(Span(start, start + elements, shape.width))
        start = found[-1].stop
    return tuple(found)


#: Vectors of the model's size (float32) that the largest optimizer state has, and bytes in addition to them.
_STATE_VECTORS, _STATE_BYTES = 4, 64 * 1024
#: Bytes that such a state has for the rows of one table, at most, where the table may have more rows than a disk.
_STATE_BYTES_OF_ROWS = 256 << 20


def most_state_bytes(size: int, tables: Sequence[TableShape] = ()) -> int:
    """Bytes of the largest optimizer state that is kept of a model of ``size`` elements and of ``tables``."""
    of_rows = [table.rows * (4 * _STATE_VECTORS * table.width + np.dtype(np.int64).itemsize) for table in tables]
    most = [min(n, _STATE_BYTES_OF_ROWS) if table.partial else n for n, table in zip(of_rows, tables, strict=True)]
    return 4 * _STATE_VECTORS * size + _STATE_BYTES + sum(most)
