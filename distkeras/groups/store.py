"""The folder of a job that trains a model for each group: its owner, its manifest, and the trained groups as Parquet.

Spark writes and reads the trained groups, as the rows of a table. Each run of the job writes to a folder of its own,
and its tasks commit one file each, when they end. When the job has ended, its manifest names the files that count. They
are never changed or deleted, so a driver that has lost the folder to another one harms neither result. In the folder::

    owner-000001-0a1b2c3d.dks   the claim of a run; the highest one owns the folder: see `ps.checkpoint.ownership`
    model-0a1b2c3d.keras        the model that each group starts from; its name has the start of its SHA-256
    groups-000001-0a1b2c3d.json the manifest of a job that has begun; the one with the highest claim counts
    groups.json                 the manifest of the job once it has ended; then it counts
    run-000001-0a1b2c3d/        the files of that run

A run may lose the folder between its last check of that and its next write. So the manifest of a job that has begun has
a name of its own for each run: written late, it replaces neither the manifest of an ended job nor that of the owner.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from distkeras.data.schema import quoted
from distkeras.ps.checkpoint.ownership import Claim, Name, Ownership, parsed
from distkeras.ps.checkpoint.store import Store, require_same_job
from distkeras.ps.errors import ConfigurationError, SnapshotError
from distkeras.ps.world.files import Files, below, file_system, open_files, write_whole
from distkeras.spark.cluster import context_of, hadoop_path

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructField, StructType

#: The columns of the table in addition to those of the key, with Spark's types: public ones, and those that only this
#: package reads: the row's name, whether the group is to be trained as a job, checksums of the rows and the weights.
SHOWN = (
    ("rows", "bigint"),
    ("seconds", "double"),
    ("loss", "double"),
    ("metrics", "map<string,double>"),
    ("error", "string"),
)
ID, LARGE, ROWS_SUM, CRC, WEIGHTS, HASH = (
    f"distkeras_{name}" for name in ("id", "large", "rows_sum", "crc", "weights", "hash")
)
_OWN = ((ID, "string"), (LARGE, "boolean"), (ROWS_SUM, "decimal(38,0)"), (CRC, "bigint"), (WEIGHTS, "binary"))
RESERVED = tuple(name for name, _ in (*SHOWN, *_OWN, (HASH, "")))
#: Bytes of a row group of a file, which is read to look up the weights of one group.
_ROW_GROUP_BYTES = 1 << 20
MANIFEST = "groups.json"
_MANIFESTS = re.compile(r"groups(-\d+-[0-9a-f]{8})?\.json")
#: Files of a run that died before it had begun its job.
_UNFINISHED = re.compile(rf"owner-.*|(model-[0-9a-f]{{8}}\.keras|{_MANIFESTS.pattern})(\..*)?")


@dataclass(frozen=True)
class TrainedGroup:
    """The outcome of one group.

    Args:
        rows: number of its rows.
        seconds: the duration of its training.
        loss: mean over the rows of its last epoch; None if there is an error.
        metrics: the same for each metric, by name; None if there is an error.
        error: why there is no model; None if there is one.
        rows_sum: the sum of the hashes of its rows.
        weights: of the model, as `packed_weights` makes them; None if there is an error.
        large: it is not trained yet: it has too many rows for a task.
    """

    rows: int
    seconds: float = 0.0
    loss: float | None = None
    metrics: tuple[tuple[str, float], ...] | None = None
    error: str | None = None
    rows_sum: int = 0
    weights: bytes | None = None
    large: bool = False

    def values(self, name: str) -> tuple[Any, ...]:
        """Return the values of the columns after those of the key, given the row's name."""
        crc = None if self.weights is None else zlib.crc32(self.weights)
        shown = (self.rows, self.seconds, self.loss, self.metrics, self.error)
        return (*shown, name, self.large, self.rows_sum, crc, self.weights)


