"""The checks of an uploaded ``.keras`` archive, before Keras opens it.

`require_archive` checks the archive's list of members and the configuration, with Python's standard library, so that
the job server itself never parses weights. `require_weights` checks those in the job's own process. Keras' safe mode
also refuses lambdas. The archives that are refused here would make Keras read files or addresses, unpickle, unpack
without a bound, or allocate more than was sent.
"""

from __future__ import annotations

import builtins
import io
import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

from distkeras.job_server.errors import DescriptionError, refused
from distkeras.keras_model.unsaved_values import VALUES
from distkeras.ps.errors import headline

#: Limits: members, ratio of unpacked bytes to those of the archive, bytes of the configuration, depth of its values.
MEMBERS_MAX, RATIO_MAX, CONFIG_MAX, DEPTH_MAX = 1000, 20, 4 << 20, 200
#: A model may have this many times the numbers in its file, plus the floor: Keras merges LoRA's weights on saving.
SIZE_RATIO_MAX, SIZE_FLOOR = 2, 1 << 20
#: The most bytes of an archive's list of members, which is read as a whole.
_LIST_MAX = 1 << 20

_CONFIG, _WEIGHTS = "config.json", "model.weights.h5"
_NEEDED = {_CONFIG, "metadata.json", _WEIGHTS}
#: Modules of Keras whose classes models consist of; other modules read files, addresses, or settings.
_MODULES = {
    "activations", "constraints", "dtype_policies", "initializers", "layers", "losses", "metrics", "models", "ops",
    "optimizers", "quantizers", "random", "regularizers", "applications",
}  # fmt: skip
#: Those of them with functions that a model may call; functions of the others load files or download.
_FUNCTIONS = {"activations", "constraints", "initializers", "losses", "metrics", "ops", "regularizers"}
#: The optimizers of this package, which may also be part of a model, by their registered names.
_OPTIMIZERS = {"distkeras>LazyAdam", "distkeras>LazyMomentum"}
#: Keras' markers of values; its other markers are code.
_VALUES = {"__keras_tensor__", "__tensor__", "__numpy__", "__bytes__", "__ellipsis__", "__slice__"}
#: Layers that contain or load code.
_CODE = {"Lambda", "TorchModuleWrapper", "JaxLayer", "FlaxLayer", "TFSMLayer"}
#: Arguments of layers that name a file if they are strings.
_FILES = {"vocabulary", "idf_weights", "file_path", "filepath"}
#: The errors of Python's readers of archives, JSON and HDF5 for invalid data.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, NotImplementedError, RecursionError, RuntimeError,
    ValueError, LookupError, TypeError,
)  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][\w.>]{0,199}")


def require_archive(file: Path | BytesIO) -> None:
    """Raise DescriptionError unless Keras may open the file: an archive of bounded size, with parts of models only."""
    try:
        size = file.stat().st_size if isinstance(file, Path) else file.getbuffer().nbytes
        raw = io.FileIO(file) if isinstance(file, Path) else file
        with _BoundedReader(raw) as reader, zipfile.ZipFile(reader) as archive:
            reader.bound = CONFIG_MAX
            _require_members(archive, size)
            config = json.loads(archive.read(_CONFIG))
            metadata = json.loads(archive.read("metadata.json"))
    except DescriptionError:
        raise
    except _DAMAGE as error:
        raise _refused(f"an archive that Keras saved (.keras). Received: {str(error)[:200]}") from error
    if not isinstance(config, dict) or not isinstance(metadata, dict):
        raise _refused("an archive that Keras saved (.keras). Received: one without a configuration")
    for part in _objects(config):
        _require_part(part)


def _require_members(archive: zipfile.ZipFile, size: int) -> None:
    members = archive.infolist()
    names = [member.filename for member in members]
    if len(members) > MEMBERS_MAX or len(set(names)) < len(names):
        raise _refused(f"an archive of at most {MEMBERS_MAX} files, each once. Received: {len(members)}")
    missing = sorted(_NEEDED - set(names))
    if missing:
        raise _refused(f"an archive that Keras saved (.keras). Received: one without {', '.join(missing)}")
    for member in members:
        path = PurePosixPath(member.filename)
        expected = member.filename in {*_NEEDED, VALUES} or path.parts[0] == "assets"
        if not expected or ".." in path.parts or path.is_absolute() or re.search(r"[\\\x00-\x1f:]", member.filename):
            raise _refused(f"an archive with Keras' files only. Received: {member.filename[:200]!r} in it")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # Python unpacks the other kinds without a bound, regardless of the size that the archive states.
            raise _refused(
                f"an archive of stored and deflated files. Received: {member.filename[:200]!r} in another form"
            )
        if member.flag_bits & 1 or (member.external_attr >> 16) & 0o170000 not in (0, 0o100000, 0o040000):
            raise _refused(f"an archive of plain files. Received: {member.filename[:200]!r}, which is not a plain file")
    total = sum(member.file_size for member in members)
    texts = max(archive.getinfo(name).file_size for name in _NEEDED - {_WEIGHTS})
    if total > max(RATIO_MAX * size, 1 << 20) or texts > CONFIG_MAX:
        raise _refused(f"an archive that unpacks to at most {RATIO_MAX} times its bytes. Received: {total} from {size}")


