"""A center that is divided among shards, in a run: its vectors on one server, with which each shard is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from support.present import present

from distkeras.ps.center.center import Center
from distkeras.ps.checkpoint.ownership import Claim, parsed
from distkeras.ps.checkpoint.parts import PartFile, vectors_of
from distkeras.ps.checkpoint.snapshots import Saved
from distkeras.ps.checkpoint.state import State, capture, restore
from distkeras.ps.protocol import compression
from distkeras.ps.protocol.loop import NO_FLOATS
from distkeras.ps.rules import Rule
from distkeras.ps.settings import ServerSettings
from distkeras.ps.shards import processes, shard_server
from distkeras.ps.shards.cut import Cut
from distkeras.ps.shards.saving import PartsOfShards
from distkeras.ps.shards.sequencer_server import SequencerDispatcher
from distkeras.ps.shards.shard import CommitPart, Shard
from distkeras.ps.shards.tickets import Kind, Ticket
from distkeras.ps.world.world import World
from simulation.scheduler import Finding
from simulation.world import Surroundings, VirtualChild, VirtualWorld

#: Elements of a block in runs with shards, so that small vectors are cut.
BLOCK = 2
#: The vectors of saved states, by the claim and the number of their snapshot.
SavedVectors = dict[tuple[Claim, int], dict[str, np.ndarray]]


class Record(NamedTuple):
    """The vectors of a shard after a ticket, and what it sends at the ticket."""

    clock: int
    vectors: dict[str, np.ndarray]


class RecordingShard(Shard):
    """A shard that records its vectors after each ticket."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.records = {0: self._record({})}

    def apply(self, ticket: Ticket) -> None:
        """See `Shard`."""
        super().apply(ticket)
        sent = {}
        if ticket.kind is Kind.RELEASE:
            sent["what is sent"] = self._released[ticket.worker].released.buffer.array
        elif ticket.kind is Kind.READ:
            sent["what is read"] = self._reads[self.applied].buffer.array
        self.records[self.applied] = self._record(sent)

    def _record(self, sent: Mapping[str, np.ndarray]) -> Record:
        center, total = self.center, self.center.round.total
        vectors = {"the center": center.current.array, **sent}
        vectors |= {f"vector {number} of the rule": vector for number, vector in enumerate(center.model)}
        for worker, lease in center.leases.items():
            for number, vector in enumerate(lease.vectors):
                vectors[f"vector {number} of lease {worker}"] = vector
        if total is not None:
            vectors["the round"] = total.array
        return Record(center.clock, {name: vector.copy() for name, vector in vectors.items()})


def difference_of(whole: Record, own: Record, stretch: slice) -> str:
    """Describe the first difference between a shard's vectors and its elements of the whole ones; "" if none."""
    if own.clock != whole.clock:
        return f"Its clock must be {whole.clock}. Received: {own.clock}"
    if own.vectors.keys() != whole.vectors.keys():
        return f"It must have {sorted(whole.vectors)}. Received: {sorted(own.vectors)}"
    for name, vector in whole.vectors.items():
        if not np.array_equal(vector[stretch], own.vectors[name]):
            return f"Of {name}, it must have {vector[stretch].tolist()}. Received: {own.vectors[name].tolist()}"
    return ""


