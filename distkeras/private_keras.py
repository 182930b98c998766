"""Every use of a name that Keras does not document: no other module of this package touches one.

`tests/test_private_keras.py` has a test for each, which names the member that a newer Keras has removed or changed.
Importing this module does not load Keras.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import keras

#: The attribute of a layer with its own flag `trainable`; the public property sets that of all inner layers, too.
OWN_FLAG = "_trainable"
#: The attribute of the callback TensorBoard with the first batch that it profiles; 0: it profiles none.
FIRST_PROFILED = "_start_batch"
#: Attributes that record an object's history or its place in a model, not its behavior. Some are public.
HISTORY = {
    "built", "_built", "_called", "_tracker", "_tracked", "_lock", "_path", "_parent_path", "_name", "name",
    "_build_shapes_dict", "_losses", "_loss_ids", "_losses_override", "_metrics", "_seed_generators", "_layers",
    "_trainable_variables", "_non_trainable_variables", "_variables", "_inbound_nodes", "_outbound_nodes",
    "_input_spec", "_auto_config", "_saved_model_inputs_spec", "_saved_model_arg_spec", "_call_signature",
    "_value", "_initializer", "_unique_id", "_functional", "_operations", "_nodes",
    "_trainable_variables_indices", "_exclude_from_weight_decay_cache",
    "_exclude_from_weight_decay",  # identities of variables, which a recipe numbers
    "_weight_decay_by_var_key",  # since Keras 3.16: what an optimizer derives from them when it is built
    "_distribution_strategy",
    "_initial_seed",
    "training",  # the mode of PyTorch's modules in their last call
    "seed", "history", "stop_training", "train_function", "test_function", "predict_function", "_jit_compile",
    "optimizer",
    "loss", "compiled", "_compile_loss", "_compile_metrics", "_loss_tracker", "_compile_config", "_initial_epoch",
    "_eval_epoch_iterator", "_compiled_trainable_state", "steps_per_execution", "unrolled_steps_per_execution",
    "_run_eagerly", "_compute_loss_has_training_arg", "_distribute_strategy", "_self_setattr_tracking",
}  # fmt: skip
#: Where optimizers that step single rows keep their slots: variables with a number for each element of a weight.
_SLOTS = ("_accumulators", "_momentums", "_velocities", "momentums")
#: Where an optimizer keeps the keys of the variables that it excludes from weight decay.
_UNDECAYED = "_exclude_from_weight_decay"


def all_layers(layer: Any) -> list[Any]:
    """Return a layer or model, and its inner layers at every depth."""
    return list(layer._flatten_layers())


def inner_layers(layer: Any) -> list[Any]:
    """Return the layers that a layer or model holds itself."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def created_variables(layer: Any) -> tuple[list[Any], list[Any]]:
    """Return the variables of a layer itself that were created trainable, and the others; the public lists mix them."""
    return list(layer._trainable_variables), list(layer._non_trainable_variables)


def seed_generators(layer: Any) -> list[Any]:
    """Return the seed generators of a layer itself."""
    return list(layer._seed_generators)


def value_of(variable: Any) -> Any:
    """Return the backend's variable within one of Keras, None before it is initialized; any other object unchanged."""
    import keras

    return variable._value if isinstance(variable, keras.Variable) else variable  # arrays of JAX have one, too


