"""Replicas that outlive a task: the next job with the same model and compilation finds its loop traced.

A Python worker of Spark runs task after task. To trace a model's loop takes longer than a small model's epoch, and in a
cross-validation over learning rates each of many fits would do it again. Only what is traced is kept: every task builds
its model, and the kept replica begins again with the state of that one.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from types import CodeType
from typing import TYPE_CHECKING, Any

from distkeras.keras_model.compile_arguments import PackedObject
from distkeras.keras_model.recipe import Recipe
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.table_replica import TableReplica
from distkeras.keras_model.tables import RowModel
from distkeras.keras_model.weights_file import ELSEWHERE, WEIGHTS, with_all_weights

if TYPE_CHECKING:
    import keras


#: Where a configuration names the layers that a tensor comes from.
_REFERENCES = {"keras_history", "input_layers", "output_layers"}
#: Attributes of a variable by which code can distinguish layers.
_NAMES = {"name", "_name", "path", "_path"}
_NUMBER = re.compile(r"_\d+$")


def fingerprint(recipe: Recipe, config: Mapping[str, Any], optimizer: keras.optimizers.Optimizer) -> bytes | None:
    """Return a digest of everything that is traced; None where a part is not Keras' own.

    A learning rate that is a number is left out: it is the value of a variable of the optimizer.

    Args:
        config: the model's configuration, as ``config.json`` in its archive has it.
        optimizer: an optimizer that the recipe built.
    """
    try:
        arguments = json.loads(json.dumps(dict(recipe.arguments), default=_config_of))
    except TypeError:
        return None
    # How the model was compiled when it was saved does not count: the recipe compiles it.
    parts = {name: value for name, value in config.items() if name != "compile_config"}
    if not _is_all_of_keras([parts, arguments]):
        return None
    settings = arguments["optimizer"]["config"] if isinstance(arguments.get("optimizer"), dict) else {}
    settings.pop("name", None)
    if isinstance(settings.get("learning_rate"), float):
        settings["learning_rate"] = None
    renaming = _Renaming(layers=_has_one_output(parts) and not _reads_names(optimizer))
    renamed = renaming.of(parts)
    if renaming.names & {word for text in _texts([renamed, arguments]) for word in re.split(r"\W+", text)}:
        renamed = _Renaming(layers=False).of(parts)
    text = json.dumps([recipe.backend, _keras_settings(), renamed, arguments], sort_keys=True)
    return hashlib.sha256(text.encode()).digest()


class _Renaming:
    """Numbers layers and shared objects by their first mention.

    Args:
        layers: number layers, too; not where there are several outputs, after which metrics are named.
    """

    def __init__(self, layers: bool) -> None:
        self._layers = layers
        self._numbers: dict[tuple[str, Any], int] = {}

    @property
    def names(self) -> set[str]:
        """Return the layers' names whose numbers were replaced."""
        return {value for kind, value in self._numbers if kind == "layer"}

    def of(self, config: Any) -> Any:
        """Return ``config`` with other numbers in names and in the place of addresses."""
        if isinstance(config, list):
            return [self.of(part) for part in config]
        if not isinstance(config, dict):
            return config
        layer = _is_layer(config.get("config"))
        parts = {}
        for key, value in config.items():
            if key == "shared_object_id":
                parts[key] = self._number("object", value)
            elif self._layers and (key in _REFERENCES or (key == "name" and (layer or _is_layer(config)))):
                parts[key] = self._renamed(value)
            else:
                parts[key] = self.of(value)
        return parts

    def _renamed(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._renamed(part) for part in value]
        if isinstance(value, dict):
            return {key: self._renamed(part) for key, part in value.items()}
        return [_NUMBER.sub("", value), self._number("layer", value)] if isinstance(value, str) else value

    def _number(self, kind: str, value: Any) -> int:
        return self._numbers.setdefault((kind, value), len(self._numbers))


def _is_layer(config: Any) -> bool:
    # Other objects' names say what they are.
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


def _texts(config: Any, *, settings: bool = False) -> Iterator[str]:
    """Yield every string in a configuration, and every key that is not the name of a setting."""
    if isinstance(config, str):
        yield config
    elif isinstance(config, dict):
        for key, value in config.items():
            if key not in ("module", "class_name"):
                if not settings and key not in ("config", "build_config"):
                    yield str(key)
                yield from _texts(value, settings=key == "config")
    elif isinstance(config, list):
        # A renamed name: its word alone says nothing of the layer.
        if len(config) == 2 and isinstance(config[0], str) and isinstance(config[1], int):
            return
        for value in config:
            yield from _texts(value)


