"""The conversion of a center's state to JSON-ready values and arrays, and back.

The version that each worker was last sent is not saved: after a restart every worker begins with a pull, which sets it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distkeras.ps.center.buffers import Buffer
from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import NO_ATTEMPT, KeptState, LeaseState, MicroBatch
from distkeras.ps.center.tables import Rows
from distkeras.ps.errors import ConfigurationError, DifferentJobError
from distkeras.ps.rules import Rule

#: Bits of the sum of hashes, and by how many bits each hash is shifted to the right for it.
SUM_BITS, SUM_SHIFT = 31, 33
_CRC_BITS = 32


def checksum_of(total: int, crc: int) -> int:
    """Return the checksum of rows whose hashes' first 31 bits add up to ``total``: at least 0, below 2⁶³."""
    return (total % (1 << SUM_BITS)) << _CRC_BITS | crc


def sum_of(checksums: Iterable[int]) -> int:
    """Return the sum over the rows of all these checksums, modulo 2³¹."""
    return sum(checksum >> _CRC_BITS for checksum in checksums) % (1 << SUM_BITS)


#: Attributes of a `PartitionLease` that are saved unchanged, and of a `Round`.
_KEPT = (
    *("attempt", "finished", "sequence", "epoch", "batch", "checksum", "steps", "skipped", "refusals"),
    *("partition", "holder", "end", "before", "rows_checksum"),
)
_KEPT_OF_ROUND = ("steps", "skipped", "began", "previous_began")


@dataclass(frozen=True)
class State:
    """The state of a center as JSON-ready values and arrays. `drop` it once it is written.

    ``metrics`` are the names of the history's columns, ``log_totals`` the result of `CommitLog.totals`. ``optimizers``
    are the kept states by partition, which have separate files. ``tables`` are the row numbers and rows of the center's
    tables, in a state that was read; `capture` leaves them empty, because rows are written in small blocks.
    """

    header: dict[str, Any]
    arrays: dict[str, np.ndarray]
    metrics: str = ""
    log_totals: dict[str, Any] = field(default_factory=dict)
    held: Buffer | None = None
    optimizers: dict[int, KeptState] = field(default_factory=dict)
    tables: tuple[Rows, ...] = ()

    def drop(self) -> None:
        """Release the center's version."""
        if self.held is not None:
            self.held.drop()


def rule_json(rule: Rule) -> dict[str, Any]:
    """Return a rule and its hyper-parameters, JSON-ready."""
    return {"name": rule.name, "hyper_parameters": rule.config()}


def capture(center: Center) -> State:
    """Return the present state of ``center``; the caller holds the lock.

    A published version of the center is shared, not copied. Vectors that change in place are copied: those of the rule
    and of its workers, an unfinished round, and the center itself under a rule with a view. Tables change in place too;
    only their shapes are returned.
    """
    held = None if center.traits.view else center.current.hold()
    arrays = {
        "center": center.current.array.copy() if held is None else held.array,
        "moving_statistics": center.moving_statistics,
    }
    arrays |= {f"model/{number}": vector.copy() for number, vector in enumerate(center.model)}
    leases = {}
    for worker, lease in center.leases.items():
        leases[str(worker)] = {name: getattr(lease, name) for name in _KEPT}
        arrays |= {f"worker/{worker}/{number}": vector.copy() for number, vector in enumerate(lease.vectors)}
    current = center.round
    if current.total is not None:
        arrays["round"] = current.total.array.copy()
    arrays["round/moving_statistics"] = current.moving_statistics.copy()
    header = {
        "rule": rule_json(center.rule),
        "workers": center.workers,
        "incarnation": center.incarnation,
        "clock": center.clock,
        "began": center.began,
        "ends_early": center.stopping is not None,
        "counters": dict(center.counters),
        "leases": leases,
        "round": {name: getattr(current, name) for name in _KEPT_OF_ROUND},
        "progress": {str(worker): number for worker, number in center.scheduler.progress().items()},
    }
    if center.saved_tables:
        header["tables"] = _shapes(center)
        header["living"] = [table.state() for table in center.living]
    if center.micro_batch is not None:
        header["micro_batch"] = list(center.micro_batch)
    if center.values.current.version:
        header["values"] = center.values.state()
    return State(header, arrays, center.metrics, center.log.totals(), held, center.leases.states())


def restore(center: Center, state: State, *, same_attempts: bool, epochs: int | None = None) -> bool:
    """Restore ``state`` into a new ``center``; return whether each partition continues exactly after its last commit.

    With another number of workers, the partitions differ too. The center then keeps its parameters, clock and
    statistics. An unfinished round ends with its contributions, the rule's buffers are drained, and its counters and
    vectors are reset. Every partition begins with the first epoch that some partition had not finished.
    """
    header, arrays = state.header, state.arrays
    if header["rule"] != rule_json(center.rule) or arrays["center"].size != center.size:
        raise DifferentJobError(
            f"the snapshot must be of rule {rule_json(center.rule)} and {center.size} elements. "
            f"Received: {header['rule']} and {arrays['center'].size}"
        )
    _restore_tables(center, state)
    center.current.array[...] = arrays["center"]
    center.moving_statistics = np.array(arrays["moving_statistics"])
    center.clock = header["clock"]
    center.counters = dict(header["counters"])
    _restore_optional(center, header)
    for number, vector in enumerate(center.model):
        vector[...] = arrays[f"model/{number}"]
    _restore_round(center, header["round"], arrays)
    if header["workers"] != center.workers:
        center.replace_workers(len(header["progress"]) - header["round"]["skipped"], header["workers"])
        _begin_epoch(center, _first_open_epoch(header))
        return False
    began_clock, began_epoch = header["began"]
    center.began = began_clock, began_epoch
    returned = [
        _restore_lease(center, int(worker), arrays, values, same_attempts=same_attempts, epochs=epochs)
        for worker, values in header["leases"].items()
    ]
    if any(returned):
        center.take_back()
    if center.lending is None and any(not lease.finished for _, lease in center.leases.loans()):
        raise ConfigurationError(
            "`lends` must be True: in this checkpoint, mini-batches of a partition are lent to another worker. "
            "Received: lends=False"
        )
    active = {worker for worker, lease in center.leases.items() if not lease.finished}
    center.scheduler.restore(
        {int(worker): number for worker, number in header["progress"].items()},
        seen=set(center.leases) if same_attempts else set(center.leases) - active,
        active=active,
    )
    return True


