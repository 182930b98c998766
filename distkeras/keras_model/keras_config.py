"""The settings of ``keras.config`` that models read: they travel with a model, and the user's own stay as they are.

Layers, losses and metrics read them when they are created and while they compute. A Python worker of Spark has Keras'
defaults or those of an earlier job, and Keras keeps some of them per thread. The driver applies a model's settings
within `applied` only; a task may set them for good.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from distkeras.private_keras import dtype_policy, forget_dtype_policy
from distkeras.ps.errors import ConfigurationError

Settings = Mapping[str, Any]
"""Values of the settings by name, JSON-ready."""


def settings_now() -> dict[str, Any]:
    """Return the settings of this thread.

    Raises:
        ConfigurationError: the global dtype policy is not described by its name.
    """
    return {name: describe(read()) for name, (read, describe, _) in _functions().items()}


def use(settings: Settings) -> None:
    """Apply settings for good; only a task may do so."""
    functions = _functions()
    for name, value in settings.items():
        functions[name][2](value)


@contextlib.contextmanager
def applied(settings: Settings) -> Iterator[None]:
    """Apply settings in this context, and restore the former ones at its end."""
    functions = _functions()
    before = {name: functions[name][0]() for name in settings}
    changed = [name for name, value in settings.items() if functions[name][1](before[name]) != value]
    try:
        for name in changed:
            functions[name][2](settings[name])
        yield
    finally:
        for name in changed:
            functions[name][2](before[name])


def to_text(settings: Settings) -> bytes:
    """Return settings as JSON."""
    return json.dumps({"keras.config": dict(settings)}, sort_keys=True).encode()


def from_text(text: bytes) -> dict[str, Any]:
    """Reverse `to_text`; return an empty dictionary for any other text.

    Raises:
        ConfigurationError: a setting is unknown, or has an invalid value.
    """
    try:
        known = json.loads(text) if text else None
    except ValueError:
        return {}
    settings = known.get("keras.config") if isinstance(known, dict) else None
    if not isinstance(settings, dict):
        return {}
    kinds: dict[str, tuple[type, ...]] = {"epsilon": (float, int), "flash_attention": (bool,)}
    kinds["dtype_policy"] = (str, type(None))
    for name, value in settings.items():
        if name not in _functions() or not isinstance(value, kinds.get(name, (str,))):
            raise ConfigurationError(
                f"an archive's settings must be those of `keras.config`. Received: {name}={str(value)[:100]!r}"
            )
    return settings


def _functions() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], None]]]:
    """Return for each setting the function that reads it, one that makes the value JSON-ready, and one that sets it."""
    import keras

    config = keras.config
    plain = {
        name: (getattr(config, name), lambda value: value, getattr(config, f"set_{name}"))
        for name in ("floatx", "epsilon", "image_data_format")
    }
    return {
        **plain,
        "dtype_policy": (dtype_policy, _policy_name, _set_policy),
        "flash_attention": (lambda: config.is_flash_attention_enabled() is not False, bool, _set_flash_attention),
    }


def _policy_name(policy: Any) -> str | None:
    import keras

    if policy is None:
        return None
    name: str = policy.name
    with contextlib.suppress(ValueError, TypeError):
        if keras.dtype_policies.get(name) == policy:
            return name
    raise ConfigurationError(
        "`keras.config.dtype_policy()` must be one that its name describes, such as 'mixed_float16': workers set it by "
        f"its name. Received: {policy!r}"
    )


def _set_policy(policy: Any) -> None:
    import keras

    if policy is None:
        forget_dtype_policy()
    else:
        keras.config.set_dtype_policy(policy)


def _set_flash_attention(enabled: bool) -> None:
    import keras

    (keras.config.enable_flash_attention if enabled else keras.config.disable_flash_attention)()
