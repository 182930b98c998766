"""The arguments of ``compile``, packed for workers, and checks that name the invalid argument."""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from distkeras.data.losses import CHOSEN_BY_LABELS
from distkeras.keras_model.attributes import Attributes, attributes_of, set_attributes
from distkeras.keras_model.carried import lost
from distkeras.ps.errors import ConfigurationError, headline
from distkeras.ps.validate import require_number

#: The trainer's name of an argument, if it differs from that of ``compile``.
_KEYWORDS = {"optimizer": "worker_optimizer"}
_KERAS_ERRORS = (TypeError, ValueError, KeyError, AttributeError, NotImplementedError)


@dataclass(frozen=True)
class PackedObject:
    """A Keras object as its configuration and the plain attributes that this lacks.

    An object that has been used holds tensors, and cannot be sent.
    """

    config: dict[str, Any]
    attributes: Attributes = ()


def pack(name: str, value: Any) -> Any:
    """Return an argument of ``compile`` with Keras' objects as `PackedObject`; ConfigurationError if it is invalid."""
    import keras

    keyword = _KEYWORDS.get(name, name)
    if isinstance(value, Mapping | list | tuple) and (value or name in ("metrics", "weighted_metrics")):
        if isinstance(value, Mapping):
            return {key: pack(name, part) for key, part in value.items()}
        return [pack(name, part) for part in value]
    if name == "loss_weights":
        return require_number(name, value, -math.inf)
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, type):
        raise ConfigurationError(f"`{keyword}` must be made: `{value.__name__}()`. Received: the class {value!r}")
    if hasattr(value, "get_config"):
        try:
            return PackedObject(keras.saving.serialize_keras_object(value))
        except _KERAS_ERRORS as error:
            raise ConfigurationError(
                f"`{keyword}` must be described by its `get_config`. Received: {value!r}; "
                f"Keras said: {headline(str(error))}"
            ) from error
    if callable(value) and name != "optimizer":
        return value
    expected = (
        "an optimizer of Keras 3, or the name of one" if name == "optimizer" else "a name, a function or an object"
    )
    raise ConfigurationError(f"`{keyword}` must be {expected}. Received: {keyword}={value!r} of {type(value)}")


def with_attributes(name: str, given: Any, packed: Any) -> Any:
    """Return ``packed``, of ``given``, with the plain attributes of each object that its configuration lacks."""
    if isinstance(packed, Mapping):
        return {key: with_attributes(name, given[key], part) for key, part in packed.items()}
    if isinstance(packed, list):
        return [with_attributes(name, one, part) for one, part in zip(given, packed, strict=True)]
    if not isinstance(packed, PackedObject):
        return packed
    try:
        rebuilt = unpack(name, packed)
    except ConfigurationError:  # as in `require_described`
        return packed
    return replace(packed, attributes=attributes_of(given, rebuilt))


def require_described(name: str, given: Any, packed: Any) -> None:
    """Raise ConfigurationError if ``given``, an argument of ``compile``, has an attribute that is not in ``packed``."""
    try:
        rebuilt = unpack(name, packed)
    except ConfigurationError:  # the classes may be known to the workers only; building the model raises a better error
        return
    keyword = _KEYWORDS.get(name, name)
    lost_properties = lost(given, rebuilt)
    if lost_properties is not None:
        raise ConfigurationError(
            f"`{keyword}` must be described by its `get_config`, from which workers rebuild it. "
            f"Received: {given!r}, of which {lost_properties}"
        )


def classes_in(value: Any) -> Iterator[type]:
    """Yield the user's own classes among the objects of an argument, which travel by value like functions."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from classes_in(part)
    elif hasattr(value, "get_config") and type(value).__module__.partition(".")[0] != "keras":
        yield type(value)


def configurations_in(packed: Any) -> Iterator[dict[str, Any]]:
    """Yield the configurations of Keras' objects in arguments that `pack` has returned."""
    if isinstance(packed, Mapping):
        packed = list(packed.values())
    if isinstance(packed, list):
        for part in packed:
            yield from configurations_in(part)
    elif isinstance(packed, PackedObject):
        yield packed.config


def unpack(name: str, value: Any) -> Any:
    """Reverse `pack`; raise ConfigurationError for a class or name that Keras does not know."""
    if isinstance(value, Mapping):
        return {key: unpack(name, part) for key, part in value.items()}
    if isinstance(value, list):
        return [unpack(name, part) for part in value]
    if isinstance(value, str):
        _require_known(name, value)
    if not isinstance(value, PackedObject):
        return value
    import keras

    try:
        rebuilt = keras.saving.deserialize_keras_object(copy.deepcopy(value.config))  # some classes modify it
        set_attributes(rebuilt, value.attributes)
        return rebuilt
    except _KERAS_ERRORS as error:
        raise ConfigurationError(
            f"`{_KEYWORDS.get(name, name)}` must be of Keras' classes and of registered ones: decorate your own with "
            "`@keras.saving.register_keras_serializable()`, or name them in `custom_objects`. "
            f"Received: {value.config.get('class_name')}; Keras said: {headline(str(error))}"
        ) from error


def _require_known(name: str, text: str) -> None:
    import keras

    kinds = {"optimizer": keras.optimizers, "loss": keras.losses}
    kinds |= dict.fromkeys(("metrics", "weighted_metrics"), keras.metrics)
    if name not in kinds or text.lower() in CHOSEN_BY_LABELS.get(name, ()):
        return
    try:
        kinds[name].get(text)
    except _KERAS_ERRORS:
        known = {public.lower(): public for public in dir(kinds[name]) if not public.startswith("_")}
        near = difflib.get_close_matches(text.lower(), known, 1)
        hint = f" (or is it {known[near[0]]!r}?)" if near else ""
        keyword = _KEYWORDS.get(name, name)
        raise ConfigurationError(
            f"`{keyword}` must be a name that Keras knows, or a registered one{hint}. Received: {text!r}"
        ) from None
