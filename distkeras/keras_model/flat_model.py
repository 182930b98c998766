"""A model whose layers are models, as one graph of the layers of all of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distkeras.keras_model.model_graph import functional_of

if TYPE_CHECKING:
    import keras


def inner_models(model: keras.Model) -> list[Any]:
    """Return the functional and Sequential models among the layers of a functional model, at any depth."""
    found = list[Any]()
    for layer in model.layers:
        inner = functional_of(layer)
        if inner is not None:
            found += [layer, *inner_models(inner)]
    return found


@contextmanager
def flattened(model: keras.Model) -> Iterator[Any]:
    """Give a functional model that computes the same with the layers of the models within it, until this ends.

    The layers are those of ``model`` themselves. Afterwards they do not know of it any more.

    Args:
        model: functional.

    Raises:
        ValueError: two layers have one name, or a model within it is given other shapes or types than it was built for;
            or the order of the layers matters, which may become another one.
    """
    import keras

    operations = [part for one in (model, *map(functional_of, inner_models(model))) for part in one.operations]
    nodes = [(part, list(part._inbound_nodes), list(part._outbound_nodes)) for part in operations]  # noqa: SLF001 - there is no public list
    try:
        flat = keras.Model(model._inputs_struct, _outputs(model, model.inputs), name=model.name)  # noqa: SLF001 - there is no public one
        _require_any_order(flat)
        yield flat
    finally:
        for part, inbound, outbound in nodes:
            part._inbound_nodes[:], part._outbound_nodes[:] = inbound, outbound  # noqa: SLF001 - there is no public list


def _require_any_order(model: Any) -> None:
    """Raise ValueError for what depends on the order of the layers: states, random numbers, sums of three gradients."""
    import keras

    calls, uses = Counter[int](), Counter[int]()
    for node in itertools.chain(*model._nodes_by_depth.values()):  # noqa: SLF001 - there is no public list
        layer = node.operation
        calls[id(layer)] += 1
        if calls[id(layer)] > 1 and getattr(layer, "variables", None):
            raise ValueError(f"the layer {layer.name!r} is called more than once")
        for tensor in node.input_tensors:
            uses[id(tensor)] += 1
            maker = tensor._keras_history.operation  # noqa: SLF001 - there is no public one
            if uses[id(tensor)] > 2 and not isinstance(maker, keras.layers.InputLayer):
                raise ValueError(f"the output of {maker.name!r} is used more than twice")


def _outputs(model: Any, inputs: list[Any]) -> Any:
    """Return what the layers of a functional model make of symbolic tensors."""
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

    return model._run_through_graph(inputs, operation_fn=operation)  # noqa: SLF001 - there is no public one
