"""The replica of a model with small tables, and what its optimizer keeps of each row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.row_optimizers import accumulators_of
from distkeras.keras_model.variables import numpy_value
from distkeras.ps.protocol.tables import Ids
from distkeras.ps.protocol.touched_rows import RowIndex, grown

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
    def nbytes(self) -> int:
        """Return the bytes of its memory."""
        return self._index.nbytes + self._values.nbytes

    def get(self, ids: Ids, out: np.ndarray) -> None:
        """Fill ``out``, float32 ``(len(ids), width)``, with the rows of ``ids``."""
        places = self._index.find(ids)
        # "clip" writes straight into `out`, with any row where there is none.
        if len(self):
            np.take(self._values, places, axis=0, out=out, mode="clip")
        out[places < 0] = self.initial

    def set(self, ids: Ids, values: np.ndarray) -> None:
        """Set the rows of ``ids``, each of which is there once."""
        places = self._index.find(ids)
        new = places < 0
        places[new] = self._index.add(ids[new])
        self._values = grown(self._values, len(self))
        self._values[places] = values


class TableReplica(KerasReplica):
    """A small model behind the interface that rules talk to.

    Its vector has the dense variables, and then the small tables. What its optimizer keeps of rows stays here from one
    window to a later one that touches them again. It is not part of the optimizer's state that is sent.

    Args:
        model: the small one, built and compiled.
        rows: the tables, and the order of the vector.
    """

    def __init__(self, model: keras.Model, rows: RowModel) -> None:
        super().__init__(model, rows.order)
        self._tables = rows.tables
        self._kept: list[RowValues] | None = None
        self._present: tuple[Ids, ...] | None = None

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

    def begin_again(self, model: keras.Model) -> bool:
        """Take over the state of another model, as `KerasReplica.begin_again`; nothing is kept of any row."""
        self._kept = self._present = None
        return super().begin_again(model)

    @property
    def _slots(self) -> list[Any]:
        """The variables of the built optimizer with something for each element of a small table."""
        small = self._weights.variables[len(self._weights.variables) - len(self._tables) :]
        slots = [accumulators_of(self.model.optimizer, variable) for variable in small]
        return [slot for slot in slots if slot is not None]

    def _unsent(self) -> frozenset[int]:
        return frozenset(map(id, self._slots))

    def _enter(self, rows: tuple[Ids, ...]) -> None:
        """Take back what the optimizer has for the rows of the window before, and give it what is kept of these."""
        slots = self._slots
        if not slots or rows is self._present:
            return
        if self._kept is None:
            initial = [float(numpy_value(slot).flat[0]) for slot in slots]
            self._kept = [RowValues(t.width, value) for t, value in zip(self._tables, initial, strict=True)]
        for place, (slot, kept) in enumerate(zip(slots, self._kept, strict=True)):
            before = numpy_value(slot)
            if self._present is not None:
                kept.set(self._present[place], before[: len(self._present[place])])
            values = np.full_like(before, kept.initial)
            kept.get(rows[place], values[: len(rows[place])])
            slot.assign(values)
        self._present = rows
