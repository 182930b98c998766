"""A worker's part of tables by rows: windows of mini-batches that name touched rows, and the replica that trains them.

The ids of a window are numbers among the rows that it touches. The optimizer's slots of a row are retained from one
window to the next that touches it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distkeras.data.batches import Batch, DataSpec, Stack, Weight, as_weight, flat_weight
from distkeras.data.columns import ColumnArrays
from distkeras.data.rows import aligned
from distkeras.keras_model.archive import from_bytes
from distkeras.keras_model.model_graph import IdSource
from distkeras.keras_model.optimizers import inner_optimizer
from distkeras.keras_model.replica import KerasReplica, layout_of, load_state, state_bytes
from distkeras.keras_model.tables import Lookup, RowModel
from distkeras.keras_model.variables import assign_without_copy, numpy_value
from distkeras.private_keras import slots_of
from distkeras.ps.errors import BadValueError
from distkeras.ps.protocol.loop import OptimizerState
from distkeras.ps.protocol.tables import STATE_BYTES_OF_ROWS, Ids, RowIndex, TableShape, grown, initial_rows, put_rows
from distkeras.ps.rules.base import all_finite
from distkeras.ps.worker.tables import Window

if TYPE_CHECKING:
    import keras


#: The largest memory of an index for a row.
_INDEX_BYTES = 128


class RowValues:
    """A row of numbers for each id that was set; memory grows with their number.

    Args:
        width: elements of a row.
        initial: the value of every element of a row that was not set.
    """

    def __init__(self, width: int, initial: float) -> None:
        #: The value of every element of a row that was not set.
        self.initial = np.float32(initial)
        self._index = RowIndex()
        self._values = np.empty((0, width), np.float32)
        #: A number for each row, which rises with each row that is set.
        self._set_at, self._next = np.empty(0, np.int64), 0

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
        return self._index.nbytes + self._values.nbytes + self._set_at.nbytes

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
            self._values, self._set_at = grown(self._values, len(self)), grown(self._set_at, len(self))
        put_rows(self._values, places, values)
        self._set_at[places] = np.arange(self._next, self._next + len(ids))
        self._next += len(ids)

    def latest(self, most: int) -> tuple[Ids, np.ndarray]:
        """Return ids and rows in the order in which they were set; of more than ``most``, those that were set last."""
        places = np.argsort(self._set_at[: len(self)])[max(0, len(self) - most) :]
        return self.ids[places], self.values[places]

    def keep(self, most: int) -> None:
        """Forget all but the ``most`` rows that were set last, and all places."""
        ids, values = self.latest(most)
        self._index, self._values, self._set_at = RowIndex(), self._values[:0].copy(), self._set_at[:0].copy()
        self.set(ids, values)


class TableReplica(KerasReplica):
    """A small model behind the interface that rules talk to.

    Its vector has the dense variables, and then the small tables. It retains the optimizer's slots of a row from one
    window to a later one that touches the row again. They are at the end of the optimizer's state that is sent: for
    each table, the number of touched rows, their ids, and for each row one vector of the table's width per slot. Of
    more than a state may have, the rows of a partial table that were touched last are sent. Of a table whose rows come
    and go, no others are retained either, and a row that has its initial value begins with new slots.

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
        #: Whether rows were received since the current window was entered.
        self._received = False

    def load(self, vector: np.ndarray) -> None:
        """Set the weights, also those of a window that is computed again; see `KerasReplica.load`."""
        super().load(vector)
        self._received = True

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
        for retained, table in zip(self._retained_slots(), self._tables, strict=True):
            ids, values = retained.ids, retained.values
            if table.partial:
                ids, values = retained.latest(_most_rows(table, retained.width))
            if not all_finite(values.reshape(-1)):
                return None
            arrays = np.array([len(ids)], np.int64), ids, values
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
        slots = [slots_of(inner_optimizer(self.model.optimizer), variable) for variable in small]
        return slots if all(slots) else []

    def _unsent(self) -> frozenset[int]:
        return frozenset(id(slot) for slots in self._slots for slot in slots)

    def _enter(self, rows: tuple[Ids, ...]) -> None:
        """Retain the slots of the previous window's rows, and load those of ``rows`` into the optimizer."""
        tables = self._slots
        if not tables or (rows is self._current and not self._received):
            return
        self._retain_slots()
        self._places_of_current = []
        for number, (slots, retained, ids) in enumerate(zip(tables, self._retained_slots(), rows, strict=True)):
            table = self._tables[number]
            if table.living and len(retained) > (most := _most_rows(table, retained.width)):
                retained.keep(most - most // 4)
            values = aligned((slots[0].shape[0], retained.width), np.dtype(np.float32))
            places = retained.get(ids, values[: len(ids)])
            self._places_of_current.append(places)
            values[len(ids) :] = retained.initial
            if table.living:
                values[self._that_begin(number, ids, places)] = retained.initial
            for slot, part in zip(slots, np.split(values, len(slots), axis=1), strict=True):
                assign_without_copy(slot, part)
        self._current, self._received = rows, False

    def _that_begin(self, number: int, ids: Ids, places: np.ndarray) -> np.ndarray:
        """Return which of the window's rows of a table have their initial values, although they have slots.

        The server has not admitted them, or they have expired or were removed: an earlier life is over.
        """
        table = self._tables[number]
        variable = self._weights.variables[len(self._weights.variables) - len(self._tables) + number]
        received = numpy_value(variable)[: len(ids)]
        known = np.flatnonzero(places >= 0)
        for width in (1, table.width):  # the first number rules out most rows
            initial = initial_rows(table, ids[known], width)
            known = known[(received[known, :width] == initial).all(axis=1)]
        return known

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


def _most_rows(table: TableShape, width: int) -> int:
    """Return how many rows of slots are sent of a partial table, and kept of one whose rows come and go."""
    sent = 8 + 4 * width
    return (STATE_BYTES_OF_ROWS - 8) // (2 * (sent + 8) + _INDEX_BYTES if table.living else sent)


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


@dataclass(frozen=True, slots=True, eq=False)
class RowBatch(Batch):
    """A mini-batch whose ids are numbers among the rows of its window.

    Attributes:
        rows: for each table, the rows that the window touches, in the order of their numbers: the same object for all
            mini-batches of a window.
    """

    rows: tuple[Ids, ...] = ()


class TouchedRows(NamedTuple):
    """The rows that a window touches, of one table.

    They are numbered in the order of their first use: then the rows of one step are adjacent, and stay in a core's
    cache.

    Args:
        touched: the rows, ascending.
        places: the number of each of ``touched``.
        by_number: the rows in the order of their numbers.
    """

    touched: Ids
    places: np.ndarray
    by_number: Ids


class _Piece(NamedTuple):
    """Mini-batches of a window, contiguous in memory. An input has the shape ``(batches, n, *column.shape)``."""

    batches: Sequence[Batch]
    x: ColumnArrays
    y: ColumnArrays
    weight: Weight


class WindowRows:
    """The windows of a worker: an iterator.

    Inputs that the small model keeps are those of the mini-batches themselves: they are not copied.

    Args:
        batches: of the whole model, in order.
        rows: the tables, and the model that computes their row numbers.
        spec: the columns of the model's inputs, and how rows are cut into mini-batches.
        window: mini-batches of a window; one that ends its epoch ends its window, too.
        worker: for error texts.

    The iteration raises:
        BadValueError: an id is not a row of its table; no mini-batch of its window is yielded.
    """

    def __init__(
        self, batches: Iterable[Batch], rows: RowModel, spec: DataSpec, window: int, worker: int | None = None
    ) -> None:
        self._batches, self._rows, self._spec, self._worker = iter(batches), rows, spec, worker
        self._window = window
        self._ids = _IdMaker(rows)

    def __iter__(self) -> Iterator[Window]:
        return self

    def __next__(self) -> Window:
        """Return the next window."""
        group = [next(self._batches)]
        while len(group) < self._window and not group[-1].last:
            group.append(next(self._batches))
        return self._window_of(group)

    def _window_of(self, group: Sequence[Batch]) -> Window:
        pieces = list(_pieces(group))
        ids = [self._ids.of(piece.x) for piece in pieces]
        touched: list[TouchedRows] = [TouchedRows(*[np.empty(0, np.int64)] * 3)] * len(self._rows.tables)
        inputs: list[list[np.ndarray]] = [[piece.x[number] for number in self._rows.inputs] for piece in pieces]
        for lookup in self._rows.lookups:
            rows, local = self._looked_up(lookup, pieces, ids)
            for number in lookup.tables:
                touched[number] = rows
            for arrays, own in zip(inputs, local, strict=True):
                arrays += own
        rows_of_tables = tuple(rows.by_number for rows in touched)
        is_open = self._rows.is_open(group[0])
        batches = [
            batch
            for piece, arrays in zip(pieces, inputs, strict=True)
            for batch in _batches_of(piece, tuple(arrays), rows_of_tables, is_open)
        ]
        return Window(batches, tuple(rows.touched for rows in touched), tuple(rows.places for rows in touched))

    def _looked_up(
        self, lookup: Lookup, pieces: Sequence[_Piece], ids: Sequence[Sequence[np.ndarray]]
    ) -> tuple[TouchedRows, list[list[np.ndarray]]]:
        """Return the rows of a lookup, and for each piece and tensor the numbers of its ids' rows."""
        own = [[arrays[source] for source in lookup.sources] for arrays in ids]
        flat = [_whole(array).reshape(-1) for arrays in own for array in arrays]
        if lookup.keeps_zero:
            flat.insert(0, np.zeros(1, flat[0].dtype))
        all_ids, shape = np.concatenate(flat), self._rows.tables[lookup.tables[0]]
        negative = bool(all_ids.min() < 0)
        if negative or lookup.keeps_zero or all_ids.max() >= shape.rows:
            self._require_rows(lookup, shape, pieces, own)
        if negative:  # Keras counts negative ids from the end
            all_ids = np.where(all_ids < 0, all_ids + shape.rows, all_ids)
        touched, numbers = numbered(all_ids)
        local: list[list[np.ndarray]] = []
        at = int(lookup.keeps_zero)
        for arrays in own:
            local.append([])
            for array in arrays:
                copy = aligned(array.shape, np.dtype(np.int32))
                copy.reshape(-1)[...] = numbers[at : at + array.size]
                at += array.size
                local[-1].append(copy)
        return touched, local

    def _require_rows(
        self, lookup: Lookup, table: TableShape, pieces: Sequence[_Piece], ids: Sequence[Sequence[np.ndarray]]
    ) -> None:
        """Raise BadValueError for the first id that is not a row of ``table``, or whose mask would be wrong."""
        least = 0 if table.partial else -table.rows
        for piece, arrays in zip(pieces, ids, strict=True):
            for number, array in zip(lookup.sources, arrays, strict=True):
                whole = _whole(array)
                is_bad = (whole < least) | (whole >= table.rows)
                if lookup.keeps_zero:  # row 0, which the whole model would not mask
                    is_bad |= (array != 0) & ((whole == 0) | (whole == least))
                bad = np.argwhere(is_bad)
                if not len(bad):
                    continue
                place, row, *within = (int(part) for part in bad[0])
                batch, source = piece.batches[place], self._rows.sources[number]
                raise BadValueError(
                    f"ids of {table.name!r} must be in [0, {table.rows}), its rows. "
                    f"Received: {array[tuple(bad[0])]} in {self._row(batch, row)}",
                    worker=self._worker,
                    column=self._column(source, within, array.shape[2:]),
                    step=batch.index,
                )

    def _row(self, batch: Batch, row: int) -> str:
        if not self._spec.shuffle:
            return f"row {batch.index * self._spec.batch_size + row}"
        return f"row {row} of mini-batch {batch.index} of epoch {batch.epoch}"

    def _column(self, source: IdSource, within: Sequence[int], shape: Sequence[int]) -> str:
        columns = [self._spec.features[number] for number in source.inputs]
        if source.output is None and columns[0].parts:
            return columns[0].name_of(int(np.ravel_multi_index(tuple(within), tuple(shape))) if within else 0)
        return ", ".join(column.name for column in columns)


class _IdMaker:
    """Computes the tensors of row numbers from a model's inputs."""

    def __init__(self, rows: RowModel) -> None:
        self._rows = rows
        self._call: Any = None

    def of(self, x: ColumnArrays) -> list[np.ndarray]:
        """Return the row numbers of each source, ``(batches, n, *shape)``, for inputs of such a shape."""
        computed = self._computed(x) if self._rows.ids_file else []
        sources = self._rows.sources
        return [x[source.inputs[0]] if source.output is None else computed[source.output] for source in sources]

    def _computed(self, x: ColumnArrays) -> list[np.ndarray]:
        if self._call is None:
            self._call = self._compiled()
        batches, size = x[0].shape[:2]
        inputs = [x[number] for number in self._rows.id_inputs]
        if self._rows.together:
            flat = self._call(*(array.reshape(-1, *array.shape[2:]) for array in inputs))
            return [array.reshape(batches, size, *array.shape[1:]) for array in flat]
        results = [self._call(*(array[place] for array in inputs)) for place in range(batches)]
        return [np.stack(arrays) for arrays in zip(*results, strict=True)]

    def _compiled(self) -> Any:
        """Return a function of the inputs that any thread may call."""
        import keras

        model = from_bytes(self._rows.ids_file, self._rows.recipe.objects)

        def call(*arrays: Any) -> Any:
            outputs = model(list(arrays) if len(arrays) > 1 else arrays[0], training=False)
            return list(outputs) if isinstance(outputs, list | tuple) else [outputs]

        if keras.backend.backend() != "tensorflow":
            return lambda *arrays: [np.asarray(keras.ops.convert_to_numpy(array)) for array in call(*arrays)]
        import tensorflow as tf

        specs = [tf.TensorSpec((None, *(None for _ in tensor.shape[1:])), tensor.dtype) for tensor in model.inputs]
        compiled = tf.function(call, input_signature=specs, autograph=False)
        return lambda *arrays: [array.numpy() for array in compiled(*arrays)]


def numbered(ids: np.ndarray) -> tuple[TouchedRows, np.ndarray]:
    """Return the unique rows among ``ids``, which are not negative, and for each id the number of its row, int64."""
    bits = max(1, ids.size - 1).bit_length()
    if int(ids.max()) >> (63 - bits):  # an id and its place do not fit into one int64
        rows, first, ranks = np.unique(ids, return_index=True, return_inverse=True)
        rows = rows.astype(np.int64)
    else:  # NumPy's `sort` is several times as fast as its `argsort`
        keys = ids.astype(np.int64)
        keys <<= bits
        keys |= np.arange(ids.size)
        keys.sort()
        at = keys & ((1 << bits) - 1)
        keys >>= bits
        begins = np.concatenate([[True], keys[1:] != keys[:-1]])
        rows, first = keys[begins], at[begins]
        ranks = np.empty(ids.size, np.int64)
        ranks[at] = np.cumsum(begins) - 1
    appears = np.zeros(ids.size, np.bool_)
    appears[first] = True
    places = (np.cumsum(appears) - 1)[first]
    return TouchedRows(rows, places, ids[appears].astype(np.int64)), places[ranks]


def _whole(ids: np.ndarray) -> np.ndarray:
    """Return ids as integers, truncated as Embedding does."""
    return ids if ids.dtype in (np.int32, np.int64) else ids.astype(np.int64)


def _pieces(group: Sequence[Batch]) -> Iterator[_Piece]:
    """Yield a window's mini-batches in contiguous runs of one stack, and all others one by one."""
    for stack, neighbors in itertools.groupby(group, key=lambda batch: batch.stack):
        run = list(neighbors)
        in_order = all(batch.place == place for place, batch in enumerate(run, run[0].place))
        if stack is None or stack.lengths is not None or not in_order:
            for batch in run:
                sides = (batch.x, batch.y, flat_weight(batch.weight))
                x, y, weights = (tuple(array[None] for array in side) for side in sides)
                yield _Piece([batch], x, y, as_weight(weights))
            continue
        span = slice(run[0].place, run[0].place + len(run))
        sides = (stack.x, stack.y, flat_weight(stack.weight))
        x, y, weights = (tuple(array[span] for array in side) for side in sides)
        yield _Piece(run, x, y, as_weight(weights))


def _batches_of(piece: _Piece, x: ColumnArrays, rows: tuple[Ids, ...], is_open: tuple[bool, ...]) -> Iterator[RowBatch]:
    """Yield the mini-batches of a piece with new inputs; several lie in one stack."""
    stack = Stack(x, piece.y, piece.weight) if len(piece.batches) > 1 else None
    for place, batch in enumerate(piece.batches):
        own = tuple(array[place] for array in x)
        new = RowBatch(
            batch.epoch, batch.index, batch.last, own, batch.y, batch.weight, batch.checksum, is_open, rows=rows
        )
        if stack is not None:
            new.placed_in(stack, place)
        yield new
