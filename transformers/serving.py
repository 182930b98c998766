"""The prediction in a task, on executors: from Arrow batches through the model to Arrow batches.

Importing this module loads neither Keras nor a backend: the first row does.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distkeras.data.column_kinds import TEXT, innermost, is_list, lists_of
from distkeras.data.columns import Column, Part, to_numpy, user_names
from distkeras.data.rows import Padding, RaggedRows, of_one_length
from distkeras.data.validity import reasons
from distkeras.keras_model import keras_config
from distkeras.keras_model.archive import CustomObjects, from_bytes
from distkeras.keras_model.mapped_tables import MappedModel
from distkeras.keras_model.published_rows import published_rows
from distkeras.keras_model.variables import (
    VariableVector,
    layers_with_rows_at_server,
    moving_statistics,
    trainable_variables,
)
from distkeras.private_keras import structures
from distkeras.ps.checkpoint.versions import Version, VersionFolder, version_named
from distkeras.ps.errors import BadValueError, ConfigurationError, ShapeError
from distkeras.spark.daemon import import_keras
from distkeras.spark.failures import message_first
from distkeras.spark.task_process import prepare_task
from distkeras.transformers.outputs import OutputColumn

if TYPE_CHECKING:
    import keras


_Rows = Sequence[np.ndarray | RaggedRows]
"""The inputs of a model, one array each; or rows of any length."""

_Part = tuple[np.ndarray, list[np.ndarray]]
"""The numbers of some rows, and each output for them."""

#: The most models that one Python worker caches. Spark reuses workers, so that most jobs find their model here.
MODELS_KEPT = 4
#: From where doubles round integers.
_EXACT_BELOW = 2**53
MODELS: OrderedDict[str, keras.Model | MappedModel] = OrderedDict()


@dataclass(frozen=True)
class ModelInput:
    """One input of the model: a row's shape, None for one extent that the data decides, and a dtype or `TEXT`.

    ``table`` is that of `Column`: on a GPU, an id that is not in it would get zeros.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    decode: Callable[[Any], Any] | None = None
    parts: tuple[Part, ...] = ()
    table: tuple[str, int] | None = None
    padding: Padding = field(default_factory=Padding)


class ModelsByKey(Protocol):
    """Weights of one model for each key of rows."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of a key in the batches that tasks see."""

    @property
    def key_names(self) -> tuple[str, ...]:
        """The columns of the rows that hold the key."""

    @property
    def shown_names(self) -> tuple[str, ...]:
        """The columns of a key as the user names them, for error texts."""

    def reason_without_model(self, batch: pa.RecordBatch) -> list[str | None]:
        """Return for each row why there is no model for its key; None if there is one."""

    def parts(self, batch: pa.RecordBatch) -> Iterator[tuple[np.ndarray, Callable[[keras.Model], None]]]:
        """Yield for each key in a batch the places of its rows, and a function that loads its weights into a model."""


@dataclass(frozen=True)
class PredictionOptions:
    """The options of predictions.

    Args:
        batch_size: the most rows of one call of the model.
        batch_bytes: the most bytes of the inputs and outputs of a call, unless one row has more.
        decode: functions that make arrays of encoded columns, by column.
        handle_invalid: for rows that cannot be predicted from: "error" fails the job, "skip" leaves them out, "keep"
            keeps them without a prediction.
        invalid_col: new column of text, with "keep": why a row has no prediction, or null; "" for none.
        models: weights by the rows' keys; None: the model's own for all rows.
        padding: of rows of any length: of all columns, or by column.
    """

    batch_size: int
    batch_bytes: int
    decode: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    handle_invalid: str = "error"
    invalid_col: str = ""
    models: ModelsByKey | None = None
    padding: Padding | Mapping[str, Padding] | None = None

    def __post_init__(self) -> None:
        if self.invalid_col and self.handle_invalid != "keep":
            raise ConfigurationError(
                "`invalid_col` must be left out unless handle_invalid='keep'. "
                f"Received: invalid_col={self.invalid_col!r} with handle_invalid={self.handle_invalid!r}"
            )

    def padding_of(self, column: str) -> Padding:
        """Return how rows of a column are padded."""
        return self.padding.get(column, Padding()) if isinstance(self.padding, Mapping) else self.padding or Padding()

    @property
    def tolerant(self) -> bool:
        """Return whether rows that cannot be predicted from get nulls, and a last column of text with the reason."""
        return self.handle_invalid != "error"


