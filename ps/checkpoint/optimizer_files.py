"""The files with the states of the workers' optimizers in a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from distkeras.ps.center.center import Center
from distkeras.ps.center.optimizer_states import KeptState
from distkeras.ps.checkpoint.directory import SnapshotDirectory
from distkeras.ps.errors import SnapshotError
from distkeras.ps.events import report
from distkeras.ps.world.world import World

log = logging.getLogger(__name__)

#: The share of the time that writing states may take, and seconds of writing that need no share.
SHARE, _FREE_SECONDS = 0.1, 5.0


class OptimizerFiles:
    """Writes each state once, however many snapshots name its file.

    Args:
        directory: where the files are.
        center: the center whose partitions' states they are.
        files: by partition, the file of the state that ``center`` was restored with.
        world: its clock.
    """

    def __init__(self, directory: SnapshotDirectory, center: Center, files: Mapping[int, str], world: World) -> None:
        self._directory, self._now = directory, world.monotonic
        kept = {worker: lease.optimizer for worker, lease in center.leases.items()}
        #: By partition, the state that was saved last and its file.
        self._saved = {worker: (kept[worker], file) for worker, file in files.items() if kept.get(worker) is not None}
        self._due = 0.0

    def save(self, states: Mapping[int, KeptState], *, now: bool) -> dict[int, str]:
        """Write those of ``states`` that have no file, if it is time or ``now``; return the files by partition.

        If many large states take long to write, snapshots would take as long. So the next states are written when the
        time for these has become a small share; until then, snapshots name the files of older states.
        """
        began = self._now()
        new = {worker: kept for worker, kept in states.items() if self._saved.get(worker, (None,))[0] is not kept}
        if new and (now or began >= self._due):
            try:
                for worker, kept in new.items():
                    self._saved[worker] = kept, self._directory.save_optimizer(worker, kept)
            except SnapshotError as error:  # the snapshot itself may still succeed
                report(log, "optimizer", "the optimizer's state of a partition is not saved: %s", error)
            seconds = self._now() - began
            self._due = self._now() + (seconds / SHARE if seconds > _FREE_SECONDS else 0.0)
        # A state that was dropped must not come back.
        self._saved = {worker: saved for worker, saved in self._saved.items() if worker in states}
        return {worker: file for worker, (_, file) in self._saved.items()}
