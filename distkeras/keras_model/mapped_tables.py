"""Prediction and evaluation with tables in files: no process loads one, and all of a machine share a file's pages.

A model is cut behind its wide Embeddings. One part computes the ids, unless they are inputs; the rows are read from the
files; the rest of the model is built without the tables. The result is that of the whole model.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distkeras.keras_model.archive import CustomObjects, from_bytes, part_to_bytes
from distkeras.keras_model.model_graph import functional_of, users_of
from distkeras.keras_model.stored_rows import StoredRows, require_ids, sorted_files
from distkeras.keras_model.variables import is_wide
from distkeras.private_keras import maker_of, nodes_of
from distkeras.ps.protocol.tables import TableShape

if TYPE_CHECKING:
    import keras

    from distkeras.keras_model.wide_embedding import WideEmbedding

#: Smaller tables stay within the model.
FILE_BYTES_MIN = 4 << 20


@dataclass(frozen=True)
class TableCall:
    """One call of an Embedding.

    Args:
        table: the number of its table.
        layer: the layer's name, for error texts.
        inputs: the numbers of the model's inputs that the ids are computed from.
        output: the number of the ids among the outputs of the model that computes them; None: they are an input.
    """

    table: int
    layer: str
    inputs: tuple[int, ...]
    output: int | None


@dataclass(frozen=True)
class ModelParts:
    """A model without its wide tables.

    Args:
        rest: archive of the model of the embedded values, one input for each call, and then of the ``inputs``.
        inputs: the numbers of the whole model's inputs that the rest needs.
        ids: archive of the model that computes ids; empty if they are all inputs.
        id_inputs: the numbers of the whole model's inputs that the model of ``ids`` needs.
        tables: for each table, its shape if only the trained rows of it exist; None: it is whole.
    """

    rest: bytes
    inputs: tuple[int, ...]
    ids: bytes
    id_inputs: tuple[int, ...]
    calls: tuple[TableCall, ...]
    tables: tuple[TableShape | None, ...]


class _Call(NamedTuple):
    layer: Any
    ids: Any
    embedded: Any


def has_wide_tables(model: keras.Model) -> bool:
    """Return whether a model has a table of `FILE_BYTES_MIN` that can stay in a file, or one that no process holds."""
    return bool(_calls(model))


def has_activity_losses(model: keras.Model) -> bool:
    """Return whether a layer adds a penalty of its table or of its output to the loss, which may need the table."""
    named = ("activity_regularizer", "embeddings_regularizer")
    return any(getattr(layer, name, None) is not None for layer in functional_of(model).layers for name in named)


def split_tables(
    model: keras.Model, objects: CustomObjects | None = None
) -> tuple[ModelParts, list[np.ndarray | WideEmbedding]]:
    """Return a model's parts and its wide tables: float32 ``(rows, width)``, or the layer of one that no process holds.

    Args:
        model: one that `has_wide_tables`. It must not be used afterwards: the parts share its layers.
        objects: its custom objects.
    """
    import keras

    functional, calls = functional_of(model), _calls(model)
    layers = list({id(call.layer): call.layer for call in calls}.values())
    inputs = [id(tensor) for tensor in functional.inputs]

    def numbers(tensors: Iterable[Any], stops: Iterable[Any] = ()) -> tuple[int, ...]:
        needed = _needed(tensors, stops)
        return tuple(number for number, key in enumerate(inputs) if key in needed)

    computed = list({id(call.ids): call.ids for call in calls if id(call.ids) not in inputs}.values())
    places = {id(tensor): place for place, tensor in enumerate(computed)}
    table_calls = tuple(
        TableCall(layers.index(call.layer), call.layer.name, numbers([call.ids]), places.get(id(call.ids)))
        for call in calls
    )
    embedded = [call.embedded for call in calls]
    kept, of_ids = numbers(functional.outputs, embedded), numbers(computed)
    tables = [layer if _is_wide(layer) else np.array(keras.ops.convert_to_numpy(layer.embeddings)) for layer in layers]
    shapes = tuple(layer.table() if _is_wide(layer) else None for layer in layers)
    ids = b""
    if computed:
        numbered = keras.Model(_unwrapped([functional.inputs[number] for number in of_ids]), computed)
        ids = part_to_bytes(numbered, objects)
    outputs = functional.output  # with the names of outputs
    rest = keras.Model(_unwrapped([*embedded, *(functional.inputs[number] for number in kept)]), outputs)
    return ModelParts(part_to_bytes(rest, objects), kept, ids, of_ids, table_calls, shapes), tables


def save_tables(tables: Sequence[np.ndarray | WideEmbedding], folder: Path) -> list[Path]:
    """Write tables to files with unique names in ``folder``, and return them as `MappedModel` takes them.

    Raises:
        ConfigurationError: the rows of a `WideEmbedding` cannot be read.
    """
    files = list[Path]()
    for table in tables:
        if isinstance(table, np.ndarray):
            files.append(folder / f"distkeras-{uuid.uuid4().hex}.npy")
            np.save(files[-1], table)
        else:
            files += sorted_files(table.saved_rows, table.table(), folder)
    return files


def _calls(model: Any) -> list[_Call]:
    """Return the calls of the Embeddings whose tables can stay in files."""
    import keras

    functional = functional_of(model)
    if functional is None:
        return []
    outputs = {id(tensor) for tensor in functional.outputs}
    wide = [
        layer
        for layer in functional.layers
        if _is_wide(layer)
        or (type(layer) is keras.layers.Embedding and _is_plain(layer) and not users_of(model, layer))
    ]
    calls: dict[int, list[_Call]] = {id(layer): [] for layer in wide}
    for node in nodes_of(functional):
        if id(node.operation) in calls:
            calls[id(node.operation)].append(_Call(node.operation, node.input_tensors[0], node.output_tensors[0]))
    return [
        call
        for layer in wide
        if not any(id(call.embedded) in outputs for call in calls[id(layer)])
        for call in calls[id(layer)]
    ]


def _is_wide(layer: Any) -> bool:
    """Return whether a layer is a `WideEmbedding` whose vectors are float32."""
    return is_wide(layer) and layer.compute_dtype == "float32"


def _is_plain(layer: Any) -> bool:
    """Return whether an Embedding takes rows, does nothing else, and has many of them."""
    if layer.mask_zero or layer.lora_enabled or layer.quantization_mode is not None:
        return False
    plain: bool = layer.embeddings.dtype == "float32" == layer.compute_dtype
    return plain and 4 * layer.input_dim * layer.output_dim >= FILE_BYTES_MIN


def _needed(tensors: Iterable[Any], stops: Iterable[Any]) -> set[int]:
    """Return the identities of ``tensors`` and of all tensors that they are computed from, up to ``stops``."""
    needed, pending, ends = set[int](), list(tensors), {id(tensor) for tensor in stops}
    while pending:
        tensor = pending.pop()
        if id(tensor) in needed or id(tensor) in ends:
            continue
        needed.add(id(tensor))
        pending += maker_of(tensor).input_tensors
    return needed


def _unwrapped(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else list(values)


class MappedModel:
    """A model that predicts with rows of tables in files.

    Args:
        parts: from `split_tables`.
        files: of the tables, as `save_tables` returns them: one for a whole table, two for a `WideEmbedding`.
        columns: the column of each of the whole model's inputs, for error texts.
        build: returns a model from the archive of the rest, such as a compiled one; None: not compiled.

    Attributes:
        rest: the model of the embedded values and of the inputs that are not ids.
    """

    def __init__(
        self,
        parts: ModelParts,
        files: Sequence[Path],
        columns: Sequence[str],
        objects: CustomObjects,
        build: Callable[[bytes], keras.Model] | None = None,
    ) -> None:
        self._parts, self._columns = parts, tuple(columns)
        paths = iter(files)
        self._tables = [
            np.load(next(paths), mmap_mode="r") if shape is None else StoredRows(shape, next(paths), next(paths))
            for shape in parts.tables
        ]
        self.rest = from_bytes(parts.rest, objects) if build is None else build(parts.rest)
        self._ids = from_bytes(parts.ids, objects) if parts.ids else None

    def outputs(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return each output for the inputs, ``(n, …)``; raise BadValueError if an id is not a row of its table."""
        import keras

        predicted = self.rest.predict_on_batch(_unwrapped(self.rest_inputs(inputs)))
        return [np.asarray(output) for output in keras.tree.flatten(predicted)]

    def rest_inputs(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the inputs of `rest`, ``(n, …)``; raise BadValueError if an id is not a row of its table."""
        import keras

        computed: list[Any] = []
        if self._ids is not None:
            own = [inputs[number] for number in self._parts.id_inputs]
            computed = keras.tree.flatten(self._ids.predict_on_batch(_unwrapped(own)))
        return list(self._embedded(inputs, computed)) + [inputs[number] for number in self._parts.inputs]

    def _embedded(self, inputs: Sequence[np.ndarray], computed: Sequence[Any]) -> Iterator[np.ndarray]:
        for call in self._parts.calls:
            ids = inputs[call.inputs[0]] if call.output is None else np.asarray(computed[call.output])
            table = self._tables[call.table]
            if isinstance(table, StoredRows):
                yield table.take(ids, column=self._columns_of(call))
                continue
            if ids.dtype not in (np.int32, np.int64):
                ids = ids.astype(np.int32)  # truncated, as Embedding does
            # Keras counts negative ids from the end, and so does numpy.
            require_ids(call.layer, ids, -len(table), len(table), self._columns_of(call))
            yield np.take(table, ids, axis=0)

    def _columns_of(self, call: TableCall) -> str:
        return ", ".join(self._columns[number] for number in call.inputs)