def table_schema(keys: Sequence[StructField]) -> StructType:
    """Return the columns of trained groups as tasks return them."""
    from pyspark.sql import types as T

    kinds: dict[str, T.DataType] = {
        "bigint": T.LongType(),
        "double": T.DoubleType(),
        "string": T.StringType(),
        "boolean": T.BooleanType(),
        "binary": T.BinaryType(),
        "decimal(38,0)": T.DecimalType(38, 0),
        "map<string,double>": T.MapType(T.StringType(), T.DoubleType()),
    }
    return T.StructType([*keys, *(T.StructField(name, kinds[kind]) for name, kind in (*SHOWN, *_OWN))])


def _row_hash(keys: Sequence[str]) -> Column:
    """Return a hash of all columns but the weights, whose checksum is one of them."""
    from pyspark.sql import functions as F

    names = [name for name, _ in (*SHOWN, *_OWN) if name not in ("metrics", WEIGHTS)]
    columns = [F.col(quoted(name)) for name in (*keys, *names)]
    return F.xxhash64(*columns, F.map_entries("metrics"))


def write_groups(groups: DataFrame, keys: Sequence[str], place: str) -> None:
    """Write rows of `table_schema` as files in a new folder; each task's file is valid once the task has ended."""
    # By the first algorithm, files would have no name before the whole job has ended, and a later run would find none.
    options = {"mapreduce.fileoutputcommitter.algorithm.version": 2, "parquet.block.size": _ROW_GROUP_BYTES}
    groups.withColumn(HASH, _row_hash(keys)).write.options(**options).parquet(place)


@dataclass(frozen=True)
class StoredGroups:
    """The location of trained groups; it is sent to executors.

    Args:
        keys: the columns of a key, as the JSON of a `StructType`.
        files: the paths of the files below ``uri``.
    """

    uri: str
    keys: str
    files: tuple[str, ...]
    count: int = 0

    @property
    def key_fields(self) -> list[StructField]:
        from pyspark.sql.types import StructType

        return list(StructType.fromJson(json.loads(self.keys)).fields)

    @property
    def key_names(self) -> tuple[str, ...]:
        return tuple(field["name"] for field in json.loads(self.keys)["fields"])

    def read(self, session: SparkSession, *, large: bool = False) -> DataFrame:
        """Return the table; a job that reads a damaged row or weight fails with the text of a SnapshotError.

        ``large``: return the groups that are not trained yet instead.
        """
        from pyspark.errors import PySparkException
        from pyspark.sql import functions as F
        from pyspark.sql.types import LongType

        schema = table_schema(self.key_fields).add(HASH, LongType())
        if not self.files:
            return session.createDataFrame([], schema)
        try:
            reader = session.read.schema(schema).option("__globPaths__", "false")
            table = reader.parquet(*(spark_path(session, below(self.uri, name)) for name in self.files))
        except PySparkException as error:
            raise SnapshotError(f"the trained groups in {self.uri!r} cannot be read: {error}") from error
        text = f"the trained groups in {self.uri!r} are damaged"  # Spark's error with it becomes a typed one
        damaged = F.raise_error(F.lit(f"{SnapshotError.__module__}.{SnapshotError.__qualname__}: {text}"))
        # Spark would put the literals of a user's filter into the hash, and then find other rows damaged. It does not
        # combine a filter with a condition that is not deterministic.
        is_sound = F.col(HASH).eqNullSafe(_row_hash(self.key_names)) & (F.spark_partition_id() >= 0)
        sound = F.when(is_sound, F.col(LARGE) == F.lit(large)).otherwise(damaged.cast("boolean"))
        same = F.crc32(WEIGHTS).eqNullSafe(F.col(CRC))
        return table.where(sound).withColumn(WEIGHTS, F.when(same, F.col(WEIGHTS)).otherwise(damaged.cast("binary")))

    def lost(self, text: str) -> SnapshotError:
        """Return the error for files that do not hold what they must."""
        return SnapshotError(f"the trained groups in {self.uri!r} must be as they were written. Received: {text}")


def spark_path(session: SparkSession, uri: str) -> str:
    """Return the place of a folder or file of groups as Spark takes it."""
    return uri if context_of(session) is None else hadoop_path(session, uri, "path")


