"""The vectors and rows of a center that is divided among shards, in files of each shard.

The snapshot itself has everything else, and names these files. It is read with any number of shards, and with one
server: vectors and rows are cut again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from distkeras.ps.checkpoint.row_files import RowFile
from distkeras.ps.checkpoint.state import State
from distkeras.ps.protocol.tables import NO_IDS, Ids


@dataclass(frozen=True)
class PartFile:
    """One file of a shard, with the elements from ``start`` to ``stop`` of each vector.

    ``rows`` are the names of the shard's files with rows; `row_files.RowFiles` in the file's header describes them.
    """

    name: str
    start: int
    stop: int
    rows: tuple[str, ...] = ()


class Share(NamedTuple):
    """What one of ``shards`` shards restores: elements ``cut(size)`` of the vectors, and the rows that it owns."""

    shard: int
    shards: int
    cut: Callable[[int], slice]
    owns: Callable[[Ids], np.ndarray]


class SavedSlice(NamedTuple):
    """A shard's share of a snapshot: ``size`` elements have the whole vectors.

    ``row_files`` are the files that have exactly the shard's rows, at the same places; none if rows were cut again.
    """

    state: State
    size: int
    row_files: tuple[RowFile, ...]


def part_of(values: Mapping[str, Any]) -> PartFile:
    """Return the part that a snapshot's header describes."""
    return PartFile(**{**values, "rows": tuple(values.get("rows", ()))})


def is_vector(name: str) -> bool:
    """Return whether the array ``name`` of a state has an element for each one of the center."""
    return name in ("center", "round") or name.startswith(("model/", "worker/"))


def joined_parts(
    parts: Sequence[PartFile], load: Callable[[PartFile], Mapping[str, np.ndarray]], stretch: slice | None = None
) -> dict[str, np.ndarray]:
    """Return the elements ``stretch`` of each vector, by default all, from the files in which they are."""
    stretch = slice(0, max(part.stop for part in parts)) if stretch is None else stretch
    joined: dict[str, np.ndarray] = {}
    for number, part in enumerate(parts):
        start, stop = max(part.start, stretch.start), min(part.stop, stretch.stop)
        if start >= stop:
            if number:  # the first one is read for the names, even if it has no element of the stretch
                continue
            stop = start
        for name, array in load(part).items():
            out = joined.setdefault(name, np.empty(stretch.stop - stretch.start, array.dtype))
            out[start - stretch.start : stop - stretch.start] = array[start - part.start : stop - part.start]
    return joined


def with_vectors(state: State, cut: Callable[[np.ndarray], np.ndarray]) -> State:
    """Return ``state`` with ``cut`` of each vector."""
    arrays = {name: cut(array) if is_vector(name) else array for name, array in state.arrays.items()}
    return State(state.header, arrays, state.metrics, state.log_totals, optimizers=state.optimizers)


def bare_state(state: State, elements: int) -> State:
    """Return ``state`` with vectors of ``elements`` zeros, and with tables of no rows."""
    bare = with_vectors(state, lambda vector: np.zeros(elements, vector.dtype))
    shapes = state.header.get("tables", ())
    return replace(bare, tables=tuple((NO_IDS, np.zeros((0, width), np.float32)) for _, width in shapes))


def vectors_of(state: State) -> dict[str, np.ndarray]:
    """Return the vectors of ``state``, by name."""
    return {name: array for name, array in state.arrays.items() if is_vector(name)}
