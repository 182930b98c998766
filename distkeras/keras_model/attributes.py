"""Attributes that a Keras object has and its configuration lacks: they travel next to the configuration.

A worker rebuilds objects from configurations, so a setting outside of a constructor, such as ``layer.factor = 0.1``,
would be the class's own again. The attributes of each object are compared with those of its rebuilt copy, and plain
values that differ are set on every copy: no list of such settings is needed. Other values, such as functions, do not
travel; the comparison of a step finds those that matter. A setting of Keras' own objects that is lost although it has
an effect, such as a regularizer that was set later, is an error that names it.
"""

from __future__ import annotations

import base64
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.keras_model.unsaved_values import named_layers
from distkeras.private_keras import HISTORY, OWN_FLAG, all_layers, created_variables
from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    import keras


Attributes = Sequence[Sequence[Any]]
"""JSON-ready: for each attribute the steps from the root to its owner, its name, and its encoded value."""

#: How a value that JSON lacks is encoded: a dictionary with this key, which names its kind.
_KIND = "distkeras_kind"


def attributes_of_model(given: keras.Model, rebuilt: keras.Model) -> Attributes:
    """Return the plain attributes of a model, its layers and their parts that a rebuilt copy lacks."""
    copies = named_layers(rebuilt)
    seen: set[int] = set()
    return [
        [[path, *steps], name, value]
        for path, layer in named_layers(given).items()
        if path in copies
        for steps, name, value in _differences(layer, copies[path], [], seen)
    ]


def attributes_of(given: Any, rebuilt: Any) -> Attributes:
    """Return the plain attributes of a loss, metric or optimizer and its parts that a rebuilt copy lacks."""
    return [list(entry) for entry in _differences(given, rebuilt, [], set())]


def set_attributes_of_model(model: keras.Model, attributes: Attributes) -> None:
    """Set the attributes that `attributes_of_model` returned; ConfigurationError if the model lacks an owner."""
    layers = named_layers(model) if attributes else {}
    for (path, *steps), name, value in attributes:
        if path not in layers:
            raise ConfigurationError(
                f"`model` must have the layer {path!r} once it is rebuilt. Received: no such layer"
            )
        _set(layers[path], steps, name, value)


def set_attributes(rebuilt: Any, attributes: Attributes) -> None:
    """Set the attributes that `attributes_of` returned."""
    for steps, name, value in attributes:
        _set(rebuilt, steps, name, value)


def _set(owner: Any, steps: Sequence[Any], name: str, value: Any) -> None:
    try:
        for step in steps:
            owner = owner[step] if isinstance(owner, list | tuple | Mapping) else vars(owner)[step]
        vars(owner)[name] = _decoded(value)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"`model` must have the attribute {name!r} of {steps} once it is rebuilt. Received: {error!r}"
        ) from error


def _differences(given: Any, rebuilt: Any, steps: list[Any], seen: set[int]) -> Iterator[tuple[list[Any], str, Any]]:
    """Yield owner, name and encoded value of each plain attribute of objects that a copy lacks."""
    if given is rebuilt or id(given) in seen:
        return
    if _is_object(given) and type(given) is type(rebuilt):
        seen.add(id(given))
        for name, value in list(vars(given).items()):
            if not isinstance(name, str) or _is_history(name):
                continue
            copy = vars(rebuilt).get(name, getattr(type(rebuilt), name, _ABSENT))
            if not _is_plain(value):
                yield from _differences(value, copy, [*steps, name], seen)
            elif (copy is _ABSENT or _is_plain(copy)) and not _is_same(value, copy):
                yield steps, name, _encoded(value)
    else:
        for step, part, copy in _parts(given, rebuilt):
            yield from _differences(part, copy, [*steps, step], seen)


