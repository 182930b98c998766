"""One step of the user's own model against one step of the model that workers rebuild from its description.

A worker rebuilds a model from a configuration, so what Keras does not describe there would be lost in silence. No
list of such things is complete. So before any work starts, both models take the same step on the same drawn rows: the
user's as ``fit`` takes it, the rebuilt one as a worker does. Outputs, loss, metrics and all weights must agree.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.data.batches import Batch, absent, as_weight, flat_weight, is_absent
from distkeras.data.column_kinds import TEXT
from distkeras.keras_model.archive import USING_MODELS
from distkeras.keras_model.compiled_steps import model_inputs
from distkeras.keras_model.optimizers import optimizer_of, require_step
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.variables import layer_states, numpy_value, trainable_variables
from distkeras.metric_columns import with_arrays
from distkeras.private_keras import compile_arguments, value_of
from distkeras.ps.errors import ConfigurationError, headline

if TYPE_CHECKING:
    import keras

    from distkeras.data.batches import DataSpec
    from distkeras.data.columns import Column


log = logging.getLogger(__name__)

#: Rows of the drawn mini-batch, if the model does not fix their number.
ROWS = 4
#: Differences that rounding explains: relative to the largest number of an array; and, for weights, relative to the
#: largest movement, next to some units in the last place of the weight itself.
_ROUNDING, _LAST_PLACES = 1e-5, 4
#: So many times what a rounding of the weights changes may be the difference of two steps, which round often.
_NUDGES = 8
#: The unit in the last place of what travels, also of a model in float64.
_FLOAT32 = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class GivenModel:
    """The user's own objects.

    Args:
        model: the user's model.
        arguments: of ``compile``, as the trainer was given them; None for what the model itself is compiled with.
    """

    model: keras.Model
    arguments: Mapping[str, Any]

    def compiled(self) -> keras.Model:
        """Compile the model with the arguments, as plain Keras would; to be called within `undone`."""
        given = {name: value for name, value in self.arguments.items() if value is not None}
        if given:
            own = {name: value for name, value in compile_arguments(self.model).items() if name in self.arguments}
            if self.model.compiled and "optimizer" not in given:
                own |= {"optimizer": self.model.optimizer, "auto_scale_loss": False}
            arguments = {name: value for name, value in (own | given).items() if value is not None}
            arguments["optimizer"] = optimizer_of(arguments.get("optimizer", "sgd"))
            self.model.compile(**arguments)
        _run_eagerly(self.model)
        return self.model


@dataclass(frozen=True)
class _Step:
    """What a step reports and leaves behind, by name: outputs before it, loss and metrics, all weights after it."""

    outputs: dict[str, np.ndarray]
    logs: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def require_same_values(given: keras.Model, rebuilt: keras.Model) -> None:
    """Raise ConfigurationError unless the rebuilt model has the same weights as the user's, of the same values."""
    theirs, ours = given.weights, rebuilt.weights
    for weight, copy in zip(theirs, ours, strict=False):
        if tuple(weight.shape) != tuple(copy.shape) or not _is_equal(numpy_value(weight), numpy_value(copy)):
            raise _lost(given, f"the weight {weight.path!r} has other values once it is rebuilt")
    if len(theirs) != len(ours):
        raise _lost(
            given,
            f"there are {len(theirs)} weights in the model and {len(ours)} once it is rebuilt, as for weights that "
            "several layers share by assignment",
        )


def require_same_outputs(given: keras.Model, rebuilt: keras.Model) -> None:
    """Raise ConfigurationError unless a rebuilt model predicts as the user's does, on drawn rows."""
    if not getattr(given, "inputs", None) or any(None in tensor.shape[1:] for tensor in given.inputs):
        return
    rng = np.random.default_rng(0)
    rows = _rows_of(given)
    x = [_drawn(rng, (rows, *tensor.shape[1:]), _numpy_dtype(tensor.dtype)) for tensor in given.inputs]
    with USING_MODELS, undone(given, rebuilt):
        try:
            expected = _outputs(given, x)
        except Exception as error:  # noqa: BLE001 - a model may refuse drawn rows in any way
            log.info("the outputs of %r were not compared: %s", given.name, headline(str(error)))
            return
        _align(given, rebuilt)
        difference = _first_difference(expected, _outputs(rebuilt, x))
        if difference is not None and _first_difference(expected, _outputs(given, x)) is None:
            raise _lost(given, f"on drawn rows, {difference}", "keras_model")


