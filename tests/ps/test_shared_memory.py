"""Memory that processes share: what may be mapped, what is refused, and when the memory is freed."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.programs import output_of
from support.ps.clocks import mapped

from distkeras.ps.world.shared_memory import SharedMemory, map_shared
from distkeras.ps.world.world import REAL

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no anonymous files"),
]

SIZE = 3 * 4096


def test_each_process_reads_what_the_other_one_writes() -> None:
    shared = REAL.share(SIZE)
    shared.memory[4096:4100] = b"here"
    code = (
        "import sys; from distkeras.ps.world.shared_memory import map_shared; "
        f"memory = map_shared(sys.argv[1], {SIZE}); print(bytes(memory[4096:4100]).decode()); memory[:5] = b'there'"
    )
    assert output_of("-c", code, shared.place) == "here\n"
    assert bytes(shared.memory[:5]) == b"there"


def test_hidden_memory_can_still_be_used_by_existing_mappings_but_not_mapped_again() -> None:
    shared = REAL.share(SIZE)
    other = REAL.map_shared(shared.place, SIZE)
    shared.hide()
    shared.hide()
    with pytest.raises(OSError, match=r"No such file|must be a file"):
        REAL.map_shared(shared.place, SIZE)
    shared.memory[0] = 7
    assert other[0] == 7


def inode(shared: SharedMemory) -> int:
    return os.fstat(int(shared.place.partition("/")[2])).st_ino


def test_memory_is_freed_with_its_last_mapping() -> None:
    shared = REAL.share(SIZE)
    other = REAL.map_shared(shared.place, SIZE)
    own = inode(shared)
    assert mapped(os.getpid())[own] == 2
    del shared
    assert mapped(os.getpid())[own] == 1
    del other
    assert mapped(os.getpid())[own] == 0


def test_memory_cannot_be_resized() -> None:
    shared = REAL.share(SIZE)
    descriptor = int(shared.place.partition("/")[2])
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600


def test_a_forked_child_does_not_inherit_the_mapping() -> None:
    shared = REAL.share(SIZE)
    own = inode(shared)
    pid = os.fork()
    if pid == 0:  # pragma: no cover - runs in the child
        os._exit(mapped(os.getpid())[own])
    assert mapped(os.getpid())[own] == 1
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert shared.memory[0] == 0


@contextmanager
def some_file(kind: str) -> Iterator[int]:
    """Yield a descriptor of a file that is not shared memory of `SIZE` bytes."""
    if kind == "a regular file":
        with tempfile.TemporaryFile() as file:
            file.truncate(SIZE)
            yield file.fileno()
    elif kind == "a pipe":
        reader, writer = os.pipe()
        yield reader
        os.close(reader)
        os.close(writer)
    elif kind == "a device":
        descriptor = os.open("/dev/zero", os.O_RDWR)
        yield descriptor
        os.close(descriptor)
    else:
        descriptor = os.memfd_create("other", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, SIZE - (kind == "another size"))
        if kind != "no seals":
            seals = fcntl.F_SEAL_SHRINK | (0 if kind == "it may grow" else fcntl.F_SEAL_GROW)
            fcntl.fcntl(
                descriptor, fcntl.F_ADD_SEALS, seals | (0 if kind == "more seals may follow" else fcntl.F_SEAL_SEAL)
            )
        yield descriptor
        os.close(descriptor)


@pytest.mark.parametrize(
    "kind", ["a regular file", "a pipe", "a device", "another size", "no seals", "it may grow", "more seals may follow"]
)
def test_a_file_that_is_not_shared_memory_of_this_size_is_not_mapped(kind: str) -> None:
    with some_file(kind) as descriptor, pytest.raises(OSError, match=r"must be|Invalid argument|Permission denied"):
        map_shared(f"{os.getpid()}/{descriptor}", SIZE)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can make another user's file")
def test_another_users_memory_is_not_mapped() -> None:
    shared = REAL.share(SIZE)
    os.fchown(int(shared.place.partition("/")[2]), 65534, 65534)
    with pytest.raises(PermissionError, match="must be a file of user 0"):
        map_shared(shared.place, SIZE)


@pytest.mark.parametrize(
    "place", ["", "1", "1/", "/1", "self/1", "1/../../etc/passwd", "01/1", "1/1\n", "-1/1", "1/+1", "9" * 11 + "/1"]
)
def test_a_place_must_be_two_numbers(place: str) -> None:
    with pytest.raises(OSError, match="must be the numbers"):
        map_shared(place, SIZE)
