"""The workers that meet at the server: members, whose commits are applied together, and groups, which have relays.

Members exchange with each other (`worker.daso`). Rules:

1. A membership is complete when every worker has announced itself. It ends when one of them announces itself again, or
   another attempt takes its partition over. Then all must announce themselves again, for the next membership.
2. A worker keeps its place, even if a later attempt runs on another host.
3. A round's commits are applied together, when the last one has arrived, in the order of the workers. Commits that wait
   when a membership ends are not applied: their workers take the round's steps again. So a round is applied for all
   workers or for none.

A worker of a group announces itself before it pulls, and again after each join. At the beginning of a job the reply
waits until all workers have announced themselves, so that every group is complete; later it is sent at once. The relay
of a group stays the same as long as it holds its lease and no worker reports it lost; after that, the next worker that
announces itself becomes the relay. The next commit of a former relay is refused. A relay also announces itself to learn
which of the workers that it waits for are still connected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from distkeras.ps.center.buffers import Buffer
from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import PartitionLease
from distkeras.ps.errors import ConfigurationError, MemberLostError, RelayLostError
from distkeras.ps.protocol.messages import Announce, Commit, Members, fault_of
from distkeras.ps.rules.daso import Daso
from distkeras.ps.server.job_state import JobCondition, Peer
from distkeras.ps.settings import ServerSettings

#: How many memberships in a row the same attempts may lose without completing a round.
LOST_MEMBERSHIPS_MAX = 5


@dataclass(eq=False)
class _Held:
    """A commit that waits for those of the other workers; ``applied`` is None until it is applied or discarded."""

    commit: Commit
    parts: Sequence[Buffer]
    arrived: float
    applied: bool | None = None


class Rendezvous:
    """Gathers the members of a job, and holds their commits until a round is complete.

    Args:
        changed: the job's lock, which the caller of each method holds.
        seconds_silent: returns for how many seconds a worker has sent nothing.
    """

    def __init__(self, settings: ServerSettings, changed: JobCondition, seconds_silent: Callable[[int], float]) -> None:
        self._settings, self._changed, self._seconds_silent = settings, changed, seconds_silent
        #: The announcements of the current membership, complete or not; and those that are not answered yet.
        self._announced: dict[int, Announce] = {}
        self._unanswered: dict[int, Announce] = {}
        #: The reply to all announcements; None until the membership is complete.
        self._members: Members | None = None
        #: The node of each worker in the first complete membership.
        self._nodes: dict[int, str] = {}
        self._held: dict[int, _Held] = {}
        #: Attempts and clock of the latest membership, and how many memberships in a row had the same.
        self._latest: tuple[dict[int, int], int] = {}, -1
        self._repeated = 0

    def announce(
        self, peer: Peer, center: Center, require_lease: Callable[[], PartitionLease], message: Announce
    ) -> Members:
        """Wait until all have announced themselves, and return the members."""
        rule, worker = self._settings.rule, message.worker
        if not isinstance(rule, Daso):
            raise ConfigurationError(f"`rule` must have peers. Received: {rule.name!r}", worker=worker)
        require_lease()
        known = self._announced.get(worker)
        if self._members is not None:
            if not self._members.places or (known and (known.attempt, known.port) == (message.attempt, message.port)):
                return self._members  # the worker announces itself again because the reply was lost
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

    def _gather(self, peer: Peer, center: Center, worker: int) -> None:
        """Wait until every worker has announced itself, or the membership is complete, or the job ends early."""
        deadlines, changed = self._settings.deadlines, self._changed
        changed.require(
            lambda: not center.scheduler.missing(),
            deadlines.gather,
            peer.hung_up,
            lambda: center.scheduler.describe_wait(worker),
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
        """Return the workers that have not announced themselves and are not connected."""
        longest = self._settings.deadlines.lease
        leases = {worker: center.leases.get(worker) for worker in range(center.workers)}
        return [
            worker
            for worker, lease in leases.items()
            if worker not in self._announced
            and not (lease is not None and lease.connected and self._seconds_silent(worker) < longest)
        ]

    def _give_up(self, center: Center, lost: Sequence[int], why: str) -> None:
        """End the job with a MemberLostError, because ``lost`` workers were not replaced."""
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
            self._members = Members("", 0, 0)  # the reply that asks all workers to leave
        else:
            # A worker stays in its first node, even if a later attempt runs on another host.
            nodes = {worker: self._nodes.get(worker, sent.node) for worker, sent in self._announced.items()}
            placed = {worker: replace(sent, node=nodes[worker]) for worker, sent in self._announced.items()}
            self._members = membership(placed, rule.nodes)
            self._nodes = nodes
            self._require_progress(center)
        self._changed.notify_all()

    def _require_progress(self, center: Center) -> None:
        """End the job if the same attempts lost each other over `LOST_MEMBERSHIPS_MAX` times since the last round."""
        latest = {worker: sent.attempt for worker, sent in self._announced.items()}, center.clock
        self._repeated = self._repeated + 1 if latest == self._latest else 0
        self._latest = latest
        if self._repeated > LOST_MEMBERSHIPS_MAX:
            why = f"have lost each other {self._repeated} times in a row without a death among them"
            self._give_up(center, sorted(self._announced), why)

    def joined(self, worker: int, attempt: int) -> None:
        """Record that ``attempt`` holds the lease of ``worker``'s partition, over a new connection.

        If it is another attempt than before, the membership ends. A held commit from an older connection is discarded,
        so that the progress in the reply to the worker is final.
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
        """End the membership, and discard the held commits; unanswered announcements count for the next one."""
        self._members, self._announced = None, dict(self._unanswered)
        for held in self._held.values():
            held.applied = False
        self._held = {}
        self._changed.notify_all()

    def commit(self, peer: Peer, center: Center, commit: Commit, parts: Sequence[Buffer], arrived: float) -> bool:
        """Apply the commit with `Center.commit`, together with those of all other workers, once all have arrived."""
        if not center.is_next(commit, len(parts)):
            return False
        worker, member = commit.worker, self._announced.get(commit.worker)
        if self._members is None or member is None or member.attempt != commit.attempt:
            raise self._round_lost(commit)
        own = self._held[worker] = _Held(commit, parts, arrived)
        try:
            if self._held.keys() >= center.scheduler.active:
                self._apply(center)
            timeout = self._settings.deadlines.reply
            if not self._changed.wait_while_running(lambda: own.applied is not None, timeout, peer.hung_up):
                self._end_membership()
        finally:
            if self._held.get(worker) is own:
                del self._held[worker]
        if not own.applied:
            raise self._round_lost(commit)
        return True

    def _apply(self, center: Center) -> None:
        held, self._held = self._held, {}
        for _, waiting in sorted(held.items()):
            waiting.applied = center.commit(waiting.commit, waiting.parts, waiting.arrived)
        self._changed.notify_all()

    def _round_lost(self, commit: Commit) -> MemberLostError:
        return MemberLostError(
            "a worker was lost before all workers had finished the round; all workers repeat it",
            worker=commit.worker,
            step=commit.first,
        )


