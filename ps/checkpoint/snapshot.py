"""A center's whole state as JSON and arrays, and back.

What a worker was last sent is left out: after a restart every worker begins again with a pull, which sets it anew.
The log is left out too, for it only ever grows; `saver` writes its new part beside each snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps.center.buffers import Buffer
from distkeras.ps.center.center import Center
from distkeras.ps.errors import SnapshotError

#: What of a `PartitionLease` is kept as it is.
_KEPT = ("attempt", "finished", "sequence", "epoch", "batch", "checksum", "steps", "skipped")


@dataclass(frozen=True)
class State:
    """What `capture` took: JSON-ready values and arrays. `drop` it once it is written."""

    header: dict[str, Any]
    arrays: dict[str, np.ndarray]
    held: Buffer | None = None

    def drop(self) -> None:
        """Lets go of the center's version."""
        if self.held is not None:
            self.held.drop()


def capture(center: Center) -> State:
    """The state of ``center`` now; the caller holds the lock.

    A published version of the center is only held on to. Vectors that change in place are copied: those of the rule
    and of its workers, an unfinished round, and the center itself under a rule with a view.
    """
    held = None if center.traits.view else center.current.hold()
    arrays = {
        "center": center.current.array.copy() if held is None else held.array,
        "moving_statistics": center.moving_statistics,
    }
    arrays |= {f"model/{number}": vector.copy() for number, vector in enumerate(center.model)}
    members = {}
    for worker, member in center.members.items():
        members[str(worker)] = {name: getattr(member, name) for name in _KEPT}
        arrays |= {f"worker/{worker}/{number}": vector.copy() for number, vector in enumerate(member.vectors)}
    current = center.round
    if current.total is not None:
        arrays["round"] = current.total.array.copy()
    arrays["round/statistics"] = current.moving_statistics.copy()
    rounds = ("steps", "skipped", "began", "previous_began")
    header = {
        "rule": {"name": center.rule.name, "hyper_parameters": center.rule.config()},
        "workers": center.workers,
        "incarnation": center.incarnation,
        "clock": center.clock,
        "counters": dict(center.counters),
        "members": members,
        "round": {name: getattr(current, name) for name in rounds},
        "progress": {str(worker): number for worker, number in center.scheduler.progress().items()},
    }
    return State(header, arrays, held)


def restore(center: Center, state: State, *, same_attempts: bool, epochs: int | None = None) -> bool:
    """Puts ``center``, which is new, where ``state`` was taken.

    With another number of workers the partitions are others too. The center then keeps its parameters, clock and
    statistics; every partition begins with the first epoch that some partition had not ended; what the rule
    keeps beside the center starts anew.

    Args:
        center: as yet untouched, of the same rule and size.
        state: from `capture`.
        same_attempts, epochs: see `saver.StartMode`.

    Returns:
        Whether every partition goes on exactly where it was: False with another number of workers.

    Raises:
        SnapshotError: the snapshot is another job's.
    """
    header, arrays = state.header, state.arrays
    rule = {"name": center.rule.name, "hyper_parameters": center.rule.config()}
    if header["rule"] != rule or arrays["center"].size != center.size:
        raise SnapshotError(
            f"the snapshot must be of rule {rule} and {center.size} elements. "
            f"Received: {header['rule']} and {arrays['center'].size}"
        )
    center.current.array[...] = arrays["center"]
    center.moving_statistics = np.array(arrays["moving_statistics"])
    center.clock = header["clock"]
    members = {int(worker): values for worker, values in header["members"].items()}
    if header["workers"] != center.workers:
        _begin_epoch(center, _first_open_epoch(members, header["workers"]))
        return False
    center.counters = dict(header["counters"])
    for number, vector in enumerate(center.model):
        vector[...] = arrays[f"model/{number}"]
    for worker, values in members.items():
        member = center.members[worker] = center.new_member(values["attempt"])
        vars(member).update(values, connected=False)
        if not same_attempts:
            member.attempt = -1
        if member.finished and epochs is not None and member.epoch < epochs:
            member.finished = False  # and what its rule kept for it was given up when it left
            continue
        for number, vector in enumerate(member.vectors):
            vector[...] = arrays[f"worker/{worker}/{number}"]
    _restore_round(center, header["round"], arrays)
    active = {worker for worker, member in center.members.items() if not member.finished}
    center.scheduler.restore(
        {int(worker): number for worker, number in header["progress"].items()},
        seen=set(center.members) if same_attempts else set(center.members) - active,
        active=active,
    )
    return True


def _first_open_epoch(members: dict[int, dict[str, Any]], workers: int) -> int:
    if len(members) < workers:
        return 0
    # A partition without rows has ended in epoch 0.
    unfinished = [values["epoch"] for values in members.values() if not values["finished"]]
    return min(unfinished) if unfinished else max(values["epoch"] for values in members.values())


def _begin_epoch(center: Center, epoch: int) -> None:
    for worker in range(center.workers):
        center.members[worker] = center.new_member(-1)
        vars(center.members[worker]).update(epoch=epoch, connected=False)


def _restore_round(center: Center, values: dict[str, int], arrays: dict[str, np.ndarray]) -> None:
    current = center.round
    vars(current).update(values, moving_statistics=np.array(arrays["round/statistics"]))
    if "round" in arrays:
        current.total = center.pool.take()
        current.total.array[...] = arrays["round"]