def folder(uri: str) -> Files:
    """Return a folder to write to, which is created if it does not exist; raise SnapshotError if that fails."""
    try:
        return open_files(uri, create=True)
    except OSError as error:
        raise SnapshotError(f"`path` must be a folder that can be written to. Received: {uri!r}: {error}") from error


def _write(uri: str, name: str, data: bytes) -> None:
    files = folder(uri)
    draft = f"{name}.{uuid.uuid4().hex[:8]}.draft"  # two drivers may write at a time
    try:
        write_whole(files, name, draft, [data])
    except OSError as error:
        with contextlib.suppress(OSError):
            files.delete(draft)
        raise SnapshotError(f"{name} cannot be written to {uri!r}: {error}") from error


def read_whole(uri: str, name: str) -> bytes | None:
    """Return the bytes of a file; None if it does not exist; raise SnapshotError if it cannot be read."""
    try:
        return b"".join(open_files(uri, create=False).read(name)) if name in _names_in(uri) else None
    except OSError as error:
        raise SnapshotError(f"{name} in {uri!r} cannot be read: {error}") from error


def _names_in(uri: str) -> list[str]:
    """Return the names of the files in a folder, none if it does not exist; raise SnapshotError if that fails."""
    try:
        return open_files(uri, create=False).names()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SnapshotError(f"the folder {uri!r} of the groups cannot be read: {error}") from error


@dataclass(frozen=True)
class Manifest:
    """The description of a job, and of the files that hold its result.

    Args:
        identity: a job that resumes in the folder must have the same; JSON-ready.
        keys: the columns of a key, as the JSON of a `StructType`.
        model: the SHA-256 of the file with the model, in hexadecimal digits.
        files: the valid files; None while the job has not ended.
        count: the number of groups in them.
    """

    identity: dict[str, Any]
    keys: str
    model: str
    files: tuple[str, ...] | None = None
    count: int = 0

    def save(self, uri: str, name: str = MANIFEST) -> None:
        """Write the manifest, with a checksum; raise SnapshotError if that fails."""
        values = asdict(self)
        text = json.dumps({"crc": zlib.crc32(json.dumps(values, sort_keys=True).encode()), **values}, indent=1)
        _write(uri, name, text.encode())

    @classmethod
    def load(cls, uri: str) -> Manifest | None:
        """Return the manifest that counts; None if there is none; raise SnapshotError if it is damaged."""
        found = filter(_MANIFESTS.fullmatch, _names_in(uri))
        name = max(found, key=lambda name: (name == MANIFEST, len(name), name), default=MANIFEST)
        data = read_whole(uri, name)
        if data is None:
            return None
        try:
            values = json.loads(data)
            crc = values.pop("crc")
            if crc == zlib.crc32(json.dumps(values, sort_keys=True).encode()):
                names = values.pop("files")
                return cls(**values, files=None if names is None else tuple(names))
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        raise SnapshotError(
            f"{name} in {uri!r} must be as it was written. Received: another content, or another version's"
        )

    def stored(self, uri: str) -> StoredGroups:
        """Return the trained groups; raise ConfigurationError if the job has not ended."""
        if self.files is None:
            raise ConfigurationError(
                f"{uri!r} must hold the models of a finished job. Received: one that has not ended"
            )
        return StoredGroups(uri, self.keys, self.files, self.count)


def model_name(manifest: Manifest) -> str:
    """Return the name of the file with the model; that of another driver, whose bytes differ, has another name."""
    return f"model-{manifest.model[:8]}.keras"


def load_model_file(uri: str, manifest: Manifest) -> bytes:
    """Return the model that each group starts from; raise SnapshotError if its file is missing or damaged."""
    name = model_name(manifest)
    data = read_whole(uri, name)
    if data is None or hashlib.sha256(data).hexdigest() != manifest.model:
        received = "no such file" if data is None else "another content"
        raise SnapshotError(f"{name} in {uri!r} must be as it was written. Received: {received}")
    return data


