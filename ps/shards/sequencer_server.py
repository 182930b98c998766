"""The sequencer's answers: those of a server whose center has no elements, and those to its shards.

A worker sends its commit when all shards have stored their parts of it, and the commit is decided as on one server. The
decision is a ticket, and the reply to the worker names the ticket at which the shards have its slices of the center.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from distkeras.ps.center.center import Center, Released, partition_of
from distkeras.ps.center.checks import check_hello, check_shapes
from distkeras.ps.checkpoint.snapshots import Saved, SnapshotDirectory
from distkeras.ps.errors import (
    DifferentJobError,
    JobStoppedError,
    NonFiniteError,
    RemoteProtocolError,
    ServerLostError,
)
from distkeras.ps.protocol import driver_messages, messages
from distkeras.ps.protocol.compression import FORMATS
from distkeras.ps.protocol.framing import Limits
from distkeras.ps.protocol.messages import Message
from distkeras.ps.protocol.shard_messages import (
    AddUp,
    AskRole,
    AskTicket,
    DividedCommit,
    DividedInspect,
    DividedRemoval,
    DividedReply,
    LatestTicket,
    ListShards,
    PartSaved,
    PublishSize,
    RegisterShard,
    Role,
    ShardFault,
    Shards,
    TakeTickets,
    Tickets,
    Total,
)
from distkeras.ps.protocol.tables import most_state_bytes
from distkeras.ps.server.dispatcher import Dispatcher
from distkeras.ps.server.job_state import Peer, ServerState
from distkeras.ps.server.shard_role import ShardRole
from distkeras.ps.settings import ServerSettings
from distkeras.ps.shards.roles import Roles
from distkeras.ps.shards.saving import PartsOfShards
from distkeras.ps.shards.sequencer import ELEMENTS, SequencingCenter
from distkeras.ps.shards.tickets import Kind, Ticket, rows_of
from distkeras.ps.shards.totals import Totals
from distkeras.ps.world.world import REAL, World

#: The longest time that a request for tickets waits, in seconds.
_PATIENCE_MOST = 10.0
#: Seconds between two looks at the shards, after which this process was suspended meanwhile.
SUSPENDED = 5.0
#: The most tickets that one message has: a shard that asks for the next ones is known to be alive.
_TICKETS_MAX = 64


class SequencerDispatcher(Dispatcher):
    """Answers workers, driver and shards; arguments as for `Dispatcher`.

    ``size`` is the number of elements of the restored center.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        incarnation: int = 1,
        snapshots: SnapshotDirectory | None = None,
        restored: tuple[Center, Saved] | None = None,
        size: int = 0,
        world: World = REAL,
    ) -> None:
        self._whole = settings  # the tables are at the shards
        self._places: dict[int, tuple[str, int]] = {}
        self._size = size
        self._totals = Totals(settings.shards)
        living = sum(shape.living for shape in settings.tables)
        #: For each shard, `LivingTable.counts` of its rows in each such table.
        self._counts = np.zeros((settings.shards, living, 4))
        self._parts: PartsOfShards | None = None
        #: What the processes of the shards must know; set by what starts them.
        self.role = ShardRole(0, "", 0, incarnation)
        #: Whether the restored snapshot was taken in this job, and not in one that it resumes.
        self.restored_own = restored is not None and snapshots is not None and snapshots.own(restored[1])
        #: When each shard has started, or asked for tickets last, in seconds (monotonic).
        self.asked_at: dict[int, float] = {}
        #: The processes that have asked to be a shard.
        self.roles = Roles()
        #: The sessions of shards, and of processes that have asked to be one; the job's lock guards it.
        self._of_shards = set[Peer]()
        #: When `lose_silent_shards` was called last.
        self._looked_at = world.monotonic()
        super().__init__(
            replace(settings, tables=()), incarnation=incarnation, snapshots=snapshots, restored=restored, world=world
        )
        if self.center is not None:
            self._listened(self.center)

    def _make_handlers(self) -> dict[type[Message], Callable[[Peer, Any], Message]]:
        return super()._make_handlers() | {
            driver_messages.BeginMicroBatch: self._on_begin_micro_batch,
            DividedCommit: self._on_divided_commit,
            PublishSize: self._on_publish_size,
            DividedInspect: self._on_divided_inspect,
            DividedRemoval: self._on_divided_removal,
            AskTicket: self._on_ask_ticket,
            AskRole: self._on_ask_role,
            RegisterShard: self._on_register,
            ListShards: self._on_list_shards,
            TakeTickets: self._on_take_tickets,
            ShardFault: self._on_shard_fault,
            PartSaved: self._on_part_saved,
            AddUp: self._on_add_up,
        }

    def _make_parts(self) -> PartsOfShards:
        self._parts = PartsOfShards(self.settings.shards, self.changed, lambda: self._sequencing)
        return self._parts

    def _on_part_saved(self, peer: Peer, message: PartSaved) -> Message:
        self._require_number(message.shard)
        with self.changed:
            if self._parts is not None:
                self._parts.note(message)
        return self.acknowledge()

    def _make_center(self, vector: np.ndarray, moving_statistics: np.ndarray) -> Center:
        make = partial(SequencingCenter, shards=self.settings.shards, shapes=self._whole.tables)
        center = self.settings.make_center(vector, moving_statistics, self._incarnation, self.world, (), make=make)
        return self._listened(center)

    def _listened(self, center: Center) -> Center:
        assert isinstance(center, SequencingCenter)
        center.issued = self.changed.notify_all
        return center

    def _elements(self, center: Center) -> int:
        return self._size

    def _limits_of(self, center: Center) -> Limits:
        limits = super()._limits_of(center)
        return replace(limits, body=max(limits.body, most_state_bytes(self._size, self._whole.tables)))

    def require_attentive(self, shard: int) -> None:
        """Raise a ServerLostError if a shard stands still, for as long as a server may: see `Deadlines.standstill`."""
        if self.changed.fault is not None:  # a shard that has ended the job asks for no more tickets
            return
        patience = self.deadlines.reply if self._whole.checkpoint is None else self.deadlines.standstill
        silence = self.world.monotonic() - self.asked_at[shard]
        if silence > patience + _PATIENCE_MOST:
            raise ServerLostError(f"shard {shard} has not asked for tickets for {silence:.0f} s")

    def wait_for_publish(self, peer: Peer) -> None:
        with self.changed:
            if len(self._places) < self.settings.shards:
                # As if no server listened yet: they may read their snapshot for longer than a publication takes.
                raise ServerLostError("the shards of this server are starting")
        super().wait_for_publish(peer)

    def _on_publish_size(self, peer: Peer, message: PublishSize) -> Message:
        with self.changed:
            if self._size not in (0, message.size):
                raise DifferentJobError(
                    f"the model must have {self._size} trainable elements, as the center that was published or "
                    f"restored. Received: {message.size}"
                )
            self._size = message.size
        return self.acknowledge()

    def has_clients(self, sessions: Sequence[Peer]) -> bool:
        """Return whether one of ``sessions`` is the driver's or a worker's, and not a shard's."""
        with self.changed:
            return any(session not in self._of_shards for session in sessions)

    def disconnected(self, peer: Peer) -> None:
        """Note that a session has ended; the end of a shard's is the loss of that shard."""
        with self.changed:
            self._of_shards.discard(peer)
            shard = self.roles.leave(peer)
            if shard is not None:
                self.asked_at.pop(shard, None)
                self.changed.notify_all()
                if shard in self._places and not self.changed.closing:
                    self.lose(f"shard {shard} has ended, or its connection has")
        super().disconnected(peer)

    def lose(self, reason: str) -> None:
        """Let another server start, unless the job has an error that its driver must read here."""
        if self.changed.fault is None:
            self.changed.report_corruption(reason)

    def lose_silent_shards(self) -> None:
        """Let another server start if a shard stands still, or must end; is called each second."""
        if self.roles.leaving is not None:
            raise ServerLostError(f"the process of shard {self.roles.leaving} must end; another one continues")
        try:
            with self.changed:  # a session that ends removes its shard
                now = self.world.monotonic()
                if now - self._looked_at > SUSPENDED:  # no shard could ask this process for tickets
                    self.asked_at = dict.fromkeys(self.asked_at, now)
                self._looked_at = now
                for shard in self.asked_at:
                    self.require_attentive(shard)
        except ServerLostError as error:
            self.lose(error.message)

    def dismiss_shards(self, seconds: float) -> None:
        """Answer the shards that the job has ended, and wait until they have left, for ``seconds`` at most."""
        deadline = self.world.monotonic() + seconds
        self.changed.close()
        with self.changed:
            while self.roles and self.changed.wait_for_change(deadline, lambda: False):
                pass

    def _on_ask_role(self, peer: Peer, message: AskRole) -> Message:
        self._require_number(message.shard)
        with self.changed:
            self._of_shards.add(peer)
            if self.changed.closing or self.roles.holder(message.shard) != message.process:
                self.changed.require_running()
            if not self.roles.ask(message, peer):
                return self.acknowledge()
            self.asked_at[message.shard] = self.world.monotonic()
            role = self.role
            epochs = -1 if role.epochs is None else role.epochs
            return Role(role.incarnation, role.claim, role.snapshot, role.same_attempts, epochs)

    def _on_register(self, peer: Peer, message: RegisterShard) -> Message:
        self._require_own(message)
        with self.changed:
            self._of_shards.add(peer)
            self._require_number(message.shard)
            place = message.host, message.port
            if self._places.setdefault(message.shard, place) != place:
                raise RemoteProtocolError(f"shard {message.shard} must register once. Received: another place, {place}")
            self.changed.notify_all()
        return self.acknowledge()

    def _require_number(self, shard: int) -> None:
        if not 0 <= shard < self.settings.shards:
            raise RemoteProtocolError(f"`shard` must be in [0, {self.settings.shards}). Received: shard={shard}")

    def wait_for_shards(self, seconds: float) -> bool:
        """Wait for up to ``seconds`` until all shards have registered, or cannot; return whether that is so.

        What starts the shards ends this server if one of them does not start.
        """
        with self.changed:
            deadline = self.world.monotonic() + seconds
            while self.settings.shards > len(self._places) and self.changed.state is ServerState.RUNNING:
                left = deadline - self.world.monotonic()
                if left <= 0:
                    return False
                self.changed.wait(left)
            return True

    def _on_list_shards(self, peer: Peer, message: ListShards) -> Message:
        with self.changed:
            known = self._places
            if not self.changed.wait_while_running(
                lambda: len(known) == self.settings.shards, self.deadlines.publish, peer.hung_up
            ):  # as if no server listened yet, and no error of the job
                raise ServerLostError(f"shards {sorted({*range(self.settings.shards)} - known.keys())} are starting")
            lines = [f"{host} {port}" for _, (host, port) in sorted(self._places.items())]
            return Shards("\n".join(lines), self._size)

    def _require_own(self, message: RegisterShard | TakeTickets) -> None:
        """Raise a ServerLostError if a shard is one of an earlier sequencer at this address, which it outlives."""
        if message.incarnation != self._incarnation:
            raise ServerLostError(
                f"shard {message.shard} must be of incarnation {self._incarnation}. Received: {message.incarnation}"
            )
        self.roles.require(message.shard, message.process)

    def _on_take_tickets(self, peer: Peer, message: TakeTickets) -> Message:
        self._require_own(message)
        self._require_number(message.shard)
        if message.counts.size != self._counts[0].size:
            raise RemoteProtocolError(
                f"`counts` must have {self._counts[0].size} numbers. Received: {message.counts.size}"
            )
        deadline = self.world.monotonic() + min(message.patience, _PATIENCE_MOST)
        with self.changed:
            self._of_shards.add(peer)
            self._counts[message.shard] = message.counts.reshape(-1, 4)
            while True:
                self.asked_at[message.shard] = self.world.monotonic()
                self.changed.require_readable()
                center = self.center
                if isinstance(center, SequencingCenter):
                    tickets = center.log_of_tickets.after(message.shard, message.after)
                    if tickets:
                        return Tickets(rows_of(tickets[:_TICKETS_MAX]))
                if not self.changed.wait_for_change(deadline, peer.hung_up):
                    return Tickets()

    def _on_add_up(self, peer: Peer, message: AddUp) -> Message:
        self._require_number(message.shard)
        # A shard that stands still is found before: see `require_attentive`.
        deadline = self.world.monotonic() + self.deadlines.reply + self.deadlines.standstill + _PATIENCE_MOST
        with self.changed:
            self._totals.add(message.ticket, message.shard, message.shares)
            self.changed.notify_all()
            while not self._totals.complete(message.ticket):
                self.changed.require_readable()
                if self._sequencing.shard_failed:
                    raise JobStoppedError("a shard has ended the job, and sends no shares any more")
                if not self.changed.wait_for_change(deadline, peer.hung_up):
                    raise ServerLostError(f"waited for all shares of ticket {message.ticket} until their deadline")
            return Total(self._totals.take(message.ticket))

    def _on_shard_fault(self, peer: Peer, message: ShardFault) -> Message:
        partition = partition_of(self.center, None if message.worker < 0 else message.worker)
        if message.within_ticket:
            with self.changed:
                self._sequencing.shard_failed = True
        self.changed.fail(replace(message, worker=-1 if partition is None else partition))
        return self.acknowledge()

    def _on_hello(self, peer: Peer, message: messages.Hello) -> Message:
        self.wait_for_publish(peer)
        check_hello(self.require_sound(), message, self._size, self._whole.tables)
        # The vectors are at the shards, in the worker's format.
        bare = replace(message, size=ELEMENTS, tables="", wire_format=FORMATS[0], memory="", memory_token="")
        welcome = super()._on_hello(peer, bare)
        if isinstance(welcome, messages.Welcome) and not welcome.finished:
            with self.changed:
                # No commit or release of this lease can have come since it was granted, as the worker has no answer.
                if self.connections.get(message.worker) is peer:
                    self._sequencing.connections[message.worker] = message.connection
        return welcome

    @property
    def _sequencing(self) -> SequencingCenter:
        center = self.require_sound()
        assert isinstance(center, SequencingCenter)
        return center

    def _on_divided_commit(self, peer: Peer, commit: DividedCommit) -> Message:
        if not commit.problem:
            return self._on_commit(peer, commit)
        center = self.require_sound()
        center.leases.held(commit.worker, commit.attempt)
        check_shapes(center, commit)
        return self._skip(peer, center, commit, NonFiniteError(commit.problem, worker=commit.worker, step=commit.first))

    def reply(self, peer: Peer, center: Center, released: Released, *, whole: bool = False) -> messages.CenterReply:
        reply = super().reply(peer, center, released, whole=whole)
        return DividedReply(**vars(reply), ticket=released.ticket)

    def counts_of_tables(self) -> np.ndarray:
        counts: np.ndarray = self._counts.sum(axis=0)
        return counts

    def _on_divided_inspect(self, peer: Peer, message: DividedInspect) -> Message:
        with self.changed:
            self.require_center(peer)
            center = self._sequencing
            released = center.inspect(request=message.request)
        return self.reply(peer, center, released, whole=True)

    def _on_divided_removal(self, peer: Peer, message: DividedRemoval) -> Message:
        with self.changed:
            self.require_center(peer)
            self.changed.require_running()
            self._sequencing.remove_requested(message.request)
            answer = self.acknowledge()
            self.wait_until_saved(peer)  # else a restarted server would continue without the change
        return answer

    def _on_ask_ticket(self, peer: Peer, message: AskTicket) -> Message:
        with self.changed:
            self.require_center(peer)
            return LatestTicket(self._sequencing.log_of_tickets.last)

    def _on_begin_micro_batch(self, peer: Peer, message: driver_messages.BeginMicroBatch) -> Message:
        with self.changed:
            answer = self._driver.begin_micro_batch(peer, message)
            assert isinstance(answer, driver_messages.MicroBatchBegun)
            if answer.began:
                center = self._sequencing
                center.issue(Ticket(Kind.MICRO_BATCH, clock=center.clock, number=message.number))
            return answer
