"""Child processes with which the parent exchanges lines.

Every fork of this process has a copy of each of its descriptors, and keeps a child's pipes open even if parent and
child are dead. So a pipe does not show that the other process has ended: parent and child watch each other's process.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

#: Seconds between two checks of the other process, where the system does not report its end.
POLL_SECONDS = 0.5
#: Seconds to collect the exit status of a process that has ended.
_COLLECT = 10.0
PIECE = 65536


class Child(Protocol):
    """A child process."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def exit_code(self) -> int | None:
        """The exit status, or minus the number of the signal that killed it; None while it runs."""

    def write(self, line: bytes) -> None:
        """Write to its standard input; raise a BrokenPipeError if it has ended."""

    def line(self, timeout: float) -> bytes:
        """Return the next line of its output, or the rest at its end; raise TimeoutError after ``timeout`` seconds."""

    def errors(self) -> Iterator[bytes]:
        """Yield the lines of its standard error, until it ends."""

    def end_input(self, goodbye: bytes) -> None:
        """Write the last line to its standard input, if it is running, and close the input."""

    def wait(self, timeout: float) -> bool:
        """Wait for up to ``timeout`` seconds; return whether it has ended."""

    def kill(self) -> None:
        """Kill it."""

    def close(self) -> None:
        """Release its resources, after it has ended."""


class ChildProcess:
    """A process of the system.

    ``--driver FD`` is appended to the command if the system has a descriptor that reports the end of this process, even
    if other processes have a copy.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        driver, pipe = _process_descriptor(os.getpid()), subprocess.PIPE
        self._process = subprocess.Popen(
            [*command, *(() if driver is None else ("--driver", str(driver)))],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=environment,
            pass_fds=() if driver is None else (driver,),
        )
        if driver is not None:
            os.close(driver)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._input, self._output, self._errors = self._process.stdin, self._process.stdout, self._process.stderr
        self._deadline = math.inf
        self._lines = _lines_of(self._process, self._output.fileno(), lambda: self._deadline)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def write(self, line: bytes) -> None:
        self._input.write(line)
        self._input.flush()

    def line(self, timeout: float) -> bytes:
        self._deadline = time.monotonic() + timeout
        return next(self._lines, b"")

    def errors(self) -> Iterator[bytes]:
        with self._errors:
            yield from _lines_of(self._process, self._errors.fileno())

    def end_input(self, goodbye: bytes) -> None:
        if not self._input.closed:
            with contextlib.suppress(BrokenPipeError):  # a process that has ended does not read it
                self._input.write(goodbye)
                self._input.close()

    def wait(self, timeout: float) -> bool:
        if self._process.poll() is not None:
            return True
        descriptor = _process_descriptor(self._process.pid)
        if descriptor is not None:  # it reports the end at once, while `subprocess` polls
            try:
                end = select.poll()
                end.register(descriptor, select.POLLIN)
                # If another thread is collecting the status, `subprocess` returns it only a moment later.
                timeout = _COLLECT if end.poll(1000 * timeout) else 0.0
            finally:
                os.close(descriptor)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._output.close()


def _process_descriptor(pid: int) -> int | None:
    """Return a descriptor that reports the end of a process; None if the system has no such descriptors."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # another system than Linux, or an old one
        return None


def _lines_of(
    child: subprocess.Popen[bytes], stream: int, deadline: Callable[[], float] = lambda: math.inf
) -> Iterator[bytes]:
    """Yield the lines that ``child`` writes to a pipe, until either ends; each must arrive before ``deadline()``."""
    poller = select.poll()
    poller.register(stream, select.POLLIN)
    rest = b""
    while True:
        ended = child.poll() is not None  # checked before the pipe is read, so that no output is missed
        seconds_left = deadline() - time.monotonic()
        if seconds_left <= 0:
            raise TimeoutError
        if poller.poll(0 if ended else 1000 * min(POLL_SECONDS, seconds_left)):
            piece = os.read(stream, PIECE)
            *lines, rest = (rest + piece).split(b"\n")
            yield from (line + b"\n" for line in lines)
            ended = not piece
        if ended:
            break
    if rest:
        yield rest