class GroupFolder:
    """The folder of a job, which this run owns until a later run claims it; created if it does not exist."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._store = Store(uri)
        self._ownership = Ownership(self._store, uuid.uuid4().hex[:8])

    @property
    def run(self) -> str:
        """The name of this run's folder below the job's."""
        return _run(self._ownership.claim)

    @property
    def epoch(self) -> int:
        """A number above those of all earlier runs."""
        return self._ownership.claim.epoch

    def begin(self, manifest: Manifest, model_file: bytes, *, resume: bool) -> tuple[Manifest, StoredGroups]:
        """Claim the folder, which must be empty, or hold the same job if it is to be resumed.

        A folder in which an earlier run died before it had written its manifest counts as empty. Return the manifest of
        the folder, and the groups that earlier runs have finished.
        """
        self._store.check()
        saved = Manifest.load(self.uri)
        claims = self._names()
        if saved is not None and resume:
            require_same_job(manifest.identity, saved.identity, self.uri)
            load_model_file(self.uri, saved)
        elif saved is not None or (others := [name for name in _names_in(self.uri) if not _UNFINISHED.fullmatch(name)]):
            received = "a job" if saved is not None else f"{len(others)} files"
            needed = "an empty folder, or `resume` must be true to continue the job in it"
            raise ConfigurationError(f"`path` must be {needed}. Received: {self.uri!r} with {received}")
        self._ownership.write(claims)
        if saved is None:
            _write(self.uri, model_name(manifest), model_file)
            self._ownership.require(self._names())  # a later run may have begun, or ended, the job by now
            manifest.save(self.uri, f"groups-{self._ownership.claim}.json")
            return manifest, StoredGroups(self.uri, manifest.keys, ())
        # Listed after the claim: what an earlier run that is still alive writes from now on does not count.
        names = [name for claim in {name.claim for name in claims} for name in self.files_of(_run(claim))]
        # Two archives of one model may differ in bytes: the one in the folder stays.
        return saved, StoredGroups(self.uri, manifest.keys, tuple(sorted({*names, *(saved.files or ())})))

    def files_of(self, run: str) -> list[str]:
        """Return the paths of the complete files of a run below the job's folder."""
        return [name for name, _ in self.listing(run) if name.endswith(".parquet") and "/_" not in name]

    def listing(self, run: str) -> list[tuple[str, int]]:
        """Return the paths below the job's folder, and the sizes, of all files of a run, also of incomplete ones."""
        from pyarrow import ArrowException, fs

        try:
            filesystem, root = file_system(self.uri)
            selector = fs.FileSelector(f"{root}/{run}", allow_not_found=True, recursive=True)
            infos = filesystem.get_file_info(selector)
        except (ArrowException, OSError) as error:
            raise SnapshotError(f"the folder {self.uri!r} cannot be read: {error}") from error
        return [(info.path[len(root) + 1 :], info.size) for info in infos if info.type == fs.FileType.File]

    def finish(self, manifest: Manifest, files: Sequence[str], count: int) -> StoredGroups:
        """Record the valid files in the manifest, and return them; OwnershipLostError if a later run has the job."""
        self._ownership.require(self._names())
        replace(manifest, files=tuple(files), count=count).save(self.uri)
        return StoredGroups(self.uri, manifest.keys, tuple(files), count)

    def _names(self) -> list[Name]:
        return [name for name in map(parsed, self._store.names()) if name is not None]


def _run(claim: Claim) -> str:
    return f"run-{claim}"


def copy_groups(stored: StoredGroups, uri: str) -> None:
    """Copy trained groups to another folder; raise SnapshotError if a file cannot be read or written."""
    target = folder(uri)
    names = [f"groups-{number:06d}.parquet" for number in range(len(stored.files))]
    try:
        for name, to in zip(stored.files, names, strict=True):
            target.write(to, open_files(stored.uri, create=False).read(name))
    except OSError as error:
        raise SnapshotError(f"the trained groups cannot be copied to {uri!r}: {error}") from error
    Manifest({}, stored.keys, "", tuple(names), stored.count).save(uri)
