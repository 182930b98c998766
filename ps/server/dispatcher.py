"""The dispatcher answers requests, or makes them wait: messages in, messages out, one lock around the `Center`.

The threads of the sessions call it, and send its replies. Commits are checked for NaN outside the lock.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import numpy as np

from distkeras.ps.center.center import Center, Released
from distkeras.ps.center.checks import check_hello, check_shapes, check_wants, not_finite
from distkeras.ps.center.driver_values import set_values
from distkeras.ps.center.leases import NO_ATTEMPT, PartitionLease, StateMemory
from distkeras.ps.center.micro_batches import begin_micro_batch, commits_before, is_complete, require_present
from distkeras.ps.checkpoint.checkpointer import Checkpointer, SavedParts
from distkeras.ps.checkpoint.snapshots import Saved, SnapshotDirectory
from distkeras.ps.errors import (
    DifferentJobError,
    DistkerasError,
    JobStoppedError,
    NodeError,
    NonFiniteError,
    Origin,
    RemoteProtocolError,
    ServerLostError,
)
from distkeras.ps.events import report
from distkeras.ps.protocol import messages
from distkeras.ps.protocol.companions import split
from distkeras.ps.protocol.compression import codec_of
from distkeras.ps.protocol.framing import Limits
from distkeras.ps.protocol.layout import Layout, decode
from distkeras.ps.protocol.loop import NO_ROWS, Position
from distkeras.ps.protocol.messages import Message
from distkeras.ps.protocol.tables import Ids, block_bytes, most_state_bytes
from distkeras.ps.server.job_state import JobCondition, LeaseConnections, Peer
from distkeras.ps.server.loan_requests import LoanRequests
from distkeras.ps.server.rendezvous import RelayGroups, Rendezvous
from distkeras.ps.server.requests import OptimizerRequests, Request, TableRequests, bytes_of_rows, rows_to_inspect
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.handshakes import map_slots
from distkeras.ps.world.world import REAL, World


def _digest_of(message: messages.Publish) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for array in (message.center, message.moving_statistics, message.model, message.names):
        digest.update(array.size.to_bytes(8, "big"))
        digest.update(array.data)
    return digest.digest()


log = logging.getLogger(__name__)

_TAKEOVER = "attempt %d took partition %d over from attempt %d, at mini-batch %d of epoch %d"
#: Bytes in a commit for its history, which has a row for each step.
_HISTORY_BYTES = 16 * 1024 * 1024
#: The longest time that one request for a lease waits, in seconds; then the worker asks again.
_LEASE_WAIT_SECONDS = 10.0


class _End(TypedDict):
    """The end of a lease as messages have it; -1: it has none."""

    end_epoch: int
    end_batch: int


def _end_in_message(end: Position | None) -> _End:
    epoch, batch = end or (-1, 0)
    return {"end_epoch": epoch, "end_batch": batch}


class Dispatcher:
    """Answers every authenticated peer.

    A peer can make the server allocate one frame (`limits`) and one reply at a time, and the records of its applied
    commits, up to 16 MiB each. With a wire format other than float32, the server also allocates the vectors of the
    commit and, between two requests, a packed commit and a packed reply; with int8 also a copy of the peer's vector. A
    peer that is not authenticated costs a thread, and less than a kilobyte. In addition, each partition has at most one
    kept optimizer state (with peers: two), and one that is arriving.

    Args:
        incarnation: this server's number, which rises with each restart.
        snapshots: where the center is saved; None: the job ends with this process.
        restored: the center that was restored, and its snapshot; None: the center is made when it is published.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        incarnation: int = 1,
        snapshots: SnapshotDirectory | None = None,
        restored: tuple[Center, Saved] | None = None,
        world: World = REAL,
    ) -> None:
        self._settings, self._deadlines = settings, settings.deadlines
        self._incarnation = incarnation
        self._snapshots = snapshots
        self._world, self._began = world, world.monotonic()
        #: The lock, its condition, and the state of the server.
        self.changed = JobCondition(world)
        #: None before it is published.
        self.center: Center | None = None
        self._checkpointer: Checkpointer | None = None
        if restored is not None:
            self.center, saved = restored
            self._checkpointer = self._make_checkpointer(self.center, saved)
        #: The digest of the driver's publication, and the model file; empty before the publication.
        self._published, self._model = b"", np.empty(0, np.uint8)
        self.limits = Limits(body=settings.max_body, arrays=Limits.arrays + 3 * len(settings.tables))
        self.connections = LeaseConnections()
        #: Peers whose commit is received and not yet applied. Reads need no lock, so `Probe` does not wait for commits.
        self._committing: set[Peer] = set()
        self._layouts: list[Layout] = []  # of center and moving statistics, if the driver published their names
        self.states = StateMemory(settings.workers, world)
        self._rows = TableRequests(settings.tables, self.changed)
        self._groups = RelayGroups(settings, self.changed)
        self._rendezvous = Rendezvous(settings, self.changed, self._seconds_silent)
        peers = settings.rule.traits.peers
        optimizers = OptimizerRequests(self.changed, self.states, self._require_lease, self._acknowledge, world, peers)
        loans = LoanRequests(
            self.changed,
            self._require_center,
            lambda number: self._seconds_silent(number) >= self._deadlines.lease,
            self._wait_until_saved,
            self._acknowledge,
        )
        self._handlers = self._make_handlers(optimizers, loans)

    def _make_handlers(
        self, optimizers: OptimizerRequests, loans: LoanRequests
    ) -> dict[type[Message], Callable[[Peer, Any], Message]]:
        return {
            messages.Commit: self._on_commit,
            messages.Pull: self._on_pull,
            messages.Probe: self._on_probe,
            messages.Heartbeat: lambda peer, message: self._acknowledge(),  # the session's activity is recorded already
            messages.Hello: self._on_hello,
            messages.Announce: self._on_announce,
            messages.KeepOptimizer: optimizers.keep,
            messages.FetchOptimizer: optimizers.fetch,
            messages.OptimizerTaken: optimizers.taken,
            messages.Leave: self._on_leave,
            messages.OfferRows: loans.offer,
            messages.AskForWork: loans.lend,
            messages.Fault: self._on_fault,
            messages.FetchModel: self._on_fetch_model,
            messages.Publish: self._on_publish,
            messages.PublishRows: lambda peer, message: self._rows.publish(self.center, message),
            messages.BeginMicroBatch: self._on_begin_micro_batch,
            messages.Observe: self._on_observe,
            messages.Inspect: self._on_inspect,
            messages.InspectRows: lambda peer, message: self._rows.inspect(lambda: self._require_center(peer), message),
            messages.SetValues: self._on_change,
            messages.RemoveRows: self._on_change,
            messages.BeginChanges: self._on_begin_changes,
            messages.Drain: self._on_drain,
            messages.EndEarly: self._on_end_early,
            messages.ListWorkers: self._on_list_workers,
            messages.Abort: self._on_abort,
            messages.Goodbye: lambda peer, message: self._acknowledge(),
        }

    def close(self, timeout: float) -> None:
        """Take a last snapshot within ``timeout`` seconds; no request may follow."""
        if self._checkpointer is not None:
            self._checkpointer.close(timeout)

    def _limits_of(self, center: Center) -> Limits:
        shapes = self._settings.tables
        vectors = center.traits.parts * center.current.array.nbytes
        commit = vectors + center.moving_statistics.nbytes + _HISTORY_BYTES + bytes_of_rows(shapes)
        blocks = [block_bytes(shape) for shape in shapes]
        return replace(self.limits, body=max(commit, most_state_bytes(center.size, shapes), *blocks))

    def partition_of(self, number: int | None) -> int | None:
        """Return the partition of a lease, by its number: events and errors name it rather than a loan."""
        lease = None if self.center is None or number is None else self.center.leases.get(number)
        return number if lease is None else lease.partition

    def disconnected(self, peer: Peer) -> None:
        """Note that a session has ended."""
        if peer.lease is None:
            return  # the end of a refused connection must not wake the other sessions
        with self.changed:
            # The worker may have reconnected before this connection was found dead.
            if self.connections.get(peer.lease[0]) is peer:
                assert self.center is not None
                self.center.leases.disconnected(*peer.lease)
            self.changed.notify_all()

    def corrupted(self, error: NodeError) -> DistkerasError:
        """Return the error to raise for ``error``, after which a commit is applied in part."""
        if self._checkpointer is None:
            return error
        self.changed.report_corruption(error.message)
        return ServerLostError(
            f"the center of this server is corrupt; another one starts from the latest snapshot: {error.message}"
        )

    def answer(self, peer: Peer, message: Message) -> Message:
        """Return the reply to ``message``; the session sends a DistkerasError to the peer."""
        handler = self._handlers.get(type(message))
        if handler is None:
            raise RemoteProtocolError(f"a message to the server must be a request. Received: {type(message).__name__}")
        return handler(peer, message)

    def _on_hello(self, peer: Peer, message: messages.Hello) -> Message:
        peer.share(None)
        self._wait_for_publish(peer)
        with self.changed:
            center = self._require_sound()
            check_hello(center, message)
            self.changed.require(
                lambda: require_present(center, message.micro_batch, message.worker),
                self._deadlines.publish,
                peer.hung_up,
                lambda: f"the driver to begin micro-batch {message.micro_batch}",
                message.worker,
            )
            self.connections.announce(message)
            peer.vectors.agree(codec_of(message.wire_format, center.size), center.pool)
            center.metrics = center.metrics or message.metrics
            worker, attempt = message.worker, message.attempt
            known = center.leases.get(worker)
            former = attempt if known is None else known.attempt
            held = known is not None and former == attempt

            def joins() -> bool:
                require_present(center, message.micro_batch, worker)
                self.connections.require_newest(message)
                expired = self._seconds_silent(worker) >= self._deadlines.lease
                return center.join(worker, attempt, expired=expired) is not None

            if not self.changed.wait_while_running(joins, _LEASE_WAIT_SECONDS, peer.hung_up):
                return messages.Waiting()
            lease = center.leases[worker]
            if lease.finished:
                self._wait_until_saved(peer, worker)
            else:
                peer.lease = (worker, attempt)
                self.connections[worker] = peer
                self._rendezvous.joined(worker, attempt)
            self.changed.notify_all()
            welcome = self._welcome(center, worker, held=held)
        if former not in (attempt, NO_ATTEMPT) and not welcome.finished:
            where = (attempt, worker, former, welcome.batch, welcome.epoch)
            report(log, "takeover", _TAKEOVER, *where, worker=worker, attempt=attempt)
        slots = None if welcome.finished else map_slots(message, peer.vectors.slot_sizes(center), self._world)
        peer.share(slots)  # this reply has no vector, so the next frame with a vector is the first to use them
        return replace(welcome, shares=slots is not None)

    def _welcome(self, center: Center, worker: int, *, held: bool) -> messages.Welcome:
        lease = center.leases[worker]
        return messages.Welcome(
            incarnation=center.incarnation,
            clock=center.clock,
            sequence=lease.sequence,
            durable=self._durable(worker, lease.sequence),
            epoch=lease.epoch,
            batch=lease.batch,
            finished=lease.finished,
            held=held,
            checksum=lease.checksum,
            skipped=lease.skipped,
            stopping=center.asks_workers_to_leave,
            optimizer=0 if lease.optimizer is None else lease.optimizer.sequence,
            refused=lease.refusals > 0,
            owes=lease.finished and center.leases.owes(worker),
            **_end_in_message(lease.end),
        )

    def _on_pull(self, peer: Peer, message: messages.Pull) -> Message:
        with self.changed:
            center = self._require_sound()
            center.require_incarnation(message.worker, message.incarnation)
            if center.tables or message.wants:
                center.leases.held(message.worker, message.attempt)  # a bad pull without the lease must not end the job
                check_wants(center.table_shapes, message.wants, message.worker)
            released = self._release(peer, center, message.worker, message.attempt, message.wants)
        return peer.vectors.encode(self._reply_with_center(peer, center, released, whole=True), whole=True)

    def _on_commit(self, peer: Peer, commit: messages.Commit) -> Message:
        arrived = self._world.monotonic()
        center = self._require_sound()
        center.leases.held(commit.worker, commit.attempt)  # a bad commit without the lease must not end the job
        if commit.grouped and self._settings.relays is None:
            raise RemoteProtocolError("a job without groups must have a commit for each worker", worker=commit.worker)
        commit, companions = split(commit)
        others = [companion.commit for companion in companions]
        check_shapes(center, commit, peer.vectors.codec)
        parts = peer.vectors.take_parts(commit, center.pool)
        unchecked = [] if peer.vectors.known_finite(commit) else [part.array for part in parts]
        error = not_finite(commit, unchecked, self._layouts, center.table_shapes)
        if error is not None:
            for part in parts:
                part.drop()
            if companions:  # each movement was finite, so their sum has overflowed
                raise error
            return self._skip(peer, center, commit, error)
        self._committing.add(peer)
        with self.changed:
            try:
                self.changed.require_running()
                self._require_holder(peer, center, commit.worker, commit.attempt)
                if commit.grouped:
                    self._groups.require_relay(commit.worker)
                    self.connections.require_companions(center, commit.worker, companions)
                if center.traits.peers:
                    applied = self._rendezvous.commit(peer, center, commit, parts, arrived)
                else:
                    applied = center.commit(commit, parts, arrived, others)
                if not applied:
                    for part in parts:
                        part.drop()
                self._note_commit(center)
            finally:
                self._committing.discard(peer)
            # This commit may release other workers; an observer may be waiting for the clock.
            self.changed.notify_all()
            refused = center.leases[commit.worker].refusals > 0
            if refused or not commit.wants_center:
                window = center.next_window(commit.worker)
                return self._acknowledge(commit.worker, commit.sequence, refused=refused, window=window)
            released = self._release(peer, center, commit.worker, commit.attempt, commit.wants)
            center.release_companions(others, released)
        return peer.vectors.encode(self._reply_with_center(peer, center, released), whole=False)

    def _skip(self, peer: Peer, center: Center, commit: messages.Commit, error: NonFiniteError) -> Message:
        with self.changed:
            self.changed.require_running()
            self._require_holder(peer, center, commit.worker, commit.attempt)
            skipped, most = center.log.skipped, self._settings.max_skipped
            if skipped >= most:
                if skipped:
                    error.message += f", after {skipped} commits that were skipped"
                raise error
            newly_skipped = center.skip(commit)
            self._note_commit(center)
            self.changed.notify_all()
            answer = self._acknowledge(commit.worker, commit.sequence, skipped=True)
        if newly_skipped:
            count = f"{skipped + 1} of at most {most}"
            text = "a commit is skipped (%s): %s"
            worker = self.partition_of(commit.worker)
            report(log, "skipped", text, count, error.message, worker=worker, attempt=commit.attempt)
        return answer

    def _on_probe(self, peer: Peer, message: messages.Probe) -> Message:
        self.changed.require_running()
        # A peer sends one request at a time, so the commits in progress are those of other peers.
        return messages.Occupancy(bool(self._committing))

    def _on_fetch_model(self, peer: Peer, message: messages.FetchModel) -> Message:
        self._wait_for_publish(peer)
        return messages.ModelFile(self._model)

    def _on_announce(self, peer: Peer, message: messages.Announce) -> Message:
        with self.changed:
            center = self._require_sound()
            meet = self._rendezvous.announce if self._settings.relays is None else self._groups.announce
            return meet(peer, center, lambda: self._require_lease(peer, message), message)

    def _on_leave(self, peer: Peer, message: messages.Leave) -> Message:
        with self.changed:
            center = self._require_sound()
            center.require_incarnation(message.worker, message.incarnation)
            lease = center.leases.get(message.worker)
            if lease is None or not lease.finished:
                self._require_holder(peer, center, message.worker, message.attempt)
            center.leave(message.worker, message.attempt)
            self.changed.notify_all()
            self._wait_until_saved(peer, message.worker)
        return self._acknowledge()

    def _on_fault(self, peer: Peer, message: messages.Fault) -> Message:
        error = messages.error_of(message)
        if error.origin is Origin.USER:
            self.changed.fail(message)
        else:  # Spark may retry the task
            number, attempt = peer.lease or (None, None)
            worker = message.worker if number is None else self.partition_of(number)
            report(log, "node", "a task attempt has failed: %s", error.message, worker=worker, attempt=attempt)
        return self._acknowledge()

    def _on_publish(self, peer: Peer, message: messages.Publish) -> Message:
        digest = _digest_of(message)
        with self.changed:
            if self._published not in (b"", digest):
                raise RemoteProtocolError("the center must be published once. Received: another one")
            if not self._published:  # else the driver sends it again, because the reply was lost
                center = self._publish(message.center, message.moving_statistics)
                if message.names.size:
                    sizes = self._elements(center), center.moving_statistics.size
                    self._layouts = decode(message.names.tobytes(), sizes)
                self._model, self._published, self.limits = message.model, digest, self._limits_of(center)
                self.changed.notify_all()
        return self._acknowledge()

    def _publish(self, vector: np.ndarray, moving_statistics: np.ndarray) -> Center:
        """Make the center, unless it was restored, and begin to save it."""
        if self.center is None:
            self._rows.require_complete()
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

    def _make_center(self, vector: np.ndarray, moving_statistics: np.ndarray) -> Center:
        tables = self._rows.tables
        return self._settings.make_center(vector, moving_statistics, self._incarnation, self._world, tables)

    def _on_begin_micro_batch(self, peer: Peer, message: messages.BeginMicroBatch) -> Message:
        with self.changed:
            center = self._require_center(peer)
            self.changed.require_running()
            began = begin_micro_batch(center, message.stream, message.number, self._settings.make_scheduler())
            if began:
                self.connections.clear()
                self.changed.notify_all()
            return messages.MicroBatchBegun(center.began[0], commits_before(center), began, is_complete(center))

    def _on_observe(self, peer: Peer, message: messages.Observe) -> Message:
        # `min` returns its first argument if the second one is NaN.
        deadline = self._world.monotonic() + min(self._deadlines.reply, message.patience)
        with self.changed:
            while not (self.changed.fault or self.changed.closing):
                if self.center is not None and self.center.clock > message.clock:
                    break
                if not self.changed.wait_for_change(deadline, peer.hung_up):
                    break
            return self.changed.fault or self._status()

    def _status(self) -> messages.Status:
        center, saved = self.center, self._checkpointer and self._checkpointer.saved
        if center is None:
            return messages.Status(0, 0, 0, 0, 0, math.nan, math.nan)
        leases, partitions = center.leases.values(), dict(center.leases.partitions())
        unfinished = {lease.partition for lease in leases if not lease.finished}
        # Partitions without rows do not count for the mean number of epochs.
        empty = sum(lease.finished and not lease.sequence for lease in partitions.values())
        return messages.Status(
            clock=center.clock,
            joined=len(partitions),
            finished=len(partitions) - len(unfinished),
            batches=center.log.batches,
            samples=center.log.samples,
            loss=center.log.loss,
            staleness=center.log.staleness,
            epochs=sum(lease.epoch + lease.passed - lease.before for lease in leases) / max(1, center.workers - empty),
            saved_clock=saved[0] if saved else -1,
            saved_seconds=self._world.monotonic() - saved[1] if saved else math.nan,
            tables=np.array([table.counts for table in center.living], np.float64).reshape(-1, 4),
            lent=center.log.lent,
        )

    def _on_inspect(self, peer: Peer, message: messages.Inspect) -> Message:
        with self.changed:
            center = self._require_center(peer)
            moved = rows_to_inspect(center.tables, message)
            released = center.inspect(moved)
        return self._reply_with_center(peer, center, released, whole=True)

    def _on_change(self, peer: Peer, message: messages.SetValues | messages.RemoveRows) -> Message:
        with self.changed:
            center = self._require_center(peer)
            self.changed.require_running()
            if isinstance(message, messages.SetValues):
                set_values(center.values, message, center.clock, center.rule, center.schedule)
            else:
                self._rows.remove(center, message)
            answer = self._acknowledge()
            self._wait_until_saved(peer)  # else a restarted server would continue without the change
        return answer

    def _on_begin_changes(self, peer: Peer, message: messages.BeginChanges) -> Message:
        with self.changed:
            return self._rows.begin_changes(self._require_center(peer), message)

    def _on_drain(self, peer: Peer, message: messages.Drain) -> Message:
        with self.changed:
            center = self._require_center(peer)
            commits, _, history = center.log.read(message.start, message.count)
            return messages.Records(
                len(center.log), center.log.missing, center.metrics, commits.view(np.uint8), history
            )

    def _on_list_workers(self, peer: Peer, message: messages.ListWorkers) -> Message:
        with self.changed:
            leases, now, workers = self._require_center(peer).leases, self._world.time(), self._settings.workers
            asking = {worker for worker, holder in self.connections.items() if holder.asking}
            rows = [
                (lease.holder, lease.attempt, lease.sequence, 0.0 if number in asking else now - lease.active_at)
                for number, lease in leases.items()
                if not lease.finished and lease.attempt != NO_ATTEMPT
                if number < workers or lease.connected  # of the loans, those that a worker trains now
            ]
            return messages.WorkerTable(np.array(rows, np.float64).reshape(-1, 4))

    def _on_end_early(self, peer: Peer, message: messages.EndEarly) -> Message:
        with self.changed:
            self._require_center(peer).end_early(message.reason)
            self.changed.notify_all()
        return self._acknowledge()

    def _on_abort(self, peer: Peer, message: messages.Abort) -> Message:
        self.changed.fail(messages.fault_of(JobStoppedError(message.reason)))
        return self._acknowledge()

    def _seconds_silent(self, worker: int) -> float:
        """Return the seconds since the holder of a partition last sent something; 0 while it waits for a reply."""
        holder = self.connections.get(worker)
        if holder is not None and holder.asking:
            return 0.0
        return self._world.monotonic() - (self._began if holder is None else holder.active_at)

    def _acknowledge(
        self, worker: int = -1, sequence: int = 0, *, skipped: bool = False, refused: bool = False, window: int = 0
    ) -> messages.Ack:
        """Return the acknowledgement of a worker's commit, or of a message without a sequence number."""
        center = self.center
        if center is None:
            return messages.Ack(0, 0, 0, 0)
        stopping, durable = center.asks_workers_to_leave, self._durable(worker, sequence)
        lease = center.leases.get(worker)
        end = _end_in_message(None if lease is None else lease.end)
        numbers = center.incarnation, center.clock, sequence, durable
        return messages.Ack(*numbers, skipped, stopping, refused, window, **end)

    def _wait_for_publish(self, peer: Peer) -> None:
        with self.changed:
            self.changed.require(
                lambda: bool(self._published),
                self._deadlines.publish,
                peer.hung_up,
                lambda: "the driver to publish the center",
            )

    def _require_center(self, peer: Peer) -> Center:
        """Return the center, for the driver or a worker without a lease; wait until it is published."""
        # They may send a request to a server that was just restarted, before the driver has published the center there.
        if self.center is None:
            self._wait_for_publish(peer)
        return self._require_sound()

    def _require_sound(self) -> Center:
        """Return the center; raise an error unless it is published and not corrupt."""
        if self.changed.corruption is not None:
            self.changed.require_running()
        if self.center is None:
            raise RemoteProtocolError("the center must be published first. Received: a request for it")
        return self.center

    def _release(self, peer: Peer, center: Center, worker: int, attempt: int, wants: Sequence[Ids] = ()) -> Released:
        """Wait until ``worker`` may be sent the center; return the reply's content, with the rows that it ``wants``."""
        self._require_holder(peer, center, worker, attempt)
        if not center.ready(worker):
            self._wait_until_ready(peer, center, worker)
        self.changed.require_running()
        self._require_holder(peer, center, worker, attempt)
        return center.release(worker, attempt, wants, peer.vectors.rows_of_reply(center.table_shapes, wants))

    def _wait_until_ready(self, peer: Peer, center: Center, worker: int) -> None:
        def wait(condition: Callable[[], bool], timeout: float) -> None:
            self.changed.require(
                lambda: condition() or self.connections.get(worker) is not peer,
                timeout,
                peer.hung_up,
                lambda: center.scheduler.describe_wait(worker),
                worker,
            )

        # In a resumed job, a partition that has contributed to the round waits for the others to join, and then for
        # their commits, each of which may take a whole window.
        wait(lambda: not center.scheduler.missing(), self._deadlines.gather)
        wait(lambda: center.ready(worker), self._deadlines.reply)

    def _require_holder(self, peer: Peer, center: Center, worker: int, attempt: int) -> None:
        center.leases.held(worker, attempt)
        self.connections.require(peer, worker)

    def _require_lease(self, peer: Peer, message: Request) -> PartitionLease:
        """Return the lease that the sender of ``message`` holds, in this incarnation; the caller holds the lock."""
        self.changed.require_running()
        center = self._require_sound()
        center.require_incarnation(message.worker, message.incarnation)
        self._require_holder(peer, center, message.worker, message.attempt)
        return center.leases[message.worker]

    def _reply_with_center(
        self, peer: Peer, center: Center, released: Released, *, whole: bool = False
    ) -> messages.CenterReply:
        """Return the reply; the caller does not hold the lock. ``whole``: with the driver's values in any case."""
        peer.vectors.hold_until_sent(released.buffer)
        version, values = center.values.current
        # A relay forwards the reply to workers that may not have them yet.
        if version == peer.vectors.version_sent and not (whole or self._settings.relays):
            version, values = 0, NO_ROWS
        else:
            peer.vectors.version_sent = version
        worker = -1 if peer.lease is None else peer.lease[0]
        return messages.CenterReply(
            incarnation=center.incarnation,
            clock=released.clock,
            sequence=released.sequence,
            durable=self._durable(worker, released.sequence),
            learning_rate=released.learning_rate,
            center=released.buffer.array,
            moving_statistics=released.moving_statistics,
            stopping=center.asks_workers_to_leave,
            window=released.window,
            rows=released.rows,
            moved=released.moved,
            version=version,
            values=values,
            **_end_in_message(released.end),
        )

    def _make_checkpointer(self, center: Center, saved: Saved | None = None) -> Checkpointer | None:
        if self._snapshots is None or self._settings.checkpoint is None:
            return None
        return Checkpointer(
            self._settings.checkpoint,
            self._snapshots,
            center,
            self.changed,
            saved,
            self._world,
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

    def _note_commit(self, center: Center) -> None:
        if self._checkpointer is not None:
            self._checkpointer.committed(center.clock)

    def _durable(self, worker: int, sequence: int) -> int:
        """Return the last commit of ``worker`` that a snapshot covers; without snapshots, ``sequence``."""
        return sequence if self._checkpointer is None else self._checkpointer.durable.get(worker, 0)

    def _wait_until_saved(self, peer: Peer, worker: int | None = None) -> None:
        """Wait until a snapshot covers all commits so far: a worker that has left cannot repeat them."""
        if self._checkpointer is not None:
            checkpointer, mark = self._checkpointer, self._checkpointer.mark()
            self.changed.require(
                lambda: checkpointer.covers(mark),
                self._deadlines.reply,
                peer.hung_up,
                lambda: f"a snapshot; {checkpointer.failure or 'it is being written'}",
                worker,
            )
