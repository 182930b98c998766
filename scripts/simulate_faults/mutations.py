"""Faults planted in the code under simulation: each must be found, or the scenarios are too tame."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from distkeras.job.supervisor import Supervisor
from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import Leases, PartitionLease
from distkeras.ps.checkpoint.checkpointer import Checkpointer
from distkeras.ps.checkpoint.directory import SnapshotDirectory
from distkeras.ps.checkpoint.ownership import Ownership
from distkeras.ps.errors import RemoteProtocolError, ServerLostError, SnapshotError
from distkeras.ps.protocol.framing import Reader
from distkeras.ps.protocol.sealing import Seal
from distkeras.ps.server.dispatcher import Dispatcher
from distkeras.ps.server.holders import Holders
from distkeras.ps.server.lifeline import GOODBYE
from distkeras.ps.server.published_center import PublishedCenter
from distkeras.ps.transport.worker_client import RestartFromCenter, WorkerClient
from simulate_faults.disk import VirtualFiles
from simulate_faults.world import VirtualChild

#: What is replaced: an object, the name of its attribute, and what stands there instead.
Patch = tuple[Any, str, Any]

MUTATIONS: dict[str, Callable[[], list[Patch]]] = {}


def _mutation(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    MUTATIONS[make.__name__.strip("_").replace("_", "-")] = make
    return make


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The code with one of `MUTATIONS`."""
    patches = [mock.patch.object(*patch) for patch in MUTATIONS[name]()]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def _nothing(*arguments: Any, **options: Any) -> None:
    """In place of a check."""


@_mutation
def _no_lease_check() -> list[Patch]:
    """Whoever commits is heard, whether it has the lease or not."""
    return [
        (Leases, "held", lambda self, worker, attempt: self[worker]),
        (Holders, "require", _nothing),
    ]


@_mutation
def _late_connections_are_heard() -> list[Patch]:
    """What an attempt had sent over an older connection counts."""
    return [(Holders, "require", _nothing), (Holders, "require_newest", _nothing)]


@_mutation
def _duplicates_are_new_where_late_connections_are_heard() -> list[Patch]:
    """A commit that comes again is no duplicate; by itself nobody would notice, for none comes."""
    due = Center._lease_for  # noqa: SLF001 - a fault within

    def never_again(self: Center, commit: Any, parts: int) -> PartitionLease | None:
        lease = due(self, commit, parts)
        return self.leases[commit.worker] if lease is None else lease

    return [(Center, "_lease_for", never_again), *_late_connections_are_heard()]


@_mutation
def _reply_before_apply() -> list[Patch]:
    """The worker hears that its commit is applied, which it will be soon."""
    commit = Center.commit

    def later(self: Center, message: Any, parts: Any) -> bool:
        queue = self.__dict__.setdefault("mutant", [])
        done = [commit(self, *queue.pop(0))] if queue else []
        queue.append((message, parts))
        return bool(done) or True

    return [(Center, "commit", later)]


@_mutation
def _let_go_before_the_snapshot() -> list[Patch]:
    """A worker returns although its last commit is in no snapshot."""
    return [(PublishedCenter, "wait_until_saved", _nothing)]


@_mutation
def _durable_before_the_snapshot() -> list[Patch]:
    """A worker is told that its commit outlives the server, which has not saved it."""
    return [(PublishedCenter, "durable", lambda self, worker, sequence: sequence)]


@_mutation
def _restart_from_an_older_snapshot() -> list[Patch]:
    """The server goes on from the snapshot before the latest one, where there is one."""
    newest = SnapshotDirectory._newest  # noqa: SLF001 - a fault within
    return [(SnapshotDirectory, "_newest", lambda self, snapshots: newest(self, snapshots[:-1] or snapshots))]


@_mutation
def _incarnation_is_ignored_at_both_ends() -> list[Patch]:
    """What a worker computed for an earlier server counts at the next one."""
    join = WorkerClient._join  # noqa: SLF001 - a fault within

    def goes_on(self: WorkerClient) -> Any:
        try:
            return join(self)
        except RestartFromCenter as restart:
            if restart.welcome.held:
                return restart.welcome
            raise

    return [(Center, "require_incarnation", _nothing), (WorkerClient, "_join", goes_on)]


@_mutation
def _an_old_sessions_end_disconnects_its_successor() -> list[Patch]:
    """A connection's end counts as its worker's, who may have come back over another one."""

    def disconnected(self: Dispatcher, peer: Any) -> None:
        if peer.lease is not None:
            with self.changed:
                if self.center is not None:
                    self.center.leases.disconnected(*peer.lease)
                self.changed.notify_all()

    return [(Dispatcher, "disconnected", disconnected)]


