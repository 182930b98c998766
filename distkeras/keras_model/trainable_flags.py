"""Which layers and variables of a model are frozen, in its archive: Keras' own configuration has only part of that.

A configuration has one flag for each layer. Keras loses the flag of a `Sequential`, which then ignores that it is set
to True again, and those of the layers within a composite layer and of single variables.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from distkeras.ps.errors import ConfigurationError

if TYPE_CHECKING:
    import keras

#: The file in an archive that Keras writes and does not read; a further file would make it unpack the archive.
_METADATA = "metadata.json"
_KEY = "distkeras_trainable"


def add_to(path: Path, model: keras.Model) -> None:
    """Add the flags of a model to the archive at ``path``, unless every layer and variable is as it was created."""
    if not _is_changed(model):
        return
    flags = {"layers": [layer.trainable for layer in _layers(model)], "weights": [v.trainable for v in model.weights]}
    with zipfile.ZipFile(path, "a") as archive:
        metadata = json.loads(archive.read(_METADATA))
        # Replaced in the list of files, so that the weights are not copied.
        archive.filelist.remove(archive.NameToInfo.pop(_METADATA))
        archive.writestr(_METADATA, json.dumps({**metadata, _KEY: flags}))


def read(data: bytes) -> dict[str, list[bool]] | None:
    """Return the flags of layers and weights in an archive; None if nothing is frozen."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        flags: dict[str, list[bool]] | None = json.loads(archive.read(_METADATA)).get(_KEY)
        return flags


def restore(flags: Mapping[str, Sequence[bool]], model: keras.Model) -> None:
    """Set the flags, as `read` returned them, of a model that was rebuilt from an archive.

    Raises:
        ConfigurationError: the model was rebuilt with another number of layers or weights.
    """
    layers, weights = _layers(model), model.weights
    found = {"layers": len(layers), "weights": len(weights)}
    if found != (expected := {kind: len(flags[kind]) for kind in found}):
        raise ConfigurationError(
            "`model` must have the same layers once it is rebuilt, so that those that are frozen stay frozen. "
            f"Received: {found} for {expected}"
        )
    for layer, flag in zip(layers, flags["layers"], strict=True):
        layer._trainable = bool(flag)  # noqa: SLF001 - the public property sets that of all inner layers, too
    for variable, flag in zip(weights, flags["weights"], strict=True):
        variable.trainable = bool(flag)


def _is_changed(model: keras.Model) -> bool:
    def changed(layer: keras.Layer) -> bool:
        created = [(v, True) for v in layer._trainable_variables]  # noqa: SLF001 - there is no public record of it
        created += [(v, False) for v in layer._non_trainable_variables]  # noqa: SLF001 - nor of this
        return not layer.trainable or any(variable.trainable is not flag for variable, flag in created)

    return any(map(changed, _layers(model)))


def _layers(model: keras.Model) -> list[keras.Layer]:
    return list(model._flatten_layers())  # noqa: SLF001 - Keras has no public list of layers at every depth