def membership(announced: Mapping[int, Announce], nodes: int | None) -> Members:
    """Return the members, node by node, filled in the order of the workers; ``nodes`` None: one node for each host."""
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
    return Members("\n".join(places), len(by_node), max(sent.batches for sent in announced.values()))


class RelayGroups:
    """The groups of a job; its lock guards them."""

    def __init__(self, settings: ServerSettings, changed: JobCondition) -> None:
        self._settings, self._changed = settings, changed
        self._announced: dict[int, Announce] = {}
        #: The relay of each group, by the group's name.
        self._relays: dict[str, Announce] = {}
        #: The names of the groups that have had a relay.
        self._formed: set[str] = set()

    def announce(
        self, peer: Peer, center: Center, require_lease: Callable[[], PartitionLease], message: Announce
    ) -> Members:
        """Return the sender's group, once it is complete; the caller holds the lock."""
        require_lease()
        worker, deadlines = message.worker, self._settings.deadlines
        self._announced[worker] = message
        for name, relay in [*self._relays.items()]:
            if message.lost == relay.line or (relay.worker == worker and self._name(message) != name):
                del self._relays[name]
        self._changed.notify_all()
        leads = any(relay.line == message.line for relay in self._relays.values())
        if not center.clock and not leads:
            self._changed.require(
                lambda: not center.scheduler.missing() or center.stopping is not None,
                deadlines.gather,
                peer.hung_up,
                lambda: center.scheduler.describe_wait(worker),
                worker,
            )
            self._changed.require(
                lambda: not self._unannounced(center) or center.stopping is not None,
                deadlines.reply,
                peer.hung_up,
                lambda: f"workers {sorted(self._unannounced(center))} to announce themselves to their groups",
                worker,
            )
            require_lease()
        return self._group_of(center, message)

    def require_relay(self, worker: int) -> None:
        """Raise a RelayLostError unless ``worker`` is the relay of its group."""
        announced = self._announced.get(worker)
        if announced is None or self._relays.get(self._name(announced)) is not announced:
            raise RelayLostError(
                "only the relay of a group may send its commits: this worker is not the relay", worker=worker
            )

    def _unannounced(self, center: Center) -> set[int]:
        """Return the workers that have data left and have not announced themselves; none after the first commit."""
        if center.clock:
            return set()
        finished = {worker for worker, lease in center.leases.items() if lease.finished}
        return set(range(center.workers)) - self._announced.keys() - finished

    def _name(self, announced: Announce) -> str:
        """Return the name of a worker's group."""
        groups = self._settings.relays
        if isinstance(groups, int):
            return str(announced.worker * groups // self._settings.workers)
        return announced.node

    def _group_of(self, center: Center, message: Announce) -> Members:
        name = self._name(message)
        members = {
            worker: other
            for worker, other in sorted(self._announced.items())
            if self._name(other) == name and _holds(center, other)
        }
        if message.worker not in members:
            raise ConfigurationError(
                "a worker must hold its lease to join a group. Received: no lease", worker=message.worker
            )
        relay = self._relays.get(name)
        if relay is None or members.get(relay.worker) is not relay:
            relay = self._relays[name] = message if name in self._formed else members[min(members)]
            self._formed.add(name)
        lines = [relay.line, *(other.line for other in members.values() if other is not relay)]
        return Members("\n".join(lines), 1, 0)


def _holds(center: Center, announced: Announce) -> bool:
    """Return whether the announced attempt holds the partition's lease, is connected, and has data left."""
    lease = center.leases.get(announced.worker)
    return lease is not None and lease.connected and not lease.finished and lease.attempt == announced.attempt
