"""Rows in memory: aligned arrays, and rows of any length, which are padded one mini-batch at a time.

Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from distkeras.ps.errors import ShapeError
from distkeras.ps.validate import check_fields, choice, count, flag, invalid, require_integer, require_number

#: Bytes: the strictest alignment that any build of TensorFlow requires.
ALIGNMENT = 64


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a new, uninitialized array that TensorFlow can take over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def is_aligned(array: np.ndarray) -> bool:
    """Return whether TensorFlow can take ``array`` over."""
    return array.flags.c_contiguous and array.__array_interface__["data"][0] % ALIGNMENT == 0


#: The most bytes of rows that are padded together: one row may be much longer than all others.
_PADDED_BYTES_MAX = 2 << 30
#: The padding to few lengths.
FEW = "few"
#: The least of the few lengths.
_LEAST = 8


@dataclass(frozen=True)
class Padding:
    """How rows of any length become one array: as `keras.utils.pad_sequences` makes it, of one mini-batch at a time.

    A mini-batch is as long as its longest row, and at least one step long.

    Args:
        value: number that fills shorter rows. Default: for labels, the class that the loss ignores, if there is one;
            else 0. Sample weights of steps are 0 there, so that the loss leaves these steps out.
        side: "post" fills a row after its steps, "pre" before them.
        longest: the most steps of a row, of which a longer one loses the rest. Default: rows are never cut.
        cut: the end at which a longer row is cut: "pre" removes its first steps, "post" its last ones.
        multiple: the length of a mini-batch is a multiple of it; or "few", for one of the lengths 8, 12, 16, 24, 32,
            48, 64 and so on, which is at most half as much again. Default: "few" where the backend compiles each length
            by itself, as JAX and XLA do; else 1.
        bucket: whether mini-batches of training have rows of like length, so that less is padded: the rows of 64
            mini-batches are sorted by length, and these mini-batches come in a random order. One column suffices.
    """

    value: float | None = None
    side: str = choice("post", "post", "pre")
    longest: int | None = count(None)
    cut: str = choice("pre", "pre", "post")
    multiple: int | str | None = None
    bucket: bool = flag(False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.value is not None:
            require_number("value", self.value, -math.inf)
        if self.multiple is not None and self.multiple != FEW:
            if isinstance(self.multiple, str):
                raise invalid("multiple", self.multiple, f'a positive integer, "{FEW}", or None')
            require_integer("multiple", self.multiple)

    def length(self, steps: int) -> int:
        """Return the length of a mini-batch whose longest row has so many ``steps``."""
        steps = max(1, steps)
        if self.multiple != FEW:
            multiple = cast("int", self.multiple or 1)
            return -(-steps // multiple) * multiple
        power = max(_LEAST, 1 << (steps - 1).bit_length())
        between = power * 3 // 4
        length = between if steps <= between and power > _LEAST else power
        return length if self.longest is None else min(length, self.longest)

    def lengths(self, steps: np.ndarray) -> np.ndarray:
        """Return the lengths of mini-batches of one row each, which have so many ``steps``."""
        kept = steps if self.longest is None else np.minimum(steps, self.longest)
        distinct, places = np.unique(kept, return_inverse=True)
        return np.array([self.length(int(number)) for number in distinct])[places]


@dataclass(frozen=True, eq=False, slots=True)
class RaggedRows:
    """Rows of any length: their steps, one row after another, and where each row begins.

    Args:
        steps: ``(all steps, *shape of a step)``.
        offsets: int64 ``(rows + 1,)``, ascending: row ``i`` is ``steps[offsets[i]:offsets[i + 1]]``.
    """

    steps: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: slice | np.ndarray) -> RaggedRows:
        """Return a range of rows, as a view; or those in an array of numbers or booleans, as a copy."""
        if isinstance(rows, slice):
            first, end, _ = rows.indices(len(self))
            return RaggedRows(self.steps, self.offsets[first : max(first, end) + 1])
        lengths = self.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        places = np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return RaggedRows(self.steps[places], offsets)

    @property
    def lengths(self) -> np.ndarray:
        """Return the steps of each row, int64 ``(rows,)``."""
        lengths: np.ndarray = np.diff(self.offsets)
        return lengths

    def lengths_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the steps of some rows, by number."""
        lengths: np.ndarray = self.offsets[rows + 1] - self.offsets[rows]
        return lengths

    @property
    def own_steps(self) -> np.ndarray:
        """Return the steps of these rows alone, without those around a slice."""
        return self.steps[self.offsets[0] : self.offsets[-1]]

    def kept(self, rows: np.ndarray, padding: Padding) -> np.ndarray:
        """Return how many steps of some rows, by number, ``padding`` keeps."""
        lengths = self.lengths_of(rows)
        return lengths if padding.longest is None else np.minimum(lengths, padding.longest)

    def padded(self, rows: np.ndarray, padding: Padding) -> np.ndarray:
        """Return some rows, by number, as one aligned array ``(rows, length, *shape of a step)``."""
        return self.padded_batches(rows, max(1, len(rows)), padding)[0]

    def padded_batches(self, rows: np.ndarray, size: int, padding: Padding) -> tuple[np.ndarray, np.ndarray]:
        """Return some rows, by number, that are mini-batches of ``size`` rows.

        Returns:
            An aligned array ``(rows, longest mini-batch, *shape of a step)``, and the length of each mini-batch; what
            is behind it has no meaning.
        """
        kept = self.kept(rows, padding)
        longest = [int(kept[first : first + size].max(initial=0)) for first in range(0, max(1, len(rows)), size)]
        lengths = np.array(list(map(padding.length, longest)))
        length = int(lengths.max())
        step_bytes = math.prod(self.steps.shape[1:]) * self.steps.dtype.itemsize
        if min(size, len(rows)) * length * step_bytes > _PADDED_BYTES_MAX:
            raise ShapeError(
                f"{min(size, len(rows))} rows must fit into {_PADDED_BYTES_MAX >> 30} GiB once they are padded: "
                f"`Padding(longest=...)` cuts long rows. Received: a row of {max(longest)} steps of {step_bytes} bytes"
            )
        starts = self.offsets[rows] + (self.lengths_of(rows) - kept if padding.cut == "pre" else 0)
        out = aligned((len(rows), length, *self.steps.shape[1:]), self.steps.dtype)
        if (kept == length).all() and not (starts % length).any():  # rows of one length, which are copied together
            whole = self.steps[: len(self.steps) // length * length].reshape(-1, *out.shape[1:])
            return whole.take(starts // length, axis=0, out=out, mode="clip"), lengths
        out.fill(padding.value or 0)
        first = (np.repeat(lengths, size)[: len(rows)] - kept) * (padding.side == "pre")
        for row, start, at, steps in zip(out, starts.tolist(), first.tolist(), kept.tolist(), strict=True):
            row[at : at + steps] = self.steps[start : start + steps]
        return out, lengths

    @classmethod
    def concatenated(cls, parts: Sequence[RaggedRows]) -> RaggedRows:
        """Return the rows of all ``parts``, in their order, without a copy of steps that lie in one array like this."""
        if _adjoin(parts):
            offsets = np.concatenate([parts[0].offsets, *(part.offsets[1:] for part in parts[1:])])
            return cls(parts[-1].steps, offsets)
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(np.concatenate([part.own_steps for part in parts]), np.concatenate([[0], np.cumsum(lengths)]))


def of_one_length(
    arrays: Sequence[np.ndarray | RaggedRows], paddings: Sequence[Padding]
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yield the rows whose values have the same lengths in all ``arrays``: their numbers, and their arrays.

    The length of a row is that of a mini-batch of this row alone.
    """
    given = zip(arrays, paddings, strict=True)
    lengths = np.array([padding.lengths(rows.lengths) for rows, padding in given if isinstance(rows, RaggedRows)])
    _, kinds = np.unique(lengths, axis=1, return_inverse=True)
    kinds = kinds.reshape(-1)
    for kind in range(kinds.max() + 1):
        places = np.flatnonzero(kinds == kind)
        given = zip(arrays, paddings, strict=True)
        yield places, [rows.padded(places, p) if isinstance(rows, RaggedRows) else rows[places] for rows, p in given]


def _adjoin(parts: Sequence[RaggedRows]) -> bool:
    """Return whether the last part's array has the steps of all parts, one after the other."""
    address = parts[0].steps.__array_interface__["data"][0]
    return all(
        part.offsets[-1] == after.offsets[0]
        and len(part.steps) <= len(after.steps)
        and after.steps.__array_interface__["data"][0] == address
        for part, after in itertools.pairwise(parts)
    )
