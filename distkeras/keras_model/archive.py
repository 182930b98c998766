"""Keras models as bytes, and the checks before such bytes are opened in another process.

Keras is imported inside the functions: an environment variable that Keras reads once, on its first import,
chooses the backend, and a task must set it before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkeras import private_keras
from distkeras.keras_model import keras_config
from distkeras.keras_model.attributes import Attributes, attributes_of_model, set_attributes_of_model
from distkeras.keras_model.keras_config import Settings
from distkeras.keras_model.optimizers import inner_optimizer
from distkeras.keras_model.unsaved_values import (
    add_flags,
    add_metadata,
    metadata_in,
    read_flags,
    restore_flags,
    set_values,
    split_values,
    with_unsaved_values,
)
from distkeras.ps.errors import ConfigurationError, headline
from distkeras.ps.validate import invalid, require_choice

if TYPE_CHECKING:
    import keras

#: The backends of Keras that can train; its other ones only predict.
BACKENDS = ("tensorflow", "jax", "torch")

#: Held while a model of the user's is read, or takes a step that is undone: several threads may train one model.
USING_MODELS = threading.RLock()

#: The key of `with_attributes` in an archive's metadata.
_ATTRIBUTES = "distkeras_attributes"

#: Keras' errors for an archive that it cannot write or read: a missing class, a refused lambda, damage.
_ARCHIVE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, OSError, zipfile.BadZipFile)


def to_bytes(model: keras.Model, name: str = "model", *, plain: bool = False) -> bytes:
    """Return a model as a ``.keras`` archive: its configuration, weights, and the optimizer's state if it has one.

    Args:
        name: of the argument, for errors.
        plain: as `keras.Model.save` writes it, which merges the factors of LoRA into the kernel. Else `from_bytes`
            returns a model with the same values.

    Raises:
        ConfigurationError: it is not a Keras model; the model or one of its layers has no weights yet; a part of it
            cannot be described by its configuration; or Keras runs on a backend that does not train.
    """
    running_backend()
    require_model(model, name)
    unbuilt = next((layer.name for layer in _layers(model) if not layer.built), None)
    if unbuilt is not None:
        raise ConfigurationError(
            f"`{name}` must be built: give it an `Input`, or call it once on data. "
            f"Received: {name}={model.name!r}, of which {unbuilt!r} is not built"
        )
    with tempfile.TemporaryDirectory(prefix="distkeras-") as directory:
        path = Path(directory, "model.keras")
        try:
            with USING_MODELS:
                model.save(path)
        except _ARCHIVE_ERRORS as error:
            raise ConfigurationError(
                f"`{name}` must be one that Keras can save. Received: {name}={model.name!r}; "
                f"Keras said: {headline(str(error))}"
            ) from error
        add_flags(path, model)
        data = path.read_bytes()
    return data if plain else _with_settings(with_unsaved_values(data, model))


def with_optimizer(model: keras.Model, name: str = "model") -> bytes:
    """Return a model as a ``.keras`` archive that can be loaded compiled.

    An optimizer that has taken no step yet is built first: Keras cannot load an archive with an unbuilt one.

    Raises:
        ConfigurationError: Keras cannot save the model.
    """
    import keras

    if isinstance(model, keras.Model) and model.compiled and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return to_bytes(model, name)


def to_save(model: keras.Model) -> bytes:
    """Return a model as `with_optimizer` does, with the attributes that its configuration lacks."""
    data = with_optimizer(model)
    return with_attributes(data, attributes_of_model(model, from_bytes(data)))


def part_to_bytes(part: keras.Model, objects: Mapping[str, Any] | None = None) -> bytes:
    """Return a model of another one's layers as `to_bytes` does, with the attributes that their configurations lack.

    Args:
        objects: custom objects of the model, by registered name.
    """
    data = to_bytes(part)
    return with_attributes(data, attributes_of_model(part, from_bytes(data, objects)))


def require_model(value: Any, name: str = "model") -> None:
    """Raise ConfigurationError unless ``value`` is a model of Keras 3, built or not."""
    import keras

    if not isinstance(value, keras.Model):
        raise ConfigurationError(f"`{name}` must be a keras.Model. Received: {name} of {type(value)}")


def require_inputs(model: Any) -> None:
    """Raise ConfigurationError unless a model's inputs and outputs are known, to which columns are bound."""
    require_model(model)
    try:
        known = bool(model.inputs and model.outputs)
    except (AttributeError, ValueError):
        known = False  # a model of the user's own class has none, a Sequential none before it is built
    if not known:
        raise ConfigurationError(
            "`model` must have inputs and outputs: give it an Input, or build a model of your own class from its "
            f"inputs and outputs, `Own(inputs, outputs)`. Received: model={model.name!r} of {type(model).__name__}"
        )


