"""Classes and functions that Keras knows by a registered name, as JSON: what is saved of them, and no code."""

from __future__ import annotations

import json
from typing import Any

from distkeras.ps.errors import ConfigurationError


def config_of(value: Any, name: str) -> Any:
    """What Keras describes ``value`` by, JSON-ready.

    Args:
        value: an object, class or function.
        name: of the caller's argument.

    Raises:
        ConfigurationError: it is neither Keras' own nor registered.
    """
    import keras

    own = getattr(value, "__module__", type(value).__module__).split(".")[0] == "keras"
    kinds = [kind for kind in (value, type(value)) if callable(kind)]
    if own or any(keras.saving.get_registered_name(kind) in keras.saving.get_custom_objects() for kind in kinds):
        config = keras.saving.serialize_keras_object(value)
        if json.loads(json.dumps(config)) == config:
            return config
    raise ConfigurationError(
        f"`{name}` must be what Keras can describe, to be saved: decorate your own classes and functions with "
        f"`keras.saving.register_keras_serializable()`. Received: {name}={value!r}"
    )


def object_of(config: Any, name: str) -> Any:
    """What `config_of` was given.

    Raises:
        ConfigurationError: Keras does not know it in this process.
    """
    import keras

    try:
        return keras.saving.deserialize_keras_object(config)
    except (TypeError, ValueError) as error:
        registered = config.get("registered_name") if isinstance(config, dict) else config
        raise ConfigurationError(
            f"`{name}` must be known to Keras in this process: import the module that registers it before loading. "
            f"Received: {name} of the registered name {registered!r}; Keras said: {error}"
        ) from error
