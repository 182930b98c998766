"""What Keras does not save of a model: values of variables, and which layers and variables are frozen.

A layer decides what is saved of it. One with LoRA saves its kernel with the product of its two factors added, and is
loaded with factors of zero, at which both gradients are zero: it would never train. What a layer saves is compared with
its variables here, so that every such layer is found, also one of the user. These values travel in a file of their own
within the archive.

A configuration has one flag for each layer. Keras loses the flag of a `Sequential`, which then ignores that it is set
to True again, and those of the layers within a composite layer and of single variables.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from distkeras.private_keras import OWN_FLAG, all_layers, created_variables, inner_layers, seed_generators
from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    import keras


#: The number at the end of a default name.
_NUMBER = re.compile(r"_\d+$")
#: The member of an archive with these values: an HDF5 file with an array of bytes for each.
VALUES = "distkeras-values.h5"


def named_layers(model: keras.Model) -> dict[str, keras.Layer]:
    """Return a model's layers at every depth by their paths, which a rebuilt copy shares; the model's own is empty.

    Keras numbers the default names of inner layers again in each copy, so their numbers are replaced by their order.
    """
    found: dict[str, keras.Layer] = {}
    seen: set[int] = set()

    def visit(layer: keras.Layer, path: str) -> None:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        found[path] = layer
        for inner in inner_layers(layer):
            stem = f"{path}/{_NUMBER.sub('', inner.name)}"
            name, number = stem, 1
            while name in found and id(inner) not in seen:
                number += 1
                name = f"{stem}#{number}"
            visit(inner, name)

    visit(model, "")
    return found


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Return the variables of a layer itself, without those of inner layers: weights, then states of seeds."""
    trainable, others = created_variables(layer)
    return [*trainable, *others, *(generator.state for generator in seed_generators(layer))]


def with_unsaved_values(data: bytes, model: keras.Model) -> bytes:
    """Return the archive of a model with the values that Keras has not saved as they are; unchanged if it has none."""
    values = {
        f"{path}//{number}": _value(variable)
        for path, layer in named_layers(model).items()
        for number, variable in _unsaved(layer)
    }
    if not values:
        return data
    import h5py

    content, buffer = BytesIO(), BytesIO(data)
    with h5py.File(content, "w") as file:
        for number, (place, value) in enumerate(values.items()):
            # HDF5 knows neither bfloat16 nor the 8-bit floats.
            raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            file.create_dataset(str(number), data=raw).attrs["place"] = place
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(VALUES, content.getvalue())
    return buffer.getvalue()


def _unsaved(layer: keras.Layer) -> list[tuple[int, keras.Variable]]:
    """Return the variables of a layer, by number, whose values are not among those that it saves."""
    own = own_variables(layer)
    seeded = [one.state for one in seed_generators(layer) if one.get_config()["seed"] is not None]
    seeds = {id(state) for state in seeded if _value(state)[1]}  # numbers have been drawn: a copy would begin again
    others_seeds = {id(generator.state) for generator in seed_generators(layer)} - seeds
    store: dict[str, Any] = {}
    if len(own) > len(seeds | others_seeds):
        layer.save_own_variables(store)
    as_they_are = {id(value) for value in store.values()} | others_seeds
    others = [_value(value) for value in store.values() if not any(value is variable for variable in own)]
    return [
        (number, variable)
        for number, variable in enumerate(own)
        if id(variable) not in as_they_are and not any(_is_same(_value(variable), other) for other in others)
    ]


def _value(value: Any) -> np.ndarray:
    import keras

    return np.asarray(keras.ops.convert_to_numpy(value))


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def split_values(data: bytes) -> tuple[bytes, dict[str, np.ndarray]]:
    """Return an archive as Keras wrote it, and the values that it did not save, bytes of shape ``(n,)`` by place."""
    import h5py

    with zipfile.ZipFile(BytesIO(data)) as archive:
        if VALUES not in archive.namelist():
            return data, {}
        with h5py.File(BytesIO(archive.read(VALUES)), "r") as file:
            values = {str(array.attrs["place"]): np.asarray(array[()]) for array in file.values()}
        plain = BytesIO()
        with zipfile.ZipFile(plain, "w") as copy:  # Keras unpacks an archive with further members in a folder
            copy.comment = archive.comment
            for name in archive.namelist():
                if name != VALUES:
                    copy.writestr(name, archive.read(name))
    return plain.getvalue(), values


