"""The groups of a job: which workers belong to each group, and which of them is its relay.

A worker announces itself before it pulls, and again after each join. At the beginning of a job the reply waits until
all workers have announced themselves, so that every group is complete; later it is sent at once. The relay of a group
stays the same as long as it holds its lease and no worker reports it lost; after that, the next worker that announces
itself becomes the relay. The next commit of a former relay is refused. A relay also announces itself to learn which of
the workers that it waits for are still connected.
"""

from __future__ import annotations

from collections.abc import Callable

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import PartitionLease
from distkeras.ps.errors import ConfigurationError, RelayLostError
from distkeras.ps.protocol.messages import Announce, Members
from distkeras.ps.server.job_state import JobCondition
from distkeras.ps.server.rendezvous import Waiter
from distkeras.ps.settings import ServerSettings


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
        self, peer: Waiter, center: Center, require_lease: Callable[[], PartitionLease], message: Announce
    ) -> Members:
        """Return the sender's group, once it is complete; the caller holds the lock.

        Raises:
            LeaseLostError: another attempt has the lease now.
            DeadlineError: the job begins, and another worker did not announce itself in time.
        """
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
