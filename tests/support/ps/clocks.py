"""Worlds whose time a test controls, and the shared memory that a process has mapped."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from distkeras.ps.world.world import Condition, Lock, World


class HandWorld(World):
    """The system's world, except that its clock is manual."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class SteppedWorld(HandWorld):
    """A world of one thread: a wait for a condition takes all of its time, and `actions` happen meanwhile.

    Attributes:
        actions: when each of them happens, in seconds, and what happens; in any order.
    """

    def __init__(self) -> None:
        self.actions: dict[float, Callable[[], object]] = {}

    def condition(self, lock: Lock | None = None) -> Condition:
        return _SteppedCondition(self, lock)


class _SteppedCondition(threading.Condition):
    def __init__(self, world: SteppedWorld, lock: Lock | None) -> None:
        super().__init__(lock)  # type: ignore[arg-type]  # the system's
        self._world = world

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None, "every wait must have a deadline"
        world = self._world
        world.now += timeout
        for at in sorted(at for at in world.actions if at <= world.now):
            world.actions.pop(at)()
        return True


class LateWorld(World):
    """The system's world, except that its clock can be set ahead by some seconds."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


def mapped(pid: int) -> Counter[int]:
    """Return how often a process has mapped each piece of shared memory, by the inode of its file.

    A single count would include the pieces of other tests in this process, which may disappear at any time.
    """
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return Counter(int(line.split()[4]) for line in lines if "memfd:distkeras" in line)


def counting_pieces() -> Callable[[int], int]:
    """Return a function that counts a process's pieces of shared memory that this process has not mapped now."""
    before = mapped(os.getpid())

    def count(pid: int) -> int:
        gc.collect()
        return sum(number for inode, number in mapped(pid).items() if inode not in before)

    return count
