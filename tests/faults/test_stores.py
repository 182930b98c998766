"""Each operation on a store of S3's protocol, under each fault of it: the right result, or one typed error.

After an error, what the store holds is what it held before, or the whole of what was to be written.
"""

from __future__ import annotations

import functools
import hashlib
import io
import uuid
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import numpy as np
import pytest
from support.ps.toy_model import ToyJob
from support.s3 import (
    CLIENT,
    S3,
    CutReply,
    CutRequest,
    ErrorWithin200,
    Fault,
    LaggingLists,
    LostReply,
    Silent,
    Slow,
    Status,
)

from distkeras.groups.store import GroupFolder, Manifest, copy_groups, load_model_file
from distkeras.keras_model.stored_rows import load_rows, save_rows
from distkeras.keras_model.weights_file import with_all_weights, without_weights_of
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.checkpoint.ownership import find
from distkeras.ps.checkpoint.snapshots import LogFiles, SnapshotDirectory
from distkeras.ps.checkpoint.state import capture
from distkeras.ps.checkpoint.versions import VersionFolder, model_key
from distkeras.ps.errors import ConfigurationError, DistkerasError, ServerLostError, SnapshotError
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.rules import make
from distkeras.ps.world import files
from distkeras.ps.world.files import below, open_files
from distkeras.ps.world.world import World


class HurriedWorld(World):
    """The system's world, except that each pause takes no time and counts as four seconds."""

    def __init__(self) -> None:
        self._skipped = 0.0
        self.monotonic = lambda: World.monotonic() + self._skipped

    def sleep(self, seconds: float) -> None:
        self._skipped += 4.0


#: What an operation does; and what the store holds then, read without faults.
Prepared = tuple[Callable[[], Any], Callable[[], Any]]
KEYS = '{"type":"struct","fields":[{"name":"shop","type":"string","nullable":true,"metadata":{}}]}'
IDENTITY = {"layers": 2}
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