def require_same_step(
    given: GivenModel, rebuilt: keras.Model, spec: DataSpec, example: Batch, *, gradient: bool
) -> None:
    """Raise ConfigurationError unless a step of the rebuilt model equals that of the user's, within rounding.

    Afterwards both models are as they were, to the bit. Seeds of random layers are made equal for the comparison. If
    two steps of the user's own model differ, by random numbers without a seed, only outputs in inference are compared.
    If the user's model cannot take a step on drawn rows, nothing is compared, and the log says why.

    Args:
        rebuilt: as workers build it, compiled, with the state of its optimizer.
        example: a mini-batch of the shapes and dtypes to come.
        gradient: workers compute gradients, and plain SGD takes its step elsewhere; else their optimizers take steps.
    """
    if not gradient:
        require_step(rebuilt)
    with USING_MODELS:
        _compare_steps(given, rebuilt, _drawn_batch(example, spec, _rows_of(rebuilt)), gradient=gradient)


def _compare_steps(given: GivenModel, rebuilt: keras.Model, batch: Batch, *, gradient: bool) -> None:
    try:
        theirs = _their_step(given, rebuilt, batch)
    except Exception as error:  # noqa: BLE001 - losses, layers and backends raise errors of any class
        text = headline(f"{type(error).__name__}: {error}")
        log.info("the step of %r was not compared with a worker's: it fails on drawn rows: %s", given.model.name, text)
        return
    try:
        with undone(rebuilt):
            ours = _our_step(rebuilt, batch, gradient=gradient)
    except Exception as error:
        text = headline(f"{type(error).__name__}: {error}")
        raise _lost(given.model, f"the rebuilt model's step fails where the model's own does not: {text}") from error
    start = {weight.path: numpy_value(weight) for weight in rebuilt.weights}
    difference = _difference(theirs, ours, start)
    if difference is None:
        return
    again = _their_step(given, rebuilt, batch)
    if _difference(theirs, again, start) is not None:
        log.info("the step of %r was not compared with a worker's: two of its own differ", given.model.name)
        difference = _first_difference(theirs.outputs, ours.outputs)
        if difference is None or _first_difference(theirs.outputs, again.outputs) is not None:
            return
    elif _difference(theirs, ours, start, _their_step(given, rebuilt, batch, nudged=True)) is None:
        return
    raise _lost(given.model, f"in one step on drawn rows, {difference}{_cause(given.model, gradient=gradient)}")


def _their_step(given: GivenModel, rebuilt: keras.Model, batch: Batch, *, nudged: bool = False) -> _Step:
    """Take a step of the user's own model as ``fit`` takes it, and undo it.

    Args:
        nudged: from weights that differ by a rounding.
    """
    with undone(given.model, *given.arguments.values()):
        _align(rebuilt, given.model)  # the user may have trained it meanwhile
        if nudged:
            _nudge(given.model.trainable_variables)
        model = given.compiled()
        _copy(model.optimizer.variables, model.optimizer.variables)  # the user may hold their arrays
        outputs = _outputs(model, batch.x)
        logs = {name: np.asarray(value, np.float64) for name, value in _fit(model, batch).items()}
        names = [weight.path for weight in rebuilt.weights]
        return _Step(outputs, logs, dict(zip(names, map(numpy_value, model.weights), strict=True)))


def _run_eagerly(model: keras.Model) -> None:
    """Take a model's steps eagerly: tracing would take longer. JAX would compile every operation, so it does not."""
    import keras

    if keras.config.backend() != "jax":
        model.run_eagerly = True


