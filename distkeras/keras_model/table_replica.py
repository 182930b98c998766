"""The replica of a model with small tables, and its optimizer's slots of each row."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import aligned
from distkeras.keras_model.replica import KerasReplica, layout_of, load_state, state_bytes
from distkeras.keras_model.row_optimizers import slots_of
from distkeras.keras_model.variables import assign_without_copy, numpy_value
from distkeras.ps.protocol.loop import OptimizerState
from distkeras.ps.protocol.tables import Ids, RowIndex, grown, put_rows
from distkeras.ps.rules.base import all_finite

if TYPE_CHECKING:
    import keras

    from distkeras.keras_model.tables import RowModel
    from distkeras.keras_model.window_rows import RowBatch


class RowValues:
    """A row of numbers for each id that was ever set; memory grows with their number.

    Args:
        width: elements of a row.
        initial: the value of every element of a row that was not set.
    """

    def __init__(self, width: int, initial: float) -> None:
        #: The value of every element of a row that was not set.
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
        # "clip" writes directly into `out`; ids that were not set get an arbitrary row first.
        if len(self):
            np.take(self._values, places, axis=0, out=out, mode="clip")
        new = places < 0
        if new.any():
            out[new] = self.initial
        return places

    def set(self, ids: Ids, values: np.ndarray, places: np.ndarray | None = None) -> None:
        """Set the rows of ``ids``, which are unique; ``places`` are from `get`, if no row was added since."""
        places = self._index.find(ids) if places is None else places
        new = places < 0
        if new.any():
            places[new] = self._index.add(ids[new])
            self._values = grown(self._values, len(self))
        put_rows(self._values, places, values)


class TableReplica(KerasReplica):
    """A small model behind the interface that rules talk to.

    Its vector has the dense variables, and then the small tables. It retains the optimizer's slots of a row from one
    window to a later one that touches the row again. They are at the end of the optimizer's state that is sent: for
    each table, the number of touched rows, their ids, and for each row one vector of the table's width per slot.

    Args:
        model: the small one, built and compiled.
        rows: the tables, and the order of the vector.
    """

    def __init__(self, model: keras.Model, rows: RowModel) -> None:
        super().__init__(model, rows.order)
        self._tables = rows.tables
        self._retained: list[RowValues] | None = None
        #: The rows of the current window.
        self._current: tuple[Ids, ...] | None = None
        #: For each table, the places of the current rows in `_retained`; -1 for new rows.
        self._places_of_current: list[np.ndarray] = []

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
        """Return the state of the optimizer, with its slots of rows; see `KerasReplica.read_optimizer`."""
        state = super().read_optimizer()
        if state is None or not self._slots:
            return state
        self._retain_slots()
        pieces = [state.content]
        for retained in self._retained_slots():
            if not all_finite(retained.values.reshape(-1)):
                return None
            arrays = np.array([len(retained)], np.int64), retained.ids, retained.values
            pieces += [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        content = np.concatenate(pieces)
        return OptimizerState(self._with_rows(state.layout), content, zlib.crc32(content.data))

    def load_optimizer(self, state: OptimizerState | None, example: RowBatch) -> str | None:  # type: ignore[override]  # of windows with rows
        """Set the state of the optimizer, with its slots of rows; see `KerasReplica.load_optimizer`."""
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
        retained = [RowValues(rows.width, float(rows.initial)) for rows in self._retained_slots()]
        problem: str | None = _fill(retained, state.content[size:])
        if problem:
            return problem
        dense = state.content[:size]
        own = OptimizerState(layout_of(optimizer, unsent), dense, zlib.crc32(dense.data))
        problem = load_state(optimizer, own, unsent)
        self.set_values(self._values)  # the state has the learning rate of its time
        if not problem:
            self._retained, self._current = retained, None
        return problem

    def _with_rows(self, layout: str) -> str:
        return f"{layout}, and rows of {', '.join(f'{t.name!r} ({t.rows} x {t.width})' for t in self._tables)}"

    def begin_again(self, model: keras.Model) -> bool:
        """Take over the state of another model, as `KerasReplica.begin_again` does; discard the slots of all rows."""
        self._retained = self._current = None
        return super().begin_again(model)

    @property
    def _slots(self) -> list[tuple[Any, ...]]:
        """The built optimizer's slots of the small tables, table by table; empty if it has none."""
        small = self._weights.variables[len(self._weights.variables) - len(self._tables) :]
        slots = [slots_of(self.model.optimizer, variable) for variable in small]
        return slots if all(slots) else []

    def _unsent(self) -> frozenset[int]:
        return frozenset(id(slot) for slots in self._slots for slot in slots)

    def _enter(self, rows: tuple[Ids, ...]) -> None:
        """Retain the slots of the previous window's rows, and load those of ``rows`` into the optimizer."""
        tables = self._slots
        if not tables or rows is self._current:
            return
        self._retain_slots()
        self._places_of_current = []
        for slots, retained, ids in zip(tables, self._retained_slots(), rows, strict=True):
            values = aligned((slots[0].shape[0], retained.width), np.dtype(np.float32))
            self._places_of_current.append(retained.get(ids, values[: len(ids)]))
            values[len(ids) :] = retained.initial
            for slot, part in zip(slots, np.split(values, len(slots), axis=1), strict=True):
                assign_without_copy(slot, part)
        self._current = rows

    def _retain_slots(self) -> None:
        """Copy the optimizer's slots of the current window's rows to `_retained`."""
        if self._current is not None:
            tables = zip(self._slots, self._retained_slots(), self._current, self._places_of_current, strict=True)
            for slots, retained, ids, places in tables:
                parts = [numpy_value(slot)[: len(ids)] for slot in slots]
                retained.set(ids, parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1), places)

    def _retained_slots(self) -> list[RowValues]:
        """Return the retained slots, table by table; before the first step, they are empty."""
        if self._retained is None:
            initial = [float(numpy_value(slots[0]).flat[0]) for slots in self._slots]  # both slots of Adam are zero
            widths = [len(slots) * table.width for slots, table in zip(self._slots, self._tables, strict=True)]
            self._retained = [RowValues(width, value) for width, value in zip(widths, initial, strict=True)]
        return self._retained


def _fill(retained: Sequence[RowValues], content: np.ndarray) -> str:
    """Set slots of rows from the end of a state of `TableReplica.read_optimizer`; return what is wrong with it."""
    at = 0
    for rows in retained:
        width = rows.width
        count = int(content[at : at + 8].copy().view(np.int64)[0]) if at + 8 <= content.nbytes else -1
        middle = at + 8 * (1 + count)
        end = middle + 4 * count * width
        if count < 0 or end > content.nbytes:
            return f"its {content.nbytes} bytes of rows must hold the announced rows. Received: {count} rows"
        ids = content[at + 8 : middle].copy().view(np.int64)
        values = content[middle:end].copy().view(np.float32).reshape(count, width)
        if len(np.unique(ids)) < len(ids) or not all_finite(values.reshape(-1)):
            return "its rows are not finite, or not unique"
        rows.set(ids, values)
        at = end
    return "" if at == content.nbytes else f"it must have {at} bytes of rows. Received: {content.nbytes}"