def set_values(model: keras.Model, values: Mapping[str, np.ndarray]) -> None:
    """Set variables of a loaded model to the values that `split_values` returned.

    Raises:
        ConfigurationError: the model has no such variable, or its value has another size.
    """
    layers = named_layers(model) if values else {}
    for place, raw in values.items():
        path, _, number = place.rpartition("//")
        own = own_variables(layers[path]) if path in layers else []
        variable = own[int(number)] if number.isdigit() and int(number) < len(own) else None
        dtype = None if variable is None else np.dtype(variable.dtype)
        size = -1 if variable is None or dtype is None else int(np.prod(variable.shape)) * dtype.itemsize
        if variable is None or raw.dtype != np.uint8 or raw.shape != (size,):
            raise ConfigurationError(
                "an archive's values must be of the model's variables. "
                f"Received: {raw.dtype} of shape {raw.shape} for {place!r}, which has {size} bytes"
            )
        variable.assign(raw.view(dtype).reshape(tuple(variable.shape)))


#: The file in an archive that Keras writes and does not read; a further file would make it unpack the archive.
_METADATA = "metadata.json"
_KEY = "distkeras_trainable"


def add_flags(path: Path, model: keras.Model) -> None:
    """Add the flags of a model to the archive at ``path``, unless every layer and variable is as it was created."""
    if not _is_changed(model):
        return
    parts = {"layers": all_layers(model), "weights": model.weights}
    flags = {kind: [part.trainable for part in of_kind] for kind, of_kind in parts.items()}
    add_metadata(path, {_KEY: flags})


def read_flags(data: bytes) -> dict[str, list[bool]] | None:
    """Return the flags of layers and weights in an archive; None if nothing is frozen."""
    flags: dict[str, list[bool]] | None = metadata_in(data).get(_KEY)
    return flags


def metadata_in(data: bytes) -> dict[str, Any]:
    """Return the metadata in an archive: those of Keras, and what `add_metadata` has added."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        metadata: dict[str, Any] = json.loads(archive.read(_METADATA))
        return metadata


def add_metadata(file: Path | IO[bytes], values: Mapping[str, Any]) -> None:
    """Add JSON values to the metadata in an archive."""
    with zipfile.ZipFile(file, "a") as archive:
        metadata = json.loads(archive.read(_METADATA))
        # Replaced in the list of files, so that the weights are not copied.
        archive.filelist.remove(archive.NameToInfo.pop(_METADATA))
        archive.writestr(_METADATA, json.dumps({**metadata, **values}))


def restore_flags(flags: Mapping[str, Sequence[bool]], model: keras.Model) -> None:
    """Set the flags, as `read_flags` returned them, of a model that was rebuilt from an archive.

    Raises:
        ConfigurationError: the model was rebuilt with another number of layers or weights.
    """
    layers, weights = all_layers(model), model.weights
    found = {"layers": len(layers), "weights": len(weights)}
    if found != (expected := {kind: len(flags[kind]) for kind in found}):
        raise ConfigurationError(
            "`model` must have the same layers once it is rebuilt, so that those that are frozen stay frozen. "
            f"Received: {found} for {expected}"
        )
    for layer, flag in zip(layers, flags["layers"], strict=True):
        setattr(layer, OWN_FLAG, bool(flag))
    for variable, flag in zip(weights, flags["weights"], strict=True):
        variable.trainable = bool(flag)


def _is_changed(model: keras.Model) -> bool:
    def changed(layer: keras.Layer) -> bool:
        trainable, others = created_variables(layer)
        return not layer.trainable or not all(v.trainable for v in trainable) or any(v.trainable for v in others)

    return any(map(changed, all_layers(model)))