def _nudge(variables: Sequence[keras.Variable]) -> None:
    """Change each number by a unit in its last place, up or down."""
    rng = np.random.default_rng(0)
    for variable in variables:
        value = np.array(numpy_value(variable))
        if np.issubdtype(value.dtype, np.floating):  # bfloat16 is none of NumPy's
            units = np.finfo(value.dtype).eps * rng.choice([-1, 1], value.shape)
            variable.assign(value * (1 + units).astype(value.dtype))


def _fit(model: keras.Model, batch: Batch) -> dict[str, Any]:
    """Return loss and metrics of a step, by name."""
    x, y, weight = model_inputs(model, batch.x, batch.y, batch.weight)
    if any(map(is_absent, [*batch.y, *flat_weight(batch.weight)])):  # only single mini-batches may lack some
        return dict(model.train_on_batch(x, y, sample_weight=weight, return_dict=True))
    fitted = model.fit(x, y, sample_weight=weight, batch_size=batch.size, shuffle=False, verbose=0)
    return {name: values[-1] for name, values in fitted.history.items()}


def _our_step(model: keras.Model, batch: Batch, *, gradient: bool) -> _Step:
    """Take the same step as a worker does."""
    outputs = _outputs(model, batch.x)
    _run_eagerly(model)
    replica = KerasReplica(model)
    staying = _staying(replica)
    rate = replica.learning_rate
    if gradient:
        moved, start = replica.layout.empty(), replica.layout.empty()
        replica.read(start)
        row = replica.gradient(batch, moved)
        moved *= -np.float32(rate)
        moved += start
        replica.load(moved)
    else:
        (row,) = replica.train([batch])
    logs = with_arrays(dict(zip(replica.metric_names, row, strict=True)))
    return _Step(outputs, logs, {weight.path: numpy_value(weight) for weight in model.weights} | staying)


def _staying(replica: KerasReplica) -> dict[str, np.ndarray]:
    """Return the values of floats that stay at a worker: if a step moves them, the trained model does not have it."""
    import keras

    travels = {*replica.layout.names, *replica.moving_statistics.names}
    weights = [weight for weight in replica.model.weights if keras.backend.is_float_dtype(weight.dtype)]
    return {weight.path: np.array(numpy_value(weight)) for weight in weights if weight.path not in travels}


def _align(source: keras.Model, target: keras.Model) -> None:
    """Give a model the weights, seeds and layers' states of another one."""
    _copy(target.weights, source.weights)
    states = layer_states(target), layer_states(source)
    if len(states[0]) == len(states[1]):
        _copy(*states)


def _copy(targets: Sequence[keras.Variable], sources: Sequence[keras.Variable]) -> None:
    """Set variables to the values of others, in memory of their own: a step on JAX takes over its variables' memory."""
    for variable, value in zip(targets, sources, strict=True):
        variable.assign(np.array(numpy_value(value)))


def _outputs(model: keras.Model, x: Sequence[Any]) -> dict[str, np.ndarray]:
    import keras

    inputs, _, _ = model_inputs(model, x, (), None)
    outputs = keras.tree.flatten(model(inputs, training=False))
    names = list(getattr(model, "output_names", ())) if len(outputs) > 1 else ["output"]
    names = names if len(names) == len(outputs) else [f"output {number}" for number in range(len(outputs))]
    # NumPy converts them: a backend may have no numbers of 64 bits, and warn.
    values = [np.asarray(keras.ops.convert_to_numpy(one)).astype(np.float64) for one in outputs]
    return {name if name == "output" else f"output {name!r}": value for name, value in zip(names, values, strict=True)}


def _difference(theirs: _Step, ours: _Step, start: Mapping[str, np.ndarray], nudged: _Step | None = None) -> str | None:
    """Describe the first difference of two steps from the same weights; None if there is none.

    Args:
        nudged: the first step from weights that differ by a rounding. What this changes in a weight is no difference:
            an optimizer that divides by the size of the gradients makes a step of their rounding, where they are 0 but
            for it, as for a bias before a BatchNormalization.
    """
    missing = [name for name in theirs.logs if name not in ours.logs]
    if missing:
        return f"{missing[0]!r} is reported by the model's own step and not by the rebuilt one's"
    text = _first_difference(theirs.outputs, ours.outputs)
    text = text or _first_difference(theirs.logs, {name: ours.logs[name] for name in theirs.logs})
    for name, expected in theirs.weights.items():
        if text is None and np.issubdtype(expected.dtype, np.number):
            own, before = (np.asarray(value, np.float64) for value in (ours.weights[name], start[name]))
            expected64 = np.asarray(expected, np.float64)
            noise = 0.0 if nudged is None else np.max(np.abs(nudged.weights[name] - expected64), initial=0.0)
            text = _difference_of_weights(name, expected64, own, before, expected.dtype, _NUDGES * noise)
    return text