class Job:
    """A job that has saved its first state, and has a commit that is not saved yet."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.toy = ToyJob(make("downpour", window=1), np.zeros(5), [np.ones((2, 5))], dtype=np.float32)
        self.directory = SnapshotDirectory(uri, token="0000000a", world=HurriedWorld())
        self.directory.take_over()
        self.save()
        self.directory.announce({"host": "there", "port": 1})
        self.toy.commit(0)

    def save(self) -> None:
        self.directory.save(capture(self.toy.center), LogFiles())
        names = self.directory.require_owned()
        self.directory.prune(1, LogFiles(), names)

    def saved(self) -> list[float]:
        saved = SnapshotDirectory(self.uri).latest()
        assert saved is not None
        return [saved.state.header["clock"], *saved.state.arrays["center"].tolist()]


def save_checkpoint(uri: str) -> Prepared:
    job = Job(uri)
    return job.save, job.saved


def claim_and_restore(uri: str) -> Prepared:
    job = Job(uri)

    def restore() -> list[float]:
        Checkpoint(uri).check(HurriedWorld())
        newer = SnapshotDirectory(uri, token="0000000b", world=HurriedWorld()).take_over()
        assert newer is not None
        return [newer.state.header["clock"], *newer.state.arrays["center"].tolist()]

    return restore, job.saved


def begin_job(uri: str) -> Prepared:
    def begin() -> None:
        Checkpoint(uri).check(HurriedWorld())
        assert SnapshotDirectory(uri, token="0000000a", world=HurriedWorld()).take_over(fresh=True) is None

    return begin, lambda: None


def find_server(uri: str) -> Prepared:
    Job(uri)
    return lambda: find(uri)["host"], lambda: None


def table_rows(uri: str) -> Prepared:
    job = Job(uri)

    def write_and_read() -> list[float]:
        file = job.directory.save_rows(0, 1, ROWS, np.array([1, 3, 4, 7]))
        return job.directory.load_rows(file)[1].ravel().tolist()

    return write_and_read, job.saved


def versions_at(uri: str) -> VersionFolder:
    folder = VersionFolder(uri, HurriedWorld(), create=True)
    folder.take(IDENTITY, lambda: b"model")
    return folder


def publish(folder: VersionFolder, number: int) -> None:
    folder.publish("stream", number, np.full(3, number, np.float32), np.zeros(1, np.float32))


def latest(folder: VersionFolder) -> list[float]:
    version = folder.latest()
    center, _ = folder.load(version, model_key(IDENTITY))
    return [version.number, *center.tolist()]


def publish_version(uri: str) -> Prepared:
    folder = versions_at(uri)
    publish(folder, 0)

    def act() -> None:
        publish(folder, 1)
        folder.prune(2)

    return act, lambda: latest(VersionFolder(uri))


def read_version(uri: str) -> Prepared:
    publish(versions_at(uri), 0)
    return lambda: latest(VersionFolder(uri, HurriedWorld())), lambda: None


def hold_version(uri: str) -> Prepared:
    publish(versions_at(uri), 0)
    return lambda: VersionFolder(uri, HurriedWorld()).hold("query", 3).number, lambda: None


MODEL = b"the model"
MANIFEST = Manifest({"num_epoch": 3}, KEYS, hashlib.sha256(MODEL).hexdigest())


def ended_groups(uri: str) -> GroupFolder:
    folder = GroupFolder(uri)
    folder.begin(MANIFEST, MODEL, resume=False)
    name = f"{folder.run}/part-0.parquet"
    open_files(below(uri, folder.run)).write("part-0.parquet", [b"rows"])
    folder.finish(MANIFEST, [name], 1)
    return folder


def read_groups(uri: str) -> Any:
    manifest = Manifest.load(uri)
    return None if manifest is None else (manifest.files is not None, load_model_file(uri, manifest))


def begin_groups(uri: str) -> Prepared:
    return lambda: GroupFolder(uri).begin(MANIFEST, MODEL, resume=False)[1].files, lambda: read_groups(uri)


def resume_groups(uri: str) -> Prepared:
    ended_groups(uri)
    return lambda: len(GroupFolder(uri).begin(MANIFEST, MODEL, resume=True)[1].files), lambda: read_groups(uri)


def finish_groups(uri: str) -> Prepared:
    folder = GroupFolder(uri)
    folder.begin(MANIFEST, MODEL, resume=False)
    return lambda: folder.finish(MANIFEST, [], 0).count, lambda: read_groups(uri)


def read_ended_groups(uri: str) -> Prepared:
    ended_groups(uri)
    return lambda: read_groups(uri), lambda: None


def copy_ended_groups(uri: str) -> Prepared:
    ended_groups(uri)
    to = below(uri, "copy")

    def copied() -> Any:
        found = Manifest.load(to)
        return found and [b"".join(open_files(to).read(name)) for name in found.files or ()]

    manifest = Manifest.load(uri)
    assert manifest is not None
    return lambda: copy_groups(manifest.stored(uri), to), copied


def weights_at(uri: str) -> bytes:
    """Write a file of weights; return an archive whose model has the same."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file["layers/dense/vars/0"] = np.arange(1 << 15, dtype=np.float32)
    open_files(uri).write("base.weights.h5", [buffer.getvalue()])
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("model.weights.h5", buffer.getvalue())
    return whole.getvalue()


def weights_of(data: bytes) -> float:
    with zipfile.ZipFile(io.BytesIO(data)) as archive, archive.open("model.weights.h5") as member:
        return float(h5py.File(member, "r")["layers/dense/vars/0"][()].sum())


def refer_to_frozen_weights(uri: str) -> Prepared:
    data = weights_at(uri)
    return lambda: len(without_weights_of(data, below(uri, "base.weights.h5"))) < len(data) // 2, lambda: None


def read_frozen_weights(uri: str) -> Prepared:
    data = without_weights_of(weights_at(uri), below(uri, "base.weights.h5"))
    return lambda: weights_of(with_all_weights(data)), lambda: None


def wide_rows(uri: str) -> Prepared:
    def write_and_read() -> list[list[float]]:
        saved = save_rows(uri, [(np.arange(4), ROWS)])
        return [rows.tolist() for _, rows in load_rows(saved, TableShape("words", 9, 3, 2))]

    return write_and_read, lambda: None


