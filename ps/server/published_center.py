"""The job's center from its publication on, and the snapshots of it."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.schedulers import scheduler_for
from distkeras.ps.checkpoint.checkpointer import Checkpointer
from distkeras.ps.checkpoint.directory import Saved, SnapshotDirectory
from distkeras.ps.errors import DifferentJobError, DistkerasError, NodeError, RemoteProtocolError, ServerLostError
from distkeras.ps.protocol.messages import Publish, fault_of
from distkeras.ps.server.waiting import JobCondition
from distkeras.ps.settings import ServerSettings


def make_center(
    settings: ServerSettings,
    vector: np.ndarray,
    moving_statistics: np.ndarray,
    incarnation: int,
    now: Callable[[], float] = time.time,
) -> Center:
    """The center that ``settings`` ask for, from its initial parameters (float32) and moving statistics.

    ``now`` is the clock for its records, seconds since the epoch.
    """
    return Center(
        settings.rule,
        vector,
        workers=settings.workers,
        learning_rate=settings.learning_rate,
        scheduler=scheduler_for(settings.rule, settings.workers, settings.staleness_bound),
        moving_statistics=moving_statistics,
        measure_gap=settings.measure_gap,
        check_finite=True,
        incarnation=incarnation,
        now=now,
    )


def digest_of(message: Publish) -> bytes:
    """Tells whether two messages publish the same."""
    digest = hashlib.blake2b(digest_size=32)
    for array in (message.center, message.moving_statistics, message.model, message.names):
        digest.update(array.size.to_bytes(8, "big"))
        digest.update(array.data)
    return digest.digest()


class PublishedCenter:
    """Holds the center, and the checkpointer that saves it; the job's lock guards both.

    Args:
        settings: the server's.
        changed: the job's lock.
        incarnation: of this server: rises with each restart.
        snapshots: where the center is saved; None: the job ends with this process.
        restored: the center that a snapshot was taken of, and that snapshot; None: it is made when it is published.
    """

    def __init__(
        self,
        settings: ServerSettings,
        changed: JobCondition,
        *,
        incarnation: int,
        snapshots: SnapshotDirectory | None,
        restored: tuple[Center, Saved] | None,
    ) -> None:
        self._settings = settings
        self._changed = changed
        self._incarnation = incarnation
        self._snapshots = snapshots
        #: None before it is published.
        self.center: Center | None = None
        self._checkpointer: Checkpointer | None = None
        if restored is not None:
            self.center, saved = restored
            self._checkpointer = self._make_checkpointer(self.center, saved)

    def _make_checkpointer(self, center: Center, saved: Saved | None = None) -> Checkpointer | None:
        if self._snapshots is None or self._settings.checkpoint is None:
            return None
        return Checkpointer(
            self._settings.checkpoint,
            self._snapshots,
            center,
            self._changed,
            saved,
            self._changed.world,
            fail=self._give_up,
        )

    def _give_up(self, error: DistkerasError) -> None:
        """The directory is another server's. Where that one was started for the same job, workers go on with it."""
        assert self._snapshots is not None
        if self._snapshots.lost_to_own_job:
            self._changed.report_corruption(error.message)
        else:
            self._changed.fail(fault_of(error))

    def corrupted(self, error: NodeError) -> DistkerasError:
        """What is to be raised for ``error``, which has left a commit applied in part.

        Where there are snapshots, the server ends, and another one begins with the latest of them; else the job does.
        """
        if self._checkpointer is None:
            return error
        self._changed.report_corruption(error.message)
        return ServerLostError(
            f"the center of this server is corrupt; another one starts from the latest snapshot: {error.message}"
        )

    def publish(self, vector: np.ndarray, moving_statistics: np.ndarray) -> Center:
        """The center: made of these, unless it was restored; begins to save it.

        A driver that finds that a restored one is not its own publishes nothing, and leaves all as it was.

        Raises:
            DifferentJobError: what was restored has other sizes.
        """
        if self.center is not None:
            sizes, expected = (
                (vector.size, moving_statistics.size),
                (self.center.size, self.center.moving_statistics.size),
            )
            if sizes != expected:
                raise DifferentJobError(
                    f"the model must have {expected[0]} trainable and {expected[1]} moving elements, as the snapshot "
                    f"has. Received: {sizes[0]} and {sizes[1]}"
                )
        else:
            self.center = make_center(
                self._settings, vector, moving_statistics, self._incarnation, self._changed.world.time
            )
            self._checkpointer = self._make_checkpointer(self.center)
        if self._checkpointer is not None:
            self._checkpointer.start()
        return self.center

    def close(self, timeout: float) -> None:
        """Takes a last snapshot; not under the lock.

        Raises:
            DeadlineError: it was not written in ``timeout`` seconds.
        """
        if self._checkpointer is not None:
            self._checkpointer.close(timeout)

    def require(self) -> Center:
        """The center.

        Raises:
            RemoteProtocolError: it is not published yet.
            ServerLostError: it is applied in part.
        """
        if self._changed.corruption is not None:
            self._changed.require_running()
        if self.center is None:
            raise RemoteProtocolError("the center must be published first. Received: a request for it")
        return self.center

    @property
    def clock(self) -> int:
        """Commits applied; -1 before there is a center."""
        return -1 if self.center is None else self.center.clock

    @property
    def saved(self) -> tuple[int, float]:
        """The clock that the latest snapshot of this server has, and seconds since then; -1 and NaN: there is none."""
        if self._checkpointer is None or self._checkpointer.saved is None:
            return -1, math.nan
        clock, taken = self._checkpointer.saved
        return clock, self._changed.world.monotonic() - taken

    def durable(self, worker: int, sequence: int) -> int:
        """The last commit of ``worker`` that outlives this process; without snapshots the last one is as good."""
        return sequence if self._checkpointer is None else self._checkpointer.durable.get(worker, 0)

    def committed(self) -> None:
        """A commit was applied or skipped."""
        if self._checkpointer is not None and self.center is not None:
            self._checkpointer.committed(self.center.clock)

    def wait_until_saved(self, timeout: float, hung_up: Callable[[], bool], worker: int) -> None:
        """Waits for a snapshot of all that was done: who is let go can repeat nothing any more.

        Args:
            timeout: seconds.
            hung_up: whether the waiting peer is not there any more.
            worker: who waits.

        Raises:
            DeadlineError, JobStoppedError, ServerLostError: see `JobCondition.require`.
        """
        if self._checkpointer is not None:
            checkpointer, mark = self._checkpointer, self._checkpointer.mark()
            self._changed.require(
                lambda: checkpointer.covers(mark),
                timeout,
                hung_up,
                lambda: f"a snapshot; {checkpointer.failure or 'it is being written'}",
                worker,
            )
