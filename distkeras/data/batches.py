"""Mini-batches, the blocks of rows that they are cut from, and the columns of a DataFrame that they hold.

`DataSpec` travels to the executors inside the task; importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from distkeras.data.columns import Column, ColumnArrays, ColumnRows
from distkeras.data.rows import RaggedRows
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import check_fields, count, flag

_Item = TypeVar("_Item")
Weight = np.ndarray | tuple[np.ndarray, ...] | None
"""Sample weights: one array for all outputs, or one for each; an `absent` one has none. None: there are no weights."""


def flat_weight(weight: Weight) -> ColumnArrays:
    return () if weight is None else weight if isinstance(weight, tuple) else (weight,)


def as_weight(arrays: Sequence[Any]) -> Any:
    """Return arrays or tensors, as `flat_weight` lists them, as sample weights."""
    return None if not arrays else arrays[0] if len(arrays) == 1 else tuple(arrays)


def absent(rows: tuple[int, ...]) -> np.ndarray:
    """Return the array of an output without labels or weights, ``(*rows, 0)``: it keeps the place of the others."""
    return np.empty((*rows, 0), np.float32)


def is_absent(array: Any) -> bool:
    """Return whether an array or tensor of rows is an `absent` one: a column of the data has at least one element."""
    return len(array.shape) == 2 and array.shape[1] == 0


class Stack:
    """Mini-batches of one size, in contiguous `aligned` memory that a backend can take over without a copy.

    ``x`` and ``y`` have, for each input and target, an array `(batches, n, *column.shape)`, which is not written to.

    Args:
        lengths: int32 ``(batches, arrays)``: of arrays of any length, those of each mini-batch, after which an array
            has no meaning; 0 for other arrays. None if there are none of any length.
    """

    __slots__ = ("lengths", "tensors", "weight", "x", "y")

    def __init__(self, x: ColumnArrays, y: ColumnArrays, weight: Weight, lengths: np.ndarray | None = None) -> None:
        self.x, self.y, self.weight, self.lengths = x, y, weight, lengths
        #: The signature that a loop is traced for, and the arrays as tensors: cached for all windows of this stack.
        self.tensors: Any = None

    def __len__(self) -> int:
        return len(self.x[0])


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One mini-batch. Its arrays may be views: not to be written to.

    Attributes:
        epoch: pass over the partition, from 0.
        index: place within the epoch, from 0.
        last: whether it ends its epoch; only then may it be shorter than the batch size.
        x: for each input, an array `(n, *column.shape)`.
        y: for each output, its labels `(n, *column.shape)`, or an `absent` array; empty if no output has labels.
        weight: sample weights `(n,)`, or `(n, steps)` with one for each time step.
        checksum: over the hashes of the partition's rows up to and including this batch's; 0 if rows have no hashes.
        is_open: for each input, output and weight, whether its rows are of any length, so that the next mini-batch may
            have another one; empty if none is.
        stack: the stack that it is part of; None for none, as for every result of `dataclasses.replace`.
        place: its number in the stack.
    """

    epoch: int
    index: int
    last: bool
    x: ColumnArrays
    y: ColumnArrays
    weight: Weight
    checksum: int = 0
    is_open: tuple[bool, ...] = ()
    stack: Stack | None = field(default=None, init=False)
    place: int = field(default=0, init=False)

    def placed_in(self, stack: Stack, place: int) -> Batch:
        """Return this batch, which is number ``place`` of ``stack``."""
        object.__setattr__(self, "stack", stack)
        object.__setattr__(self, "place", place)
        return self

    @property
    def size(self) -> int:
        return len(self.x[0])


def in_blocks(pieces: Iterable[ColumnRows], rows: int) -> Iterator[ColumnRows]:
    """Yield the same rows in blocks of exactly ``rows``, except for the last; contiguous pieces are not copied."""
    pending: list[ColumnRows] = []
    missing = rows
    for piece in pieces:
        first, end = 0, len(piece[0])
        while end - first >= missing:
            pending.append(tuple(array[first : first + missing] for array in piece))
            yield _concatenated_columns(pending)
            first += missing
            pending, missing = [], rows
        if first < end:
            pending.append(tuple(array[first:] for array in piece))
            missing -= end - first
    if pending:
        yield _concatenated_columns(pending)


def _concatenated_columns(pieces: list[ColumnRows]) -> ColumnRows:
    return pieces[0] if len(pieces) == 1 else tuple(map(_concatenated, zip(*pieces, strict=True)))


