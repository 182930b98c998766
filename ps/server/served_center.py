"""The center of a server: from its publication to its last snapshot, and what every answer about it needs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TypedDict

import numpy as np

from distkeras.ps.center.center import Center, Released
from distkeras.ps.center.leases import PartitionLease, StateMemory
from distkeras.ps.checkpoint.checkpointer import Checkpointer, SavedParts
from distkeras.ps.checkpoint.snapshots import Saved, SnapshotDirectory
from distkeras.ps.errors import DifferentJobError, DistkerasError, NodeError, RemoteProtocolError, ServerLostError
from distkeras.ps.protocol import driver_messages, messages
from distkeras.ps.protocol.framing import Limits
from distkeras.ps.protocol.layout import Layout, decode
from distkeras.ps.protocol.loop import NO_ROWS, Position
from distkeras.ps.protocol.tables import block_bytes, most_state_bytes
from distkeras.ps.server.job_state import JobCondition, LeaseConnections, Peer
from distkeras.ps.server.table_requests import TableRequests, bytes_of_rows
from distkeras.ps.settings import ServerSettings
from distkeras.ps.world.world import World

#: Bytes in a commit for its history, which has a row for each step.
_HISTORY_BYTES = 16 * 1024 * 1024

#: The requests that need the lease of a partition.
LeaseRequest = messages.KeepOptimizer | messages.FetchOptimizer | messages.OptimizerTaken | messages.Announce


class _End(TypedDict):
    """The end of a lease as messages have it; -1: it has none."""

    end_epoch: int
    end_batch: int


def end_in_message(end: Position | None) -> _End:
    """Return the fields of a message for the end of a lease."""
    epoch, batch = end or (-1, 0)
    return {"end_epoch": epoch, "end_batch": batch}


class ServedCenter:
    """A center, the lock around it, its snapshots, and the connections of those who hold its leases.

    `publish`, `require_holder`, `require_lease`, `note_commit` and `wait_until_saved` are called with the lock held,
    which is `changed`.

    Args:
        incarnation: this server's number, which rises with each restart.
        snapshots: where the center is saved; None: the job ends with this process.
        restored: the center that was restored, and its snapshot; None: the center is made when it is published.
    """

    def __init__(
        self,
        settings: ServerSettings,
        incarnation: int,
        snapshots: SnapshotDirectory | None,
        restored: tuple[Center, Saved] | None,
        world: World,
    ) -> None:
        self.settings, self.deadlines, self.world = settings, settings.deadlines, world
        self._incarnation, self._snapshots, self._began = incarnation, snapshots, world.monotonic()
        #: The lock, its condition, and the state of the server.
        self.changed = JobCondition(world)
        #: None before it is published.
        self.center: Center | None = None
        self._checkpointer: Checkpointer | None = None
        if restored is not None:
            self.center, saved = restored
            self._checkpointer = self._make_checkpointer(self.center, saved)
        #: The digest of the driver's publication, and the model file; empty before the publication.
        self._published, self.model = b"", np.empty(0, np.uint8)
        #: The layouts of center and moving statistics, if the driver published their names.
        self.layouts: list[Layout] = []
        self.limits = Limits(body=settings.max_body, arrays=Limits.arrays + 3 * len(settings.tables))
        self.connections = LeaseConnections()
        self.states = StateMemory(settings.workers, world)
        self.rows = TableRequests(settings.tables, self.changed)

    def close(self, timeout: float) -> None:
        """Take a last snapshot within ``timeout`` seconds; no request may follow."""
        if self._checkpointer is not None:
            self._checkpointer.close(timeout)

    def corrupted(self, error: NodeError) -> DistkerasError:
        if self._checkpointer is None:
            return error
        self.changed.report_corruption(error.message)
        return ServerLostError(
            f"the center of this server is corrupt; another one starts from the latest snapshot: {error.message}"
        )

    def publish(self, message: driver_messages.Publish) -> None:
        """Make the center, unless it was restored, and begin to save it."""
        digest = _digest_of(message)
        if self._published not in (b"", digest):
            raise RemoteProtocolError("the center must be published once. Received: another one")
        if self._published:  # the driver sends it again, because the reply was lost
            return
        center = self._begin(message.center, message.moving_statistics)
        if message.names.size:
            sizes = self._elements(center), center.moving_statistics.size
            self.layouts = decode(message.names.tobytes(), sizes)
        self.model, self._published, self.limits = message.model, digest, self._limits_of(center)
        self.changed.notify_all()

    def _begin(self, vector: np.ndarray, moving_statistics: np.ndarray) -> Center:
        if self.center is None:
            self.rows.require_complete()
            self.center = self._make_center(vector, moving_statistics)
            self._checkpointer = self._make_checkpointer(self.center)
        sizes, expected = (vector.size, moving_statistics.size), (self.center.size, self.center.moving_statistics.size)
        if sizes != expected:
            raise DifferentJobError(
                f"the model must have {expected[0]} trainable and {expected[1]} moving elements, as the snapshot "
                f"has. Received: {sizes[0]} and {sizes[1]}"
            )
        if self._checkpointer is not None:
            self._checkpointer.start()
        return self.center

    def _elements(self, center: Center) -> int:
        """Return the number of elements of the model."""
        return center.size

    def _limits_of(self, center: Center) -> Limits:
        shapes = self.settings.tables
        vectors = center.traits.parts * center.current.array.nbytes
        commit = vectors + center.moving_statistics.nbytes + _HISTORY_BYTES + bytes_of_rows(shapes)
        blocks = [block_bytes(shape) for shape in shapes]
        return replace(self.limits, body=max(commit, most_state_bytes(center.size, shapes), *blocks))

    def _make_center(self, vector: np.ndarray, moving_statistics: np.ndarray) -> Center:
        tables = self.rows.tables
        return self.settings.make_center(vector, moving_statistics, self._incarnation, self.world, tables)

    def _make_checkpointer(self, center: Center, saved: Saved | None = None) -> Checkpointer | None:
        if self._snapshots is None or self.settings.checkpoint is None:
            return None
        return Checkpointer(
            self.settings.checkpoint,
            self._snapshots,
            center,
            self.changed,
            saved,
            self.world,
            fail=self._give_up,
            parts=self._make_parts(),
        )

    def _make_parts(self) -> SavedParts | None:
        """Return what saves the elements, if they are at shards."""
        return None

    def _give_up(self, error: DistkerasError) -> None:
        """Stop because another server owns the directory; if it serves the same job, the workers move to it."""
        assert self._snapshots is not None
        if self._snapshots.lost_to_own_job:
            self.changed.report_corruption(error.message)
        else:
            self.changed.fail(messages.fault_of(error))

    def wait_for_publish(self, peer: Peer) -> None:
        """Wait until the driver has published the center."""
        with self.changed:
            self.changed.require(
                lambda: bool(self._published),
                self.deadlines.publish,
                peer.hung_up,
                lambda: "the driver to publish the center",
            )

    def require_center(self, peer: Peer) -> Center:
        """Return the center, for the driver or a worker without a lease; wait until it is published."""
        # They may send a request to a server that was just restarted, before the driver has published the center there.
        if self.center is None:
            self.wait_for_publish(peer)
        return self.require_sound()

    def require_sound(self) -> Center:
        """Return the center; raise an error unless it is published and not corrupt."""
        if self.changed.corruption is not None:
            self.changed.require_running()
        if self.center is None:
            raise RemoteProtocolError("the center must be published first. Received: a request for it")
        return self.center

    def require_holder(self, peer: Peer, center: Center, worker: int, attempt: int) -> None:
        """Raise a LeaseLostError unless ``peer`` is the connection of the attempt that holds the lease."""
        center.leases.held(worker, attempt)
        self.connections.require(peer, worker)

    def require_lease(self, peer: Peer, message: LeaseRequest) -> PartitionLease:
        """Return the lease that the sender of ``message`` holds, in this incarnation."""
        self.changed.require_running()
        center = self.require_sound()
        center.require_incarnation(message.worker, message.incarnation)
        self.require_holder(peer, center, message.worker, message.attempt)
        return center.leases[message.worker]

    def seconds_silent(self, worker: int) -> float:
        """Return the seconds since the holder of a partition last sent something; 0 while it waits for a reply."""
        holder = self.connections.get(worker)
        if holder is not None and holder.asking:
            return 0.0
        return self.world.monotonic() - (self._began if holder is None else holder.active_at)

    def saved(self) -> tuple[int, float] | None:
        """Return the clock of the latest snapshot, and when it was taken (`World.monotonic`); None: there is none."""
        return None if self._checkpointer is None else self._checkpointer.saved

    def durable(self, worker: int, sequence: int) -> int:
        """Return the last commit of ``worker`` that a snapshot covers; without snapshots, ``sequence``."""
        return sequence if self._checkpointer is None else self._checkpointer.durable.get(worker, 0)

    def note_commit(self, center: Center) -> None:
        """Let the checkpointer decide whether a snapshot is due."""
        if self._checkpointer is not None:
            self._checkpointer.committed(center.clock)

    def wait_until_saved(self, peer: Peer, worker: int | None = None) -> None:
        """Wait until a snapshot covers all commits so far: a worker that has left cannot repeat them."""
        if self._checkpointer is not None:
            checkpointer, mark = self._checkpointer, self._checkpointer.mark()
            self.changed.require(
                lambda: checkpointer.covers(mark),
                self.deadlines.reply,
                peer.hung_up,
                lambda: f"a snapshot; {checkpointer.failure or 'it is being written'}",
                worker,
            )

    def acknowledge(
        self, worker: int = -1, sequence: int = 0, *, skipped: bool = False, refused: bool = False, window: int = 0
    ) -> messages.Ack:
        """Return the acknowledgement of a worker's commit, or of a message without a sequence number."""
        center = self.center
        if center is None:
            return messages.Ack(0, 0, 0, 0)
        stopping, durable = center.asks_workers_to_leave, self.durable(worker, sequence)
        lease = center.leases.get(worker)
        end = end_in_message(None if lease is None else lease.end)
        numbers = center.incarnation, center.clock, sequence, durable
        return messages.Ack(*numbers, skipped, stopping, refused, window, **end)

    def reply(self, peer: Peer, center: Center, released: Released, *, whole: bool = False) -> messages.CenterReply:
        """Return the reply; the caller does not hold the lock. ``whole``: with the driver's values in any case."""
        peer.vectors.hold_until_sent(released.buffer)
        version, values = center.values.current
        # A relay forwards the reply to workers that may not have them yet.
        if version == peer.vectors.version_sent and not (whole or self.settings.relays):
            version, values = 0, NO_ROWS
        else:
            peer.vectors.version_sent = version
        worker = -1 if peer.lease is None else peer.lease[0]
        return messages.CenterReply(
            incarnation=center.incarnation,
            clock=released.clock,
            sequence=released.sequence,
            durable=self.durable(worker, released.sequence),
            learning_rate=released.learning_rate,
            center=released.buffer.array,
            moving_statistics=released.moving_statistics,
            stopping=center.asks_workers_to_leave,
            window=released.window,
            rows=released.rows,
            moved=released.moved,
            version=version,
            values=values,
            **end_in_message(released.end),
        )

    def counts_of_tables(self) -> np.ndarray:
        """Return `LivingTable.counts` of each table whose touches are counted, shape ``(tables, 4)``, float64."""
        living = () if self.center is None else self.center.living
        return np.array([table.counts for table in living], np.float64).reshape(-1, 4)


def _digest_of(message: driver_messages.Publish) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for array in (message.center, message.moving_statistics, message.model, message.names):
        digest.update(array.size.to_bytes(8, "big"))
        digest.update(array.data)
    return digest.digest()
