"""Prediction and evaluation with tables in files: no process loads one, and all of a machine share a file's pages.

A model is cut behind its wide Embeddings. One part computes the ids, unless they are inputs; the rows are read from the
files; the rest of the model is built without the tables. The result is that of the whole model.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.keras_model.archive import CustomObjects, from_bytes, part_to_bytes
from distkeras.keras_model.model_graph import (
    Division,
    IdSource,
    TableCall,
    free_name,
    functional_of,
    table_calls,
    unwrapped,
    users_of,
)
from distkeras.keras_model.stored_rows import StoredRows, require_ids, sorted_files
from distkeras.keras_model.variables import is_wide
from distkeras.ps.protocol.tables import TableShape

if TYPE_CHECKING:
    import keras

    from distkeras.keras_model.wide_embedding import WideEmbedding

#: Smaller tables stay within the model.
FILE_BYTES_MIN = 4 << 20


@dataclass(frozen=True)
class MappedCall:
    """One call of an Embedding: the number of its table, the layer's name for error texts, and where its ids are."""

    table: int
    layer: str
    ids: IdSource


@dataclass(frozen=True)
class ModelParts:
    """A model without its wide tables.

    Args:
        rest: archive of the model of the ``inputs``, and then of the vectors of each call.
        inputs: the numbers of the whole model's inputs that the rest needs.
        ids: archive of the model that computes ids; empty if they are all inputs.
        id_inputs: the numbers of the whole model's inputs that the model of ``ids`` needs.
        tables: for each table, its shape if only the trained rows of it exist; None: it is whole.
    """

    rest: bytes
    inputs: tuple[int, ...]
    ids: bytes
    id_inputs: tuple[int, ...]
    calls: tuple[MappedCall, ...]
    tables: tuple[TableShape | None, ...]


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

    calls = _calls(model)
    division = Division(functional_of(model), calls)
    layers = list({id(call.layer): call.layer for call in calls}.values())
    sources, (ids, id_inputs) = division.sources(), division.before()
    taken = {operation.name for operation in functional_of(model).operations}
    vectors = [
        keras.Input(
            batch_shape=call.vectors.shape,
            dtype=call.vectors.dtype,
            name=free_name(f"{call.layer.name}_vectors", taken),
        )
        for call in calls
    ]
    rest = keras.Model(unwrapped([*division.kept_inputs(), *vectors]), division.behind(vectors))
    parts = ModelParts(
        part_to_bytes(rest, objects),
        division.kept,
        b"" if ids is None else part_to_bytes(ids, objects),
        id_inputs,
        tuple(
            MappedCall(layers.index(call.layer), call.layer.name, sources[division.number_of(call.ids)])
            for call in calls
        ),
        tuple(layer.table() if is_wide(layer) else None for layer in layers),
    )
    tables = [layer if is_wide(layer) else np.array(keras.ops.convert_to_numpy(layer.embeddings)) for layer in layers]
    return parts, tables


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


def _calls(model: Any) -> list[TableCall]:
    """Return the calls of the Embeddings whose tables can stay in files."""
    import keras

    functional = functional_of(model)
    if functional is None:
        return []
    outputs, calls = {id(tensor) for tensor in functional.outputs}, list[TableCall]()
    for layer in functional.layers:
        plain = type(layer) is keras.layers.Embedding and _is_plain(layer) and not users_of(model, layer)
        if plain or (is_wide(layer) and layer.compute_dtype == "float32"):
            of_layer = table_calls(functional, layer)
            # An output has the name of its layer.
            calls += [] if any(id(call.vectors) in outputs for call in of_layer) else of_layer
    return calls


def _is_plain(layer: Any) -> bool:
    """Return whether an Embedding takes rows, does nothing else, and has many of them."""
    if layer.mask_zero or layer.lora_enabled or layer.quantization_mode is not None:
        return False
    plain: bool = layer.embeddings.dtype == "float32" == layer.compute_dtype
    return plain and 4 * layer.input_dim * layer.output_dim >= FILE_BYTES_MIN


class MappedModel:
    """A model that predicts with rows of tables in files.

    Args:
        parts: from `split_tables`.
        files: of the tables, as `save_tables` returns them: one for a whole table, two for a `WideEmbedding`.
        columns: the column of each of the whole model's inputs, for error texts.
        build: returns a model from the archive of the rest, such as a compiled one; None: not compiled.

    Attributes:
        rest: the model of the inputs that are not ids, and of the vectors of each call.
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
        mapped = (np.load(path, mmap_mode="r") for path in files)
        self._tables = [
            next(mapped) if shape is None else StoredRows(shape, next(mapped), next(mapped)) for shape in parts.tables
        ]
        self.rest = from_bytes(parts.rest, objects) if build is None else build(parts.rest)
        self._ids = from_bytes(parts.ids, objects) if parts.ids else None

    def outputs(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return each output for the inputs, ``(n, …)``; raise BadValueError if an id is not a row of its table."""
        import keras

        predicted = self.rest.predict_on_batch(unwrapped(self.rest_inputs(inputs)))
        return [np.asarray(output) for output in keras.tree.flatten(predicted)]

    def rest_inputs(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the inputs of `rest`, ``(n, …)``; raise BadValueError if an id is not a row of its table."""
        import keras

        computed: list[Any] = []
        if self._ids is not None:
            own = [inputs[number] for number in self._parts.id_inputs]
            computed = keras.tree.flatten(self._ids.predict_on_batch(unwrapped(own)))
        return [inputs[number] for number in self._parts.inputs] + list(self._vectors(inputs, computed))

    def _vectors(self, inputs: Sequence[np.ndarray], computed: Sequence[Any]) -> Iterator[np.ndarray]:
        for call in self._parts.calls:
            source = call.ids
            ids = inputs[source.inputs[0]] if source.output is None else np.asarray(computed[source.output])
            table = self._tables[call.table]
            if isinstance(table, StoredRows):
                yield table.take(ids, column=self._columns_of(call))
                continue
            if ids.dtype not in (np.int32, np.int64):
                ids = ids.astype(np.int32)  # truncated, as Embedding does
            # Keras counts negative ids from the end, and so does numpy.
            require_ids(call.layer, ids, -len(table), len(table), self._columns_of(call))
            yield np.take(table, ids, axis=0)

    def _columns_of(self, call: MappedCall) -> str:
        return ", ".join(self._columns[number] for number in call.ids.inputs)
