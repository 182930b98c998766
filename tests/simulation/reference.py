"""The expected center, computed independently from what workers sent, and compared with a restored snapshot.

There are two methods. `Formula` replays the ledger's commits over float64 vectors, for rules whose formula it has: the
center, each worker's momentum, and the moving statistics. `Standing` is the state that a center's next steps depend on,
for any rule, after each commit; a server that continues from a snapshot must have a state that another one had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.center.leases import NO_ATTEMPT, PartitionLease
from distkeras.ps.rules.schedules import schedule_of
from simulation.outer import BUFFERED, OUTER, Outer
from simulation.plan import Plan
from simulation.scheduler import Finding
from simulation.speed_watch import Times

#: Rules whose server adds what it receives; subtracts it times eta; does so at the end of a round; keeps a momentum.
_ADDING = ("downpour", "zealous_downpour", "agn", "aeasgd", "eamsgd")
_SUBTRACTING = ("asgd",)
_MEAN = ("ssgd",)
_MOMENTUM = ("dana_zero", "multi_asgd")
#: Rules whose center is the mean of the workers' parameters at the end of a round.
_AVERAGE = ("averaging", "daso")
#: The error, relative to a number (and to 1), that float32 arithmetic may have after all commits of a run.
_TOLERANCE = 1e-4
#: The error, relative to a number (and to 1), of what a worker receives in a coarse wire format.
_COARSE = 0.02
#: The fields of a lease that the next steps depend on.
_OF_LEASE = ("sequence", "epoch", "batch", "checksum", "steps", "skipped", "refusals")
_OF_ROUND = ("steps", "skipped", "began", "previous_began")


class Sent(NamedTuple):
    """A commit as its worker sent it.

    Args:
        parts: the vectors, as the server reads them.
        statistics: the moving statistics.
        began: clock at which its window began, according to its worker.
        first: whether it is the first commit of its loop.
        times: times of its window, according to its worker.
        touched, moved: the rows of each table that it moves, and how.
    """

    parts: list[np.ndarray]
    statistics: np.ndarray
    began: int
    first: bool
    times: Times
    touched: tuple[np.ndarray, ...] = ()
    moved: tuple[np.ndarray, ...] = ()


class Standing(NamedTuple):
    """The state that a center's next steps depend on, except what was last sent to a worker, which no snapshot has.

    Args:
        center, statistics: the vectors.
        model: state of the rule in addition to the center.
        workers: state of the rule for each worker.
        total, contributed: contributions of the present round; the former is empty if there are none.
        numbers: clock, counters, round, progress of the scheduler, and sums of the log.
        leases: the lease of each partition, if it says more than that it was granted.
        finished: the partitions whose data has ended.
    """

    center: np.ndarray
    statistics: np.ndarray
    model: tuple[np.ndarray, ...]
    workers: dict[int, tuple[np.ndarray, ...]]
    total: np.ndarray
    contributed: np.ndarray
    numbers: dict[str, Any]
    leases: dict[int, tuple[Any, ...]]
    finished: frozenset[int]


_NOTHING = np.empty(0, np.float32)


def standing_of(center: Center, elements: Center) -> Standing:
    """Return the present standing of ``center``, whose vectors ``elements`` has."""
    current, leases, log, total = center.round, center.leases, center.log, elements.round.total
    return Standing(
        elements.current.array.copy(),
        center.moving_statistics.copy(),
        tuple([vector.copy() for vector in elements.model]),
        {
            worker: tuple([vector.copy() for vector in elements.leases[worker].vectors])
            for worker, lease in leases.items()
            if lease.sequence
        },
        _NOTHING if total is None else total.array.copy(),
        current.moving_statistics.copy(),
        {
            "clock": center.clock,
            "began": tuple(center.began),
            "counters": dict(center.counters),
            "round": [getattr(current, name) for name in _OF_ROUND],
            "progress": center.scheduler.progress(),
            "log": (log.batches, log.samples, log.skipped),
            "rows": len(log),
            "micro_batch": center.micro_batch,
        },
        {
            worker: tuple([getattr(lease, name) for name in _OF_LEASE])
            for worker, lease in leases.items()
            if lease.sequence or lease.epoch
        },
        frozenset([worker for worker, lease in leases.items() if lease.finished]),
    )


def difference(was: Standing, now: Standing, again: frozenset[int]) -> str:  # noqa: C901 - one thing after another
    """Describe the difference between a restored center and the saved one; return "" if there is none.

    Args:
        was, now: the two states.
        again: partitions that had ended and have more data now.
    """
    if again:
        was = _returned(was, now.finished)
    if was.finished - again != now.finished:
        return f"finished {sorted(now.finished)} for {sorted(was.finished - again)}"
    for name in ("numbers", "leases"):
        if getattr(was, name) != getattr(now, name):
            return f"{name} {getattr(now, name)} for {getattr(was, name)}"
    for name in ("center", "statistics", "total", "contributed"):
        if not np.array_equal(getattr(was, name), getattr(now, name)):
            return f"{name} {getattr(now, name).tolist()} for {getattr(was, name).tolist()}"
    for number, vector in enumerate(was.model):
        if not np.array_equal(vector, now.model[number]):
            return f"vector {number} of the rule, {now.model[number].tolist()} for {vector.tolist()}"
    for worker, vectors in was.workers.items():
        for number, vector in enumerate(vectors):
            if not np.array_equal(vector, now.workers[worker][number]):
                found = now.workers[worker][number].tolist()
                return f"vector {number} of partition {worker}, {found} for {vector.tolist()}"
    return ""


def _returned(was: Standing, finished: frozenset[int]) -> Standing:
    """Return a standing in which only the partitions ``finished`` have ended, for the rule's own vectors."""
    counters = dict(was.numbers["counters"])
    if not counters.pop("left", 0):
        return was
    left = np.zeros_like(was.model[1])
    for worker in sorted(finished):
        counters["left"] = counters.get("left", 0) + 1
        left += was.workers[worker][0] if worker in was.workers else 0
    return was._replace(model=(was.model[0], left), numbers=was.numbers | {"counters": counters})


