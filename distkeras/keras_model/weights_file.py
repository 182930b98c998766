"""Weights that do not travel with a model: they are read from another file when its archive is opened.

A model that is fine-tuned may be gigabytes of frozen weights below a small head. If the workers can read the file that
the weights came from, they are sent a reference of a few bytes instead. Arrays are matched by their contents, at any
place in the file: it may be that of a base model alone, or a preset's.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import zipfile
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from distkeras.ps.errors import ConfigurationError, headline
from distkeras.ps.world.files import absolute, file_system

if TYPE_CHECKING:
    import h5py
    import numpy as np

#: Members of an archive: Keras' file of weights, and the reference to weights in another file.
WEIGHTS, ELSEWHERE = "model.weights.h5", "distkeras-weights.json"
#: Smaller arrays travel: searching for them takes longer.
REFERENCE_BYTES_MIN = 64 << 10
#: The group of an archive's weights that always travels: it changes as the model is trained.
_OPTIMIZER = "optimizer"


def without_weights_of(data: bytes, uri: str) -> bytes:
    """Return a ``.keras`` archive with a reference to a file in place of the large arrays that the file contains.

    Args:
        uri: path of the file, or URI that Arrow's file systems open; ``.keras``, ``.weights.h5`` or another HDF5.

    Raises:
        ConfigurationError: the file cannot be read, or has none of the archive's large arrays.
    """
    uri = absolute(uri)  # executors have another working directory
    with _weights_of(io.BytesIO(data)) as weights:
        wanted: dict[tuple[Any, ...], list[tuple[str, str]]] = {}
        for path, dataset in _large(weights).items():
            if path.split("/")[0] != _OPTIMIZER:
                wanted.setdefault(_kind(dataset), []).append((path, _digest(dataset[()])))
        removed: dict[str, dict[str, str]] = {}
        with _opened(uri) as file:
            for place, dataset in _large(file).items():
                if _kind(dataset) in wanted:
                    digest = _digest(dataset[()])
                    same = [path for path, known in wanted[_kind(dataset)] if known == digest]
                    removed.update({path: {"at": place, "digest": digest} for path in same})
        if not removed:
            raise ConfigurationError(
                f"`frozen_weights` must be a file with weights of the model, in the model's own precision: arrays of "
                f"{REFERENCE_BYTES_MIN >> 10} KiB or more that are equal to the bit. Received: frozen_weights={uri!r} "
                f"with none of the {sum(map(len, wanted.values()))} that the model has"
            )
        remaining = _rewritten(weights, removed)
    return _archive(data, remaining, {ELSEWHERE: json.dumps({"uri": uri, "arrays": removed}).encode()})


def with_all_weights(data: bytes) -> bytes:
    """Reverse `without_weights_of`; return any other archive unchanged.

    Raises:
        ConfigurationError: the file cannot be read, or its arrays have changed.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if ELSEWHERE not in archive.namelist():
            return data
        elsewhere = json.loads(archive.read(ELSEWHERE))
    with _weights_of(io.BytesIO(data)) as weights, _opened(elsewhere["uri"]) as file:
        return _archive(data, _rewritten(weights, (), _read(file, **elsewhere)), {})


def _read(file: h5py.File, uri: str, arrays: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, Any, Any]]:
    """Yield for each array its path in the archive, its value and its attributes."""
    for path, declared in arrays.items():
        dataset = file.get(declared["at"])
        value = dataset[()] if hasattr(dataset, "dtype") else None
        if value is None or _digest(value) != declared["digest"]:
            raise ConfigurationError(
                "`frozen_weights` must be the same file for driver and executors. "
                f"Received: {uri!r}, which has another array at {declared['at']!r} here than on the driver"
            )
        yield path, value, dataset.attrs


@contextlib.contextmanager
def _opened(uri: str) -> Iterator[h5py.File]:
    """Open the weights in the file at a path or URI."""
    import pyarrow as pa

    try:
        system, path = file_system(uri)
    except (OSError, ConfigurationError) as error:
        raise _unsuitable(uri, error) from error
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(io.BufferedReader(stack.enter_context(system.open_input_file(path))))
            yield stack.enter_context(_weights_of(file))
    except (OSError, KeyError, zipfile.BadZipFile, pa.ArrowException) as error:
        raise _unsuitable(uri, error) from error


def _unsuitable(uri: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        "`frozen_weights` must be a file of weights that driver and executors can read. "
        f"Received: frozen_weights={uri!r}: {headline(str(error))}"
    )


@contextlib.contextmanager
def _weights_of(file: IO[bytes]) -> Iterator[h5py.File]:
    """Open the weights in an archive, or in a file of weights alone."""
    import h5py

    with contextlib.ExitStack() as stack:
        if zipfile.is_zipfile(file):
            file = stack.enter_context(stack.enter_context(zipfile.ZipFile(file)).open(WEIGHTS))
        file.seek(0)
        yield stack.enter_context(h5py.File(file, "r"))


def _large(file: h5py.File) -> dict[str, Any]:
    large: dict[str, Any] = {}

    def visit(path: str, node: Any) -> None:
        if getattr(node, "dtype", None) is not None and node.dtype.kind != "O" and node.nbytes >= REFERENCE_BYTES_MIN:
            large[path] = node

    file.visititems(visit)
    return large


def _kind(dataset: Any) -> tuple[Any, ...]:
    return dataset.shape, dataset.dtype.str


def _digest(value: np.ndarray) -> str:
    return hashlib.sha256(value.tobytes()).hexdigest()


def _rewritten(
    weights: h5py.File, left_out: Container[str], added: Iterable[tuple[str, np.ndarray, Mapping[str, Any]]] = ()
) -> bytes:
    """Return a copy of the file without some arrays, and with added ones; deletion in HDF5 would not free the space."""
    import h5py

    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as copy:

        def take(path: str, node: Any) -> None:
            if isinstance(node, h5py.Group):
                copy.require_group(path).attrs.update(node.attrs)
            elif path not in left_out:
                copy.create_dataset(path, data=node[()]).attrs.update(node.attrs)

        copy.attrs.update(weights.attrs)
        weights.visititems(take)
        for path, array, attributes in added:
            copy.create_dataset(path, data=array).attrs.update(attributes)
    return buffer.getvalue()


def _archive(data: bytes, weights: bytes, more: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        new.comment = old.comment
        for name in old.namelist():
            if name not in (WEIGHTS, ELSEWHERE):
                new.writestr(name, old.read(name))
        for name, content in {WEIGHTS: weights, **more}.items():
            new.writestr(name, content)
    return buffer.getvalue()