@_mutation
def _no_heartbeats() -> list[Patch]:
    """A worker that computes is silent, and an earlier attempt may take its partition back."""
    return [(WorkerClient, "_start_heartbeats", _nothing)]


@_mutation
def _a_later_attempt_need_not_wait() -> list[Patch]:
    """A second attempt takes a partition over from one that is there."""
    join = Leases.join
    return [(Leases, "join", lambda self, worker, attempt, expired=False: join(self, worker, attempt, expired=True))]


@_mutation
def _publishing_is_not_tried_again() -> list[Patch]:
    """A driver whose connection is cut while it publishes gives up."""

    def enter(self: Supervisor) -> Supervisor:
        driver = self._driver
        try:
            self._publish(driver)
        except Exception as error:
            raise ServerLostError(str(error)) from error
        return self

    return [(Supervisor, "__enter__", enter)]


@_mutation
def _no_owner() -> list[Patch]:
    """Nobody looks for a higher claim."""
    return [(Ownership, "require", _nothing), (Ownership, "require_own", _nothing)]


@_mutation
def _nothing_is_synced() -> list[Patch]:
    """Snapshots are left to the system's mercy."""
    return [(VirtualFiles, "sync", _nothing)]


@_mutation
def _a_header_waits_for_what_may_follow() -> list[Patch]:
    """The rest of a header is read together with bytes that need not come."""
    received = Reader.received

    def greedy(self: Reader, count: int) -> Any:
        event = received(self, count)
        spaces = self.spaces()
        if event is None and self._stage == self._parse_header and len(spaces) == 1:
            spaces.append(self._ahead)
        return event

    return [(Reader, "received", greedy)]


@_mutation
def _one_exception_ends_the_checkpointer() -> list[Patch]:
    """What nobody has thought of ends its thread."""

    def tried(self: Checkpointer, closing: bool, idle: bool) -> bool:
        try:
            self._save(closing)
        except SnapshotError as error:
            self.failure = error
            return False
        return True

    return [(Checkpointer, "_try_turn", tried)]


@_mutation
def _a_server_outlives_its_driver() -> list[Patch]:
    """Nobody tells a server that its driver is gone."""

    def until_goodbye(self: VirtualChild, server: Any) -> int:
        self.server = server
        while GOODBYE not in self.lines:
            self.world.sleep(1.0)
        return 0

    return [(VirtualChild, "wait_until_over", until_goodbye)]


@_mutation
def _tags_are_not_checked() -> list[Patch]:
    """Whatever a frame has become on its way is taken."""
    return [(Seal, "check", _nothing)]


@_mutation
def _a_claim_is_tried_once() -> list[Patch]:
    """A server that finds no room for its claim gives up."""
    return [(SnapshotDirectory, "_patiently", lambda self, call, patience=0.0: call())]


@_mutation
def _the_driver_asks_once() -> list[Patch]:
    """A driver's connection that breaks while the server lives is not made again."""

    def ask(self: Supervisor, call: Any) -> Any:
        return call(self._driver)

    return [(Supervisor, "ask", ask)]


@_mutation
def _a_server_that_stands_still_is_left_alone() -> list[Patch]:
    """Nobody kills a server that answers nobody."""
    return [(Supervisor, "_end_silent", _nothing), (Supervisor, "_answers", lambda self: True)]


@_mutation
def _the_checkpointer_gives_up() -> list[Patch]:
    """A snapshot that fails is the last one that is tried."""
    save = Checkpointer._save  # noqa: SLF001 - a fault within

    def once(self: Checkpointer, closing: bool) -> None:
        if self.failure is None:
            save(self, closing)

    return [(Checkpointer, "_save", once)]


@_mutation
def _a_gap_in_the_mini_batches_is_taken() -> list[Patch]:
    """Commits need not go on where their partition stands, and a worker that lost its place goes on where it was."""
    join = WorkerClient._join  # noqa: SLF001 - a fault within

    def goes_on(self: WorkerClient) -> Any:
        try:
            return join(self)
        except RestartFromCenter as restart:
            return restart.welcome

    def check(self: PartitionLease, commit: Any) -> None:
        if commit.sequence != self.sequence + 1:
            raise RemoteProtocolError("a gap")

    return [(WorkerClient, "_join", goes_on), (PartitionLease, "require_next", check)]