def from_bytes(
    data: bytes, custom_objects: Mapping[str, Any] | None = None, *, compiled: bool = False, trusted: str = ""
) -> keras.Model:
    """Return the model in a ``.keras`` archive, built with the settings of ``keras.config`` with which it was made.

    Args:
        data: what `to_bytes` returned.
        custom_objects: registered name to class or function, in addition to what this process has registered.
        compiled: compile it as it was, with the optimizer's state; else it is not compiled.
        trusted: from `trusted_code` of this archive. Without it, code in the archive (lambdas) is refused, never run.

    Raises:
        ConfigurationError: the bytes are damaged, or have an unknown class or a lambda.
    """
    from distkeras.keras_model import lazy_optimizers, wide_embedding  # noqa: F401 - they register classes with Keras

    try:
        safe = not trusted or trusted != config_digest(data)
        saved, values = split_values(data)
        flags = read_flags(saved)
        with _asset_folder(saved), keras_config.applied(settings_of(data)):
            model: keras.Model = private_keras.load_model(
                BytesIO(saved), custom_objects or {}, compiled=compiled and flags is None, safe=safe
            )
        if flags is not None:
            restore_flags(flags, model)
            if compiled:  # only now, as the optimizer is built for what is trainable
                _compile(model, saved, custom_objects)
    except _ARCHIVE_ERRORS as error:
        expected = "`data` must be a .keras archive"
        if zipfile.is_zipfile(BytesIO(data)):
            expected = (
                "`model` must consist of Keras' classes and of registered ones: decorate your own with "
                "`@keras.saving.register_keras_serializable()`, or name them in `custom_objects`"
            )
        unknown = re.search(r"Could not locate (class|function) '[^']+'", str(error))  # deep in Keras' message
        reason = headline(str(error)) if unknown is None else unknown[0]
        if "enable_unsafe_deserialization" in str(error):
            expected = (
                "`model` must consist of layers without code of their own: replace a `Lambda` by a registered one, or "
                "call `keras.config.enable_unsafe_deserialization()` before, which lets workers run its code"
            )
        raise ConfigurationError(f"{expected}. Received: {len(data)} bytes; Keras said: {reason}") from error
    set_values(model, values)
    set_attributes_of_model(model, attributes_in(data))
    return model


def attributes_in(data: bytes) -> Attributes:
    """Return the attributes in an archive, from `with_attributes`."""
    found: Attributes = metadata_in(data).get(_ATTRIBUTES, [])
    return found


def with_attributes(data: bytes, attributes: Attributes) -> bytes:
    """Return an archive with attributes that `from_bytes` sets, which its configuration lacks."""
    if not attributes:
        return data
    buffer = BytesIO(data)
    add_metadata(buffer, {_ATTRIBUTES: attributes})
    return buffer.getvalue()


def _compile(model: keras.Model, data: bytes, custom_objects: Mapping[str, Any] | None) -> None:
    """Compile a loaded model as its archive says, with the optimizer's state."""
    import keras

    config = read_config(data).get("compile_config")
    if config:
        with keras.saving.custom_object_scope(dict(custom_objects or {})):
            model.compile_from_config(config)
        if model.optimizer is not None:
            load_optimizer_state(model, data)


def read_config(data: bytes) -> Any:
    """Return the parsed JSON configuration in a ``.keras`` archive."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        return json.loads(archive.read("config.json"))


def has_optimizer_state(model: keras.Model) -> bool:
    """Return whether a model's compiled optimizer has taken steps on all variables that are trainable now."""
    optimizer = model.optimizer if model.compiled else None
    if optimizer is None or not optimizer.built or not _has_stepped(optimizer):
        return False
    known = set(map(id, private_keras.moved_variables(inner_optimizer(optimizer))))
    return known.issubset(map(id, model.weights)) and known.issuperset(map(id, model.trainable_variables))


def _has_stepped(optimizer: Any) -> bool:
    if int(inner_optimizer(optimizer).iterations):
        return True
    # A step that overflows lowers the scale of the loss, and is not counted.
    scale = getattr(optimizer, "dynamic_scale", None)
    return scale is not None and float(scale) != optimizer.initial_scale


def frozen_since(model: keras.Model) -> tuple[int, ...]:
    """Return the variables of an optimizer with a state if some were frozen since, as numbers in ``model.weights``.

    Empty if it has the variables that are trainable now.
    """
    known = private_keras.moved_variables(inner_optimizer(model.optimizer))
    if list(map(id, known)) == list(map(id, model.trainable_variables)):
        return ()
    numbers = {id(variable): number for number, variable in enumerate(model.weights)}
    return tuple(numbers[id(variable)] for variable in known)


def load_optimizer_state(model: keras.Model, data: bytes, variables: Sequence[int] = ()) -> None:
    """Load a compiled model's optimizer state from an archive of such a model.

    Args:
        variables: from `frozen_since` of that model.

    Raises:
        ConfigurationError: the archive has no such state.
    """
    weights = model.weights
    model.optimizer.build([weights[number] for number in variables] or model.trainable_variables)
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            private_keras.load_optimizer(model.optimizer, BytesIO(archive.read("model.weights.h5")))
    except _ARCHIVE_ERRORS as error:
        raise ConfigurationError(
            "`model` must have an optimizer whose state fits its variables. "
            f"Received: {model.optimizer.name!r}; Keras said: {headline(str(error))}"
        ) from error


