"""Tables that travel by rows: a model without its wide Embeddings, and the model that computes their row numbers.

A worker's model has a small table in the place of each. Before a window, the rows that its mini-batches touch are put
into it, and the mini-batches refer to them by their places there. All else is the model's own, so the same steps move
the same weights. A table that cannot be cut out in this way stays dense, and the reason is stated.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distkeras.keras_model.archive import part_to_bytes
from distkeras.keras_model.model_graph import (
    Division,
    IdSource,
    TableCall,
    calls_within,
    flattened,
    free_name,
    functional_of,
    inner_models,
    needed,
    require_exact_ids,
    table_calls,
    unwrapped,
    users_of,
)
from distkeras.keras_model.optimizers import inner_optimizer, reason_against_rows
from distkeras.keras_model.variables import VariableOrder, is_wide, moving_statistics, trainable_variables
from distkeras.private_keras import calls_of, inner_layers, maker_of, nodes_removed
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.tables import TableShape

if TYPE_CHECKING:
    import keras

    from distkeras.data.batches import Batch
    from distkeras.keras_model.recipe import Recipe

#: A table with fewer rows than this many times those that a window can touch stays dense. Measured with windows of ten
#: mini-batches of 512 rows of four ids, width 64: with twice as many rows as a window can touch, a window of the whole
#: table takes the worker and the server less time with Adagrad, and as much with SGD, before it is sent.
ROWS_RATIO_MIN = 4
#: A table also stays dense if the rows that a window cannot touch have fewer bytes than this. Measured with two workers
#: next to their server, windows of five mini-batches of 32 ids, width 16, SGD: with a table of 0.2 or 0.7 MB, a job by
#: rows has 0.9 to 1.0 of the speed of a dense one, and with 2.6 MB twice its speed.
UNTOUCHED_BYTES_MIN = 1 << 20
#: The options of a `WideEmbedding` that an Embedding has, too.
_OF_BOTH = ("name", "output_dim", "dtype")


@dataclass(frozen=True)
class Lookup:
    """Tables of one size that are looked up by the same tensors, so that each window touches the same rows of them.

    Args:
        tables: the numbers of the tables.
        sources: the numbers of the tensors.
        keeps_zero: row 0 is always the first of a window's rows, since a mask is made from it.
    """

    tables: tuple[int, ...]
    sources: tuple[int, ...]
    keeps_zero: bool


@dataclass(frozen=True)
class RowModel:
    """All that a worker needs for tables by rows except the small model's file. Travels in Spark's task closure.

    The inputs of the small model are some of the original's, and then an int32 one for each tensor of each lookup.

    Args:
        recipe: how to rebuild the small model.
        order: of its variables in the vectors: the dense ones in the order of the original, then the tables.
        tables: one for each table, in the order of the vector.
        inputs: the numbers of the original's inputs that the small model keeps.
        sources: the tensors of row numbers.
        lookups: which tensors are for which tables.
        ids_file: the archive of the model that computes row numbers; empty if they are all inputs.
        id_inputs: the numbers of the original's inputs that the model in ``ids_file`` has.
        together: the model in ``ids_file`` can compute a whole window at once.
    """

    recipe: Recipe
    order: VariableOrder
    tables: tuple[TableShape, ...]
    inputs: tuple[int, ...]
    sources: tuple[IdSource, ...]
    lookups: tuple[Lookup, ...]
    ids_file: bytes
    id_inputs: tuple[int, ...]
    together: bool

    def is_open(self, batch: Batch) -> tuple[bool, ...]:
        """Return `Batch.is_open` of a mini-batch for the small model, from that of one for the original."""
        if not batch.is_open:
            return ()
        looked_up = [self.sources[number].shape[:1] == (None,) for lookup in self.lookups for number in lookup.sources]
        return (*(batch.is_open[number] for number in self.inputs), *looked_up, *batch.is_open[len(batch.x) :])


@dataclass(frozen=True)
class CutModel:
    """A model's tables that travel by rows, and those that stay dense.

    Args:
        kept_dense: the reason for each Embedding that stays dense, by the layer's name.
        tables: those that travel; if there are none, the following are None and empty.
        worker: the part that is sent to workers.
        model_file: the archive of the small model.
        order: of the original's variables in vectors: the dense ones first, as for the small model, then the tables
            that it has.
    """

    kept_dense: Mapping[str, str]
    tables: tuple[TableShape, ...] = ()
    worker: RowModel | None = None
    model_file: bytes = b""
    order: VariableOrder | None = None

    @property
    def whole(self) -> tuple[TableShape, ...]:
        """The tables that the driver holds, which come first."""
        return tuple(table for table in self.tables if not table.partial)

    @property
    def partial(self) -> tuple[tuple[int, TableShape], ...]:
        """The tables of which only touched rows exist, and their numbers among all."""
        return tuple((number, table) for number, table in enumerate(self.tables) if table.partial)

    @property
    def living(self) -> tuple[TableShape, ...]:
        """The tables whose touches the server counts."""
        return tuple(table for table in self.tables if table.living)

    def tracked(self) -> CutModel:
        """Return the same, with partial tables whose changes the server knows."""
        tables = tuple(replace(table, tracked=table.partial) for table in self.tables)
        return replace(self, tables=tables, worker=None if self.worker is None else replace(self.worker, tables=tables))


def cut(
    model: keras.Model,
    recipe: Recipe,
    *,
    window: int | str | None,
    batch_size: int,
    choose: str | Sequence[str] | None = "auto",
    shapes: Sequence[tuple[int | None, ...]] | None = None,
    least_bytes: int = UNTOUCHED_BYTES_MIN,
) -> CutModel:
    """Cut out of a model the tables that can travel by rows without changing the result.

    Args:
        model: as ``recipe`` builds it; with the optimizer's state, if training continues from it. It is not changed.
        recipe: of the model.
        window: mini-batches of a window.
        batch_size: rows of a mini-batch.
        choose: "auto": every table that can travel and has enough rows; names of Embedding layers: these, of any
            number of rows; None: none.
        shapes: of a row's value for each input, if the model does not declare it.
        least_bytes: "auto" chooses only tables whose rows that a window cannot touch have at least this size.

    Raises:
        ConfigurationError: a named layer does not exist, or must stay dense.
    """
    import keras

    embeddings = list(_embeddings(model))
    names = _require_names(choose, {path for path, _ in embeddings})
    kept, tables = dict[str, str](), list[_TableByRows]()
    with keras.saving.custom_object_scope(recipe.objects), _graph_of(model, [path for path, _ in embeddings]) as graph:
        plan = _Plan(model, graph, recipe, window, batch_size, names, shapes, least_bytes)
        for path, layer in embeddings:
            table = plan.table(path, layer)
            if isinstance(table, str) and is_wide(layer):
                raise ConfigurationError(f"the WideEmbedding {path!r} must travel by rows. Received: {table}")
            if isinstance(table, str):
                kept[path] = table
            else:
                tables.append(table)
        for name in names or ():
            if name in kept:
                raise ConfigurationError(
                    "`tables` must name layers whose rows can travel. "
                    f"Received: {name!r}, which stays dense: {kept[name]}"
                )
        if not tables:
            return CutModel(kept)
        tables.sort(key=lambda table: table.shape.partial)  # the driver's vector ends with the whole tables
        return _Cutter(plan, tables, kept).cut_model()


@contextmanager
def _graph_of(model: keras.Model, paths: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """Yield a model as a functional one (None if it is not), and the reason why nested models are not in its graph."""
    functional, reason = functional_of(model), ""
    if functional is not model or not any("/" in path for path in paths) or not inner_models(model):
        yield functional, reason
        return
    with ExitStack() as stack:
        if any(functional_of(maker_of(tensor).operation) for tensor in model.outputs):
            reason = ", and an output has the name of such a layer"
        else:
            try:
                functional = stack.enter_context(flattened(model))
            except ValueError as error:
                reason = f", and {error}"
        yield functional, reason


def _require_names(choose: str | Sequence[str] | None, known: set[str]) -> tuple[str, ...] | None:
    """Return the names that were chosen; None for "auto"."""
    if choose is None:
        return ()
    if choose == "auto":
        return None
    names = (choose,) if isinstance(choose, str) else tuple(choose)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigurationError(
            f"`tables` must be 'auto', None, or names of Embedding layers of the model, which are {sorted(known)}. "
            f"Received: {unknown}"
        )
    return names


def embedding_names(model: keras.Model) -> list[str]:
    """Return the names of a model's Embeddings, at any depth, as `cut` takes them."""
    return [path for path, _ in _embeddings(model)]


