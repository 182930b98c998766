"""Checks, under any fault, of the states of the workers' optimizers."""

from __future__ import annotations

from distkeras.ps.center.center import Center
from distkeras.ps.protocol.loop import OptimizerState
from simulation.scheduler import Finding, Process

#: Keys: a layout's number and a partition; a driver, an incarnation of its server, and a partition.
Partition = tuple[int, int]
Life = tuple[Process, int, int]


class StateWatch:
    """A record of every state that an attempt had, and of those that each server kept."""

    def __init__(self) -> None:
        #: The states that a partition's attempts had after an applied commit, with the number of that commit.
        self._had: dict[Partition, dict[bytes, int]] = {}
        #: The states that a server has kept in each life, with the latest one last; None if it has dropped one.
        self._kept: dict[Life, list[bytes | None]] = {}
        #: The states that servers had kept of each partition, by the ledger's length and latest row.
        self._stood: dict[tuple[int, bytes], dict[int, set[bytes | None]]] = {}

    def had(self, partition: Partition, content: bytes, sequence: int) -> None:
        """Record that an attempt at ``partition`` has this state after commit ``sequence``."""
        self._had.setdefault(partition, {})[content] = sequence

    def see(self, center: Center, server: tuple[Process, int], ledger: tuple[int, bytes]) -> None:
        """Record what a server has kept now."""
        stood = self._stood.setdefault(ledger, {})
        for worker, lease in center.leases.items():
            content = None if lease.optimizer is None else lease.optimizer.state.content.tobytes()
            history = self._kept.setdefault((*server, worker), [None])
            if content != history[-1]:
                history.append(content)
            stood.setdefault(worker, set()).add(content)

    def count(self, life: Life) -> int:
        """Return how many states a server has kept of a partition."""
        return len(self._kept.get(life, [None]))

    def require_kept(self, life: Life, content: bytes) -> None:
        """Check that a server has kept the state that it acknowledged."""
        if content not in self._kept.get(life, ()):
            raise Finding("state", f"a state that is acknowledged must be kept. Received: none of partition {life[2]}")

    def check_fetched(
        self, life: Life, before: int, partition: Partition, state: OptimizerState | None, after: int, sequence: int
    ) -> None:
        """Check that a successor receives the latest state that its server has kept, from an attempt of its partition.

        Args:
            life: life of its server and partition.
            before: `count` at the time of the request.
            partition: partition of the successor.
            state: the answer, which is the state after commit ``after``.
            sequence: the latest commit of the partition.
        """
        content = None if state is None else state.content.tobytes()
        if content not in self._kept.get(life, [None])[before - 1 :]:
            raise Finding("state", f"partition {partition[1]} must be given the latest state. Received: another one")
        if state is None:
            return
        assert content is not None
        known = self._had.get(partition, {}).get(content)
        if state.damaged or known is None or known != after or after > sequence:
            raise Finding(
                "state",
                f"partition {partition[1]} must be given a state of its own up to commit {sequence}. "
                f"Received: one after commit {after}, which it had after {known}",
            )

    def require_restored(self, center: Center, ledger: tuple[int, bytes]) -> None:
        """Check that a server that continues from a snapshot has the states that were kept when it was taken."""
        stood = self._stood.get(ledger, {})
        for worker, lease in center.leases.items():
            content = None if lease.optimizer is None else lease.optimizer.state.content.tobytes()
            if content not in stood.get(worker, {None}):
                text = f"the state of partition {worker} must be restored as it was saved. Received: {lease.optimizer}"
                raise Finding("state", text)
