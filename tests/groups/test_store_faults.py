"""The folder of trained groups under a disk that fails at any operation, drivers that die there, and second drivers."""

from __future__ import annotations

import contextlib
import errno
import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distkeras.groups.store import GroupFolder, Manifest, load_model_file
from distkeras.ps.errors import DistkerasError, SnapshotError
from distkeras.ps.world.files import LocalFiles

KEYS = '{"type":"struct","fields":[{"name":"shop","type":"string","nullable":true,"metadata":{}}]}'
#: More operations than a run has.
_MOST = 100


class DeathError(BaseException):
    """A driver died: neither its handlers nor its cleanup reach the disk."""


class Disk:
    """Fails at one operation of `LocalFiles`: calls ``strike`` there, and, if ``stays``, at all later ones."""

    def __init__(
        self, at: int, strike: Callable[[], object], *, stays: bool = False, only: tuple[str, ...] = ()
    ) -> None:
        self.at, self.strike, self.stays, self.only, self.count = at, strike, stays, only, 0

    def before(self, operation: str) -> None:
        if self.only and operation not in self.only:
            return
        self.count += 1
        if self.count == self.at or (self.stays and self.count > self.at):
            self.strike()


@contextlib.contextmanager
def failing(disk: Disk) -> Iterator[Disk]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("names", "write", "sync", "move", "delete"):
            patch.setattr(LocalFiles, name, _struck(disk, name, getattr(LocalFiles, name)))
        yield disk


def _struck(disk: Disk, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def struck(self: LocalFiles, *arguments: Any) -> Any:
        try:
            disk.before(name)
        except (OSError, DeathError):
            if name == "write":  # a torn file remains
                call(self, arguments[0], [b"torn"])
            raise
        return call(self, *arguments)

    return struck


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def die() -> None:
    raise DeathError


def manifest_of(model: bytes) -> Manifest:
    return Manifest({"num_epoch": 3}, KEYS, hashlib.sha256(model).hexdigest())


def run(uri: str, model: bytes, *, resume: bool) -> GroupFolder:
    """Begin or resume the job as one driver does, train the group that no run has trained, and end it."""
    opened = GroupFolder(uri)
    manifest, before = opened.begin(manifest_of(model), model, resume=resume)
    if not before.files:
        place = Path(uri, opened.run)
        place.mkdir()
        (place / "part.parquet").write_bytes(b"group")
    files = [*before.files, *opened.files_of(opened.run)]
    opened.finish(manifest, files, len(files))
    return opened


def require_whole(uri: str) -> None:
    """Check that the folder holds a finished job whose files and model are there."""
    manifest = Manifest.load(uri)
    assert manifest is not None
    assert manifest.files
    assert all(Path(uri, name).read_bytes() == b"group" for name in manifest.files)
    load_model_file(uri, manifest)


#: Names that a URI or a shell would read as something else.
ODD = ("a b", "ü", "a+b", "a#b", "a%20b", "a[1]")


@pytest.mark.parametrize(
    ("strike", "stays", "only"),
    [(full, False, ()), (full, True, ("write",)), (full, True, ("write", "move", "delete")), (die, True, ())],
    ids=["once", "full", "read-only", "death"],
)
def test_a_job_goes_on_after_a_fault_at_any_operation(
    strike: Callable[[], object], stays: bool, only: tuple[str, ...], tmp_path: Path
) -> None:
    struck = 0
    for at in range(1, _MOST):
        uri = str(tmp_path / f"{at}" / ODD[at % len(ODD)])
        failure: BaseException | None = None
        with failing(Disk(at, strike, stays=stays, only=only)) as disk:
            try:
                run(uri, b"model", resume=False)
            except (DistkerasError, DeathError) as error:
                failure = error
        if disk.count < at:
            break
        struck += 1
        assert failure is None or isinstance(failure, SnapshotError | DeathError)
        run(uri, b"model", resume=True)
        require_whole(uri)
    assert struck > 3


def second_driver(disk: Disk, uri: str, *, dies: bool) -> None:
    """Run the whole job; then the first driver goes on, or dies."""
    disk.at = -1
    run(uri, b"of the second", resume=True)
    require_whole(uri)
    if dies:
        disk.at, disk.stays, disk.strike = 0, True, die
        die()


@pytest.mark.parametrize("dies", [False, True])
def test_a_second_driver_at_any_operation_leaves_a_whole_folder(dies: bool, tmp_path: Path) -> None:
    """The archives of the model differ, as those of two drivers do."""
    struck = 0
    for at in range(1, _MOST):
        uri = str(tmp_path / f"{at}")
        disk = Disk(at, full)
        disk.strike = partial(second_driver, disk, uri, dies=dies)
        with failing(disk), contextlib.suppress(DistkerasError, DeathError):
            run(uri, b"of the first", resume=False)
        if disk.at == at:
            break
        struck += 1
        require_whole(uri)  # also if the first driver went on after the second one had ended the job
        run(uri, b"of the third", resume=True)
        require_whole(uri)
    assert struck > 10
