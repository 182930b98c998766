"""A functional model's configuration as a graph, its sub-models, and the models nested in it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from distkeras.private_keras import (
    all_layers,
    called_with,
    created_variables,
    functional_in,
    inner_layers,
    maker_of,
    nodes_of,
    nodes_removed,
)
from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    import keras

#: A floating dtype represents all integers from 0 to this number exactly; `keras.Input` is float32 by default.
_EXACT_BELOW = {"bfloat16": 2**8, "float16": 2**11, "float32": 2**24, "float64": 2**53}
_TENSOR = "__keras_tensor__"


def require_exact_ids(name: str, rows: int, dtype: str) -> None:
    """Raise ConfigurationError if ids of ``dtype`` cannot represent all row numbers of layer ``name``."""
    if rows > _EXACT_BELOW.get(dtype, rows):
        raise ConfigurationError(
            f'ids of {name!r} must be integers, as of `keras.Input((1,), dtype="int64")`: {dtype} rounds '
            f"them from {_EXACT_BELOW[dtype]} on. Received: ids of {dtype} for {rows} rows"
        )


class Source(NamedTuple):
    """A tensor in a model.

    Args:
        layer: name of the layer or operation that outputs it.
        call: number of the layer's call within the model.
        output: number of the output of that call.
    """

    layer: str
    call: int
    output: int


class Given(NamedTuple):
    """An input tensor of a layer's call: its source, its shape (None for an unknown dimension), and its dtype."""

    source: Source
    shape: tuple[int | None, ...]
    dtype: str


class ModelGraph:
    """The layers of a functional model, and the inputs of each of their calls.

    Args:
        config: what the model's ``get_config`` returns.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._layers: dict[str, Mapping[str, Any]] = {layer["name"]: layer for layer in config["layers"]}

    def calls(self, layer: str) -> list[list[Given]]:
        """Return the input tensors of each call of a layer."""
        return [
            [Given(Source(*t["keras_history"]), tuple(t["shape"]), str(t["dtype"])) for t in _tensors(node)]
            for node in self._layers[layer]["inbound_nodes"]
        ]

    def before(self, source: Source) -> list[str]:
        """Return the layers that compute a tensor, including the one that outputs it, in the model's order."""
        return self._needed([source.layer], {})

    def part(
        self, replaced: Mapping[str, Sequence[str]], inputs: Sequence[Mapping[str, Any]], kept: Sequence[str]
    ) -> Any:
        """Return the configuration of the sub-model from new inputs to the same outputs.

        Args:
            replaced: for each layer that takes new inputs, the name of the new input of each of its calls.
            inputs: configurations of the new input layers, as `input_layer` makes them.
            kept: the names of the model's own inputs.

        Returns:
            The configuration, whose inputs are those of ``kept`` that the outputs depend on, and then the new ones.
        """
        outputs = [source.layer for source in _sources(self._config["output_layers"])]
        needed = set(self._needed(outputs, replaced))
        layers = [copy.deepcopy(dict(layer)) for name, layer in self._layers.items() if name in needed]
        new = {layer["name"]: layer for layer in inputs}
        for layer in layers:
            for node, name in zip(layer["inbound_nodes"], replaced.get(layer["name"], ()), strict=False):
                for tensor in _tensors(node):
                    tensor.update(dtype=new[name]["config"]["dtype"], keras_history=[name, 0, 0])
        names = [[name, 0, 0] for name in (*kept, *new) if name in needed or name in new]
        return {
            **self._config,
            "layers": [*inputs, *layers],
            "input_layers": names if len(names) > 1 else names[0],
            "output_layers": copy.deepcopy(self._config["output_layers"]),
        }

    def _needed(self, layers: Sequence[str], replaced: Mapping[str, Any]) -> list[str]:
        needed, pending = set[str](), list(layers)
        while pending:
            name = pending.pop()
            if name not in needed:
                needed.add(name)
                if name not in replaced:
                    pending += [given.source.layer for call in self.calls(name) for given in call]
        return [name for name in self._layers if name in needed]


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


def input_layer(name: str, shape: Sequence[int | None], dtype: str) -> dict[str, Any]:
    """Return the configuration of an input; ``shape`` is that of a mini-batch, None for an unknown dimension."""
    config = {"batch_shape": list(shape), "dtype": dtype, "sparse": False, "ragged": False, "name": name}
    return {
        "module": "keras.layers",
        "class_name": "InputLayer",
        "config": config,
        "registered_name": None,
        "name": name,
        "inbound_nodes": [],
    }


def _tensors(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the configurations of the tensors in the arguments of a call."""
    if isinstance(node, Mapping):
        if node.get("class_name") == _TENSOR:
            yield node["config"]
        else:
            for value in node.values():
                yield from _tensors(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _tensors(value)


def _sources(structure: Any) -> Iterator[Source]:
    """Yield the tensors in ``input_layers`` or ``output_layers`` of a configuration."""
    if isinstance(structure, Mapping):
        for value in structure.values():
            yield from _sources(value)
    elif isinstance(structure, list | tuple):
        if len(structure) == 3 and isinstance(structure[0], str):
            yield Source(*structure)
        else:
            for value in structure:
                yield from _sources(value)


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
        flat = keras.Model(model.input, _outputs(model, model.inputs), name=model.name)
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


def _outputs(model: Any, inputs: list[Any]) -> Any:
    """Return the outputs of a functional model for symbolic ``inputs``, computed by the layers of nested models."""
    import keras

    def operation(part: Any) -> Any:
        inner = functional_of(part)
        if inner is None:
            return part

        def call(given: Any, **options: Any) -> Any:
            tensors = keras.tree.flatten(given)
            kinds = [[(tuple(t.shape), t.dtype) for t in side] for side in (tensors, inner.inputs)]
            if kinds[0] != kinds[1] or any(value is not None for value in options.values()):
                raise ValueError(
                    f"the model {part.name!r} must be given {kinds[1]}. Received: {kinds[0]} with {options}"
                )
            outputs = _outputs(inner, tensors)
            return outputs[0] if isinstance(outputs, list | tuple) and len(outputs) == 1 else outputs

        return call

    return called_with(model, inputs, operation)
