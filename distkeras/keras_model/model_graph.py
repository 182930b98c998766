"""A functional model as a graph of symbolic tensors: the calls of its tables, and the parts before and behind them.

Training by rows and prediction with tables in files divide a model in the same way. All parts share its layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from distkeras.private_keras import (
    all_layers,
    arguments_with,
    call_recorded,
    calls_of,
    created_variables,
    functional_in,
    inner_layers,
    maker_of,
    nodes_of,
    nodes_removed,
    structures,
)
from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    import keras

#: A floating dtype represents all integers from 0 to this number exactly; `keras.Input` is float32 by default.
_EXACT_BELOW = {"bfloat16": 2**8, "float16": 2**11, "float32": 2**24, "float64": 2**53}


def require_exact_ids(name: str, rows: int, dtype: str) -> None:
    """Raise ConfigurationError if ids of ``dtype`` cannot represent all row numbers of layer ``name``."""
    if rows > _EXACT_BELOW.get(dtype, rows):
        raise ConfigurationError(
            f'ids of {name!r} must be integers, as of `keras.Input((1,), dtype="int64")`: {dtype} rounds '
            f"them from {_EXACT_BELOW[dtype]} on. Received: ids of {dtype} for {rows} rows"
        )


def functional_of(model: Any) -> Any:
    """Return a functional model itself, and the functional model inside a Sequential one; None for any other."""
    kind = type(model)
    if kind.__module__.partition(".")[0] != "keras":
        return None
    if kind.__name__ == "Sequential":
        return functional_in(model)
    return model if kind.__name__ == "Functional" else None


def users_of(model: Any, embedding: Any) -> list[Any]:
    """Return the other layers of a model that hold an Embedding or its weights."""
    users = []
    for other in all_layers(model)[1:]:
        trainable, others = created_variables(other)
        own = [*inner_layers(other), *trainable, *others]
        if other is not embedding and any(part is embedding or part is embedding.embeddings for part in own):
            users.append(other)
    return users


@dataclass(frozen=True)
class IdSource:
    """One tensor of row numbers.

    Args:
        inputs: the numbers of the model's inputs that it is computed from.
        output: its number among the outputs of the model that computes row numbers; None: it is an input.
        shape: of a row's value, None for an unknown dimension.
    """

    inputs: tuple[int, ...]
    output: int | None
    shape: tuple[int | None, ...]


class TableCall(NamedTuple):
    """A call of a table: its layer, and the symbolic tensors of the ids that it takes and of the vectors it returns."""

    layer: Any
    ids: Any
    vectors: Any


def calls_within(functional: Any, layer: Any) -> list[Any]:
    """Return the nodes of a layer's calls within a functional model."""
    own = set(map(id, nodes_of(functional)))
    return [node for node in calls_of(layer) if id(node) in own]


def table_calls(functional: Any, layer: Any) -> list[TableCall]:
    """Return the calls of a table within a functional model; each takes one tensor."""
    nodes = calls_within(functional, layer)
    return [TableCall(layer, node.input_tensors[0], node.output_tensors[0]) for node in nodes]


class Division:
    """A functional model before and behind the calls of its tables.

    Args:
        functional: the model.
        calls: all calls of these tables.

    Attributes:
        ids: the symbolic tensors of the calls' ids, each once.
        kept: the numbers of the model's inputs that its part behind the calls needs.
    """

    def __init__(self, functional: Any, calls: Sequence[TableCall]) -> None:
        self._functional, self._calls = functional, calls
        self._inputs = {id(tensor): number for number, tensor in enumerate(functional.inputs)}
        self.ids = list({id(call.ids): call.ids for call in calls}.values())
        self.kept = self._inputs_of(functional.outputs, {id(call.vectors) for call in calls})
        self._computed = [tensor for tensor in self.ids if id(tensor) not in self._inputs]

    def number_of(self, ids: Any) -> int:
        """Return the number of a tensor among `ids`."""
        return next(number for number, tensor in enumerate(self.ids) if tensor is ids)

    def sources(self) -> tuple[IdSource, ...]:
        """Return the source of each of `ids`."""
        outputs = {id(tensor): number for number, tensor in enumerate(self._computed)}
        return tuple(
            IdSource(self._inputs_of([tensor]), outputs.get(id(tensor)), tuple(tensor.shape[1:])) for tensor in self.ids
        )

    def before(self) -> tuple[keras.Model | None, tuple[int, ...]]:
        """Return the model that computes ids, None if they are all inputs, and the numbers of the inputs it has."""
        import keras

        if not self._computed:
            return None, ()
        numbers = self._inputs_of(self._computed)
        return keras.Model(unwrapped([self._functional.inputs[number] for number in numbers]), self._computed), numbers

    def behind(self, vectors: Sequence[Any]) -> Any:
        """Return the outputs, in their structure, for other symbolic vectors: one tensor for each call."""
        given = {id(tensor): tensor for tensor in self.kept_inputs()}
        given |= {id(call.vectors): tensor for call, tensor in zip(self._calls, vectors, strict=True)}
        return _outputs(self._functional, given)

    def kept_inputs(self) -> list[Any]:
        """Return the symbolic inputs that are `kept`."""
        return [self._functional.inputs[number] for number in self.kept]

    def _inputs_of(self, tensors: Iterable[Any], stops: Container[int] = ()) -> tuple[int, ...]:
        """Return the numbers of the inputs among the tensors that are `needed`."""
        found = needed(tensors, stops)
        return tuple(sorted(self._inputs[key] for key in found if key in self._inputs))


