"""The members of a job whose workers exchange with each other: who they are, and their commits, which count together.

Rules:

1. A membership is complete when every worker has announced itself. It is over as soon as one of them announces itself
   again, or another attempt takes its partition over. Then all have to announce themselves, and the next one begins.
2. A worker keeps its place, wherever a later attempt of it runs.
3. A round's commits are applied together, when the last one is there, in the order of the workers. Those that wait when
   a membership ends are not applied: their workers take the round's steps again. So a round counts for all or for none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from distkeras.ps.center.buffers import Buffer
from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import PartitionLease
from distkeras.ps.errors import ConfigurationError, MemberLostError
from distkeras.ps.protocol.messages import Announce, Commit, Members, fault_of
from distkeras.ps.rules.daso import Daso
from distkeras.ps.server.job_state import JobCondition
from distkeras.ps.settings import ServerSettings

#: Memberships in a row that the same attempts may lose before they have ended a round.
MOST_LOST = 5


class Waiter(Protocol):
    """A session, as far as a wait for others needs it."""

    def hung_up(self) -> bool:
        """Return whether the peer has closed its end."""


@dataclass(eq=False)
class _Held:
    """A commit that waits for those of the other workers; ``applied`` is None until its fate is known."""

    commit: Commit
    parts: Sequence[Buffer]
    arrived: float
    applied: bool | None = None


class Rendezvous:
    """Where the members of a job find each other, and where their commits wait for each other.

    Args:
        changed: the job's lock, which the caller of each method holds.
        seconds_silent: returns for how long a worker has given no sign of life.
    """

    def __init__(self, settings: ServerSettings, changed: JobCondition, seconds_silent: Callable[[int], float]) -> None:
        self._settings, self._changed, self._seconds_silent = settings, changed, seconds_silent
        #: The announcements of the present membership, complete or not; and those whose answer is still to come.
        self._announced: dict[int, Announce] = {}
        self._unanswered: dict[int, Announce] = {}
        #: The answer to all; None while the membership is not complete.
        self._members: Members | None = None
        #: The node of each worker, as it was when the first membership was complete.
        self._nodes: dict[int, str] = {}
        self._held: dict[int, _Held] = {}
        #: Attempts and clock of the latest membership, and how many in a row have had the same.
        self._latest: tuple[dict[int, int], int] = {}, -1
        self._repeated = 0

    def announce(
        self, peer: Waiter, center: Center, require_lease: Callable[[], PartitionLease], message: Announce
    ) -> Members:
        """Wait until all have announced themselves, and return the members.

        Args:
            require_lease: returns the lease of the sender's partition; raises a LeaseLostError if it has none.

        Raises:
            LeaseLostError: another attempt has the lease now.
            ConfigurationError: the rule has no peers, or nodes of unequal size.
            MemberLostError: a worker was lost, and no successor has come; the job ends.
            DeadlineError: a worker did not read its rows in time.
        """
        rule, worker = self._settings.rule, message.worker
        if not isinstance(rule, Daso):
            raise ConfigurationError(f"`rule` must have peers. Received: {rule.name!r}", worker=worker)
        require_lease()
        known = self._announced.get(worker)
        if self._members is not None:
            if not self._members.places or (known and (known.attempt, known.port) == (message.attempt, message.port)):
                return self._members  # only the answer to the first announcement was lost
            self._end_membership()
        self._announced[worker] = self._unanswered[worker] = message
        self._changed.notify_all()
        try:
            self._gather(peer, center, worker)
            require_lease()
            if self._members is None:
                self._complete(center, rule)
        except BaseException:
            if self._members is None and self._announced.get(worker) is message:
                del self._announced[worker]
            raise
        finally:
            if self._unanswered.get(worker) is message:
                del self._unanswered[worker]
        assert self._members is not None
        return self._members

    def _gather(self, peer: Waiter, center: Center, worker: int) -> None:
        """Wait until the membership can be completed, or is."""
        deadlines, changed = self._settings.deadlines, self._changed
        changed.require(
            lambda: not center.scheduler.missing(),
            deadlines.gather,
            peer.hung_up,
            lambda: center.scheduler.awaited(worker),
            worker,
        )

        def ended() -> bool:
            complete = self._members is not None or len(self._announced) == center.workers
            return complete or center.stopping is not None

        while not ended():
            if not changed.wait_while_running(
                lambda: ended() or not self._absent(center), deadlines.reply, peer.hung_up
            ):
                self._give_up(center, self._absent(center), f"no successor has come within {deadlines.reply:g} s")
            changed.require(
                lambda: ended() or bool(self._absent(center)),
                deadlines.rows,
                peer.hung_up,
                lambda: f"workers {sorted(set(range(center.workers)) - self._announced.keys())} to read their rows",
                worker,
            )

    def _absent(self, center: Center) -> list[int]:
        """Return the workers that have neither announced themselves nor are there to do so."""
        longest = self._settings.deadlines.lease
        leases = {worker: center.leases.get(worker) for worker in range(center.workers)}
        return [
            worker
            for worker, lease in leases.items()
            if worker not in self._announced
            and not (lease is not None and lease.connected and self._seconds_silent(worker) < longest)
        ]

    def _give_up(self, center: Center, lost: Sequence[int], why: str) -> None:
        """End the job, for ``lost`` workers cannot be replaced."""
        lease = center.leases.get(lost[0]) if lost else None
        error = MemberLostError(
            f"workers {list(lost)}, which exchange with others, were lost in epoch {lease.epoch if lease else 0}, and "
            f"{why}",
            worker=lost[0] if lost else None,
            step=lease.batch if lease else 0,
        )
        self._changed.fail(fault_of(error))
        self._changed.require_running()

    def _complete(self, center: Center, rule: Daso) -> None:
        if center.stopping is not None:
            self._members = Members("", 0, 0)  # to all: none trains
        else:
            placed = {
                worker: replace(one, node=self._nodes.get(worker, one.node)) for worker, one in self._announced.items()
            }
            self._members = membership(placed, rule.nodes, whole=self._settings.authenticate_vectors)
            self._nodes = {worker: one.node for worker, one in placed.items()}
            self._require_progress(center)
        self._changed.notify_all()

    def _require_progress(self, center: Center) -> None:
        """End the job if the same attempts have lost each other again and again since the last round."""
        latest = {worker: one.attempt for worker, one in self._announced.items()}, center.clock
        self._repeated = self._repeated + 1 if latest == self._latest else 0
        self._latest = latest
        if self._repeated > MOST_LOST:
            why = f"have lost each other {self._repeated} times in a row without a death among them"
            self._give_up(center, sorted(self._announced), why)

    def joined(self, worker: int, attempt: int) -> None:
        """Note that ``attempt`` holds the lease of ``worker``'s partition, over a new connection.

        Another attempt is a member no more; and what came over an older connection is not applied any more, so that the
        answer to the worker says for good where its partition stands.
        """
        held = self._held.pop(worker, None)
        if held is not None:
            held.applied = False
            self._changed.notify_all()
        member = self._announced.get(worker)
        if member is None or member.attempt == attempt:
            return
        if self._members is not None:
            self._end_membership()
        for announced in (self._announced, self._unanswered):
            announced.pop(worker, None)

    def _end_membership(self) -> None:
        """Begin to gather the next one, among those that have no answer yet, and apply nothing of what is held."""
        self._members, self._announced = None, dict(self._unanswered)
        for held in self._held.values():
            held.applied = False
        self._held = {}
        self._changed.notify_all()

    def commit(self, peer: Waiter, center: Center, commit: Commit, parts: Sequence[Buffer], arrived: float) -> bool:
        """Do what `Center.commit` does, together with the commits of all others, once they are there.

        Raises:
            MemberLostError: a worker was lost before, or has not come in time, and none of them is applied.
        """
        if not center.is_next(commit, len(parts)):
            return False
        worker, member = commit.worker, self._announced.get(commit.worker)
        if self._members is None or member is None or member.attempt != commit.attempt:
            raise self._cut(commit)
        own = self._held[worker] = _Held(commit, parts, arrived)
        try:
            if self._held.keys() >= center.scheduler.active:
                self._apply(center)
            # Another one may have waited for a member that does not respond, and will say so.
            timeout = self._settings.deadlines.reply
            if not self._changed.wait_while_running(lambda: own.applied is not None, timeout, peer.hung_up):
                self._end_membership()
        finally:
            if self._held.get(worker) is own:
                del self._held[worker]
        if not own.applied:
            raise self._cut(commit)
        return True

    def _apply(self, center: Center) -> None:
        held, self._held = self._held, {}
        for _, one in sorted(held.items()):
            one.applied = center.commit(one.commit, one.parts, one.arrived)
        self._changed.notify_all()

    def _cut(self, commit: Commit) -> MemberLostError:
        return MemberLostError(
            "a worker was lost before all workers had finished the round; all workers repeat it",
            worker=commit.worker,
            step=commit.first,
        )


def membership(announced: Mapping[int, Announce], nodes: int | None, *, whole: bool) -> Members:
    """Return the members, node by node.

    Args:
        announced: each worker's announcement, by its number from 0 on.
        nodes: how many nodes to make of them, in the order of the workers; None: one of each machine.
        whole: whether tags cover the long vectors between members.

    Raises:
        ConfigurationError: the nodes would not be equally large.
    """
    workers = sorted(announced)
    if nodes is not None and len(workers) % nodes:
        raise ConfigurationError(f"`num_workers` must be a multiple of `nodes`={nodes}. Received: {len(workers)}")
    devices = len(workers) // (nodes or 1)
    by_node: dict[str | int, list[int]] = {}
    for worker in workers:
        node = announced[worker].node if nodes is None else worker // devices
        by_node.setdefault(node, []).append(worker)
    if len({len(members) for members in by_node.values()}) > 1:
        sizes = ", ".join(f"{node}: {len(members)}" for node, members in by_node.items())
        raise ConfigurationError(
            "each host must run the same number of workers, because the workers of a host form a node; or set the "
            f"rule's `nodes`. Received: {sizes}"
        )
    ranks = [worker for members in by_node.values() for worker in members]
    places = [announced[worker].line for worker in ranks]
    return Members("\n".join(places), len(by_node), max(one.batches for one in announced.values()), whole)