def _reads_names(optimizer: Any) -> bool:
    """Return whether the code of an optimizer, below Keras' base classes, reads names of variables or layers."""
    import keras

    parts = [optimizer, *_inner_optimizers(optimizer)]
    classes = {kind for part in parts for kind in type(part).__mro__}
    # What Keras' own base classes read is set by no configuration.
    own = classes.difference(keras.optimizers.Optimizer.__mro__, (keras.optimizers.LossScaleOptimizer,))
    return any(_NAMES.intersection(_words(code)) for kind in own for code in _code_of(kind))


def _inner_optimizers(optimizer: Any) -> Iterator[Any]:
    import keras

    for value in vars(optimizer).values():
        if isinstance(value, keras.optimizers.Optimizer):
            yield value
            yield from _inner_optimizers(value)


def _code_of(kind: type) -> Iterator[CodeType]:
    for value in vars(kind).values():
        for function in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset", "func"))):
            if inspect.isfunction(inspect.unwrap(function) if callable(function) else function):
                yield inspect.unwrap(function).__code__


def _words(code: CodeType) -> Iterator[str]:
    """Yield the attributes that a function and those within it read, and their texts, as `getattr` takes them."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words(constant)
        elif isinstance(constant, str):
            yield constant


def _keras_settings() -> dict[str, str]:
    """Return what ``keras.config`` says in this process: functions without arguments that change nothing."""
    import keras

    settings = {}
    for name, function in sorted(vars(keras.config).items()):
        changes = name.startswith(("enable_", "disable_", "set_"))
        if inspect.isfunction(function) and not changes and not inspect.signature(function).parameters:
            value = function()
            settings[name] = value if isinstance(value, str) else repr(getattr(value, "name", value))
    return settings


def _config_of(value: Any) -> Any:
    if isinstance(value, PackedObject):
        return value.config
    raise TypeError(f"must have a configuration. Received: {value!r}")


def _is_all_of_keras(config: Any) -> bool:
    """Return whether every class and function that ``config`` names is Keras' own."""
    if isinstance(config, list):
        return all(map(_is_all_of_keras, config))
    if not isinstance(config, dict):
        return True
    if "class_name" in config and "config" in config:
        module = config.get("module")
        if module is not None and str(module).partition(".")[0] != "keras":
            return False
    return all(map(_is_all_of_keras, config.values()))


#: Most bytes of a replica that is kept: while a task builds its model, the process holds both.
_MOST_BYTES = 256 * 2**20
_PLAIN_MEMBERS = {"metadata.json", "config.json", WEIGHTS, ELSEWHERE}


class ReplicaCache:
    """Keeps the replica of the last task.

    Only models of Keras' own classes and functions are kept: others may have state that is not in their variables.
    """

    def __init__(self) -> None:
        self._kept: tuple[bytes, KerasReplica] | None = None
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, recipe: Recipe, model_file: bytes, rows: RowModel | None = None) -> Iterator[KerasReplica]:
        """Yield a replica as ``recipe`` builds it, for as long as the context lasts.

        Its weights and moving statistics are to be loaded; everything else is as it is in a new one. After an
        exception it is not kept. Weights that did not travel are read where the archive says that they are.

        Args:
            rows: its small tables, where it is cut.

        Raises:
            ConfigurationError: as `Recipe.build` says.
        """
        with self._lock:
            kept, self._kept = self._kept, None
        model = recipe.build(with_all_weights(model_file), to_train=True)
        key = _key(recipe, model_file, model, rows)
        replica = kept[1] if kept is not None and kept[0] == key and kept[1].begin_again(model) else None
        if replica is None:
            replica = KerasReplica(model) if rows is None else TableReplica(model, rows)
        del kept, model
        yield replica
        if key is not None and replica.nbytes <= _MOST_BYTES:
            with self._lock:
                self._kept = key, replica


def _key(recipe: Recipe, model_file: bytes, model: keras.Model, rows: RowModel | None) -> bytes | None:
    """Return what two replicas must share for one to replace the other; None if none can."""
    # None can where a part is the user's own, training goes on from an optimizer's state, or nothing is traced.
    if recipe.objects or recipe.optimizer_state or model.run_eagerly:
        return None
    with zipfile.ZipFile(BytesIO(model_file)) as archive:
        if not _PLAIN_MEMBERS.issuperset(archive.namelist()):
            return None
        config = json.loads(archive.read("config.json"))
    traced = fingerprint(recipe, config, model.optimizer)
    if traced is None or rows is None:
        return traced
    return traced + repr((rows.order, rows.tables)).encode()
