"""Memory that two processes of one user on one host share, without a name that could outlive them.

It is an anonymous file of the kernel (``memfd``): no directory lists it, and the kernel frees it when the processes
that map it have ended, even by a crash. Other processes find it by the process id of its creator and the number of the
descriptor; Linux allows only processes of the same user, and of root, to open it. Its size is sealed, so that a mapping
cannot lose its pages, and all of its pages are reserved before it is used, because a write to a page for which there is
no memory would kill the process.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
from pathlib import Path
from typing import Protocol

#: The commands and seals of `fcntl(2)`: the seals cannot be changed, the size can neither shrink nor grow.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SIZE_IS_SEALED = 0x1 | 0x2 | 0x4
#: A flag of `memfd_create(2)` since Linux 6.3, which some settings require: the file can never be executed.
_NOT_EXECUTABLE = 0x8
_PLACE = re.compile(r"([1-9][0-9]{0,9})/([0-9]{1,9})")


class SharedMemory(Protocol):
    """Memory that this process has created, initially zero."""

    @property
    def memory(self) -> memoryview:
        """Its bytes."""

    @property
    def place(self) -> str:
        """The place by which another process maps it."""

    def hide(self) -> None:
        """Prevent further processes from mapping it; existing mappings stay valid."""


class AnonymousFile:
    """An anonymous file of ``size`` bytes, mapped: `SharedMemory`."""

    def __init__(self, size: int) -> None:
        self._descriptor = _anonymous_file()
        try:
            os.fchmod(self._descriptor, 0o600)
            os.ftruncate(self._descriptor, size)
            _fcntl(self._descriptor, _ADD_SEALS, _SIZE_IS_SEALED)
            self.memory = _mapped(self._descriptor, size)
        except BaseException:
            self.hide()
            raise
        self.place = f"{os.getpid()}/{self._descriptor}"

    def __del__(self) -> None:
        self.hide()

    def hide(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def map_shared(place: str, size: int) -> memoryview:
    """Return the memory that another process of this user has created at ``place``, with all of its pages reserved.

    Only numbers are taken from ``place``, and only a sealed anonymous file of exactly ``size`` bytes is mapped.
    """
    numbers = _PLACE.fullmatch(place)
    if numbers is None:
        raise OSError(
            errno.EINVAL, f"a place must be the numbers of a process and of a descriptor. Received: {place!r}"
        )
    path = Path(f"/proc/{numbers[1]}/fd/{numbers[2]}")
    _require_own(path.stat(), size)  # before it is opened, because opening a device may have an effect
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _require_own(os.fstat(descriptor), size)
        if _fcntl(descriptor, _GET_SEALS, 0) & _SIZE_IS_SEALED != _SIZE_IS_SEALED:
            raise OSError(errno.EPERM, "the size of shared memory must be sealed. Received: a file that may change")
        os.posix_fallocate(descriptor, 0, size)
        return _mapped(descriptor, size)
    finally:
        os.close(descriptor)


def _anonymous_file() -> int:
    create = getattr(os, "memfd_create", None)
    if create is None:
        raise OSError(errno.ENOSYS, "this system has no anonymous files")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return int(create("distkeras", flags | _NOT_EXECUTABLE))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return int(create("distkeras", flags))  # an older kernel


def _require_own(found: os.stat_result, size: int) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != size:
        raise OSError(
            errno.EPERM,
            f"shared memory must be a file of user {os.geteuid()} with {size} bytes. "
            f"Received: mode {found.st_mode:o}, user {found.st_uid}, {found.st_size} bytes",
        )


def _mapped(descriptor: int, size: int) -> memoryview:
    mapping = mmap.mmap(descriptor, size)
    if hasattr(mmap, "MADV_DONTFORK"):  # else a forked child would keep the memory after both ends have ended
        mapping.madvise(mmap.MADV_DONTFORK)
    return memoryview(mapping)


def _fcntl(descriptor: int, command: int, value: int) -> int:
    import fcntl  # not on every system

    return fcntl.fcntl(descriptor, command, value)