def _difference_of_weights(
    name: str, expected: np.ndarray, own: np.ndarray, start: np.ndarray, dtype: np.dtype, noise: float
) -> str | None:
    movement = np.max(np.abs(expected - start), initial=0.0)
    unit = max(np.finfo(dtype).eps, _FLOAT32) if np.issubdtype(dtype, np.floating) else 0.0
    allowed = noise + _ROUNDING * movement + _LAST_PLACES * unit * np.abs(start)
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(own - expected) <= allowed) & ~(np.isnan(own) & np.isnan(expected))
    if not bad.any():
        return None
    place = int(np.argmax(bad))
    return (
        f"the weight {name!r} moves from {start.flat[place]:.9g} to {expected.flat[place]:.9g}, and once it is rebuilt "
        f"to {own.flat[place]:.9g}"
    )


def _first_difference(theirs: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray]) -> str | None:
    for name, expected in theirs.items():
        own = ours.get(name)
        if own is None or own.shape != expected.shape:
            received = "nothing" if own is None else f"shape {own.shape}"
            return f"{name} has shape {expected.shape}, and {received} once the model is rebuilt"
        most = np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))
        with np.errstate(invalid="ignore"):
            bad = ~(np.abs(own - expected) <= _ROUNDING * most) & ~(own == expected)
        bad &= ~(np.isnan(own) & np.isnan(expected))
        if bad.any():
            place = int(np.argmax(bad))
            return f"{name} is {expected.flat[place]:.9g}, and {own.flat[place]:.9g} once the model is rebuilt"
    return None


def _is_equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() == other.tobytes() or np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def _rows_of(model: keras.Model) -> int:
    return next((int(tensor.shape[0]) for tensor in model.inputs if tensor.shape[0] is not None), ROWS)


def _numpy_dtype(dtype: Any) -> np.dtype:
    name = str(dtype)
    return np.dtype({"bfloat16": "float32", TEXT: "str"}.get(name, name))


