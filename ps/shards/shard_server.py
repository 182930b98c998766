"""A shard's answers to workers and driver, and its two threads: one sends reports, one takes and applies tickets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from distkeras.ps.center.center import Center, Released
from distkeras.ps.center.checks import check_shapes, check_wants, not_finite
from distkeras.ps.center.leases import StateMemory
from distkeras.ps.checkpoint.parts import SavedSlice, Share
from distkeras.ps.checkpoint.row_files import RowFile
from distkeras.ps.checkpoint.snapshots import SnapshotDirectory
from distkeras.ps.checkpoint.state import restore
from distkeras.ps.errors import (
    DeadlineError,
    DistkerasError,
    JobStoppedError,
    LeaseLostError,
    LocalProtocolError,
    NodeError,
    RemoteProtocolError,
    ServerLostError,
    ShapeError,
)
from distkeras.ps.protocol import driver_messages, messages
from distkeras.ps.protocol.compression import codec_of
from distkeras.ps.protocol.framing import Limits
from distkeras.ps.protocol.layout import Layout, decode
from distkeras.ps.protocol.loop import NO_FLOATS, NO_ROWS
from distkeras.ps.protocol.messages import Fault, Message, fault_of
from distkeras.ps.protocol.shard_messages import (
    AddUp,
    AskRows,
    DividedInspect,
    DividedRemoval,
    FetchSlice,
    Greet,
    PartStored,
    PublishSlice,
    ReadRows,
    RegisterShard,
    SendPart,
    ShardFault,
    TakeTickets,
    Tickets,
    Total,
)
from distkeras.ps.protocol.tables import block_bytes, most_state_bytes
from distkeras.ps.rules import Rule
from distkeras.ps.server.job_state import JobCondition, Peer
from distkeras.ps.server.shard_role import ShardRole
from distkeras.ps.server.table_requests import TableRequests, bytes_of_rows, rows_to_inspect
from distkeras.ps.settings import ServerSettings
from distkeras.ps.shards.cut import Cut
from distkeras.ps.shards.owned_tables import make_owned_table
from distkeras.ps.shards.saving import PartWriter
from distkeras.ps.shards.shard import CommitPart, Shard
from distkeras.ps.shards.tickets import Kind, PartKey, tickets_of
from distkeras.ps.shards.totals import PartialCenter
from distkeras.ps.transport.client import Address, Channel, Client
from distkeras.ps.transport.deadlines import Backoff, Deadlines
from distkeras.ps.world.world import REAL, World

#: The worker of a peer that has not sent a `Greet`: the driver.
_DRIVER = -1
#: Seconds that the sequencer waits for a ticket before it answers that there is none, at most.
_PATIENCE_MOST = 5.0
#: Seconds between two attempts to reach the sequencer, at most.
_PAUSE_SECONDS_MAX = 1.0


class _SequencerClient(Client):
    """A connection that is made once: another sequencer may have the address later.

    The first message over it says of which incarnation the shard is.
    """

    #: Whether the shard ends.
    closed = False

    def _connect(self) -> Channel:
        """Connect; a sequencer that is suspended or busy while it starts may answer later."""
        if self._met:
            raise ServerLostError("the connection of the shard to its sequencer has ended")
        backoff = Backoff(longest=_PAUSE_SECONDS_MAX, timeout=self.deadlines.publish, world=self.world)
        while True:
            try:
                return super()._connect()
            except ServerLostError:
                if self.closed or not backoff.pause():
                    raise


def _patience(deadlines: Deadlines) -> float:
    """Return the seconds between two requests of a shard, whose connection the sequencer closes if it is silent."""
    return min(_PATIENCE_MOST, deadlines.silence / 2)


class Follower:
    """A shard's connections to its sequencer: one for reports, one for tickets.

    Args:
        address: of the sequencer.
        name: of the threads.
        apply: applies tickets, in order, and returns the request for the next ones.
        fail: is called with an error of the job, after which no ticket is applied.
        lost: is called with the error, if the sequencer cannot be reached; then the shard must end.
    """

    def __init__(
        self,
        address: Address,
        settings: ServerSettings,
        name: str,
        world: World,
        apply: Callable[[np.ndarray], TakeTickets],
        fail: Callable[[Fault], None],
        lost: Callable[[Exception], None],
    ) -> None:
        self._apply, self._fail, self._lost = apply, fail, lost
        self._changed = world.condition()
        self._due: deque[Message] = deque()
        self._closed, self._patience = False, _patience(settings.deadlines)
        self._reports = _SequencerClient(address, settings.deadlines, world)
        self._tickets = _SequencerClient(address, settings.deadlines, world)
        runs = {"reports": self._send_reports, "tickets": self._take_tickets}
        self._threads = [world.thread(partial(self._guarded, run), f"{name}-{stream}") for stream, run in runs.items()]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """Send ``message``, which is answered by an `Ack`, soon; messages are sent in their order."""
        with self._changed:
            self._due.append(message)
            self._changed.notify_all()

    def add_up(self, shard: int, ticket: int, shares: Sequence[float]) -> float:
        """Return the sum of the shares of all shards, at ``ticket``, which is being applied."""
        return self._tickets.request(AddUp(shard, ticket, np.array([shares])), Total).value

    def close(self, timeout: float) -> None:
        """End the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for client in (self._reports, self._tickets):
            client.closed = True
            if client.channel is not None:
                client.channel.hang_up()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout)
            if thread.is_alive():
                raise DeadlineError(f"waited {timeout:g} s for thread {thread.name} to end")

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:  # noqa: BLE001 - `lost` reports it, and ends the shard
            if not self._closed:
                self._lost(error)

    def _send_reports(self) -> None:
        while True:
            with self._changed:
                if not (self._due or self._closed):
                    self._changed.wait(self._patience)
                if self._closed:
                    return
                message = self._due.popleft() if self._due else messages.Heartbeat()
            self._reports.request(message, messages.Ack)

    def _take_tickets(self) -> None:
        request = self._apply(NO_ROWS)
        while not self._closed:
            rows = self._tickets.request(request, Tickets).rows
            try:
                request = self._apply(rows)
            except (ServerLostError, JobStoppedError):  # while the shards add up
                raise
            except DistkerasError as error:  # of the job, such as a center that is not finite
                self._fail(fault_of(error))
                return