def set_values(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Set variables on JAX to arrays of their own shapes and dtypes, which `assign` would convert and check first."""
    for variable, value in zip(variables, values, strict=True):
        variable._value = value


def mask_of(tensor: Any) -> Any:
    """Return the mask that layers have attached to a tensor; None if there is none."""
    return getattr(tensor, "_keras_mask", None)


def functional_in(sequential: Any) -> Any:
    """Return the functional model in a Sequential one; None before it is built."""
    return sequential._functional


def structures(model: Any) -> tuple[Any, Any]:
    """Return the inputs and outputs of a functional model as it was given them; None for any other model."""
    return getattr(model, "_inputs_struct", None), getattr(model, "_outputs_struct", None)


def calls_of(operation: Any) -> list[Any]:
    """Return the nodes of the calls of a layer or operation, in any model."""
    return list(operation._inbound_nodes)


def nodes_of(functional: Any) -> list[Any]:
    """Return the nodes of the calls within a functional model, each after those whose outputs it takes."""
    return [node for _, nodes in sorted(functional._nodes_by_depth.items(), reverse=True) for node in nodes]


def maker_of(tensor: Any) -> Any:
    """Return the node of the call that has a symbolic tensor as its output."""
    history = tensor._keras_history
    return calls_of(history.operation)[history.node_index]


@contextlib.contextmanager
def nodes_removed(operations: Iterable[Any]) -> Iterator[None]:
    """Remove the nodes that calls of ``operations`` create, at the end of the context."""
    before = [(part, list(part._inbound_nodes), list(part._outbound_nodes)) for part in operations]
    try:
        yield
    finally:
        for part, inbound, outbound in before:
            part._inbound_nodes[:], part._outbound_nodes[:] = inbound, outbound


def arguments_with(node: Any, tensors: Mapping[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a node's arguments with other tensors: those in ``tensors``, by the identities of its own."""
    args, kwargs = node.arguments.fill_in(tensors)
    return tuple(args), dict(kwargs)


def call_recorded(node: Any, tensors: Mapping[int, Any]) -> list[Any]:
    """Record a further call of a node's operation, with `arguments_with`; return its outputs. No code of it runs."""
    import keras
    from keras.src.ops.node import Node

    args, kwargs = arguments_with(node, tensors)
    outputs = [keras.KerasTensor(own.shape, own.dtype, sparse=own.sparse) for own in node.output_tensors]
    Node(node.operation, call_args=args, call_kwargs=kwargs, outputs=outputs)
    return outputs


def compile_arguments(model: Any) -> dict[str, Any]:
    """Return the arguments of ``compile`` as they were given; empty if the model is not compiled."""
    kept = getattr(model, "_compile_config", None) if model.compiled else None
    return {} if kept is None else dict(kept.config)


def losses_of_outputs(model: Any) -> list[keras.metrics.Mean]:
    """Return the metrics that average the loss of each output, if there are several outputs.

    They average over rows if a step knows the number of its rows, and over batches in TensorFlow's graphs.
    """
    compiled = getattr(model, "_compile_loss", None)
    return [] if compiled is None else [metric for metric in compiled.metrics if metric is not None]


def counted_loss(model: Any, x: Any, y: Any, predicted: Any, weight: Any, rows: Any) -> Any:
    """Return the loss of a mini-batch of ``rows`` rows, and count it in the metric, as ``train_step`` does."""
    loss = model._compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight, training=True)
    model._loss_tracker.update_state(loss, sample_weight=rows)
    return loss


def make_metrics(model: Any, data: Any) -> None:
    """Make the loss and the metrics of a compiled model from a step's data; the public functions compile a step."""
    model._symbolic_build(data_batch=data)