def _drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return numbers in [-1, 1), or 0 and 1 for integers, which are rows of every table; texts of a word or two."""
    if dtype.kind == "U":
        return rng.choice(["", "the", "a word", "12"], shape)
    if dtype.kind == "f":
        return rng.uniform(-1.0, 1.0, shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def _drawn_labels(rng: np.random.Generator, column: Column, shape: tuple[int, ...]) -> np.ndarray:
    """Return labels that losses accept: classes; 0 and 1; or, for several numbers, one-hot rows."""
    dtype = np.dtype(column.dtype)
    if column.classes is not None:
        return rng.integers(0, column.classes, shape).astype(dtype)
    if column.size > 1:
        places = rng.integers(0, shape[-1], shape[:-1])
        return np.eye(shape[-1], dtype=dtype)[places]
    return rng.integers(0, 2, shape).astype(dtype)


def _drawn_batch(example: Batch, spec: DataSpec, rows: int) -> Batch:
    rng = np.random.default_rng(0)
    x = tuple(_drawn(rng, (rows, *array.shape[1:]), array.dtype) for array in example.x)
    y = tuple(
        absent((rows,)) if label is None else _drawn_labels(rng, label, (rows, *array.shape[1:]))
        for label, array in zip(spec.labels, example.y, strict=True)
    )
    weights = [
        absent((rows,)) if column is None else rng.uniform(0.5, 1.5, (rows, *array.shape[1:])).astype(column.dtype)
        for column, array in zip(spec.weights, flat_weight(example.weight), strict=True)
    ]
    return replace(example, x=x, y=y, weight=as_weight(weights))


def _cause(model: keras.Model, *, gradient: bool) -> str:
    if gradient and any(getattr(variable, "constraint", None) for variable in trainable_variables(model)):
        return ". Weights have constraints, which act after a step of the worker's optimizer, and this rule takes none"
    return ""


def _lost(model: keras.Model, difference: str, name: str = "model") -> ConfigurationError:
    return ConfigurationError(
        f"`{name}` must be the same once it is rebuilt from its configuration, its weights and its plain attributes, "
        f"as workers do. Received: {name}={model.name!r}: {difference}. Describe what is lost in `get_config`, or "
        "set `Monitoring(check_model=False)`"
    )


class Snapshot:
    """The state of Keras objects and of the random numbers of Python and NumPy.

    Args:
        roots: models, optimizers, losses and metrics, as single objects or in lists and dictionaries. Other objects of
            the user's that are attributes of these are not searched.
    """

    def __init__(self, *roots: Any) -> None:
        self._attributes: list[tuple[Any, dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._values: list[tuple[Any, np.ndarray]] = []
        self._seen: dict[int, Any] = {}  # holds the objects, so that no identity is used again
        pending: list[Any] = list(roots)
        while pending:
            found = pending.pop()
            value = _unwrapped(found)
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                pending.extend(self._recorded(value))
                if value is not found:
                    # What TensorFlow knows of the container: it refuses to export one that was changed without it.
                    self._attributes.append((found, dict(vars(found))))
                    pending.extend(vars(found).values())
        self._random = random.getstate(), np.random.get_state()

    def _recorded(self, value: Any) -> Iterator[Any]:
        """Record one object, and yield the objects that it holds."""
        import keras

        if isinstance(value, list | set):
            self._contents.append((value, type(value)(value) if type(value) in (list, set) else list(value)))
            yield from value
        elif isinstance(value, dict):
            self._contents.append((value, dict(value)))
            yield from value.values()
        elif isinstance(value, tuple):
            yield from value
        elif _is_of_keras(value):
            if isinstance(value, keras.Variable) and value_of(value) is not None:
                self._values.append((value, np.array(keras.ops.convert_to_numpy(value))))
            self._attributes.append((value, dict(vars(value))))
            yield from vars(value).values()

    def restore(self) -> None:
        """Put everything back; objects that were created since are no longer referred to."""
        for owner, attributes in self._attributes:
            own = vars(owner)
            for name in [name for name in own if name not in attributes]:
                del own[name]
            own.update(attributes)
        for container, content in self._contents:
            _refill(container, content)
        for variable, value in self._values:
            variable.assign(value)
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])


@contextmanager
def undone(*roots: Any) -> Iterator[None]:
    """Restore the state of ``roots`` when the context ends, also by an exception; see `Snapshot`."""
    snapshot = Snapshot(*roots)
    try:
        yield
    finally:
        snapshot.restore()


def _unwrapped(value: Any) -> Any:
    """Return the plain container within one of TensorFlow's, which it puts into the attributes of layers."""
    inner = getattr(type(value), "__module__", "").startswith("tensorflow") and (
        getattr(value, "__wrapped__", None) if isinstance(value, dict | tuple) else getattr(value, "_storage", None)
    )
    return inner if isinstance(inner, dict | list | tuple) else value


def _is_of_keras(value: Any) -> bool:
    """Return whether an object is of one of Keras' classes, or of a class of the user's that extends one."""
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    return any(kind.__module__.partition(".")[0] == "keras" for kind in type(value).__mro__)


def _refill(container: Any, content: Any) -> None:
    if len(container) == len(content) and all(one is other for one, other in zip(container, content, strict=True)):
        if not isinstance(container, dict):
            return
        if all(container[key] is value for key, value in content.items()):
            return
    # Keras' containers track what is added: the plain methods do not.
    if isinstance(container, dict):
        dict.clear(container)
        dict.update(container, content)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, content)
    else:
        list.__setitem__(container, slice(None), content)