def _concatenated(parts: Sequence[Any]) -> np.ndarray | RaggedRows:
    """Return one view of parts that are contiguous in one array, as in the spool; copy others."""
    if isinstance(parts[0], RaggedRows):
        return RaggedRows.concatenated(parts)
    base = parts[0].base
    if not isinstance(base, np.ndarray) or not all(part.base is base for part in parts):
        return np.concatenate(parts)
    if not base.flags.c_contiguous or (base.shape[1:], base.dtype) != (parts[0].shape[1:], parts[0].dtype):
        return np.concatenate(parts)
    start, row = base.__array_interface__["data"][0], base.strides[0]
    firsts = [(part.__array_interface__["data"][0] - start) // row for part in parts]
    if any(first + len(part) != after for first, part, after in zip(firsts, parts, firsts[1:], strict=False)):
        return np.concatenate(parts)
    return base[firsts[0] : firsts[-1] + len(parts[-1])]


@dataclass(frozen=True)
class DataSpec:
    """The data plane's part of a job.

    Args:
        features: the model's inputs, in its order; at least one.
        labels: the labels of each output, in the model's order, None for an output without; empty if no output has
            labels.
        sample_weight: weights that scale the loss, one number per row or one for each time step; one column for all
            outputs, one for each, of which None has no weights, or None.
        batch_size: rows per mini-batch and worker; the last one of an epoch may be shorter.
        epochs: passes over the data.
        seed: of the row order, not negative. It decides as well which rows share a partition.
        shuffle: use a new order for every epoch, or the order of arrival for all.
        spool_bytes: memory in which one worker may keep rows for its later epochs. More rows go to a memory-mapped
            file.
        rewindable: keep the rows of a single epoch too, for a rewind of the worker.
    """

    features: tuple[Column, ...]
    labels: tuple[Column | None, ...] = ()
    sample_weight: Column | tuple[Column | None, ...] | None = None
    batch_size: int = count(32)
    epochs: int = count(1)
    seed: int = count(0, 0)
    shuffle: bool = flag(True)
    spool_bytes: int = count(256 << 20, 0)
    rewindable: bool = flag(False)

    def __post_init__(self) -> None:
        if not self.features:
            raise ConfigurationError("`features` must name at least one column. Received: features=()")
        check_fields(self)

    @property
    def targets(self) -> tuple[Column, ...]:
        """Return the columns of labels, of the outputs that have any."""
        return tuple(label for label in self.labels if label is not None)

    @property
    def weights(self) -> tuple[Column | None, ...]:
        """Return the columns of weights: none, one for all outputs, or one for each."""
        given = self.sample_weight
        return () if given is None else given if isinstance(given, tuple) else (given,)

    def of_columns(self, changed: Callable[[Column | None], Column | None]) -> DataSpec:
        """Return the same with other columns, each ``changed``."""
        sides = (map(changed, side) for side in (self.features, self.labels, self.weights))
        return self.with_columns(*sides)

    def with_columns(
        self, features: Iterable[Column | None], labels: Iterable[Column | None], weights: Iterable[Column | None]
    ) -> DataSpec:
        """Return the same with other columns in place of `features`, `labels` and `weights`."""
        weights = tuple(weights)
        weight = weights if isinstance(self.sample_weight, tuple) else (*weights, None)[0]
        return replace(self, features=tuple(filter(None, features)), labels=tuple(labels), sample_weight=weight)

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """Return every column once, in the order of first use: an autoencoder's target is its input."""
        weights = tuple(weight for weight in self.weights if weight is not None)
        # Of equal columns the last one counts, which is the label: it says what to check.
        return tuple({column: column for column in self.features + self.targets + weights}.values())

    @cached_property
    def is_open(self) -> tuple[bool, ...]:
        """Return for each input, label and weight whether its rows are of any length; nothing if none is."""
        columns = (*self.features, *self.labels, *self.weights)
        found = tuple(column is not None and column.is_open for column in columns)
        return found if any(found) else ()

    def sides(self, arrays: ColumnArrays) -> tuple[ColumnArrays, ColumnArrays, Weight]:
        """Return inputs, targets and sample weights as in `Batch`, from one array for each of `columns`."""
        rows = arrays[0].shape[: arrays[0].ndim - len(self.columns[0].shape)]
        x, y, weights = (
            tuple(absent(rows) if place is None else arrays[place] for place in places) for places in self._places
        )
        return x, y, as_weight(weights)

    def by_array(self, columns: Sequence[_Item], without: _Item) -> list[_Item]:
        """Return what there is for each of `columns` for each array in `sides`; ``without`` for an absent one."""
        return [without if place is None else columns[place] for places in self._places for place in places]

    @cached_property
    def _places(self) -> list[list[int | None]]:
        """For each input, label and weight, its place among `columns`, or None."""
        places: dict[Column | None, int | None] = {column: place for place, column in enumerate(self.columns)}
        sides: Sequence[Sequence[Column | None]] = (self.features, self.labels, self.weights)
        return [[places.get(column) for column in side] for side in sides]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the DataFrame's columns, of assembled ones those that they were assembled from."""
        parts = [[part.name for part in column.parts] or [column.name] for column in self.columns]
        return tuple(dict.fromkeys(name for names in parts for name in names))

    @property
    def encoded(self) -> frozenset[str]:
        """Return the names of the columns that executors decode."""
        return frozenset(column.name for column in self.columns if column.decode is not None)

    @property
    def whole(self) -> frozenset[str]:
        """Return the names of the columns that the model expects as integers."""
        return frozenset(column.name for column in self.columns if column.whole)

    @property
    def doubles(self) -> frozenset[str]:
        """Return the names of the columns that hold numbers which float32 rounds."""
        return self.whole | {column.name for column in self.columns if column.dtype == "float64"}

    @property
    def row_bytes(self) -> int:
        return sum(column.row_bytes for column in self.columns)