def with_other_workers(was: Standing, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Return center and moving statistics after the end of a round or buffer whose workers do not return."""
    if plan.rule in BUFFERED:
        outer = Outer(plan.make_rule(), len(plan.batches), was.model, was.numbers["counters"])
        return outer.drain(was.center.astype(np.float64)), was.statistics
    if not was.total.size:
        return was.center, was.statistics
    steps, skipped, began, previous = was.numbers["round"]
    count = len(was.numbers["progress"]) - skipped
    schedule = None if plan.learning_rate is None else schedule_of(plan.learning_rate)
    rate, before = (0.0, 0.0) if schedule is None else (schedule(began), schedule(previous))
    center, total = was.center.astype(np.float64), was.total.astype(np.float64)
    match plan.rule:
        case "ssgd":
            center = center - rate / count * total
        case "ssgdm":
            correction = rate / before if before else 1.0
            center = center - plan.hyper_parameters.get("momentum", 0.9) * correction * was.model[0] - rate * total
        case "ssgdm_local":
            center = center - total
        case "averaging":
            center = total / count
        case "easgd":
            center = center + total
        case name if name in OUTER:
            outer = Outer(plan.make_rule(), len(plan.batches), was.model, was.numbers["counters"])
            center = outer.end_round(center, total / count)
        case _:
            raise LookupError(f"a rule with rounds must have its formula here. Received: {plan.rule}")
    return center, was.contributed / steps if was.statistics.size else was.statistics


class Formula:
    """A center that is computed from the ledger's commits; it starts from a server's own center.

    The vectors and counters that an outer optimizer keeps are computed as well.

    Args:
        plan: plan of the run.
        center: center of the server when it comes up.
        elements: the center that has the vectors.
        exact: whether every partition continues where it was; otherwise they are new, and none has joined.
    """

    def __init__(self, plan: Plan, center: Center, elements: Center, *, exact: bool) -> None:
        self._rule = plan.rule
        self._known = plan.rule in (*_ADDING, *_SUBTRACTING, *_MEAN, *_MOMENTUM, *_AVERAGE, *OUTER)
        self._workers = center.workers
        outer = plan.rule in OUTER
        self._outer = Outer(center.rule, center.workers, elements.model, center.counters) if outer else None
        self._rounds, self._momentum = center.traits.synchronous, getattr(center.rule, "momentum", 0.0)
        self._keeps_rounds_average = plan.rule in _MEAN
        self._rate = None if plan.learning_rate is None else schedule_of(plan.learning_rate)
        self._center = elements.current.array.astype(np.float64)
        self._velocities = {
            worker: lease.vectors[0].astype(np.float64) for worker, lease in elements.leases.items() if lease.vectors
        }
        self._statistics = center.moving_statistics.astype(np.float64)
        self._steps = {worker: lease.steps for worker, lease in center.leases.items()}
        self._here = {worker for worker, lease in center.leases.items() if exact and not lease.finished}
        self._gone = {worker for worker, lease in center.leases.items() if lease.finished}
        current, total = center.round, elements.round.total
        self._total = None if total is None else total.array.astype(np.float64)
        self._sum, self._round_steps = current.moving_statistics.astype(np.float64), current.steps
        self._arrived = set(center.scheduler.progress()) if self._rounds else set[int]()
        self._skipped, self._began = current.skipped, current.began

    def see(self, leases: Mapping[int, PartitionLease], clock: int) -> None:
        """Record which workers have joined, and whose data has ended, since the last call."""
        for worker, lease in leases.items():
            if not lease.finished and lease.attempt != NO_ATTEMPT:
                self._here.add(worker)
        for worker, lease in leases.items():
            if lease.finished and worker not in self._gone:
                self._gone.add(worker)
                self._here.discard(worker)
                self._end_round(clock)
        if self._outer is not None and self._gone == set(leases) >= set(range(self._workers)):
            self._center = self._outer.drain(self._center)

    def apply(self, commits: Sequence[tuple[Any, Sent]]) -> None:
        """Apply the ledger's next commit, or the commits of a group, with their rows."""
        if len(commits) == 1:
            self._apply_one(*commits[0])
            return
        total = sum(int(row["steps"]) for row, _ in commits)
        mean = sum(sent.statistics * (int(row["steps"]) / total) for row, sent in commits)
        workers = {int(row["worker"]) for row, _ in commits}
        others = sum([self._steps.get(other, 0) for other in self._here - workers])
        self._statistics = self._statistics + (mean - self._statistics) * (total / (total + others))
        for row, sent in commits:
            self._move(int(row["worker"]), sent.parts[0].astype(np.float64), row)
            self._steps[int(row["worker"])] = int(row["steps"])

    def _apply_one(self, row: Any, sent: Sent) -> None:
        worker, clock = int(row["lease"]), int(row["clock"])
        if row["skipped"]:
            if self._rounds:
                self._arrived.add(worker)
                self._skipped += 1
                self._end_round(clock)
            return
        steps, part = int(row["steps"]), sent.parts[0].astype(np.float64)
        if self._rounds:
            self._total = part if self._total is None else self._total + part
            self._sum = self._sum + sent.statistics.astype(np.float64) * steps
            self._round_steps += steps
            self._arrived.add(worker)
        else:
            self._move(worker, part, row)
            others = sum([self._steps.get(other, 0) for other in self._here if other != worker])
            self._statistics = self._statistics + (sent.statistics - self._statistics) * (steps / (steps + others))
        self._steps[worker] = steps
        self._end_round(clock + 1)

    def _move(self, worker: int, part: np.ndarray, row: Any) -> None:
        clock = int(row["clock"])
        if self._outer is not None:
            self._center = self._outer.move(self._center, part, clock, int(row["staleness"]))
            return
        if self._rule in _ADDING:
            self._center = self._center + part
            return
        if not self._known:
            return
        assert self._rate is not None
        if self._rule in _MOMENTUM:
            part = self._velocities[worker] = self._momentum * self._velocities.get(worker, 0.0) + part
        self._center = self._center - self._rate(clock) * part

    def _end_round(self, clock: int) -> None:
        if not (self._rounds and self._arrived and self._here <= self._arrived):
            return
        if self._total is not None:
            mean = self._total / (len(self._arrived) - self._skipped)
            if self._outer is not None:
                self._center = self._outer.end_round(self._center, mean)
            elif self._rule in _AVERAGE:
                self._center = mean
            elif self._keeps_rounds_average:
                assert self._rate is not None
                self._center = self._center - self._rate(self._began) * mean
            self._statistics = self._sum / self._round_steps
            self._total, self._sum, self._round_steps = None, np.zeros_like(self._sum), 0
            self._began = clock
        self._arrived, self._skipped = set(), 0

    def check(self, center: Center, elements: Center) -> None:
        """Compare the computed center with the server's own, whose vectors ``elements`` has.

        Raises:
            Finding: If they differ.
        """
        if self._statistics.size:
            _require_close("statistics", "the moving statistics", self._statistics, center.moving_statistics)
        if not self._known:
            return
        _require_close("formula", "the center", self._center, elements.current.array)
        if self._outer is not None:
            for number, vector in enumerate(self._outer.vectors):
                _require_close("rule's vector", f"vector {number} of the rule", vector, elements.model[number])
            expected, found = (
                {name: count for name, count in counters.items() if count}
                for counters in (self._outer.counters, center.counters)
            )
            if expected != found:
                raise Finding("counters", f"the rule's counters must be {expected}. Received: {found}")
        if self._rule in _MOMENTUM:
            for worker, velocity in self._velocities.items():
                what = f"the momentum of partition {worker}"
                _require_close("momentum", what, velocity, elements.leases[worker].vectors[0])
        if self._rule == "dana_zero":
            total = sum(self._velocities.values(), np.zeros_like(self._center))
            _require_close("momentum", "the sum of the momenta", total, elements.model[0])

    def view(self, clock: int) -> np.ndarray | None:
        """Return what a worker receives now, or None if it is not known."""
        if self._rule == "dana_zero":
            assert self._rate is not None
            here = [velocity for worker, velocity in self._velocities.items() if worker not in self._gone]
            total = sum(here, np.zeros_like(self._center))
            return self._center - self._rate(max(0, clock - 1)) * self._momentum * total
        return None


def close(expected: np.ndarray, found: np.ndarray, *, coarse: bool = False) -> bool:
    """Return whether two vectors are equal except for rounding, including that of a wire format if ``coarse``."""
    if (expected == found).all():
        return True
    off = np.abs(expected - found)
    return float(off.max()) <= (_COARSE if coarse else _TOLERANCE) * (1.0 + float(np.abs(found).max()))


def _require_close(kind: str, what: str, expected: np.ndarray, found: np.ndarray) -> None:
    if not close(expected, found):
        raise Finding(
            kind, f"{what} must be what the ledger says, {expected.round(4).tolist()}. Received: {found.tolist()}"
        )