def _restore_lease(
    center: Center,
    worker: int,
    arrays: Mapping[str, np.ndarray],
    values: Mapping[str, Any],
    *,
    same_attempts: bool,
    epochs: int | None,
) -> bool:
    """Restore a lease; return whether it had ended and has more epochs now."""
    lease = center.leases.add(worker, values["attempt"] if same_attempts else NO_ATTEMPT)
    lease.state = LeaseState.FINISHED if values["finished"] else LeaseState.FREE  # its attempt is not connected
    for name in _KEPT:
        if name not in ("attempt", "finished"):
            setattr(lease, name, values[name])
    lease.end = None if lease.end is None else (lease.end[0], lease.end[1])  # JSON has lists
    if same_attempts and center.lending is not None:
        center.lending.expect(lease)
    for number, vector in enumerate(lease.vectors):
        vector[...] = arrays[f"worker/{worker}/{number}"]
    # A job that has ended early goes on, and the rows of more epochs continue the last share of a partition.
    returns = lease.finished and epochs is not None and (lease.epoch, lease.batch) < (lease.end or (epochs, 0))
    if returns:
        lease.move(LeaseState.FREE)
    return returns


def _restore_optional(center: Center, header: dict[str, Any]) -> None:
    if "micro_batch" in header:
        center.micro_batch = MicroBatch(*header["micro_batch"])
    if "values" in header:
        center.values.restore(header["values"])


def _restore_tables(center: Center, state: State) -> None:
    saved, expected = state.header.get("tables", []), _shapes(center)
    # A partial table may have any number of rows, so only its width is compared.
    partial = [table.shape.partial for table in center.saved_tables]
    if len(saved) != len(partial) or any(
        before[skipped:] != now[skipped:] for before, now, skipped in zip(saved, expected, partial, strict=True)
    ):
        raise DifferentJobError(
            f"the snapshot must have tables of these rows and widths: {expected}. Received: {saved}"
        )
    for table, (ids, rows) in zip(center.saved_tables, state.tables, strict=True):
        table.restore(rows, ids)
    for living, counts in zip(center.living, state.header.get("living", ()), strict=True):
        living.restore_state(counts)


def _shapes(center: Center) -> list[list[int]]:
    tables = center.saved_tables
    return [[table.count if table.shape.partial else table.shape.rows, table.shape.width] for table in tables]


def sum_of_rows(state: State) -> int | None:
    """Return the sum over the job's rows; None if some partition was not read to its end."""
    header, own = state.header, _own_leases(state.header)
    if len(own) < header["workers"]:
        return None
    sums = [_sum_of_partition(lease) for lease in own.values() if _has_rows(lease, header)]
    known = [one for one in sums if one >= 0]
    return sum_of(known) if len(known) == len(sums) else None


def _sum_of_partition(lease: Mapping[str, Any]) -> int:
    """Return the checksum of a partition's rows; -1 if they were not read to their end."""
    checksum: int = lease["checksum"] if lease["epoch"] else lease["rows_checksum"]
    return checksum


def _has_rows(lease: Mapping[str, Any], header: Mapping[str, Any]) -> bool:
    """Return whether a partition may have rows."""
    # Only an empty partition ends without a commit, unless the job ended early, before the partition began.
    return bool(lease["sequence"] or not lease["finished"] or header["ends_early"])


def _first_open_epoch(header: dict[str, Any]) -> int:
    own = _own_leases(header)
    if len(own) < header["workers"]:
        return 0
    with_rows = [partition for partition, lease in own.items() if _has_rows(lease, header)]
    epochs = [_open_epoch(partition, header["leases"].values()) for partition in with_rows or own]
    return min(epochs) if with_rows else max(epochs)


def _own_leases(header: dict[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return the leases of the partitions, by number, without those of loans."""
    return {int(number): lease for number, lease in header["leases"].items() if int(number) < header["workers"]}


def _open_epoch(partition: int, leases: Iterable[Mapping[str, Any]]) -> int:
    """Return the first epoch that a partition has not completed."""
    shares = [lease for lease in leases if lease["partition"] == partition]
    # A share that has ended may lie before its end, if the job has ended early; the last one's end is the job's.
    first: int = min(
        lease["epoch"]
        for lease in shares
        if not lease["finished"] or lease["end"] is None or (lease["epoch"], lease["batch"]) < tuple(lease["end"])
    )
    return first


def _begin_epoch(center: Center, epoch: int) -> None:
    center.began = center.clock, epoch
    for worker in range(center.workers):
        lease = center.leases.add(worker, NO_ATTEMPT)
        lease.epoch, lease.state = epoch, LeaseState.FREE


def _restore_round(center: Center, values: dict[str, int], arrays: dict[str, np.ndarray]) -> None:
    current = center.round
    for name in _KEPT_OF_ROUND:
        setattr(current, name, values[name])
    current.moving_statistics = np.array(arrays["round/moving_statistics"])
    if "round" in arrays:
        current.total = center.pool.take()
        current.total.array[...] = arrays["round"]
