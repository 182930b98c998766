"""Tables: sections of the center that travel by rows, in addition to its dense vector."""

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

#: The largest number of rows, and the largest seed: row numbers are int64.
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True)
class TableShape:
    """A table of float32 rows.

    Args:
        name: of its layer; for errors.
        most: the largest number of rows that one window can touch.
        seed: of the initial rows of a partial table: see `touched_rows.initial_rows`. None: the table is kept whole,
            and its initial rows are published.
        scale: the largest absolute value of the initial rows.

    Raises:
        ConfigurationError: a number is not positive, ``most`` is above ``rows``, or seed or scale is negative.
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
        """Return whether the table is partial: the server stores only its touched rows."""
        return self.seed is not None


def describe(shapes: Sequence[TableShape]) -> str:
    """Return the shapes as text, equal for equal tables; empty if there are none."""
    return json.dumps([dataclasses.astuple(shape) for shape in shapes]) if shapes else ""


#: A driver sends or reads rows in blocks of this many bytes, or of one row; the server copies them under its lock.
_BLOCK_BYTES = 4 << 20


def block_rows(shape: TableShape) -> int:
    """Return how many rows a driver sends or reads at a time."""
    return max(1, _BLOCK_BYTES // (4 * shape.width))


def block_bytes(shape: TableShape) -> int:
    """Return the bytes of `block_rows` rows, and of their numbers for a partial table."""
    return (4 * shape.width + 8 * shape.partial) * block_rows(shape)


class Span(NamedTuple):
    """The position of a small table in a worker's vector: elements ``start`` to ``stop``, rows of ``width``."""

    start: int
    stop: int
    width: int


def row_elements(shapes: Sequence[TableShape]) -> tuple[int, ...]:
    """Return the largest number of elements in the rows that a window touches, for each table."""
    return tuple(shape.most * shape.width for shape in shapes)


def spans(dense: int, shapes: Sequence[TableShape]) -> tuple[Span, ...]:
    """Return the positions of the small tables, which follow the ``dense`` elements of a worker's vector."""
    positions, start = [], dense
    for shape, elements in zip(shapes, row_elements(shapes), strict=True):
        positions.append(Span(start, start + elements, shape.width))
        start = positions[-1].stop
    return tuple(positions)


#: The largest optimizer state: this many vectors of the model's size (float32), and this many bytes more.
_STATE_VECTORS, _STATE_BYTES = 4, 64 * 1024
#: The largest part of a state for the rows of one partial table, in bytes; the table may be larger than a disk.
_STATE_BYTES_OF_ROWS = 256 << 20


def most_state_bytes(size: int, tables: Sequence[TableShape] = ()) -> int:
    """Return the bytes of the largest optimizer state that is kept for a model of ``size`` elements and ``tables``."""
    of_rows = [table.rows * (4 * _STATE_VECTORS * table.width + np.dtype(np.int64).itemsize) for table in tables]
    most = [min(n, _STATE_BYTES_OF_ROWS) if table.partial else n for n, table in zip(of_rows, tables, strict=True)]
    return 4 * _STATE_VECTORS * size + _STATE_BYTES + sum(most)
