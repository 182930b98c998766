"""The state of each worker's optimizer, as it was sent last: what a later attempt at the partition begins with.

A state is never work that counts: it decides how well a successor trains, not what the ledger says. So it is kept only
as it came, and one that is damaged, too large, or without a place is dropped.

Under a rule with peers it is all that a member has. It comes ahead of the commit that it belongs to, and one is kept
next to it until then. A job whose member does not find its state ends with an error (`worker.daso`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.protocol.messages import OptimizerState
from distkeras.ps.world.world import REAL, World

#: Bytes of memory that all partitions' states may take together; a state above its partition's share is in a file.
MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class KeptState:
    """A state, and where its partition stood.

    Args:
        state: as the worker sent it.
        attempt: that sent it.
        sequence: its latest commit at that time.
        kept_at: when it came, seconds since the epoch.
    """

    state: OptimizerState
    attempt: int
    sequence: int
    kept_at: float


class StateMemory:
    """Where states are kept: in memory, or in files without a name in the system's folder for temporary files.

    Args:
        workers: number of workers of the job, n: a state in memory has at most a share of 1/n of `MEMORY_BYTES`.
    """

    def __init__(self, workers: int, world: World = REAL) -> None:
        self._most = MEMORY_BYTES // workers
        self._world = world

    def array(self, size: int) -> np.ndarray:
        """Return ``size`` bytes for a state; where the disk has no room, in memory, where it cannot stay: `holds`."""
        if size > self._most:
            try:
                return np.frombuffer(self._world.scratch(size), np.uint8)
            except OSError:
                pass  # the state is received and dropped, which the caller reports
        return np.empty(size, np.uint8)

    def holds(self, array: np.ndarray) -> bool:
        """Return whether ``array`` may be kept: it is small, or in a file."""
        return array.nbytes <= self._most or not array.flags.owndata