def require_exact_embeddings(model: keras.Model) -> None:
    """Raise ConfigurationError if the dtype of an Embedding's ids rounds some of its row numbers."""
    for name, layer in _embeddings(model):
        for node in calls_of(layer):
            require_exact_ids(name, layer.input_dim, str(node.input_tensors[0].dtype))


def _embeddings(model: keras.Model) -> Iterator[tuple[str, keras.Layer]]:
    """Yield every Embedding of a model, at any depth, with its path of layer names."""
    import keras

    seen = set[int]()

    def walk(layer: Any, path: str) -> Iterator[tuple[str, keras.Layer]]:
        for part in inner_layers(layer):
            if id(part) in seen:
                continue
            seen.add(id(part))
            name = f"{path}/{part.name}" if path else part.name
            if isinstance(part, keras.layers.Embedding) or is_wide(part):
                yield name, part
            yield from walk(part, name)

    yield from walk(model, "")


def _masks(layer: Any) -> bool:
    return bool(getattr(layer, "mask_zero", False))


@dataclass(frozen=True)
class _TableByRows:
    """An Embedding that travels by rows: its table, and its calls."""

    layer: keras.Layer
    shape: TableShape
    calls: tuple[TableCall, ...]


class _Plan:
    """Decides which Embeddings travel by rows."""

    def __init__(
        self,
        model: keras.Model,
        graph: tuple[Any, str],
        recipe: Recipe,
        window: int | str | None,
        batch_size: int,
        names: tuple[str, ...] | None,
        shapes: Sequence[tuple[int | None, ...]] | None,
        least_bytes: int,
    ) -> None:
        self.model, self.recipe, self._names = model, recipe, names
        self.functional, self._nested = graph
        self._window, self._batch_size, self._shapes = window, batch_size, shapes
        self._least_bytes = least_bytes
        self._against = reason_against_rows(model.optimizer)
        # Row 0, if a mask is made from it, also for a table without a mask, which may share the lookup.
        self._always = int(any(_masks(layer) for _, layer in _embeddings(model)))

    def table(self, path: str, layer: Any) -> _TableByRows | str:
        """Return the table of an Embedding, or the reason why it stays dense."""
        reason = self._reason(path, layer)
        if reason is not None:
            return reason
        calls = tuple(table_calls(self.functional, layer))
        each = {id(call.ids): self._ids_per_row(call.ids) for call in calls}
        unknown = next((tuple(call.ids.shape) for call in calls if each[id(call.ids)] is None), None)
        if unknown is not None:
            return (
                "how many ids a row of data has is not known, unless `Padding.longest` says how many steps it has: "
                f"their shape is {unknown}"
            )
        assert isinstance(self._window, int)
        most = self._window * self._batch_size * sum(number or 0 for number in each.values()) + self._always
        if is_wide(layer):
            return _TableByRows(layer, layer.table(min(most, layer.input_dim)), calls)
        few = (
            layer.input_dim < ROWS_RATIO_MIN * most
            or 4 * (layer.input_dim - most) * layer.output_dim < self._least_bytes
        )
        if self._names is None and few:
            return f"{layer.input_dim} rows of {layer.output_dim} are too few to gain by it: a window can touch {most}"
        shape = TableShape(path, layer.input_dim, layer.output_dim, min(most, layer.input_dim))
        return _TableByRows(layer, shape, calls)

    def _reason(self, path: str, layer: Any) -> str | None:
        if self._names is not None and path not in self._names and not is_wide(layer):
            return "`tables` does not name it"
        if self.functional is None:
            return "only functional and Sequential models of Keras' own classes can be cut"
        if not isinstance(self._window, int):
            return f"a window must be a number of mini-batches. Received: window={self._window!r}"
        if "/" in path and (is_wide(layer) or not any(own is layer for own in self.functional.layers)):
            return f"it lies within the layer {path.rpartition('/')[0]!r}{self._nested}"
        own = self._reason_of_layer(layer)
        return own or self._against or self._reason_of_state() or self._reason_of_ids(layer)

    def _reason_of_state(self) -> str | None:
        import keras

        # SGD is the only optimizer for rows without slots.
        if self.recipe.optimizer_state and type(inner_optimizer(self.model.optimizer)) is not keras.optimizers.SGD:
            return "the optimizer continues from accumulators of all rows"
        if self.recipe.optimizer_variables:
            return "the optimizer continues with variables that were frozen since its last step"
        return None

    def _reason_of_layer(self, layer: Any) -> str | None:
        import keras

        if is_wide(layer):
            return None if layer.trainable else "it does not train"
        if type(layer) is not keras.layers.Embedding:
            return f"its class is {type(layer).__name__}, and not Embedding itself"
        if layer.lora_enabled:
            return "LoRA replaces its weights by a product"
        if layer.quantization_mode is not None:
            return f"it is quantized to {layer.quantization_mode}"
        if not layer.trainable or not layer.embeddings.trainable:
            return "it does not train"
        if layer.embeddings.dtype != "float32":
            return f"its weights are {layer.embeddings.dtype}, and rows travel as float32"
        if layer.embeddings_regularizer is not None:
            return "its regularizer moves every row"
        if layer.embeddings_constraint is not None:
            return "its constraint may move every row"
        models = inner_models(self.model) if self.functional is not functional_of(self.model) else []
        users = [other.name for other in users_of(self.model, layer) if not any(other is model for model in models)]
        return f"its weights are used in {', '.join(map(repr, users))}, too" if users else None

    def _reason_of_ids(self, layer: Any) -> str | None:
        for node in calls_within(self.functional, layer):
            if len(node.input_tensors) != 1:
                return f"it is called on {len(node.input_tensors)} tensors, and not on one"
            for tensor in needed(node.input_tensors).values():
                reason = _reason_against_making_ids(maker_of(tensor).operation)
                if reason is not None:
                    return reason
        return None

    def _ids_per_row(self, ids: Any) -> int | None:
        """Return the number of ids that a tensor has for each row of data; None if it is unknown."""
        shape = tuple(ids.shape[1:])
        if None in shape and self._shapes is not None:
            shape = self._inferred_shape(ids)
        return None if None in shape else math.prod(shape)

    def _inferred_shape(self, ids: Any) -> tuple[int | None, ...]:
        """Return the shape of a row's ids, inferred from the shapes of the inputs."""
        import keras

        assert self._shapes is not None
        inputs = [
            keras.KerasTensor((None, *shape), tensor.dtype)
            for tensor, shape in zip(self.functional.inputs, self._shapes, strict=True)
        ]
        maker = keras.Model(self.functional.inputs, ids)
        return tuple(maker.compute_output_spec(unwrapped(inputs)).shape[1:])


