"""The numbers that the driver may set for all workers during a job: learning rate, and variables that are not trained.

Each number has a place, which is the same in every process that builds the model: place 0 is the learning rate, and the
elements of the variables follow, in the order of the layers.

A callback sets them in the driver's copy of the model: the copy before a hook is compared with the copy after it. Any
other change would be without effect on the workers, and is an error at the first one.

Importing this module does not load Keras.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distkeras.keras_model.optimizers import inner_optimizer
from distkeras.keras_model.variables import numpy_value
from distkeras.private_keras import all_layers, created_variables, rate_of, value_of
from distkeras.ps.center.driver_values import VALUES_MAX
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.loop import NO_ROWS

if TYPE_CHECKING:
    import keras


class Settable(NamedTuple):
    """A variable that the driver may set.

    Args:
        name: what it is called in texts.
        variable: of Keras or of its backend; None: the learning rate is a schedule.
        start: the place of its first element.
        size: the number of its elements.
        obstacle: why workers would not use another value; empty: they would.
    """

    name: str
    variable: Any
    start: int
    size: int
    obstacle: str = ""

    def value(self) -> np.ndarray:
        """Return a copy of its elements, float64 ``(size,)``."""
        import keras

        if self.variable is None:
            return np.zeros(self.size)
        return np.array(keras.ops.convert_to_numpy(self.variable), np.float64).reshape(-1)

    def assign(self, value: np.ndarray) -> None:
        """Set its elements, float64 ``(size,)``."""
        if self.variable is not None:
            self.variable.assign(value.reshape(tuple(self.variable.shape)).astype(_numpy_dtype(self.variable)))


def settable(model: keras.Model, obstacle: str = "") -> list[Settable]:
    """Return what may be set of a compiled model, in the order of the places.

    Args:
        obstacle: why only the learning rate can be set; empty: all can be.
    """
    import keras

    rate = rate_of(inner_optimizer(model.optimizer))
    named = [("the learning rate", rate if isinstance(rate, keras.Variable) else None, "")]
    known = {id(variable) for variable in [*model.trainable_variables, rate]}
    for layer in all_layers(model):
        for variable in created_variables(layer)[1]:
            if id(variable) not in known:
                known.update((id(variable), id(value_of(variable))))
                named.append((f"variable {variable.path!r}", variable, obstacle))
    if keras.backend.backend() == "jax":
        obstacle = obstacle or "JAX compiles it into the step as a constant, unless it is a weight of a layer"
    named += [(f"variable {name!r}", variable, obstacle) for name, variable in _untracked(model, known)]
    found, start = [], 0
    for name, variable, why in named:
        size = 1 if variable is None else math.prod(tuple(variable.shape))
        found.append(Settable(name, variable, start, size, why))
        start += size
    return found


def assign_rows(variables: Sequence[Settable], rows: np.ndarray) -> None:
    """Set numbers of a model.

    Args:
        variables: from `settable`.
        rows: float64 ``(numbers, 2)``: place and value, places ascending.

    Raises:
        ConfigurationError: the model has no such place.
    """
    end = variables[-1].start + variables[-1].size
    if len(rows) and rows[-1, 0] >= end:
        raise ConfigurationError(
            f"the model must have the variables that a callback on the driver has set. Received: {end} places, "
            f"and a value for place {int(rows[-1, 0])}"
        )
    for variable in variables:
        own = (
            rows[(rows[:, 0] >= variable.start) & (rows[:, 0] < variable.start + variable.size)] if len(rows) else rows
        )
        if len(own):
            value = variable.value()
            value[own[:, 0].astype(np.int64) - variable.start] = own[:, 1]
            variable.assign(value)


def _untracked(model: keras.Model, known: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield variables that a layer or the loss uses and Keras does not track, by a name; ``known`` grows."""
    roots: list[tuple[str, Any]] = [("loss", getattr(model, "loss", None)), ("compute_loss", model.compute_loss)]
    for layer in all_layers(model):
        roots += [(f"{layer.name}.{name}", value) for name, value in _attributes(layer)]
    pending, seen = list(reversed(roots)), set[int]()
    while pending:
        name, value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_variable(value):
            if id(value) not in known and id(value_of(value)) not in known:
                known.update((id(value), id(value_of(value))))
                yield name, value
        else:
            pending += reversed([(f"{name}.{part}" if part else name, inner) for part, inner in _parts(value)])


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function, an object of a loss, or a container refers to."""
    import keras

    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(place), part) for place, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from (("", part) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.MethodType):
        yield "", value.__func__
    elif isinstance(value, types.FunctionType) and not value.__module__.startswith("keras."):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # it is empty
                continue
        yield from ((name, value.__globals__[name]) for name in value.__code__.co_names if name in value.__globals__)
    elif isinstance(value, keras.losses.Loss):
        yield from _attributes(value)
        yield "call", value.call


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    yield from ((name, value) for name, value in list(vars(owner).items()) if not name.startswith("_"))


def _is_variable(value: Any) -> bool:
    import keras

    if isinstance(value, keras.Variable):
        return True
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return isinstance(value, tf.Variable)
    return False


def _numpy_dtype(variable: Any) -> Any:
    dtype = variable.dtype
    return dtype if isinstance(dtype, str) and dtype != "bfloat16" else getattr(dtype, "as_numpy_dtype", np.float32)


_PLAIN = (bool, int, float, str, type(None))
_ADVICE = (
    "Learning rate and variables that are not trained (a `keras.Variable`, `add_weight(trainable=False)`) reach them. "
    "For anything else, end the job in the callback (`self.model.stop_training = True`), change the model, and train "
    "it again"
)


class CopyState:
    """The state of a copy of the model, to be compared with a later one.

    Args:
        variables: what can be set of it.
    """

    def __init__(self, model: keras.Model, variables: Sequence[Settable]) -> None:
        self._model, self._optimizer, self._settable = model, model.optimizer, variables
        self._values = [variable.value() for variable in self._settable]
        self._weights = [np.array(numpy_value(weight)) for weight in model.trainable_variables]
        self._flags = _flags(model)
        self._attributes = _plain_attributes(model)
        self._iterations = int(model.optimizer.iterations)

    def changes(self, author: str) -> tuple[np.ndarray, list[str]]:
        """Return what has changed and can be carried: rows of place and value, and its names.

        Args:
            author: whose hook it was, for texts.

        Raises:
            ConfigurationError: something has changed that cannot be carried, or more than `VALUES_MAX` numbers.
        """
        self._require_unchanged(author)
        rows, names = [], []
        for variable, before in zip(self._settable, self._values, strict=True):
            after = variable.value()
            moved = np.flatnonzero(before != after)
            if not moved.size:
                continue
            _require_carried(author, variable, after)
            rows.append(np.stack([moved + float(variable.start), after[moved]], axis=1))
            shown = f" ({after[0]:.6g})" if variable.size == 1 else f" ({moved.size} of {variable.size} numbers)"
            names.append(variable.name + shown)
        found = np.concatenate(rows) if rows else NO_ROWS
        if len(found) > VALUES_MAX:
            raise _refused(author, f"{len(found)} numbers at once: at most {VALUES_MAX} can be set")
        return found, names

    def _require_unchanged(self, author: str) -> None:
        model = self._model
        if model.optimizer is not self._optimizer:
            raise _refused(author, "how the model is compiled")
        flags = _flags(model)
        changed = next((name for name, flag in self._flags.items() if flags.get(name, flag) is not flag), None)
        if changed is not None:
            raise _refused(author, f"`trainable` of {changed} to {flags[changed]}")
        weights = zip(model.trainable_variables, self._weights, strict=True)
        moved = (now.path for now, old in weights if not np.array_equal(old, numpy_value(now), equal_nan=True))
        first = next(moved, None)
        if first is not None:
            raise _refused(author, f"weights during training, first {first!r}; it may do so in `on_train_end`")
        attributes = _plain_attributes(model)
        for name, value in self._attributes.items():
            now = attributes.get(name, value)
            if type(now) is not type(value) or now != value:
                raise _refused(
                    author, f"`{name}` from {value!r} to {now!r}, which a step reads once, when it is traced"
                )
        if int(model.optimizer.iterations) != self._iterations:
            raise _refused(author, "the optimizer's count of steps")


def _require_carried(author: str, variable: Settable, after: np.ndarray) -> None:
    if not np.isfinite(after).all():
        raise _refused(author, f"{variable.name} to a value that is not finite")
    if variable.obstacle:
        raise _refused(author, f"{variable.name}: {variable.obstacle}")


def _refused(author: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"`callbacks` must not change what cannot be sent to the workers, which have models of their own. {_ADVICE}. "
        f"Received: {author} has changed {what}"
    )


def _flags(model: keras.Model) -> dict[str, bool]:
    flags = {f"layer {layer.name!r} ({number})": layer.trainable for number, layer in enumerate(all_layers(model))}
    return flags | {
        f"variable {weight.path!r} ({number})": weight.trainable for number, weight in enumerate(model.weights)
    }


def _plain_attributes(model: keras.Model) -> dict[str, Any]:
    """Return the public attributes with plain values of the optimizer, the loss and the layers, by their names."""
    owners: dict[str, Any] = {"optimizer": model.optimizer, "loss": getattr(model, "loss", None)}
    inner = getattr(model.optimizer, "inner_optimizer", None)
    owners |= {"optimizer.inner_optimizer": inner}
    for number, layer in enumerate(all_layers(model)):
        owners[f"{layer.name} ({number})" if layer is not model else "model"] = layer
    return {
        f"{owner}.{name}": value
        for owner, thing in owners.items()
        for name, value in getattr(thing, "__dict__", {}).items()
        if not name.startswith(("_", "stop_")) and isinstance(value, _PLAIN)
    }