def needed(tensors: Iterable[Any], stops: Container[int] = ()) -> dict[int, Any]:
    """Return ``tensors`` and all tensors that they are computed from, by their identities.

    The tensors whose identities are in ``stops`` are not returned, and neither is what only they are computed from.
    """
    found, pending = dict[int, Any](), list(tensors)
    while pending:
        tensor = pending.pop()
        if id(tensor) not in found and id(tensor) not in stops:
            found[id(tensor)] = tensor
            pending += maker_of(tensor).input_tensors
    return found


def free_name(name: str, taken: set[str]) -> str:
    """Return ``name``, or the name with the first number that is free, and add it to those that are ``taken``."""
    free = next(
        text for text in (name, *(f"{name}_{number}" for number in range(1, len(taken) + 2))) if text not in taken
    )
    taken.add(free)
    return free


def unwrapped(values: Sequence[Any]) -> Any:
    """Return the value of a sequence of one, and the list of any other."""
    return values[0] if len(values) == 1 else list(values)


def inner_models(model: keras.Model) -> list[Any]:
    """Return the functional and Sequential models among the layers of a functional model, at any depth."""
    models = list[Any]()
    for layer in model.layers:
        inner = functional_of(layer)
        if inner is not None:
            models += [layer, *inner_models(inner)]
    return models


@contextmanager
def flattened(model: keras.Model) -> Iterator[Any]:
    """Yield an equivalent functional model, in which the layers of nested models take the place of these models.

    It shares the layers of ``model``, and is removed from their lists of nodes when the context ends.

    Args:
        model: functional.

    Raises:
        ValueError: two layers have the same name; a nested model is called with other shapes or dtypes than it was
            built for; or the result depends on the order of the layers, which may change.
    """
    import keras

    operations = [part for graph in (model, *map(functional_of, inner_models(model))) for part in graph.operations]
    with nodes_removed(operations):
        flat = keras.Model(
            model.input, _outputs(model, {id(own): own for own in model.inputs}, flat=True), name=model.name
        )
        _require_any_order(flat)
        yield flat


def _require_any_order(model: Any) -> None:
    """Raise ValueError if states, random numbers or sums of three gradients depend on the order of the layers."""
    import keras

    calls, uses = Counter[int](), Counter[int]()
    for node in nodes_of(model):
        layer = node.operation
        calls[id(layer)] += 1
        if calls[id(layer)] > 1 and getattr(layer, "variables", None):
            raise ValueError(f"the layer {layer.name!r} is called more than once")
        for tensor in node.input_tensors:
            uses[id(tensor)] += 1
            maker = maker_of(tensor).operation
            if uses[id(tensor)] > 2 and not isinstance(maker, keras.layers.InputLayer):
                raise ValueError(f"the output of {maker.name!r} is used more than twice")


def _outputs(model: Any, given: Mapping[int, Any], *, flat: bool = False) -> Any:
    """Return the outputs of a functional model, in their structure, from other tensors.

    The calls of its operations are recorded once more: none of them runs, so that no layer counts a call.

    Args:
        given: new tensors in the place of tensors of the model, by the identities of these; they suffice.
        flat: record the calls within nested models instead of those of the models.
    """
    import keras

    known, left = dict(given), needed(model.outputs, given)
    for node in nodes_of(model):
        if any(id(tensor) in left for tensor in node.output_tensors):
            inner = functional_of(node.operation) if flat else None
            new = call_recorded(node, known) if inner is None else _flat_outputs(node, inner, known)
            known |= {id(own): tensor for own, tensor in zip(node.output_tensors, new, strict=True)}
    return keras.tree.map_structure(lambda tensor: known[id(tensor)], structures(model)[1])


def _flat_outputs(node: Any, inner: Any, known: Mapping[int, Any]) -> list[Any]:
    """Return the outputs of the call of a nested model, whose own calls are recorded."""
    import keras

    args, options = arguments_with(node, known)
    first, *others = args or (options.pop("inputs"),)
    tensors, given_too = keras.tree.flatten(first), keras.tree.flatten([others, options])
    kinds = [[(tuple(t.shape), t.dtype) for t in side] for side in (tensors, inner.inputs)]
    if kinds[0] != kinds[1] or any(value is not None for value in given_too):
        raise ValueError(
            f"the model {node.operation.name!r} must be given {kinds[1]}. Received: {kinds[0]} with {options}"
        )
    given = {id(own): tensor for own, tensor in zip(inner.inputs, tensors, strict=True)}
    return list(keras.tree.flatten(_outputs(inner, given, flat=True)))
