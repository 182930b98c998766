"""The dispatcher answers requests, or makes them wait: messages in, messages out, one lock around the `Center`.

The threads of the sessions call it, and send its replies. Commits are checked for NaN outside the lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from distkeras.ps.center.center import Center, Released, partition_of
from distkeras.ps.center.checks import check_hello, check_shapes, check_wants, not_finite
from distkeras.ps.center.leases import NO_ATTEMPT
from distkeras.ps.center.micro_batches import require_present
from distkeras.ps.checkpoint.snapshots import Saved, SnapshotDirectory
from distkeras.ps.errors import NonFiniteError, Origin, RemoteProtocolError
from distkeras.ps.events import report
from distkeras.ps.protocol import driver_messages, messages
from distkeras.ps.protocol.companions import split
from distkeras.ps.protocol.compression import codec_of
from distkeras.ps.protocol.messages import Message
from distkeras.ps.protocol.tables import Ids
from distkeras.ps.server.driver_requests import DriverRequests
from distkeras.ps.server.job_state import Peer
from distkeras.ps.server.loan_requests import LoanRequests
from distkeras.ps.server.optimizer_requests import OptimizerRequests
from distkeras.ps.server.rendezvous import RelayGroups, Rendezvous
from distkeras.ps.server.served_center import ServedCenter, end_in_message
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.handshakes import map_slots
from distkeras.ps.world.world import REAL, World

log = logging.getLogger(__name__)

_TAKEOVER = "attempt %d took partition %d over from attempt %d, at mini-batch %d of epoch %d"
#: The longest time that one request for a lease waits, in seconds; then the worker asks again.
_LEASE_WAIT_SECONDS = 10.0


class Dispatcher(ServedCenter):
    """Answers every authenticated peer.

    A peer can make the server allocate one frame (`limits`) and one reply at a time, and the records of its applied
    commits, up to 16 MiB each. With a wire format other than float32, the server also allocates the vectors of the
    commit and, between two requests, a packed commit and a packed reply; with int8 also a copy of the peer's vector. A
    peer that is not authenticated costs a thread, and less than a kilobyte. In addition, each partition has at most one
    kept optimizer state (with peers: two), and one that is arriving.

    For the arguments see `ServedCenter`.
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
        super().__init__(settings, incarnation, snapshots, restored, world)
        #: Peers whose commit is received and not yet applied. Reads need no lock, so `Probe` does not wait for commits.
        self._committing: set[Peer] = set()
        self._groups = RelayGroups(settings, self.changed)
        self._rendezvous = Rendezvous(settings, self.changed, self.seconds_silent)
        self._driver = DriverRequests(self)
        self._handlers = self._make_handlers()

    def _make_handlers(self) -> dict[type[Message], Callable[[Peer, Any], Message]]:
        optimizers, loans, driver = OptimizerRequests(self), LoanRequests(self), self._driver
        return {
            messages.Commit: self._on_commit,
            messages.Pull: self._on_pull,
            messages.Probe: self._on_probe,
            messages.Heartbeat: lambda peer, message: self.acknowledge(),  # the session's activity is recorded already
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
            driver_messages.Publish: driver.publish,
            driver_messages.PublishRows: driver.publish_rows,
            driver_messages.BeginMicroBatch: driver.begin_micro_batch,
            driver_messages.Observe: driver.observe,
            driver_messages.Inspect: driver.inspect,
            driver_messages.InspectRows: driver.inspect_rows,
            driver_messages.SetValues: driver.change,
            driver_messages.RemoveRows: driver.change,
            driver_messages.BeginChanges: driver.begin_changes,
            driver_messages.Drain: driver.drain,
            driver_messages.EndEarly: driver.end_early,
            driver_messages.ListWorkers: driver.list_workers,
            driver_messages.Abort: driver.abort,
            driver_messages.Goodbye: lambda peer, message: self.acknowledge(),
        }

    def disconnected(self, peer: Peer) -> None:
        if peer.lease is None:
            return  # the end of a refused connection must not wake the other sessions
        with self.changed:
            # The worker may have reconnected before this connection was found dead.
            if self.connections.get(peer.lease[0]) is peer:
                assert self.center is not None
                self.center.leases.disconnected(*peer.lease)
            self.changed.notify_all()

    def answer(self, peer: Peer, message: Message) -> Message:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise RemoteProtocolError(f"a message to the server must be a request. Received: {type(message).__name__}")
        return handler(peer, message)

    def _on_hello(self, peer: Peer, message: messages.Hello) -> Message:
        peer.share(None)
        self.wait_for_publish(peer)
        with self.changed:
            center = self.require_sound()
            check_hello(center, message)
            self.changed.require(
                lambda: require_present(center, message.micro_batch, message.worker),
                self.deadlines.publish,
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
                expired = self.seconds_silent(worker) >= self.deadlines.lease
                return center.join(worker, attempt, expired=expired) is not None

            if not self.changed.wait_while_running(joins, _LEASE_WAIT_SECONDS, peer.hung_up):
                return messages.Waiting()
            lease = center.leases[worker]
            if lease.finished:
                self.wait_until_saved(peer, worker)
            else:
                peer.lease = (worker, attempt)
                self.connections[worker] = peer
                self._rendezvous.joined(worker, attempt)
            self.changed.notify_all()
            welcome = self._welcome(center, worker, held=held)
        if former not in (attempt, NO_ATTEMPT) and not welcome.finished:
            where = (attempt, worker, former, welcome.batch, welcome.epoch)
            report(log, "takeover", _TAKEOVER, *where, worker=worker, attempt=attempt)
        slots = None if welcome.finished else map_slots(message, peer.vectors.slot_sizes(center), self.world)
        peer.share(slots)  # this reply has no vector, so the next frame with a vector is the first to use them
        return replace(welcome, shares=slots is not None)

    def _welcome(self, center: Center, worker: int, *, held: bool) -> messages.Welcome:
        lease = center.leases[worker]
        return messages.Welcome(
            incarnation=center.incarnation,
            clock=center.clock,
            sequence=lease.sequence,
            durable=self.durable(worker, lease.sequence),
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
            **end_in_message(lease.end),
        )

    def _on_pull(self, peer: Peer, message: messages.Pull) -> Message:
        with self.changed:
            center = self.require_sound()
            center.require_incarnation(message.worker, message.incarnation)
            if center.tables or message.wants:
                center.leases.held(message.worker, message.attempt)  # a bad pull without the lease must not end the job
                check_wants(center.table_shapes, message.wants, message.worker)
            released = self._release(peer, center, message.worker, message.attempt, message.wants)
        return peer.vectors.encode(self.reply(peer, center, released, whole=True), whole=True)

    def _on_commit(self, peer: Peer, commit: messages.Commit) -> Message:
        arrived = self.world.monotonic()
        center = self.require_sound()
        center.leases.held(commit.worker, commit.attempt)  # a bad commit without the lease must not end the job
        if commit.grouped and self.settings.relays is None:
            raise RemoteProtocolError("a job without groups must have a commit for each worker", worker=commit.worker)
        commit, companions = split(commit)
        others = [companion.commit for companion in companions]
        check_shapes(center, commit, peer.vectors.codec)
        parts = peer.vectors.take_parts(commit, center.pool)
        unchecked = [] if peer.vectors.known_finite(commit) else [part.array for part in parts]
        error = not_finite(commit, unchecked, self.layouts, center.table_shapes)
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
                self.require_holder(peer, center, commit.worker, commit.attempt)
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
                self.note_commit(center)
            finally:
                self._committing.discard(peer)
            # This commit may release other workers; an observer may be waiting for the clock.
            self.changed.notify_all()
            refused = center.leases[commit.worker].refusals > 0
            if refused or not commit.wants_center:
                window = center.next_window(commit.worker)
                return self.acknowledge(commit.worker, commit.sequence, refused=refused, window=window)
            released = self._release(peer, center, commit.worker, commit.attempt, commit.wants)
            center.release_companions(others, released)
        return peer.vectors.encode(self.reply(peer, center, released), whole=False)

    def _skip(self, peer: Peer, center: Center, commit: messages.Commit, error: NonFiniteError) -> Message:
        with self.changed:
            self.changed.require_running()
            self.require_holder(peer, center, commit.worker, commit.attempt)
            skipped, most = center.log.skipped, self.settings.max_skipped
            if skipped >= most:
                if skipped:
                    error.message += f", after {skipped} commits that were skipped"
                raise error
            newly_skipped = center.skip(commit)
            self.note_commit(center)
            self.changed.notify_all()
            answer = self.acknowledge(commit.worker, commit.sequence, skipped=True)
        if newly_skipped:
            count = f"{skipped + 1} of at most {most}"
            text = "a commit is skipped (%s): %s"
            worker = partition_of(center, commit.worker)
            report(log, "skipped", text, count, error.message, worker=worker, attempt=commit.attempt)
        return answer

    def _on_probe(self, peer: Peer, message: messages.Probe) -> Message:
        self.changed.require_running()
        # A peer sends one request at a time, so the commits in progress are those of other peers.
        return messages.Occupancy(bool(self._committing))

    def _on_fetch_model(self, peer: Peer, message: messages.FetchModel) -> Message:
        self.wait_for_publish(peer)
        return messages.ModelFile(self.model)

    def _on_announce(self, peer: Peer, message: messages.Announce) -> Message:
        with self.changed:
            center = self.require_sound()
            meet = self._rendezvous.announce if self.settings.relays is None else self._groups.announce
            return meet(peer, center, lambda: self.require_lease(peer, message), message)

    def _on_leave(self, peer: Peer, message: messages.Leave) -> Message:
        with self.changed:
            center = self.require_sound()
            center.require_incarnation(message.worker, message.incarnation)
            lease = center.leases.get(message.worker)
            if lease is None or not lease.finished:
                self.require_holder(peer, center, message.worker, message.attempt)
            center.leave(message.worker, message.attempt)
            self.changed.notify_all()
            self.wait_until_saved(peer, message.worker)
        return self.acknowledge()

    def _on_fault(self, peer: Peer, message: messages.Fault) -> Message:
        error = messages.error_of(message)
        if error.origin is Origin.USER:
            self.changed.fail(message)
        else:  # Spark may retry the task
            number, attempt = peer.lease or (None, None)
            worker = message.worker if number is None else partition_of(self.center, number)
            report(log, "node", "a task attempt has failed: %s", error.message, worker=worker, attempt=attempt)
        return self.acknowledge()

    def _release(self, peer: Peer, center: Center, worker: int, attempt: int, wants: Sequence[Ids] = ()) -> Released:
        """Wait until ``worker`` may be sent the center; return the reply's content, with the rows that it ``wants``."""
        self.require_holder(peer, center, worker, attempt)
        if not center.scheduler.ready(worker):
            self._wait_until_ready(peer, center, worker)
        self.changed.require_running()
        self.require_holder(peer, center, worker, attempt)
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
        wait(lambda: not center.scheduler.missing(), self.deadlines.gather)
        wait(lambda: center.scheduler.ready(worker), self.deadlines.reply)
