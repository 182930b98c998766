"""Worlds whose time a test controls, and the shared memory that a process has mapped."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from distkeras.ps.world.world import World


class HandWorld(World):
    """The system's world, except that its clock is manual."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


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
