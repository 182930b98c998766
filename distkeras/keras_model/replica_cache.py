"""Replicas that outlive a task: the next job with the same model and compilation reuses the traced loop.

A Python worker of Spark runs task after task. Tracing a model's loop takes longer than a small model's epoch, and every
fit of a cross-validation over learning rates would repeat it. Only the traced functions are reused: every task builds
its model, and the cached replica takes over the state of this model.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

from distkeras.keras_model.archive import read_config
from distkeras.keras_model.optimizers import inner_optimizer
from distkeras.keras_model.recipe import PackedObject, Recipe, layer_names
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.table_replica import TableReplica
from distkeras.keras_model.tables import RowModel
from distkeras.keras_model.unsaved_values import VALUES, read_flags
from distkeras.keras_model.weights_file import ELSEWHERE, WEIGHTS, with_all_weights

if TYPE_CHECKING:
    import keras


_NUMBER = re.compile(r"_\d+$")
_ADDRESS = re.compile(r'("shared_object_id": )(\d+)')
#: Keras optimizers that do not read the name of a variable or of a layer.
_NAME_INDEPENDENT = {
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "Nadam", "RMSprop", "SGD",
    "ScheduleFreeAdamW",
}  # fmt: skip


def fingerprint(recipe: Recipe, config: Mapping[str, Any], model: keras.Model) -> bytes | None:
    """Return a digest of everything that is traced; None if a part is not Keras' own.

    A learning rate that is a number is left out: it is the value of a variable of the optimizer.

    Args:
        config: the model's configuration, which is ``config.json`` in its archive.
        model: one that the recipe built.
    """
    try:
        arguments = json.loads(json.dumps(dict(recipe.arguments), default=_config_of))
    except TypeError:
        return None
    # The compilation in the archive is left out: the recipe compiles the model.
    parts = {name: value for name, value in config.items() if name != "compile_config"}
    if not _is_all_of_keras([parts, arguments]):
        return None
    settings = arguments["optimizer"]["config"] if isinstance(arguments.get("optimizer"), dict) else {}
    settings.pop("name", None)
    if isinstance(settings.get("learning_rate"), float):
        settings["learning_rate"] = None
    text = json.dumps([recipe.backend, _keras_settings(), parts, arguments], sort_keys=True)
    addresses: dict[str, int] = {}
    text = _ADDRESS.sub(lambda match: f"{match[1]}{addresses.setdefault(match[2], len(addresses))}", text)
    # With several outputs, metrics are named after layers.
    if len(model.outputs) == 1 and type(inner_optimizer(model.optimizer)).__name__ in _NAME_INDEPENDENT:
        text = _renamed(text, list(dict.fromkeys(layer_names(parts))))
    return hashlib.sha256(text.encode()).digest()


def _renamed(text: str, names: Sequence[str]) -> str:
    """Return ``text`` without the numbers in its layers' ``names``, or unchanged if anything else mentions a name."""
    renamed = text
    for number, name in enumerate(names):
        renamed = renamed.replace(json.dumps(name), f'"#{number}"')
    if any(re.search(rf"\b{re.escape(name)}\b", renamed) for name in names):
        return text
    return renamed + json.dumps([_NUMBER.sub("", name) for name in names])


def _keras_settings() -> dict[str, str]:
    """Return the values of the getters of ``keras.config``: its functions without arguments that change nothing."""
    import keras

    settings = {}
    for name, function in sorted(vars(keras.config).items()):
        changes = name.startswith(("enable_", "disable_", "set_"))
        if inspect.isfunction(function) and not changes and not inspect.signature(function).parameters:
            value = function()
            settings[name] = value if isinstance(value, str) else repr(getattr(value, "name", value))
    return settings


def _config_of(value: Any) -> Any:
    if isinstance(value, PackedObject) and not value.attributes:
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


#: The most bytes of a cached replica: while a task builds its model, the process holds both.
_BYTES_MAX = 256 * 2**20
_PLAIN_MEMBERS = {"metadata.json", "config.json", WEIGHTS, ELSEWHERE, VALUES}


class ReplicaCache:
    """Caches the replica of the last task.

    Only models of Keras' own classes and functions are cached: others may have state that is not in their variables.
    """

    def __init__(self) -> None:
        self._cached: tuple[bytes, KerasReplica] | None = None
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, recipe: Recipe, model_file: bytes, rows: RowModel | None = None) -> Iterator[KerasReplica]:
        """Yield a replica as ``recipe`` builds it, and cache it when the context ends without an exception.

        The caller must load its weights and moving statistics; everything else is as in a new one. Weights that did
        not travel are read from the file that the archive names.

        Args:
            rows: its small tables, if the model is cut.

        Raises:
            ConfigurationError: as `Recipe.build` says.
        """
        with self._lock:
            cached, self._cached = self._cached, None
        model = recipe.build(with_all_weights(model_file), to_train=True)
        key = _key(recipe, model_file, model, rows)
        replica = cached[1] if cached is not None and cached[0] == key and cached[1].begin_again(model) else None
        if replica is None:
            replica = KerasReplica(model) if rows is None else TableReplica(model, rows)
        del cached, model
        yield replica
        if key is not None and replica.nbytes <= _BYTES_MAX:
            with self._lock:
                self._cached = key, replica


def _key(recipe: Recipe, model_file: bytes, model: keras.Model, rows: RowModel | None) -> bytes | None:
    """Return a key that two replicas share if one can replace the other; None if this one cannot be cached."""
    # Not if a part is the user's own, training continues from an optimizer's state, or nothing is traced.
    if recipe.objects or recipe.optimizer_state or model.run_eagerly:
        return None
    with zipfile.ZipFile(BytesIO(model_file)) as archive:
        if not _PLAIN_MEMBERS.issuperset(archive.namelist()):
            return None
    traced = fingerprint(recipe, read_config(model_file), model)
    if traced is None:
        return traced
    traced += repr(read_flags(model_file)).encode()
    return traced if rows is None else traced + repr((rows.order, rows.tables)).encode()
