"""What makes one model's traced loop as good as another's: all but what Keras numbers, and what is set from outside.

Each `keras.Sequential` of a session gets another name, and so do its layers, and what objects share is told by their
addresses: by its configuration alone, no model is ever built twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distkeras.keras_model.compile_arguments import PackedObject
from distkeras.keras_model.recipe import Recipe

#: Where a configuration names the layers that a tensor comes from.
_REFERENCES = {"keras_history", "input_layers", "output_layers"}


@dataclass(frozen=True)
class Fingerprint:
    """Of a model and its compilation.

    Args:
        digest: of all that is traced.
        learning_rate: what the optimizer's variable of that name begins with; None: a schedule, or another object's.
    """

    digest: bytes
    learning_rate: float | None


def fingerprint(recipe: Recipe, config: Mapping[str, Any]) -> Fingerprint | None:
    """Of the model whose archive has ``config`` in its ``config.json``; None where a part is not Keras' own."""
    try:
        arguments = json.loads(json.dumps(dict(recipe.arguments), default=_config_of))
    except TypeError:
        return None
    # How the model was compiled when it was saved does not count: the recipe compiles it.
    parts = {name: value for name, value in config.items() if name != "compile_config"}
    if not _is_all_of_keras([parts, arguments]):
        return None
    rate = None
    optimizer = arguments.get("optimizer")
    if isinstance(optimizer, dict):
        settings = optimizer["config"]
        settings.pop("name", None)
        if isinstance(settings.get("learning_rate"), float):
            rate = settings.pop("learning_rate")
    text = json.dumps([recipe.backend, _Renaming(_has_one_output(parts)).of(parts), arguments], sort_keys=True)
    return Fingerprint(hashlib.sha256(text.encode()).digest(), rate)


class _Renaming:
    """Numbers layers and shared objects by their first mention.

    Args:
        layers: number layers, too; where there are several outputs, metrics are named by them.
    """

    def __init__(self, layers: bool) -> None:
        self._layers = layers
        self._numbers: dict[tuple[str, Any], int] = {}

    def of(self, config: Any) -> Any:
        """``config`` with numbers in the place of names and addresses."""
        if isinstance(config, list):
            return [self.of(part) for part in config]
        if not isinstance(config, dict):
            return config
        layer = _is_layer(config.get("config"))
        found = {}
        for key, value in config.items():
            if key == "shared_object_id":
                found[key] = self._number("object", value)
            elif self._layers and (key in _REFERENCES or (key == "name" and (layer or _is_layer(config)))):
                found[key] = self._renamed(value)
            else:
                found[key] = self.of(value)
        return found

    def _renamed(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._renamed(part) for part in value]
        if isinstance(value, dict):
            return {key: self._renamed(part) for key, part in value.items()}
        return self._number("layer", value) if isinstance(value, str) else value

    def _number(self, kind: str, value: Any) -> int:
        return self._numbers.setdefault((kind, value), len(self._numbers))


def _is_layer(config: Any) -> bool:
    """Whether that is the configuration of a layer, or of a model; other objects have names that say what they are."""
    return isinstance(config, dict) and "name" in config and ("trainable" in config or "batch_shape" in config)


def _has_one_output(config: Mapping[str, Any]) -> bool:
    if config["class_name"] == "Sequential":
        return True
    outputs = config["config"].get("output_layers")
    return isinstance(outputs, list) and _strings(outputs) == 1


def _strings(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_strings, value))
    return int(isinstance(value, str)) if not isinstance(value, dict) else 2  # several, by name


def _config_of(value: Any) -> Any:
    if isinstance(value, PackedObject):
        return value.config
    raise TypeError(f"must have a configuration. Received: {value!r}")


def _is_all_of_keras(config: Any) -> bool:
    """Whether every class and function that ``config`` names is Keras' own."""
    if isinstance(config, list):
        return all(map(_is_all_of_keras, config))
    if not isinstance(config, dict):
        return True
    if "class_name" in config and "config" in config:
        module = config.get("module")
        if module is not None and str(module).partition(".")[0] != "keras":
            return False
    return all(map(_is_all_of_keras, config.values()))
