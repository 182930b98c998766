"""Attributes that a Keras object has and its configuration lacks: they travel next to the configuration.

A worker rebuilds objects from configurations, so a setting outside of a constructor, such as ``layer.factor = 0.1``,
would be the class's own again. The attributes of each object are compared with those of its rebuilt copy, and plain
values that differ are set on every copy: no list of such settings is needed. Other values, such as functions, do not
travel; the comparison of a step finds those that matter.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.keras_model.carried import ABSENT, is_history, is_object
from distkeras.keras_model.unsaved_values import named_layers
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
    if is_object(given) and type(given) is type(rebuilt):
        seen.add(id(given))
        for name, value in list(vars(given).items()):
            if not isinstance(name, str) or is_history(name):
                continue
            copy = vars(rebuilt).get(name, getattr(type(rebuilt), name, ABSENT))
            if not _is_plain(value):
                yield from _differences(value, copy, [*steps, name], seen)
            elif (copy is ABSENT or _is_plain(copy)) and not _is_same(value, copy):
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
    if other is ABSENT:
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