@contextlib.contextmanager
def _asset_folder(data: bytes) -> Iterator[None]:
    """Make Keras unpack a layer's assets, such as a vocabulary, in a folder that is deleted in any case."""
    # In a task this is Spark's local folder: Spark deletes it with the application, even if the process was killed.
    folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    with zipfile.ZipFile(BytesIO(data)) as archive:
        has_assets = any(name.startswith("assets/") for name in archive.namelist())
    if not (has_assets and folder and Path(folder).is_dir()):
        yield
        return
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def running_backend() -> str:
    """Return Keras' backend in this process; raise ConfigurationError if it does not train."""
    import keras

    name: str = keras.config.backend()
    if name not in BACKENDS:
        raise ConfigurationError(
            f"Keras must run on {', '.join(BACKENDS)}: set KERAS_BACKEND before its first import. Received: {name!r}"
        )
    return name


def ensure_backend(name: str) -> str:
    """Make Keras run on backend ``name`` in this process, without importing it, and return the name.

    A Python worker that Spark uses again may have imported Keras for an earlier job: it cannot change then,
    and would silently continue with the other backend.

    Raises:
        ConfigurationError: ``name`` is not a backend, or Keras runs on another one in this process.
    """
    require_choice("name", name, BACKENDS)
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = name
        return name
    import keras

    if keras.config.backend() != name:
        raise ConfigurationError(
            f"Keras must run on the backend {name!r} in this process, but was imported with "
            f"{keras.config.backend()!r} before. Restart the Spark session, or stay with one backend. "
            f"Received: name={name!r}"
        )
    return name


def trusted_code(data: bytes) -> str:
    """Return what `from_bytes` needs to run the lambdas of an archive, if the user has permitted lambdas; else "".

    It is the digest of the archive's configuration. It must only travel in Spark's own closures: an archive may come
    over the network.
    """
    return config_digest(data) if private_keras.code_is_permitted() else ""


def config_digest(data: bytes) -> str:
    """Return the digest of the configuration in a ``.keras`` archive."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        return hashlib.sha256(archive.read("config.json")).hexdigest()


def settings_of(data: bytes) -> Settings:
    """Return the settings of ``keras.config`` with which an archive was made; empty if it is not from `to_bytes`.

    Raises:
        ConfigurationError: a setting is unknown, or has an invalid value.
    """
    with zipfile.ZipFile(BytesIO(data)) as archive:
        text = archive.comment
    end = len(data) - len(text)
    if int.from_bytes(data[end - 2 : end], "little") != len(text):  # Python's reader accepts a part of it
        raise ConfigurationError(f"`data` must be a .keras archive. Received: {len(data)} bytes, the last ones missing")
    return keras_config.from_text(text)


def _with_settings(data: bytes) -> bytes:
    # A comment: Keras unpacks an archive that has further members in a folder.
    buffer = BytesIO(data)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.comment = keras_config.to_text(keras_config.settings_now())
    return buffer.getvalue()


class CustomObjects(dict[str, Any]):
    """Registered name to class or function; pickles so that the backend is chosen before Keras is imported.

    Classes defined in a notebook travel by value, and their base classes make the receiving process import
    Keras while it unpickles: the backend must be known by then. A pickle is rebuilt in the order of its
    parts, so the backend goes first.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled_objects, (_Backend(running_backend()), dict(self))


class _Backend(str):
    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return ensure_backend, (str(self),)


def _unpickled_objects(_: str, objects: dict[str, Any]) -> CustomObjects:
    return CustomObjects(objects)


def custom_objects(data: bytes | None = None, configs: Iterable[Any] = ()) -> CustomObjects:
    """Return what this process has registered with ``keras.saving``, also by an open ``custom_object_scope``.

    Args:
        data: a ``.keras`` archive; only the objects that its configuration names are returned then. Libraries
            register hundreds, which every task would import.
        configs: further configurations, which name objects as well.
    """
    import keras

    registered = keras.saving.get_custom_objects() | private_keras.objects_in_scope()
    if data is not None:
        configs = [read_config(data), *configs]
        names_in_config = {value for value in keras.tree.flatten(configs) if isinstance(value, str)}
        registered = {name: value for name, value in registered.items() if name in names_in_config}
    return CustomObjects(registered)


def require_objects(objects: Any) -> Mapping[str, Any]:
    """Return the argument ``custom_objects``, an empty mapping for None; ConfigurationError for anything else."""
    if objects is None:
        return {}
    if not isinstance(objects, Mapping) or not all(isinstance(k, str) and callable(v) for k, v in objects.items()):
        raise invalid("custom_objects", objects, "a dictionary: name to class or function")
    return objects


def _layers(model: keras.Model) -> Iterator[keras.Layer]:
    for layer in getattr(model, "layers", ()):
        yield from _layers(layer)
    yield model
