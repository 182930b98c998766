"""The replica of a model with small tables, and what its optimizer keeps of each row."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import aligned
from distkeras.keras_model.replica import KerasReplica, layout_of, load_state, state_bytes
from distkeras.keras_model.row_optimizers import slots_of
from distkeras.keras_model.variables import hand_over, numpy_value
from distkeras.ps.protocol.messages import OptimizerState
from distkeras.ps.protocol.tables import Ids
from distkeras.ps.protocol.touched_rows import RowIndex, grown, put_rows
from distkeras.ps.rules.base import all_finite

if TYPE_CHECKING:
    import keras

    from distkeras.keras_model.tables import RowModel
    from distkeras.keras_model.window_rows import RowBatch


class RowValues:
    """A row of numbers for each id that was ever set; memory grows with these.

    Args:
        width: elements of a row.
        initial: every element of a row that was not set.
    """

    def __init__(self, width: int, initial: float) -> None:
        #: Every element of a row that was not set.
        self.initial = np.float32(initial)
        self._index = RowIndex()
        self._values = np.empty((0, width), np.float32)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def width(self) -> int:
        """Return the elements of a row."""
        return int(self._values.shape[1])

    @property
    def ids(self) -> Ids:
        """Return the ids that were set, in the order of `values`."""
        return self._index.rows()

    @property
    def values(self) -> np.ndarray:
        """Return the rows that were set, ``(len(self), width)``."""
        return self._values[: len(self)]

    @property
    def nbytes(self) -> int:
        """Return the bytes of its memory."""
        return self._index.nbytes + self._values.nbytes

    def get(self, ids: Ids, out: np.ndarray) -> np.ndarray:
        """Fill ``out``, float32 ``(len(ids), width)``, with the rows of ``ids``.

        Returns:
            The places of ``ids``, for `set`.
        """
        places = self._index.find(ids)
        # "clip" writes straight into `out`, with any row where there is none.
        if len(self):
            np.take(self._values, places, axis=0, out=out, mode="clip")
        new = places < 0
        if new.any():
            out[new] = self.initial
        return places

    def set(self, ids: Ids, values: np.ndarray, places: np.ndarray | None = None) -> None:
        """Set the rows of ``ids``, each of which is there once; ``places`` are what `get` has returned, if it is known.

        No row was added since.
        """
        places = self._index.find(ids) if places is None else places
        new = places < 0
        if new.any():
            places[new] = self._index.add(ids[new])
            self._values = grown(self._values, len(self))
        put_rows(self._values, places, values)


class TableReplica(KerasReplica):
    """A small model behind the interface that rules talk to.

    Its vector has the dense variables, and then the small tables. What its optimizer keeps of rows stays here from one
    window to a later one that touches them again. In the optimizer's state that is sent, it comes last: for each table,
    the number of rows that were touched, their ids, and what is kept of each: as many vectors of the table's width as
    the optimizer has for each element.

    Args:
        model: the small one, built and compiled.
        rows: the tables, and the order of the vector.
    """

    def __init__(self, model: keras.Model, rows: RowModel) -> None:
        super().__init__(model, rows.order)
        self._tables = rows.tables
        self._kept: list[RowValues] | None = None
        self._present: tuple[Ids, ...] | None = None
        #: For each table, where the rows of the present window are kept, and -1 for those that are not yet.
        self._kept_at: list[np.ndarray] = []

    def train(self, batches: Sequence[RowBatch]) -> np.ndarray:  # type: ignore[override]  # of windows with rows
        """Take one optimizer step per mini-batch, in order; see `KerasReplica.train`."""
        results = []
        for _, group in itertools.groupby(batches, key=lambda batch: id(batch.rows)):
            window = list(group)
            self.prepare(window[0])
            self._build_optimizer()
            self._enter(window[0].rows)
            results.append(super().train(window))
        return np.concatenate(results) if results else super().train(batches)

    def read_optimizer(self) -> OptimizerState | None:
        """Return the state of the optimizer, with what it keeps of rows; see `KerasReplica.read_optimizer`."""
        state = super().read_optimizer()
        if state is None or not self._slots:
            return state
        self._take_back()
        pieces = [state.content]
        for kept in self._kept_rows():
            if not all_finite(kept.values.reshape(-1)):
                return None
            arrays = np.array([len(kept)], np.int64), kept.ids, kept.values
            pieces += [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        content = np.concatenate(pieces)
        return OptimizerState(self._with_rows(state.layout), content, zlib.crc32(content.data))

    def load_optimizer(self, state: OptimizerState | None, example: RowBatch) -> str | None:  # type: ignore[override]  # of windows with rows
        """Set the state of the optimizer, with what it keeps of rows; see `KerasReplica.load_optimizer`."""
        self.prepare(example)
        self._build_optimizer()
        if state is None or not self._slots:
            return super().load_optimizer(state, example)
        optimizer, unsent = self.model.optimizer, self._unsent()
        layout, size = self._with_rows(layout_of(optimizer, unsent)), state_bytes(optimizer, unsent)
        if state.layout != layout:
            return f"it must be of {layout}. Received: one of {state.layout}"
        if state.damaged:
            return f"its {state.content.nbytes} bytes have another checksum than {state.checksum:#010x}"
        kept = [RowValues(rows.width, float(rows.initial)) for rows in self._kept_rows()]
        problem: str | None = _fill(kept, state.content[size:])
        if problem:
            return problem
        dense = state.content[:size]
        own = OptimizerState(layout_of(optimizer, unsent), dense, zlib.crc32(dense.data))
        problem = load_state(optimizer, own, unsent)
        if not problem:
            self._kept, self._present = kept, None
        return problem

    def _with_rows(self, layout: str) -> str:
        return f"{layout}, and rows of {', '.join(f'{t.name!r} ({t.rows} x {t.width})' for t in self._tables)}"

    def begin_again(self, model: keras.Model) -> bool:
        """Take over the state of another model, as `KerasReplica.begin_again`; nothing is kept of any row."""
        self._kept = self._present = None
        return super().begin_again(model)

    @property
    def _slots(self) -> list[tuple[Any, ...]]:
        """The variables of the built optimizer with something for each element, table by table; empty without any."""
        small = self._weights.variables[len(self._weights.variables) - len(self._tables) :]
        slots = [slots_of(self.model.optimizer, variable) for variable in small]
        return slots if all(slots) else []

    def _unsent(self) -> frozenset[int]:
        return frozenset(id(slot) for slots in self._slots for slot in slots)

    def _enter(self, rows: tuple[Ids, ...]) -> None:
        """Take back what the optimizer has for the rows of the window before, and give it what is kept of these."""
        tables = self._slots
        if not tables or rows is self._present:
            return
        self._take_back()
        self._kept_at = []
        for slots, kept, ids in zip(tables, self._kept_rows(), rows, strict=True):
            values = aligned((slots[0].shape[0], kept.width), np.dtype(np.float32))
            self._kept_at.append(kept.get(ids, values[: len(ids)]))
            values[len(ids) :] = kept.initial
            for slot, part in zip(slots, np.split(values, len(slots), axis=1), strict=True):
                hand_over(slot, part)
        self._present = rows

    def _take_back(self) -> None:
        """Keep what the optimizer has for the rows of the present window."""
        if self._present is not None:
            every = zip(self._slots, self._kept_rows(), self._present, self._kept_at, strict=True)
            for slots, kept, ids, places in every:
                parts = [numpy_value(slot)[: len(ids)] for slot in slots]
                kept.set(ids, parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1), places)

    def _kept_rows(self) -> list[RowValues]:
        """Return what is kept of rows, table by table; before the first step, of none."""
        if self._kept is None:
            initial = [float(numpy_value(slots[0]).flat[0]) for slots in self._slots]  # Adam's two begin with zeros
            widths = [len(slots) * table.width for slots, table in zip(self._slots, self._tables, strict=True)]
            self._kept = [RowValues(width, value) for width, value in zip(widths, initial, strict=True)]
        return self._kept


def _fill(kept: Sequence[RowValues], content: np.ndarray) -> str:
    """Set rows from the bytes that `TableReplica.read_optimizer` adds for them; return what is wrong with these."""
    at = 0
    for rows in kept:
        width = rows.width
        count = int(content[at : at + 8].copy().view(np.int64)[0]) if at + 8 <= content.nbytes else -1
        middle = at + 8 * (1 + count)
        end = middle + 4 * count * width
        if count < 0 or end > content.nbytes:
            return f"its {content.nbytes} bytes of rows must be whole ones. Received: {count} of them"
        ids = content[at + 8 : middle].copy().view(np.int64)
        values = content[middle:end].copy().view(np.float32).reshape(count, width)
        if len(np.unique(ids)) < len(ids) or not all_finite(values.reshape(-1)):
            return "its rows are not finite, or there twice"
        rows.set(ids, values)
        at = end
    return "" if at == content.nbytes else f"it must have {at} bytes of rows. Received: {content.nbytes}"