def specification(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a function of a model returns for arrays: symbolic tensors of its shapes. No number is computed.

    The variables that the function creates are initialized.
    """
    import keras
    from keras.src.backend import compute_output_spec

    def symbolic(value: Any) -> Any:
        return keras.KerasTensor(value.shape, str(value.dtype)) if isinstance(value, np.ndarray) else value

    args, kwargs = keras.tree.map_structure(symbolic, (args, kwargs))
    return compute_output_spec(function, *args, **kwargs)


def function_options(loss: Any) -> dict[str, Any]:
    """Return the options with which an object of a loss calls its function; empty if it has none."""
    return dict(getattr(loss, "_fn_kwargs", None) or {})


def rate_of(optimizer: Any) -> Any:
    """Return an optimizer's learning rate, a variable, schedule or function; the public property evaluates it."""
    return optimizer._learning_rate


def step_count(optimizer: Any) -> Any:
    """Return the variable that counts steps; `iterations` counts only the updates of accumulated gradients."""
    return optimizer._iterations


def moved_variables(optimizer: Any) -> list[Any]:
    """Return the variables that a built optimizer moves."""
    return list(optimizer._trainable_variables)


def clipped(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Return gradients clipped as an optimizer's arguments say."""
    return list(optimizer._clip_gradients(gradients))


def slots_of(optimizer: Any, variable: Any) -> tuple[Any, ...]:
    """Return the slots of ``variable`` in a built optimizer for rows: its accumulator, or momentum before velocity."""
    place = optimizer._get_variable_index(variable)
    return tuple(slots[place] for slots in (getattr(optimizer, name, None) for name in _SLOTS) if slots)


def keys_of(optimizer: Any, variables: Iterable[Any]) -> list[Any]:
    """Return the keys by which an optimizer knows variables; they differ in each process."""
    return [optimizer._var_key(variable) for variable in variables]


def undecayed(optimizer: Any) -> set[Any]:
    """Return the keys of the variables that an optimizer excludes from weight decay."""
    return set(getattr(optimizer, _UNDECAYED, None) or ())


def set_undecayed(optimizer: Any, keys: Iterable[Any]) -> None:
    """Exclude the variables with these keys from weight decay, before the optimizer is built."""
    vars(optimizer)[_UNDECAYED] = set(keys)


def stateless_methods() -> tuple[type, dict[str, Any]]:
    """Return Keras' base class of optimizers for TensorFlow, and its methods that must be those for any backend.

    The methods for TensorFlow change each `tf.Variable`, so that `stateless_apply` would not be stateless.
    """
    import keras

    in_tensorflow, base = keras.optimizers.Optimizer.__bases__
    names = (
        "stateless_apply",
        "_apply_weight_decay",
        "_backend_update_step",
        "_backend_increment_gradient_accumulators",
        "_overwrite_model_variables_with_average_value",
    )
    # In a stateless scope, the value of a variable has no key of its own.
    key = {"_var_key": lambda self, variable: value_of(variable)._unique_id}
    return in_tensorflow, {name: getattr(base, name) for name in names} | key


def code_is_permitted() -> bool:
    """Return whether the user has called `keras.config.enable_unsafe_deserialization` in this thread."""
    import keras  # noqa: F401 - makes its modules known
    from keras.src.saving import serialization_lib

    return serialization_lib.in_safe_mode() is False


def load_model(file: IO[bytes], objects: Mapping[str, Any], *, compiled: bool, safe: bool) -> keras.Model:
    """Return the model in a ``.keras`` archive; the public function reads files only, which a killed process leaves.

    Args:
        file: with the archive.
        objects: custom objects by registered name.
        compiled: compile it as it was.
        safe: refuse code in the archive, also if the user has permitted it in this thread.
    """
    import keras
    from keras.src.saving import saving_lib, serialization_lib

    def load() -> keras.Model:
        loaded: keras.Model = saving_lib.load_model(file, dict(objects), compile=compiled, safe_mode=safe)
        return loaded

    # The scope has precedence over the argument, and over the user's own setting.
    with serialization_lib.SafeModeScope(safe):
        if not compiled and keras.config.backend() == "jax" and not keras.config.is_nnx_enabled():
            try:
                return without_initializers(load)  # each compiles a function for each shape of a weight
            except Exception:  # noqa: BLE001 - such as a layer that creates a variable from an array: it loads below
                file.seek(0)
        return load()


def without_initializers(load: Callable[[], keras.Model]) -> keras.Model:
    """Return what ``load`` returns; the initializers of the variables that it creates and assigns do not run.

    Raises:
        ValueError: of Keras, if it creates a variable from an array.
    """
    import keras

    assigned: dict[int, tuple[keras.Variable, Any]] = {}

    class Scope(keras.StatelessScope):  # type: ignore[misc]  # Keras' classes are Any
        """Variables that are created within are initialized at its end."""

        def add_update(self, update: tuple[keras.Variable, Any]) -> None:
            super().add_update(update)
            assigned[id(update[0])] = update

        def __exit__(self, *error: object) -> None:
            for variable, value in assigned.values():
                if value_of(variable) is None:
                    variable._initializer = lambda *_, value=value, **__: value
            super().__exit__(*error)

    with Scope():
        model = load()
    for variable, value in assigned.values():
        if value_of(variable) is not value:
            variable.assign(value)
    return model


def load_optimizer(optimizer: Any, weights: IO[bytes]) -> None:
    """Load the state of a built optimizer from the file of weights in an archive; Keras loads whole models only.

    Raises:
        Exception: of Keras, if the file has no such state.
    """
    from keras.src.saving import saving_lib

    errors: dict[int, tuple[Any, Exception]] = {}
    with contextlib.closing(saving_lib.H5IOStore(weights, mode="r")) as store:
        saving_lib._load_state(
            optimizer, store, None, "optimizer", visited_saveables=set(), failed_saveables=set(), error_msgs=errors
        )
    for _, error in errors.values():
        raise error


def objects_in_scope() -> dict[str, Any]:
    """Return the objects of the `custom_object_scope` that is open in this thread; an inner one hides outer ones."""
    from keras.src.backend.common import global_state

    return dict(global_state.get_global_attribute("custom_objects_scope_dict", {}))


def dtype_policy() -> Any:
    """Return the global policy; None if there is none yet: Keras' own getter would create it from today's floatx."""
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute("dtype_policy")


def forget_dtype_policy() -> None:
    """Unset the global policy."""
    from keras.src.backend.common import global_state

    global_state.set_global_attribute("dtype_policy", None)


class _TensorFlowIfImported:
    """Keras' lazy TensorFlow where it asks whether an object is of TensorFlow's types: only an imported one has any."""

    def __init__(self, lazy: Any) -> None:
        self._lazy = lazy

    @property
    def available(self) -> bool:
        return "tensorflow" in sys.modules and bool(self._lazy.available)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lazy, name)


def leave_tensorflow_out() -> None:
    """Keep Keras on another backend from importing TensorFlow, which takes seconds, to write a configuration."""
    import keras
    from keras.src.saving import serialization_lib

    if keras.config.backend() != "tensorflow" and not isinstance(serialization_lib.tf, _TensorFlowIfImported):
        serialization_lib.tf = _TensorFlowIfImported(serialization_lib.tf)
