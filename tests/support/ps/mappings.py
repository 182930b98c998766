"""The shared memory that a process has mapped."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path


def mapped(pid: int) -> Counter[int]:
    """How often a process has mapped each piece of shared memory, by the number of its file.

    A count of all would count what other tests of the process have left, which goes at any time.
    """
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return Counter(int(line.split()[4]) for line in lines if "memfd:distkeras" in line)


def counting_pieces() -> Callable[[int], int]:
    """What counts the pieces of shared memory of a process that this one does not have mapped now."""
    before = mapped(os.getpid())

    def count(pid: int) -> int:
        gc.collect()
        return sum(number for inode, number in mapped(pid).items() if inode not in before)

    return count