@dataclass(frozen=True)
class PredictionPlan:
    """Everything that a task needs to predict.

    Args:
        read_archive: returns the model's ``.keras`` archive, in the task.
        key: identity of the model: a content hash, and a unique suffix if the model has custom objects.
        objects: custom objects; unpickling them chooses the backend.
        inputs: the model's inputs, in its order.
        columns: the new columns, each computed from one of the model's outputs.
        row_bytes: bytes of a row's inputs and outputs, of which an open extent counts as 1.
        step_outputs: the shapes of a row's outputs of which an extent is open, as that of steps or of an attention map.
        map_tables: returns the model with its wide tables in files, in the task, given the inputs' columns; None: the
            model is loaded from the archive.
        settings: those of ``keras.config`` on the driver, which layers read while they compute.
        trusted: of the archive whose lambdas may run, from `archive.trusted_code`; "" for none.
    """

    read_archive: Callable[[], bytes]
    key: str
    objects: CustomObjects
    inputs: tuple[ModelInput, ...]
    columns: tuple[OutputColumn, ...]
    row_bytes: int
    options: PredictionOptions
    step_outputs: tuple[tuple[int | None, ...], ...] = ()
    map_tables: Callable[[Sequence[str], CustomObjects], MappedModel] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    trusted: str = ""

    def rows_per_call(self, row_bytes: int = 0) -> int:
        """Return the rows of a call of the model, for rows of ``row_bytes``, or of the fixed shapes' bytes if more."""
        return max(1, min(self.options.batch_size, self.options.batch_bytes // max(1, row_bytes, self.row_bytes)))

    def step_bytes(self, steps: Any) -> Any:
        """Return the bytes of a row's outputs whose open extents are so many ``steps``, which may be an array."""
        return sum(4 * math.prod(extent or 1 for extent in s) * steps ** s.count(None) for s in self.step_outputs)


def predict(plan: PredictionPlan, batches: Iterable[pa.RecordBatch], worker: int | None) -> Iterator[pa.RecordBatch]:
    """Yield the batches of one partition with the model's outputs as further columns, in order."""
    first_row = 0
    model: keras.Model | MappedModel | None = None
    size = plan.rows_per_call()
    # A yielded batch holds all its outputs: it has no more bytes of them than a call.
    most = max(size, plan.options.batch_bytes // max(1, plan.row_bytes) // size * size)
    for batch in _in_pieces(rebatched(batches, size, most), plan):
        # Bad data is found before a backend is imported, which takes seconds in each of Spark's attempts.
        arrays, why = _inputs(plan, batch, worker, first_row)
        if model is None:
            model = _cached_model(plan)
        if plan.options.models is None:
            parts = list(_predict_rows(model, arrays, plan, worker))
        else:
            parts, why = _predict_by_key(model, batch, arrays, why, plan, worker)
        columns = _columns(parts, plan, worker)
        names = [*batch.schema.names, *(column.name for column in plan.columns)]
        if plan.options.tolerant:
            columns = [spread(column, why) for column in columns] + [pa.array(why, pa.string())]
            names.append("")
        yield pa.RecordBatch.from_arrays([*batch.columns, *columns], names=names)
        first_row += batch.num_rows


def _in_pieces(batches: Iterable[pa.RecordBatch], plan: PredictionPlan) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches whose outputs of steps have no more bytes than a call, or are those of one row."""
    for batch in batches:
        ends = np.cumsum(plan.step_bytes(_steps(batch, plan)) if plan.step_outputs else np.zeros(batch.num_rows))
        first = 0
        while first < batch.num_rows:
            before = ends[first - 1] if first else 0
            end = max(first + 1, int(np.searchsorted(ends, before + plan.options.batch_bytes, "right")))
            yield batch.slice(first, end - first)
            first = end


def _steps(batch: pa.RecordBatch, plan: PredictionPlan) -> np.ndarray:
    """Return the steps of each row, the most of all inputs; 1 where they are unknown, as before rows are decoded."""
    steps = np.ones(batch.num_rows, np.int64)
    for column in plan.inputs:
        values = lists_of(batch.column(batch.schema.get_field_index(column.name)))
        if column.shape[:1] == (None,) and column.decode is None and is_list(values.type):
            lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
            size = 1 if is_list(values.type.value_type) else math.prod(extent or 1 for extent in column.shape)
            steps = np.maximum(steps, column.padding.lengths(lengths // size))
    return steps


def _inputs(
    plan: PredictionPlan, batch: pa.RecordBatch, worker: int | None, first_row: int
) -> tuple[list[np.ndarray | RaggedRows], list[str | None]]:
    """Return the model's inputs from the usable rows, and for each row the reason why it is not usable, or None."""

    def convert(part: pa.RecordBatch, first: int) -> list[np.ndarray | RaggedRows]:
        return [_input_array(part, column, worker, first) for column in plan.inputs]

    try:
        return convert(batch, first_row), [None] * batch.num_rows
    except (BadValueError, ShapeError):
        if not plan.options.tolerant:
            with message_first():
                raise
    why = reasons(batch.num_rows, lambda start, stop: convert(batch.slice(start, stop - start), first_row + start))
    usable = [row for row, text in enumerate(why) if text is None]
    if usable:
        try:
            return convert(batch.take(pa.array(usable)), first_row), why
        except ShapeError:  # each row can be predicted alone, and they have several lengths
            with message_first():
                _raise_for_odd_row(convert, batch, usable, first_row)
                raise
    # The model is called on a row of zeros, only for the types of the columns: the result goes to no row.
    shapes = [[1, *(extent or 1 for extent in column.shape)] for column in plan.inputs]
    dtypes = [np.dtype(str if column.dtype == TEXT else column.dtype) for column in plan.inputs]
    return [np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)], why


def _raise_for_odd_row(
    convert: Callable[[pa.RecordBatch, int], object], batch: pa.RecordBatch, usable: Sequence[int], first_row: int
) -> None:
    """Raise the ShapeError of the first of the ``usable`` rows that does not fit the first one, under its number."""
    for row in usable[1:]:
        convert(batch.take(pa.array([usable[0], row])), first_row + row - 1)


def exact_column(column: OutputColumn, output: np.ndarray, worker: int | None) -> pa.Array:
    """Return a new column of an output ``(n, …)``; BadValueError for an integer that a column of doubles rounds."""
    if column.holds_doubles and output.dtype.kind in "iu":
        rounded = output[(output >= _EXACT_BELOW) | (output <= -_EXACT_BELOW)]
        if rounded.size:
            text = (
                f"integers in a column of doubles must be smaller than {_EXACT_BELOW}; the arrays of `ModelPredictor`"
            )
            with message_first():
                raise BadValueError(
                    f"{text} hold those of int64. Received: {rounded[0]}", worker=worker, column=column.name
                )
    return column.to_arrow(output)


def spread(values: pa.Array, why: Sequence[str | None]) -> pa.Array:
    """Return one value for each row: the next of ``values`` if the row has no reason in ``why``, else null."""
    missing = np.array([text is not None for text in why])
    places = np.maximum(np.cumsum(~missing) - 1, 0)
    if not pa.types.is_struct(values.type):
        return values.take(pa.array(places, pa.int64(), mask=missing))
    # Spark requires that the fields of a vector are not null, even in a null vector.
    parts = [values.field(number).take(pa.array(places)) for number in range(values.type.num_fields)]
    names = [values.type.field(number).name for number in range(values.type.num_fields)]
    return pa.StructArray.from_arrays(parts, names=names, mask=pa.array(missing))


def rebatched(batches: Iterable[pa.RecordBatch], size: int, most: int | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of a multiple of ``size`` rows, at most ``most``, except for the last."""
    pending: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        while batch.num_rows:
            if not pending and batch.num_rows >= size:
                whole = min(batch.num_rows - batch.num_rows % size, most or batch.num_rows)
                yield batch.slice(0, whole)
                batch = batch.slice(whole)
                continue
            part = batch.slice(0, size - count)
            pending.append(part)
            count += part.num_rows
            batch = batch.slice(part.num_rows)
            if count == size:
                yield _concatenated(pending)
                pending, count = [], 0
    if pending:
        yield _concatenated(pending)


def _concatenated(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    (whole,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return whole


def _predict_by_key(
    model: keras.Model,
    batch: pa.RecordBatch,
    arrays: _Rows,
    why: Sequence[str | None],
    plan: PredictionPlan,
    worker: int | None,
) -> tuple[list[_Part], list[str | None]]:
    """Return the outputs of the rows with inputs and a model, and for each row the reason why it has none, or None."""
    models = plan.options.models
    assert models is not None
    no_model = models.reason_without_model(batch)
    missing = next((reason for reason in no_model if reason is not None), None)
    if missing is not None and not plan.options.tolerant:
        with message_first():
            raise BadValueError(missing, worker=worker, column=", ".join(models.shown_names))
    all_reasons = [reason or other for reason, other in zip(why, no_model, strict=True)]
    usable = batch.filter(pa.array([reason is None for reason in all_reasons]))
    if not usable.num_rows:  # one row of the right type, for `spread`
        return list(_predict_rows(model, [array[:1] for array in arrays], plan, worker)), all_reasons
    with_model = np.array([reason is None for other, reason in zip(why, no_model, strict=True) if other is None])
    arrays = [array[with_model] for array in arrays]
    parts: list[_Part] = []
    for places, load in models.parts(usable):
        load(model)
        own = _predict_rows(model, [array[places] for array in arrays], plan, worker)
        parts += [(places[within], outputs) for within, outputs in own]
    return parts, all_reasons


def _cached_model(plan: PredictionPlan) -> keras.Model | MappedModel:
    # A model whose weights change from key to key must not be shared with jobs that use its archive's weights.
    models = plan.options.models
    key = plan.key if models is None else f"{plan.key} {type(models).__name__}"
    model = MODELS.get(key)
    prepare_task()
    import_keras()
    keras_config.use(plan.settings)
    if model is None:
        if plan.map_tables is None:
            model = from_bytes(plan.read_archive(), plan.objects, trusted=plan.trusted)
        else:
            columns = [user_names(column.name, column.parts) for column in plan.inputs]
            model = plan.map_tables(columns, plan.objects)
        MODELS[key] = model
        if len(MODELS) > MODELS_KEPT:
            MODELS.popitem(last=False)
    MODELS.move_to_end(key)
    return model


def _predict_rows(
    model: keras.Model | MappedModel, arrays: _Rows, plan: PredictionPlan, worker: int | None
) -> Iterator[_Part]:
    """Yield the outputs of all rows; of those of one length together, so that none is padded for another."""
    if not any(isinstance(rows, RaggedRows) for rows in arrays):
        yield np.arange(len(arrays[0])), _predict_batches(model, cast("Sequence[np.ndarray]", arrays), plan, worker)
        return
    for places, own in of_one_length(arrays, [column.padding for column in plan.inputs]):
        yield places, _predict_batches(model, own, plan, worker)


def _columns(parts: Sequence[_Part], plan: PredictionPlan, worker: int | None) -> list[pa.Array]:
    """Return the new columns, in the order of the rows' numbers."""
    made = [[exact_column(column, outputs[column.output], worker) for _, outputs in parts] for column in plan.columns]
    if len(parts) == 1:
        return [one for (one,) in made]
    order = pa.array(np.argsort(np.concatenate([places for places, _ in parts])))
    return [pa.concat_arrays(arrays).take(order) for arrays in made]


def _predict_batches(
    model: keras.Model | MappedModel, arrays: Sequence[np.ndarray], plan: PredictionPlan, worker: int | None
) -> list[np.ndarray]:
    """Return each output for all rows, ``(n, …)``, from calls of ``batch_size`` rows."""
    rows, parts = len(arrays[0]), []
    of_steps = [array for array, column in zip(arrays, plan.inputs, strict=True) if column.shape[:1] == (None,)]
    steps = max((array.shape[1] for array in of_steps), default=1)
    size = plan.rows_per_call(sum(array.nbytes for array in arrays) // rows + plan.step_bytes(steps))
    for start in range(0, rows, size):
        inputs = [array[start : start + size] for array in arrays]
        n = len(inputs[0])
        inputs = [pad(array, size) for array in inputs]
        outputs = outputs_of_call(model, inputs)
        for column in plan.columns:
            output = outputs[column.output]
            if output.ndim < 1 or len(output) != len(inputs[0]):
                raise ShapeError(
                    f"the model must return one value a row. Received: shape {output.shape} for {len(inputs[0])} rows",
                    worker=worker,
                    column=column.name,
                )
        parts.append([output[:n] for output in outputs])
    return [part[0] if len(part) == 1 else np.concatenate(part) for part in zip(*parts, strict=True)]


def outputs_of_call(model: keras.Model | MappedModel, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return each output of one call of a model for its inputs, in its order."""
    import keras

    if isinstance(model, MappedModel):
        return model.outputs(inputs)

    # A model may require its inputs as a dictionary.
    structure = structures(model)[0]
    x = inputs[0] if structure is None else keras.tree.pack_sequence_as(structure, list(inputs))
    return [np.asarray(output) for output in keras.tree.flatten(model.predict_on_batch(x))]


def pad(array: np.ndarray, full: int) -> np.ndarray:
    """Return ``array`` with its last row repeated up to the next power of two, but to at most ``full`` rows.

    Backends compile for each batch size: this limits the number of sizes, and wastes less than half a call.
    """
    n = len(array)
    target = min(full, 1 << (n - 1).bit_length())
    return array if n == target else np.concatenate([array, np.repeat(array[-1:], target - n, axis=0)])


def _input_array(
    batch: pa.RecordBatch, column: ModelInput, worker: int | None, first_row: int
) -> np.ndarray | RaggedRows:
    values = batch.column(batch.schema.get_field_index(column.name))
    if column.dtype == TEXT:
        return _texts(values, column, worker, first_row)
    shape: tuple[int | None, ...] = column.shape
    is_open = None in column.shape[1:]
    if is_open:  # the first row decides for all of them
        extent = max(1, _open_extent(values[:1], column, math.prod(fixed for fixed in column.shape if fixed)))
        shape = tuple(extent if fixed is None else fixed for fixed in column.shape)
    whole = Column(column.name, shape, column.dtype, column.decode, column.parts, table=column.table)
    try:
        return to_numpy(values, whole, worker=worker, first_row=first_row, record=batch)
    except ShapeError as error:
        if not is_open or batch.num_rows == 1:
            raise
        raise ShapeError(
            f"rows that are predicted together must have one length where the input's shape {column.shape} is open: "
            f"pad them. {error.message}",
            worker=worker,
            column=error.column,
        ) from None


def _texts(values: pa.Array, column: ModelInput, worker: int | None, first_row: int) -> np.ndarray:
    """Return texts as an array of numpy's own text type, one for each row, in the input's shape."""
    texts = []
    for row, value in enumerate(values.to_pylist()):
        try:
            text = value if value is None or column.decode is None else column.decode(value)
        except Exception as error:  # noqa: BLE001 - every error of the caller's function gets its row
            text = error
        if not isinstance(text, str):
            received = f"values must be texts. Received: {text!r} in row {first_row + row}"
            with message_first():
                raise BadValueError(received, worker=worker, column=column.name)
        texts.append(text)
    return np.array(texts, str).reshape(len(texts), *column.shape)


def _open_extent(first: pa.Array, column: ModelInput, others: int) -> int:
    """Return the open extent of a row's value; ``others`` is the product of the fixed extents."""
    if column.decode is None:
        return len(innermost(first)) // others
    if first.null_count:
        return 1
    try:
        shape = np.asarray(column.decode(first[0].as_py())).shape
    except Exception:  # noqa: BLE001 - the conversion decodes this row again, and reports its error with the row
        return 1
    return shape[column.shape.index(None)] if len(shape) == len(column.shape) else math.prod(shape) // others


#: Temporary columns: the version's name, and its number.
NAME, NUMBER = "__distkeras_version_name", "__distkeras_version"
#: The local properties in which Spark stores a streaming query's id, and the number of its micro-batch.
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"


@dataclass(frozen=True)
class PublishedModels:
    """The versions in a directory, for rows with a column that names their version. Travels to executors."""

    uri: str
    model: str
    columns: tuple[str, ...] = (NAME,)

    @property
    def key_names(self) -> tuple[str, ...]:
        """The same as `columns`."""
        return (NAME,)

    @property
    def shown_names(self) -> tuple[str, ...]:
        """The same as `columns`."""
        return (NAME,)

    def reason_without_model(self, batch: pa.RecordBatch) -> list[str | None]:
        """Return None for each row: every version has a model."""
        return [None] * batch.num_rows

    def parts(self, batch: pa.RecordBatch) -> Iterator[tuple[np.ndarray, Callable[[keras.Model], None]]]:
        """Yield for each version in a batch the places of its rows, and a function that loads it into a model."""
        names = batch.column(self.columns[0])
        for name in pc.unique(names).to_pylist():
            yield np.flatnonzero(pc.equal(names, name)), partial(self._load, name=name)

    def _load(self, model: keras.Model, name: str) -> None:
        loaded = _LOADED.get(model)
        if loaded is None:
            loaded = _LOADED[model] = _Loaded(model)
        loaded.load(self, name)


class _Loaded:
    """A model of this process, and the version of its weights."""

    def __init__(self, model: keras.Model) -> None:
        self._weights = VariableVector(trainable_variables(model))
        self._moving_statistics = VariableVector(moving_statistics(model))
        self._wide = layers_with_rows_at_server(model)
        self._version: tuple[str, str] | None = None

    def load(self, models: PublishedModels, name: str) -> None:
        """Load the weights of a version into the model, unless it has them."""
        if self._version == (models.uri, name):
            return
        version = version_named(name)
        assert version is not None, name
        with message_first():
            folder = VersionFolder(models.uri)
            center, statistics = folder.load(version, models.model)
            rows = folder.rows_of(version) if self._wide else {}
        self._version = None  # until both are loaded
        self._weights.load(center)
        self._moving_statistics.load(statistics)
        for layer in self._wide:
            layer.rows, layer.rows_checksum = published_rows(models.uri, rows, layer.name)
            with message_first():
                layer.open_rows()
        self._version = models.uri, name


_LOADED: weakref.WeakKeyDictionary[keras.Model, _Loaded] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class HeldVersion:
    """Yields one row with the version that predicts a micro-batch. Travels to one task of each micro-batch."""

    uri: str

    def rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the version's name and number for the batch that has a row; the other batches are empty."""
        for batch in batches:
            if batch.num_rows:
                with message_first():
                    version = self._version()
                columns = [pa.array([str(version)]), pa.array([version.number], pa.int64())]
                yield pa.RecordBatch.from_arrays(columns, names=[NAME, NUMBER])

    def _version(self) -> Version:
        from pyspark import TaskContext

        context = TaskContext.get()
        query, batch = (None if context is None else context.getLocalProperty(name) for name in (_QUERY, _BATCH))
        if query is None or batch is None:
            raise ConfigurationError(
                "rows of a stream must be read in a streaming query. Received: a task without a query"
            )
        return VersionFolder(self.uri).hold(query, int(batch))