class _BoundedReader(io.BufferedReader):
    """A file that returns at most ``bound`` bytes at a time, because the archive determines how much is read."""

    bound = _LIST_MAX

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as any file does; raise ValueError for more bytes than ``bound``."""
        data = super().read(self.bound + 1 if size is None or size < 0 else min(size, self.bound + 1))
        if len(data) > self.bound:
            raise ValueError(f"a list of files that is too long: more than {self.bound} bytes")
        return data


def _objects(config: Any) -> Iterator[dict[str, Any]]:
    """Yield every JSON object in ``config``."""
    pending = [(config, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > DEPTH_MAX:
            raise _refused(f"a model whose configuration is at most {DEPTH_MAX} values deep. Received: a deeper one")
        if isinstance(value, dict):
            yield value
            pending += [(part, depth + 1) for part in value.values()]
        elif isinstance(value, list):
            pending += [(part, depth + 1) for part in value]


def _require_part(part: dict[str, Any]) -> None:
    """Check that an object of the configuration is a part of a model."""
    files = [name for name in _FILES & set(part) if isinstance(part[name], str)]
    if files:
        raise _refused(f"a model that reads no file. Received: {files[0]}={str(part[files[0]])[:100]!r}")
    if not {"class_name", "module"} & set(part):
        return
    name, module = part.get("class_name"), part.get("module")
    if not isinstance(name, str) or not isinstance(module, str | None):
        raise _refused(f"made of classes. Received: class_name={str(name)[:100]!r}, module={str(module)[:100]!r}")
    if name in _VALUES and module is None:
        return
    if name.startswith("__") or name in _CODE or _NAME.fullmatch(name) is None:
        raise _refused(f"made of Keras' classes without code of their own. Received: {name[:100]!r}")
    if module == "builtins":
        called = part.get("config")
        if name != "function" or not isinstance(called, str) or hasattr(builtins, called):
            raise _refused(f"made of Keras' functions. Received: {str(called)[:100]!r}")
    elif module is not None and not _is_of_models(module, part.get("config") if name == "function" else name):
        raise _refused(f"made of Keras' classes. Received: {name[:100]!r} of {module[:100]!r}")
    names = [text for text in (name, str(part.get("registered_name"))) if text.startswith("distkeras>")]
    if not _OPTIMIZERS.issuperset(names):  # this package's layers read files
        raise _refused(f"made of Keras' classes. Received: {names[0][:100]!r}")


def _is_of_models(module: str, name: Any) -> bool:
    """Return whether a class (its name begins with a capital) or a function of ``module`` may be in a model."""
    parts = module.split(".")
    if parts[0] == "distkeras":
        return f"distkeras>{name}" in _OPTIMIZERS
    if parts[0] != "keras" or not isinstance(name, str):
        return False
    below = parts[2:] if parts[1:2] == ["src"] else parts[1:]
    if not name[:1].isupper():
        return bool(below) and below[0] in _FUNCTIONS
    if below[:1] == ["applications"]:
        return name == "LayerScale"  # a layer of ConvNeXt; the others build models and download weights
    return not below or below[0] in _MODULES


def require_weights(data: bytes) -> None:
    """Check an archive's files of weights, and that its model has no more weights than they hold.

    A configuration of a few bytes can describe layers of any size, so the model is built without values first.
    """
    import h5py

    stored = {}
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            config = json.loads(archive.read(_CONFIG)) | {"compile_config": None}
            files = {name: archive.read(name) for name in archive.namelist() if name in (_WEIGHTS, VALUES)}
        for name, weights in files.items():
            with h5py.File(BytesIO(weights), "r") as file:
                arrays = list(_datasets(file))
                total, stored[name] = sum(map(_bytes_of, arrays)), sum(array.size for array in arrays)
            if total > len(weights):
                raise _refused(
                    f"an archive whose arrays fill their file. Received: arrays of {total} in {len(weights)} bytes"
                )
    except DescriptionError:
        raise
    except _DAMAGE as error:
        raise _refused(f"an archive with weights. Received: {str(error)[:200]}") from error
    needed = _size_of(config)
    if needed > SIZE_RATIO_MAX * stored[_WEIGHTS] + SIZE_FLOOR:
        raise _refused(
            f"an archive with the weights of its model, {needed} numbers. Received: one with {stored[_WEIGHTS]}"
        )


def _size_of(config: Any) -> int:
    """Return how many weights a model has, without allocating them."""
    import keras

    try:
        with keras.StatelessScope(initialize_variables=False):
            model = keras.saving.deserialize_keras_object(config, safe_mode=True)
            return sum(math.prod(variable.shape) for variable in model.weights)
    except Exception as error:  # Keras' layers raise errors of any class
        raise _refused(f"a model that Keras can build. Keras said: {headline(str(error))[:300]}") from error
    finally:
        keras.utils.clear_session()  # else the end of the next scope would allocate the variables


def _datasets(file: Any) -> Iterator[Any]:
    """Yield every array in an HDF5 file once, even if links are cyclic."""
    import h5py

    pending, seen = [file], set()
    while pending:
        group = pending.pop()
        for name in group:
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise _refused(f"an archive whose weights lie in it. Received: {name[:100]!r}, a link to elsewhere")
            member = group[name]
            address = h5py.h5o.get_info(member.id).addr
            if address in seen:
                continue
            seen.add(address)
            if isinstance(member, h5py.Group):
                pending.append(member)
            elif isinstance(member, h5py.Dataset):
                yield member


def _bytes_of(dataset: Any) -> int:
    if dataset.external or dataset.is_virtual:
        raise _refused(f"an archive whose weights lie in it. Received: {dataset.name[:100]!r}, which is elsewhere")
    return int(dataset.nbytes)


def _refused(expected: str) -> DescriptionError:
    return refused("model", f"be {expected}")
