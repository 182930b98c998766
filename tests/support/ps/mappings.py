"""The shared memory that a process has mapped."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path


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