Operation = Callable[[str], Prepared]
#: Each operation, and its error if the store stays broken.
OPERATIONS: dict[Operation, type[DistkerasError]] = {
    begin_job: SnapshotError,
    save_checkpoint: SnapshotError,
    claim_and_restore: SnapshotError,
    find_server: ServerLostError,
    table_rows: SnapshotError,
    publish_version: SnapshotError,
    read_version: SnapshotError,
    hold_version: SnapshotError,
    begin_groups: SnapshotError,
    resume_groups: SnapshotError,
    finish_groups: SnapshotError,
    read_ended_groups: SnapshotError,
    copy_ended_groups: SnapshotError,
    refer_to_frozen_weights: ConfigurationError,
    read_frozen_weights: ConfigurationError,
    wide_rows: ConfigurationError,
}
READERS = (find_server, read_version, read_ended_groups, refer_to_frozen_weights, read_frozen_weights)
#: These check the store, or need a list at once.
STARTS = (begin_job, claim_and_restore, begin_groups, resume_groups, wide_rows)
#: These need to find in a list what they have written.
PROOFS = (save_checkpoint, publish_version, hold_version)

#: Faults of any request, of requests that write, and of lists, and whether a repetition helps.
ANY: dict[str, tuple[Callable[[], Fault], bool]] = {
    "500 and 503 once": (lambda: Status(2), True),
    "500 and 503": (Status, False),
    "slow": (Slow, True),
    "reply cut once": (lambda: CutReply(1), True),
    "reply cut": (CutReply, False),
}
WRITES: dict[str, tuple[Callable[[], Fault], bool]] = {
    "request cut once": (lambda: CutRequest(1), True),
    "request cut": (CutRequest, False),
    "reply lost once": (lambda: LostReply(1), True),
    "error in 200 once": (lambda: ErrorWithin200(1), True),
    "error in 200": (ErrorWithin200, False),
}
LISTS: dict[str, tuple[Callable[[], Fault], bool]] = {
    "lists lag": (lambda: LaggingLists(2), True),
    "lists lack": (LaggingLists, False),
}


#: Faults and operations that the default run has: one fault that lasts, and those of lists; the others are slow tests.
DEFAULT = ("500 and 503", *LISTS)
OF_CHECKPOINTS = (begin_job, save_checkpoint, claim_and_restore, publish_version)


def cells() -> Iterator[Any]:
    """Yield each operation with each fault that meets it, and its error; None: the right result."""
    slow = pytest.mark.slow
    for operation, lasting in OPERATIONS.items():
        for name, (fault, helps) in {**ANY, **({} if operation in READERS else WRITES)}.items():
            first = operation in OF_CHECKPOINTS and name in DEFAULT
            marks = () if first or (operation, name) == (claim_and_restore, "reply cut once") else slow
            error = None if helps else lasting
            yield pytest.param(operation, fault, error, id=f"{operation.__name__}-{name}", marks=marks)
        for name, (fault, helps) in LISTS.items() if operation in STARTS + PROOFS else ():
            error = ConfigurationError if operation in STARTS else None if helps else lasting
            marks = () if operation in OF_CHECKPOINTS else slow
            yield pytest.param(operation, fault, error, id=f"{operation.__name__}-{name}", marks=marks)


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with pytest.MonkeyPatch.context() as patch, S3().serving() as s3:
        for name, value in CLIENT.items():
            patch.setenv(name, value)
        patch.setattr(files, "S3_RETRIES", 2)
        open_files(s3.uri("bucket"))
        yield s3


@pytest.fixture(scope="module")
def right(server: S3) -> Callable[[Operation], Any]:
    """Return a function from an operation to what it returns, and what the store holds then, without faults."""

    @functools.cache
    def result(operation: Operation) -> Any:
        act, held = operation(server.uri(f"bucket/{uuid.uuid4().hex}"))
        return act(), held()

    return result


@pytest.mark.parametrize(("operation", "fault", "expected"), list(cells()))
def test_each_fault_ends_with_the_right_result_or_one_error(
    server: S3,
    right: Callable[[Operation], Any],
    operation: Operation,
    fault: Callable[[], Fault],
    expected: type[DistkerasError] | None,
) -> None:
    place = f"bucket/{uuid.uuid4().hex}"
    act, held = operation(server.uri(place))
    before = held()
    result, error = None, None
    with server.broken(fault()) as planted:
        try:
            result = act()
        except DistkerasError as raised:
            error = raised
    assert planted.struck
    if expected is None:
        assert error is None
        assert (result, held()) == right(operation)
    else:
        assert type(error) is expected
        assert place in str(error)
        assert held() in (before, right(operation)[1])


def test_a_store_that_never_answers_is_an_error(server: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "S3_RETRIES", 0)
    folder = open_files(server.uri("bucket/silent"), create=False)
    silent = Silent()
    with server.broken(silent):
        with pytest.raises(OSError, match="Timeout was reached"):
            folder.names()
        silent.end()
