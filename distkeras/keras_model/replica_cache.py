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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

from distkeras.keras_model.archive import read_config
from distkeras.keras_model.compile_arguments import PackedObject
from distkeras.keras_model.optimizers import inner_optimizer
from distkeras.keras_model.recipe import Recipe, layer_names
from distkeras.keras_model.replica import KerasReplica
from distkeras.keras_model.table_replica import TableReplica
from distkeras.keras_model.tables import RowModel
from distkeras.keras_model.weights_file import ELSEWHERE, WEIGHTS, with_all_weights

if TYPE_CHECKING:
    import keras


_NUMBER = re.compile(r"_\d+$")
_ADDRESS = re.compile(r'("shared_object_id": )(\d+)')
#: Optimizers of Keras that read no name of a variable or of a layer.
_NAMELESS = {
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "Nadam", "RMSprop", "SGD",
    "ScheduleFreeAdamW",
}  # fmt: skip


def fingerprint(recipe: Recipe, config: Mapping[str, Any], model: keras.Model) -> bytes | None:
    """Return a digest of everything that is traced; None where a part is not Keras' own.

    A learning rate that is a number is left out: it is the value of a variable of the optimizer.

    Args:
        config: the model's configuration, as ``config.json`` in its archive has it.
        model: one that the recipe built.
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
    text = json.dumps([recipe.backend, _keras_settings(), parts, arguments], sort_keys=True)
    addresses: dict[str, int] = {}
    text = _ADDRESS.sub(lambda match: f"{match[1]}{addresses.setdefault(match[2], len(addresses))}", text)
    # Metrics of several outputs are named by layers.
    if len(model.outputs) == 1 and type(inner_optimizer(model.optimizer)).__name__ in _NAMELESS:
        text = _renamed(text, list(dict.fromkeys(layer_names(parts))))
    return hashlib.sha256(text.encode()).digest()


def _renamed(text: str, names: Sequence[str]) -> str:
    """Return ``text`` without the numbers in ``names``, which are its layers' names, if nothing else mentions them."""
    renamed = text
    for number, name in enumerate(names):
        renamed = renamed.replace(json.dumps(name), f'"#{number}"')
    if any(re.search(rf"\b{re.escape(name)}\b", renamed) for name in names):
        return text
    return renamed + json.dumps([_NUMBER.sub("", name) for name in names])


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
    traced = fingerprint(recipe, read_config(model_file), model)
    if traced is None or rows is None:
        return traced
    return traced + repr((rows.order, rows.tables)).encode()