def _reason_against_making_ids(layer: Any) -> str | None:
    """Return why row numbers that a layer computes cannot be computed outside of the model; None if they can."""
    import keras

    if not isinstance(layer, keras.Layer):  # an operation
        return None
    if layer.trainable_variables:
        return f"its ids are made by {layer.name!r}, which trains"
    if layer.non_trainable_variables and not isinstance(layer, keras.layers.Normalization):
        return f"its ids are made by {layer.name!r}, which has a state"
    if "training" in inspect.signature(layer.call).parameters:
        return f"its ids are made by {layer.name!r}, which may do otherwise in training"
    return None


class _Cutter:
    """Builds the small model and the one that computes row numbers."""

    def __init__(self, plan: _Plan, tables: Sequence[_TableByRows], kept: Mapping[str, str]) -> None:
        self._model, self._functional, self._recipe = plan.model, plan.functional, plan.recipe
        self._tables, self._kept = tables, kept
        self._division = Division(self._functional, [call for table in tables for call in table.calls])

    def cut_model(self) -> CutModel:
        recipe, lookups, sources = self._recipe, self._lookups(), self._division.sources()
        shapes = tuple(table.shape for table in self._tables)
        with nodes_removed(self._functional.operations):
            embeddings = [self._small_embedding(table) for table in self._tables]
            small, inputs = self._small_model(lookups, embeddings)
            order, whole = self._orders(small, embeddings)
            if recipe.optimizer_state:
                self._copy_optimizer(small)
            worker = RowModel(recipe, order, shapes, inputs, sources, lookups, *self._ids_part())
            return CutModel(self._kept, shapes, worker, part_to_bytes(small, recipe.objects), whole)

    def _lookups(self) -> tuple[Lookup, ...]:
        """Group tables that have the same number of rows and are looked up by the same tensors."""
        groups: dict[tuple[int, bool, tuple[int, ...]], list[int]] = {}
        for number, table in enumerate(self._tables):
            sources = dict.fromkeys(self._division.number_of(call.ids) for call in table.calls)
            groups.setdefault((table.shape.rows, table.shape.partial, tuple(sources)), []).append(number)
        return tuple(
            Lookup(tuple(numbers), sources, any(_masks(self._tables[number].layer) for number in numbers))
            for (_, _, sources), numbers in groups.items()
        )

    def _small_embedding(self, table: _TableByRows) -> keras.Layer:
        """Return the Embedding of a window's rows, which are zero, in the place of a table."""
        import keras

        layer = table.layer
        config = {name: value for name, value in layer.get_config().items() if not is_wide(layer) or name in _OF_BOTH}
        small = keras.layers.Embedding.from_config(
            {**config, "input_dim": table.shape.most, "embeddings_initializer": "zeros"}
        )
        small.build()
        return small

    def _small_model(self, lookups: Sequence[Lookup], embeddings: Sequence[Any]) -> tuple[Any, tuple[int, ...]]:
        """Return the small model, and the numbers of the original's inputs that it keeps."""
        import keras

        taken = {operation.name for operation in self._functional.operations}
        inputs, vectors = list[Any](), dict[int, Any]()
        for lookup in lookups:
            places = dict[int, Any]()
            for number in lookup.sources:
                ids = self._division.ids[number]
                name = free_name(f"{maker_of(ids).operation.name}_rows", taken)
                places[id(ids)] = keras.Input(batch_shape=ids.shape, dtype="int32", name=name)
            inputs += places.values()
            for number in lookup.tables:
                for call in self._tables[number].calls:
                    vectors[id(call.vectors)] = embeddings[number](places[id(call.ids)])
        if functional_of(self._model) is not self._model:  # a Sequential model stays one: its outputs have no names
            first = [part is self._tables[0].layer for part in self._model.layers].index(True)
            return keras.Sequential([*inputs, *embeddings, *self._model.layers[first + 1 :]], name=self._model.name), ()
        outputs = self._division.behind([vectors[id(call.vectors)] for table in self._tables for call in table.calls])
        inputs = [*self._division.kept_inputs(), *inputs]
        return keras.Model(unwrapped(inputs), outputs, name=self._model.name), self._division.kept

    def _orders(self, small: Any, embeddings: Sequence[Any]) -> tuple[VariableOrder, VariableOrder]:
        """Return the order of the small model's variables, and that of the original's, in the same vectors."""
        tables = [table.layer.embeddings for table in self._tables if not table.shape.partial]
        dense = [v for v in trainable_variables(self._model) if not any(v is table for table in tables)]
        statistics = moving_statistics(self._model)
        return (
            _order(small, [*dense, *(layer.embeddings for layer in embeddings)], statistics),
            _order(self._model, [*dense, *tables], statistics),
        )

    def _copy_optimizer(self, small: Any) -> None:
        """Compile the small model with a copy of the original's optimizer, which has no slots."""
        own = self._model.optimizer
        small.compile(optimizer=type(own).from_config(own.get_config()), loss="mse")
        small.optimizer.build(small.trainable_variables)
        for variable, copy in zip(own.variables, small.optimizer.variables, strict=True):
            copy.assign(variable)

    def _ids_part(self) -> tuple[bytes, tuple[int, ...], bool]:
        """Return the last three arguments of `RowModel`: of the model that computes row numbers."""
        model, numbers = self._division.before()
        if model is None:
            return b"", (), True
        keras_own = all(type(part).__module__.partition(".")[0] == "keras" for part in model.operations)
        return part_to_bytes(model, self._recipe.objects), numbers, keras_own


def _order(model: Any, trainable: Sequence[Any], statistics: Sequence[Any]) -> VariableOrder:
    """Return the order of a model's variables, given these variables in that order."""
    places = [{id(v): number for number, v in enumerate(of(model))} for of in (trainable_variables, moving_statistics)]
    return VariableOrder(tuple(places[0][id(v)] for v in trainable), tuple(places[1][id(v)] for v in statistics))