class Mirror:
    """The vectors of a divided center on one server: a single shard, which makes all calls at once.

    Args:
        settings, world: settings of the server, and its world.
        incarnation: that of the server.
        vector: the initial center.
        restored: its restored state, with whole vectors, and options of `restore`; None: the center is new.
        save: called with the number of a snapshot and its vectors.
    """

    def __init__(
        self,
        settings: ServerSettings,
        world: World,
        incarnation: int,
        vector: np.ndarray,
        restored: tuple[State, dict[str, Any]] | None,
        save: Callable[[int, dict[str, np.ndarray]], None],
    ) -> None:
        def make_center(now: Callable[[], float]) -> Center:
            def make(rule: Rule, vector: np.ndarray, **options: Any) -> Center:
                return Center(rule, vector, **options | {"now": now})

            center = settings.make_center(vector, NO_FLOATS, incarnation, world, make=make)
            if restored is not None:
                state, options = restored
                restore(center, state, **options)
            return center

        def keep(number: int) -> None:
            state = capture(self.center)
            save(number, {name: array.copy() for name, array in vectors_of(state).items()})
            state.drop()

        self._shard = RecordingShard(make_center, settings.make_scheduler, keep)

    @property
    def center(self) -> Center:
        """Return the center, which has the vectors, and no moving statistics."""
        return self._shard.center

    def at(self, ticket: int) -> Record:
        """Return the vectors after a ticket."""
        record = self._shard.records.get(ticket)
        if record is None:
            raise Finding("shard", f"ticket {ticket} must be applied after it is issued. Received: before")
        return record

    def follow(self, center: Any, parts: Callable[[int, int, int], Sequence[np.ndarray]]) -> None:
        """Make the calls that the sequencer has decided; ``parts`` returns the vectors of a commit.

        Its arguments are worker, attempt and number of the commit.
        """
        log = center.log_of_tickets
        for ticket in log._tickets[self._shard.applied - log._forgotten :]:  # noqa: SLF001 - what is not asked for yet
            if ticket.kind in (Kind.COMMIT, Kind.SKIP):
                self._put(ticket, parts(ticket.worker, ticket.attempt, ticket.sequence))
            self._shard.apply(ticket)

    def _put(self, ticket: Ticket, vectors: Sequence[np.ndarray]) -> None:
        buffers = [self.center.pool.take() for _ in vectors]
        for buffer, vector in zip(buffers, vectors, strict=True):
            buffer.array[...] = vector
        self._shard.put(CommitPart(ticket.part, buffers))


def mirror_for(child: VirtualChild, size: int, saved: SavedVectors) -> Mirror | None:
    """Return the mirror of a server whose center is divided, before its first ticket; None for another one.

    ``saved`` has the vectors of all snapshots that mirrors have seen, and receives those of this one.
    """
    dispatcher = child.server.dispatcher
    if not isinstance(dispatcher, SequencerDispatcher):
        return None
    assert child.request is not None
    role, mode = dispatcher.role, child.request.mode
    owner = parsed(f"owner-{role.claim}")
    restored = None
    if role.snapshot:
        own = dispatcher.restored_own
        options = {"same_attempts": own or mode.same_attempts, "epochs": None if own else mode.epochs}
        restored = _whole(child.surroundings, child.surroundings.saved[child.process], saved), options

    def save(number: int, vectors: dict[str, np.ndarray]) -> None:
        assert owner is not None
        saved[owner.claim, number] = vectors

    vector = np.zeros(size, np.float32)
    return Mirror(child.request.settings, child.world, role.incarnation, vector, restored, save)


def _whole(surroundings: Surroundings, snapshot: Saved, saved: SavedVectors) -> State:
    """Return the state of a snapshot with the vectors that it must have."""
    state, names, numbers = snapshot.state, [part.name for part in snapshot.parts], surroundings.snapshots_of_parts
    nothing = {name: NO_FLOATS for name in state.arrays if name.endswith("moving_statistics")}
    arrays = state.arrays | nothing
    if names:
        keys = {(present(parsed(name)).claim, numbers[name]) for name in names}
        known = saved.get(next(iter(keys)))
        if len(keys) != 1 or known is None:
            raise Finding("parts", f"the parts must be of one snapshot that was taken. Received: {names}")
        arrays |= known
    return State(state.header, arrays)


@contextmanager
def patched(surroundings: Surroundings) -> Iterator[None]:
    """Cut small vectors, record what shards have, and which snapshots their servers restore."""
    make_center = processes.Divided.make_center  # it sees the snapshot with its vectors
    files = PartsOfShards.files

    def make(self: Any, settings: ServerSettings, saved: Saved, incarnation: int, world: World) -> Center:
        assert isinstance(world, VirtualWorld)
        surroundings.saved[world.process] = saved
        return make_center(self, settings, saved, incarnation, world)

    def files_of(self: PartsOfShards, marker: int) -> Sequence[PartFile]:
        parts = files(self, marker)
        surroundings.snapshots_of_parts |= dict.fromkeys([part.name for part in parts], marker)
        return parts

    with ExitStack() as stack:
        for owner, name, replacement in (
            (Cut.__init__, "__defaults__", (BLOCK,)),
            (compression, "BLOCK", BLOCK),
            (shard_server, "Shard", RecordingShard),
            (processes.Divided, "make_center", make),
            (PartsOfShards, "files", files_of),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