def _parts(given: Any, rebuilt: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the keys or places of two containers, and their parts there."""
    if isinstance(given, Mapping) and isinstance(rebuilt, Mapping):
        yield from ((key, given[key], rebuilt[key]) for key in given if isinstance(key, str) and key in rebuilt)
    elif isinstance(given, list | tuple) and isinstance(rebuilt, list | tuple) and len(given) == len(rebuilt):
        yield from ((place, part, copy) for place, (part, copy) in enumerate(zip(given, rebuilt, strict=True)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    return value is None or isinstance(value, bool | int | float | str | re.Pattern | np.number | np.bool_)


def _is_same(one: Any, other: Any) -> bool:
    if other is _ABSENT:
        return False
    one, other = _encoded(one), _encoded(other)
    return bool(repr(one) == repr(other))


def _encoded(value: Any) -> Any:
    """Return a plain value, JSON-ready."""
    if isinstance(value, np.ndarray | np.number | np.bool_):
        array = np.asarray(value)
        data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        return {_KIND: type(value).__name__, "dtype": array.dtype.str, "shape": list(array.shape), "data": data}
    if isinstance(value, re.Pattern):
        return {_KIND: "pattern", "text": value.pattern, "flags": value.flags}
    if isinstance(value, tuple | set | frozenset):
        kind = next(kind.__name__ for kind in (tuple, set, frozenset) if isinstance(value, kind))
        parts = list(map(_encoded, value))
        return {_KIND: kind, "parts": parts if kind == "tuple" else sorted(parts, key=repr)}
    if isinstance(value, list):
        return list(map(_encoded, value))
    if isinstance(value, Mapping):
        return {key: _encoded(part) for key, part in value.items()}
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_decoded, value))
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: _decoded(part) for key, part in value.items()}
    if kind == "pattern":
        return re.compile(str(value["text"]), int(value["flags"]))
    containers: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
    if kind in containers:
        return containers[kind](map(_decoded, value["parts"]))
    array = np.frombuffer(base64.b64decode(value["data"]), np.dtype(str(value["dtype"])))
    array = array.reshape([int(extent) for extent in value["shape"]]).copy()
    return array if kind == "ndarray" else array[()]


_PLAIN = (type(None), bool, int, float, complex, str, bytes, re.Pattern, np.generic)
#: A value that is absent.
_ABSENT = object()


def _is_history(name: str) -> bool:
    """Return whether an attribute records an object's history or its place in a model, by its name."""
    return name in HISTORY or name.startswith("_self_")


def lost_from_model(given: keras.Model, rebuilt: keras.Model) -> str | None:
    """Describe the first setting of the user's model that the one from its archive lacks; None if there is none."""
    seen: set[int] = set()
    for layer, copy in zip(all_layers(given), all_layers(rebuilt), strict=False):
        for text in _lost(layer, copy, f"layer {layer.name!r}" if layer is not given else "the model", seen):
            return text
    for variable, copy in zip(given.weights, rebuilt.weights, strict=False):
        for text in _lost(variable, copy, f"variable {variable.path!r}", seen):
            return text
    return None


def lost(given: Any, rebuilt: Any) -> str | None:
    """Describe the first setting of an argument of ``compile`` that its rebuilt copy lacks; None if there is none."""
    return next(_lost(given, rebuilt, "", set()), None)


def _lost(given: Any, rebuilt: Any, where: str, seen: set[int]) -> Iterator[str]:
    """Yield differences of plain values, containers of them, and Keras objects' attributes; skip all others."""
    if given is rebuilt:
        return
    if _is_object(given) and _is_object(rebuilt) and type(given) is type(rebuilt):
        if id(given) not in seen:
            seen.add(id(given))
            yield from _lost_attributes(given, rebuilt, where, seen)
    elif isinstance(given, Mapping) and isinstance(rebuilt, Mapping):
        for key in (key for key in given if isinstance(key, str)):
            yield from _lost(given[key], rebuilt.get(key, _ABSENT), f"{where}[{key!r}]", seen)
    elif _is_list(given) and _is_list(rebuilt) and len(given) == len(rebuilt):
        for place, (part, copy) in enumerate(zip(given, rebuilt, strict=True)):
            yield from _lost(part, copy, f"{where}[{place}]", seen)
    elif _is_lost(given, rebuilt):
        yield _difference(given, rebuilt, where)


def _is_lost(given: Any, rebuilt: Any) -> bool:
    if not (_is_known(given) and _is_known(rebuilt)) or _is_equal(given, rebuilt):
        return False
    return rebuilt is not _ABSENT or not (_is_state(given) or not given)


def _difference(given: Any, rebuilt: Any, where: str) -> str:
    copy = "nothing" if rebuilt is _ABSENT else _shown(rebuilt)
    return f"{where or 'it'} is {_shown(given)}, and {copy} once it is rebuilt"


def _lost_attributes(given: Any, rebuilt: Any, where: str, seen: set[int]) -> Iterator[str]:
    import keras

    attributes = vars(rebuilt)
    for name, value in list(vars(given).items()):
        if not isinstance(name, str) or _is_history(name):
            continue
        if name == OWN_FLAG and isinstance(given, keras.Layer) and not any(created_variables(given)):
            continue  # the inner layers are compared themselves
        path = f"{where}.{name}".lstrip(".")
        if name not in attributes and inspect.isroutine(value) and hasattr(type(given), name):
            yield _difference(value, "the class's own", path)
        elif _is_setting(given, name):
            yield from _lost(value, attributes.get(name, _ABSENT), path, seen)


def _is_setting(owner: Any, name: str) -> bool:
    """Return whether an attribute may be a setting: in a user's class, only if a constructor has such an argument."""
    kind = type(owner)
    if kind.__module__.partition(".")[0] == "keras":
        return True
    arguments = {name for part in kind.__mro__ if "__init__" in vars(part) for name in _parameters(part)}
    return name in arguments or name.lstrip("_") in arguments


def _parameters(kind: type) -> Sequence[str]:
    try:
        return list(inspect.signature(kind.__init__).parameters)  # type: ignore[misc]  # inspected, not called
    except (TypeError, ValueError):
        return []


def _is_object(value: Any) -> bool:
    """Return whether a value is one of Keras' objects that settings are attributes of."""
    import keras

    kinds: tuple[type, ...] = (
        keras.Layer, keras.Variable, keras.Loss, keras.Metric, keras.optimizers.Optimizer, keras.Regularizer,
        keras.constraints.Constraint, keras.optimizers.schedules.LearningRateSchedule, keras.DTypePolicy,
        keras.quantizers.Quantizer,
    )  # fmt: skip
    if hasattr(keras.optimizers, "OptimizerMap"):  # missing in the oldest supported Keras
        kinds = (*kinds, keras.optimizers.OptimizerMap)
    return isinstance(value, kinds)


def _is_state(value: Any) -> bool:
    """Return whether a value is a variable or a list of them, which an object creates when it is first used.

    An optimizer may have None in the place of a weight for which it has no state.
    """
    import keras

    if _is_list(value):
        parts = [part for part in value if part is not None]
        return bool(parts or not value) and all(map(_is_state, parts))
    return isinstance(value, keras.Variable)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_known(value: Any) -> bool:
    if value is _ABSENT or isinstance(value, (*_PLAIN, np.ndarray)) or _is_object(value):
        return True
    return isinstance(value, list | tuple | Set) and all(map(_is_known, value))


def _is_equal(given: Any, rebuilt: Any) -> bool:
    if _is_object(given) or _is_object(rebuilt):
        return False  # their classes differ
    if isinstance(given, np.ndarray) or isinstance(rebuilt, np.ndarray):
        return np.array_equal(given, rebuilt)
    if isinstance(given, list | tuple | Set) and isinstance(rebuilt, list | tuple | Set):
        return len(given) == len(rebuilt) and (given == rebuilt or list(given) == list(rebuilt))
    return bool(given == rebuilt) or (given != given and rebuilt != rebuilt)  # a NaN


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, _PLAIN) else f"{type(value).__name__} {value!r}"
    return text if len(text) < 200 else text[:200] + "…"


def require_carried(given: keras.Model, rebuilt: keras.Model) -> None:
    """Raise ConfigurationError if workers cannot train the model, or would lose a setting when they rebuild it."""
    stateful = [layer.name for layer in all_layers(given) if getattr(layer, "stateful", False)]
    if stateful and any(tensor.shape[0] not in (None, 1) for tensor in given.inputs or ()):
        raise ConfigurationError(
            "`model` must not have stateful layers: the last mini-batch of an epoch may have fewer rows, and rows have "
            f"an order of their own in each epoch. Use stateful=False. Received: model={given.name!r} with {stateful}"
        )
    lost_properties = lost_from_model(given, rebuilt)
    if lost_properties is not None:
        raise ConfigurationError(
            "`model` must be described by its configuration and its weights, from which workers rebuild it: "
            "set what follows by arguments of the layer, or in `get_config`. "
            f"Received: model={given.name!r}, of which {lost_properties}"
        )