class _ShardCondition(JobCondition):
    """The condition of a shard: an error that would end the job is the sequencer's to end it with."""

    def __init__(self, world: World, forward: Callable[[ShardFault], None]) -> None:
        super().__init__(world)
        self._forward = forward

    def fail(self, fault: Fault) -> None:
        self._forward(ShardFault(**vars(fault)))

    def fail_for_good(self, fault: Fault) -> None:
        """End the job because of an error within a ticket: this shard applies no further one."""
        self._forward(ShardFault(**vars(fault), within_ticket=True))
        super().fail(fault)


class ShardDispatcher:
    """Answers workers and driver with the elements and rows of one slice; it decides nothing.

    Args:
        settings: of the whole job.
        role: which shard this is.
        sequencer: its address; its tickets are applied.
    """

    def __init__(self, settings: ServerSettings, role: ShardRole, sequencer: Address, world: World = REAL) -> None:
        self._settings, self._deadlines, self._world = settings, settings.deadlines, world
        self._role, self._number = role, role.shard
        condition = _ShardCondition(world, lambda fault: self._follower.send(fault))
        self.changed: JobCondition = condition
        self.limits = Limits(body=settings.max_body, arrays=Limits.arrays + 3 * len(settings.tables))
        self.states = StateMemory(settings.workers, world)
        self._shard: Shard | None = None
        self._slice, self._layouts = slice(0, 0), list[Layout]()
        self._writer: PartWriter | None = None
        #: By peer, its worker, attempt and connection.
        self._greetings: dict[Peer, Greet] = {}
        self._cut = Cut(0, settings.shards)  # of the rows; the elements are not published yet
        self._rows = TableRequests(
            settings.tables, self.changed, lambda shape: make_owned_table(shape, self._cut, role.shard)
        )
        name, fail = f"shard-{role.shard}", condition.fail_for_good
        self._follower = Follower(sequencer, settings, name, world, self._apply, fail, self._lose)
        self._handlers: dict[type[Message], Callable[[Peer, Any], Message]] = {
            PublishSlice: self._on_publish,
            driver_messages.PublishRows: self._on_publish_rows,
            DividedInspect: self._on_ask,
            DividedRemoval: self._on_ask,
            ReadRows: self._on_read_rows,
            Greet: self._on_greet,
            SendPart: self._on_part,
            AskRows: self._on_ask_rows,
            FetchSlice: self._on_fetch,
            driver_messages.Goodbye: lambda peer, message: self._acknowledge(),
        }

    def restore(self, snapshots: SnapshotDirectory) -> None:
        """Restore the shard's elements of the snapshot that its role names, and follow the sequencer."""
        cut, number = self._cut, self._number
        share = Share(number, cut.shards, self._stretch, lambda ids: cut.owners(ids) == number)
        saved = snapshots.slice_of(self._role.snapshot, share)
        arrays = saved.state.arrays
        nothing = {name: NO_FLOATS for name in arrays if name.endswith("moving_statistics")}
        saved = saved._replace(state=replace(saved.state, arrays=arrays | nothing))
        with self.changed:
            self._begin(saved.size, np.array(arrays["center"]), saved)

    def register(self, place: tuple[str, int]) -> None:
        """Report to the sequencer that this shard listens at ``place``."""
        self._follower.send(RegisterShard(self._number, *place, self._role.incarnation, self._role.process))
        self._follower.start()

    def _stretch(self, size: int) -> slice:
        return Cut(size, self._settings.shards).slices[self._number]

    def _acknowledge(self) -> messages.Ack:
        return messages.Ack(self._role.incarnation, 0, 0, 0)

    @property
    def center(self) -> Center | None:
        """The center of the shard's slice; None before it is published."""
        return None if self._shard is None else self._shard.center

    def close(self, timeout: float) -> None:
        """End the threads within ``timeout`` seconds."""
        try:
            if self._writer is not None:
                self._writer.close(timeout)
        finally:
            self._follower.close(timeout)

    def disconnected(self, peer: Peer) -> None:
        with self.changed:
            self._greetings.pop(peer, None)
            self.changed.notify_all()

    def corrupted(self, error: NodeError) -> DistkerasError:
        self.changed.report_corruption(error.message)
        return ServerLostError(f"this shard is corrupt: {error.message}")

    def answer(self, peer: Peer, message: Message) -> Message:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise RemoteProtocolError(f"a message to a shard must be a request. Received: {type(message).__name__}")
        return handler(peer, message)

    def _on_publish_rows(self, peer: Peer, message: driver_messages.PublishRows) -> Message:
        self._cut.require_own([message.ids], self._number)
        return self._rows.publish(self.center, message)

    def _on_publish(self, peer: Peer, message: PublishSlice) -> Message:
        with self.changed:
            stretch = self._stretch(message.size)
            if stretch.stop - stretch.start != message.center.size:
                raise ShapeError(
                    f"shard {self._number} must have {stretch.stop - stretch.start} of {message.size} elements. "
                    f"Received: {message.center.size}"
                )
            if message.names.size and not self._layouts:
                self._layouts = decode(message.names.tobytes(), (message.size, message.moving_statistics))
            if self._shard is None:
                self._begin(message.size, message.center)
        return self._acknowledge()

    def _begin(self, size: int, vector: np.ndarray, saved: SavedSlice | None = None) -> None:
        """Make the shard's center of its slice ``vector``, and follow the sequencer."""
        settings, role = self._settings, self._role
        if saved is None:
            self._rows.require_complete()
        self._cut = Cut(size, settings.shards)
        self._slice = self._cut.slices[self._number]

        def make_center(now: Callable[[], float]) -> Center:
            def make(rule: Rule, vector: np.ndarray, **options: Any) -> Center:
                return PartialCenter(rule, vector, add_up=self._add_up, **options | {"now": now})

            tables = self._rows.tables
            center = settings.make_center(vector, NO_FLOATS, role.incarnation, self._world, tables, make)
            if saved is not None:
                restore(center, saved.state, same_attempts=role.same_attempts, epochs=role.epochs)
            return center

        shard = Shard(make_center, settings.make_scheduler, self._save)
        if settings.checkpoint is not None:
            files = () if saved is None else saved.row_files
            self._writer = self._make_writer(settings.checkpoint.uri, shard.center, files)
        self._shard = shard
        vectors = self._shard.center.traits.parts * vector.nbytes
        # Like a server, so that the driver may ask for as many rows.
        body = most_state_bytes(vector.size, settings.tables)
        blocks = [block_bytes(shape) for shape in settings.tables]
        self.limits = replace(self.limits, body=max(vectors + bytes_of_rows(settings.tables), body, *blocks))
        self.changed.notify_all()

    def _make_writer(self, uri: str, center: Center, files: Sequence[RowFile]) -> PartWriter:
        role, directory = self._role, SnapshotDirectory(uri, world=self._world)
        directory.adopt(role.claim, role.shard, self._cut.shards)
        report = self._follower.send
        return PartWriter(directory, center, self.changed, files, role.shard, self._slice, report, self._world)

    def _save(self, number: int) -> None:
        if self._writer is not None:
            self._writer.save(number)

    def _on_greet(self, peer: Peer, message: Greet) -> Message:
        with self.changed:
            center = self._require_shard().center
            center.require_incarnation(message.worker, message.incarnation)
            if message.shard != self._number:
                raise RemoteProtocolError(f"`shard` must be {self._number} here. Received: shard={message.shard}")
            self._greetings[peer] = message
            peer.vectors.agree(codec_of(message.wire_format, center.size), center.pool)
        return self._acknowledge()

    def _on_part(self, peer: Peer, message: SendPart) -> Message:
        greeting, center = self._greeting(peer), self._require_shard().center
        commit = _commit_of(greeting, message)
        check_shapes(center, commit, peer.vectors.codec)
        self._cut.require_own([*message.touched, *message.wants], self._number)
        buffers = peer.vectors.take_parts(commit, center.pool)
        if message.moved:
            peer.vectors.keep_rest()
        unchecked = [] if peer.vectors.known_finite(commit) else [buffer.array for buffer in buffers]
        error = not_finite(commit, unchecked, self._layouts, center.table_shapes, self._slice.start)
        key = PartKey(greeting.worker, greeting.attempt, greeting.connection, message.sequence)
        with self.changed:
            self._require_shard().put(CommitPart(key, buffers, message.touched, message.moved, message.wants))
        return PartStored("" if error is None else error.message)

    def _on_ask_rows(self, peer: Peer, message: AskRows) -> Message:
        greeting = self._greeting(peer)
        with self.changed:
            shard = self._require_shard()
            check_wants(shard.center.table_shapes, message.wants, greeting.worker)
            self._cut.require_own(message.wants, self._number)
            shard.want(PartKey(greeting.worker, greeting.attempt, greeting.connection, 0), message.wants)
        return messages.Ack(self._role.incarnation, 0, 0, 0)

    def _on_fetch(self, peer: Peer, message: FetchSlice) -> Message:
        greeting = self._greetings.get(peer)
        worker = _DRIVER if greeting is None else greeting.worker
        with self.changed:
            shard = self._require_applied(peer, message.ticket, None if greeting is None else worker)
            released = shard.fetch(worker, message.ticket)
        if released is None:
            raise LeaseLostError(
                f"the slice at ticket {message.ticket} is not there any more: it was sent, or a later one replaced it",
                worker=worker,
            )
        return peer.vectors.encode(self._reply(peer, released), whole=message.whole)

    def _reply(self, peer: Peer, released: Released) -> messages.CenterReply:
        peer.vectors.hold_until_sent(released.buffer)
        return messages.CenterReply(
            incarnation=self._role.incarnation,
            clock=released.clock,
            sequence=released.sequence,
            durable=0,
            learning_rate=released.learning_rate,
            center=released.buffer.array,
            rows=released.rows,
            moved=released.moved,
        )

    def _on_ask(self, peer: Peer, message: DividedInspect | DividedRemoval) -> Message:
        with self.changed:
            shard = self._require_shard()
            if isinstance(message, DividedRemoval):
                self._rows.require_removable(message)
                self._cut.require_own([message.ids], self._number)
            else:
                rows_to_inspect(shard.center.tables, replace(message, moved_after=-1))
                self._cut.require_own(message.wants, self._number)
            shard.ask(message)
        return messages.Ack(self._role.incarnation, 0, 0, 0)

    def _on_read_rows(self, peer: Peer, message: ReadRows) -> Message:
        with self.changed:
            center = self._require_applied(peer, message.ticket).center
        return self._rows.inspect(lambda: center, message)

    def _require_applied(self, peer: Peer, ticket: int, worker: int | None = None) -> Shard:
        """Return the shard once it has applied ``ticket``."""
        shard = self._require_shard()
        timeout = self._deadlines.reply
        if not self.changed.wait_while_running(lambda: shard.applied >= ticket, timeout, peer.hung_up):
            raise ServerLostError(
                f"waited {timeout:g} s for ticket {ticket} at shard {self._number}, which has applied {shard.applied}",
                worker=worker,
            )
        return shard

    def _greeting(self, peer: Peer) -> Greet:
        greeting = self._greetings.get(peer)
        if greeting is None:
            raise RemoteProtocolError("a worker must greet a shard before it sends parts. Received: no greeting")
        return greeting

    def _require_shard(self) -> Shard:
        self.changed.require_running()
        if self._shard is None:
            raise RemoteProtocolError("the slice must be published first. Received: a request for it")
        return self._shard

    def _apply(self, rows: np.ndarray) -> TakeTickets:
        """Apply tickets; return the request for the next ones."""
        shard = self._shard
        if shard is None:
            if rows.size:
                raise LocalProtocolError("a shard must have its slice before the first ticket. Received: a ticket")
            living = sum(shape.living for shape in self._settings.tables)
            return self._next_tickets(0, np.zeros((living, 4)))
        tickets = tickets_of(rows) if rows.size else []
        for ticket in tickets:
            with self.changed:
                shard.apply(ticket)
                if ticket.kind is Kind.RELEASE or ticket is tickets[-1]:  # a worker does not wait for its commit alone
                    self.changed.notify_all()
        counts = np.array([table.counts for table in shard.center.living], np.float64).reshape(-1, 4)
        return self._next_tickets(shard.applied, counts)

    def _next_tickets(self, after: int, counts: np.ndarray) -> TakeTickets:
        role = self._role
        return TakeTickets(role.shard, after, _patience(self._deadlines), role.incarnation, counts, role.process)

    def _add_up(self, shares: Sequence[float]) -> float:
        assert self._shard is not None
        return self._follower.add_up(self._number, self._shard.applied, shares)

    def _lose(self, error: Exception) -> None:
        """End the shard, after ``error`` in one of its threads."""
        if isinstance(error, JobStoppedError):
            self.changed.release()
        else:
            self.changed.report_corruption(f"shard {self._number} has ended: {error}")


def _commit_of(greeting: Greet, message: SendPart) -> messages.Commit:
    """Return a part as a commit, for the checks that commits have."""
    return messages.Commit(
        epoch=message.epoch,
        first=message.first,
        last=message.last,
        epoch_end=False,
        wants_center=False,
        learning_rate=0.0,
        scale=1.0,
        parts=message.parts,
        packed=message.packed,
        touched=message.touched,
        moved=message.moved,
        wants=message.wants,
        worker=greeting.worker,
        attempt=greeting.attempt,
        incarnation=greeting.incarnation,
        sequence=message.sequence,
    )
