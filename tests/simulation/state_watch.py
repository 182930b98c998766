"""Checks of the states of the workers' optimizers, which hold under any fault."""

from __future__ import annotations

from distkeras.ps.center.center import Center
from distkeras.ps.protocol.messages import OptimizerState
from simulation.scheduler import Finding, Process

#: A layout's number and a partition; a driver, an incarnation of its server, and a partition.
Partition = tuple[int, int]
Life = tuple[Process, int, int]


class StateWatch:
    """Knows every state that an attempt had, and what each server kept of them."""

    def __init__(self) -> None:
        #: By partition, the states that its attempts had after a commit that was applied: of which commit.
        self._had: dict[Partition, dict[bytes, int]] = {}
        #: By life, all that a server has kept, the latest one last; None: it has dropped it.
        self._kept: dict[Life, list[bytes | None]] = {}
        #: By the ledger's length and latest row, what servers had kept of each partition.
        self._stood: dict[tuple[int, bytes], dict[int, set[bytes | None]]] = {}

    def had(self, partition: Partition, content: bytes, sequence: int) -> None:
        """An attempt at ``partition`` has this state after commit ``sequence``."""
        self._had.setdefault(partition, {})[content] = sequence

    def see(self, center: Center, server: tuple[Process, int], ledger: tuple[int, bytes]) -> None:
        """What a server has kept now."""
        stood = self._stood.setdefault(ledger, {})
        for worker, lease in center.leases.items():
            content = None if lease.optimizer is None else lease.optimizer.state.content.tobytes()
            history = self._kept.setdefault((*server, worker), [None])
            if content != history[-1]:
                history.append(content)
            stood.setdefault(worker, set()).add(content)

    def count(self, life: Life) -> int:
        """How many states a server has kept of a partition."""
        return len(self._kept.get(life, [None]))

    def require_kept(self, life: Life, content: bytes) -> None:
        """The server has acknowledged a state."""
        if content not in self._kept.get(life, ()):
            raise Finding("state", f"a state that is acknowledged must be kept. Received: none of partition {life[2]}")

    def check_fetched(
        self,
        life: Life,
        before: int,
        partition: Partition,
        state: OptimizerState | None,
        after: int,
        sequence: int,
    ) -> None:
        """What a successor is given is the latest that its server has kept, and some attempt of its partition had it.

        Args:
            life: of its server and partition.
            before: `count` when it asked.
            partition: its own.
            state: the answer, which says that it is that after commit ``after``.
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
        """A server that goes on from a snapshot has the states that were kept when that was taken."""
        stood = self._stood.get(ledger, {})
        for worker, lease in center.leases.items():
            content = None if lease.optimizer is None else lease.optimizer.state.content.tobytes()
            if content not in stood.get(worker, {None}):
                text = f"the state of partition {worker} must be restored as it was saved. Received: {lease.optimizer}"
                raise Finding("state", text)
