"""The reduction of a run that breaks a promise to a smaller one that still does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from simulation.plan import Fault, Plan
from simulation.simulation import Outcome, simulate

#: The largest number of runs.
_MOST_RUNS = 300


def shrink(plan: Plan, kind: str) -> tuple[Plan, int]:
    """Return the smallest plan whose finding is of ``kind``, and how many runs the search took."""
    runs, going = 0, True
    while going:
        going = False
        for smaller in _smaller(plan):
            if runs == _MOST_RUNS:
                return plan, runs
            runs += 1
            if _broken(simulate(smaller), kind):
                plan, going = smaller, True
                break
    return plan, runs


def _broken(outcome: Outcome, kind: str) -> bool:
    return outcome.finding is not None and outcome.finding.kind == kind


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Yield reduced plans, the smallest first."""
    for number in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:number] + plan.faults[number + 1 :])
    if plan.epochs > 1:
        yield replace(plan, epochs=1)
    if plan.workers > 1:
        fewer, stream = _faults_for(plan, plan.workers - 1), tuple(batches[:-1] for batches in plan.stream)
        batches = plan.batches[:-1]
        yield replace(plan, workers=plan.workers - 1, batches=batches, faults=fewer, resized=(), stream=stream)
    yield from _fewer_batches(plan)
    plain = {
        "overlap": False,
        "tls": False,
        "wire_format": "float32",
        "long": 0.0,
        "fragmenting": 0.0,
        "capacity": 1 << 20,
        "resized": (),
        "raised": 0,
        "altered": False,
        "statistics": 0,
        "rounding": False,
        "gap": False,
        "lists": False,
        "sets": False,
        "cluster": False,
        "visits": False,
        "tables": False,
        "neighbors": 0,
        "skipped": 0,
        "bound": None,
        "enough": 0,
    }
    for name, value in (plain | {"yielding": 0.0, "keep": 3}).items():
        if getattr(plan, name) != value:
            yield replace(plan, **{name: value})  # type: ignore[arg-type]  # of the field's own type
    for number, fault in enumerate(plan.faults):
        for simpler in _simpler(fault):
            yield replace(plan, faults=(*plan.faults[:number], simpler, *plan.faults[number + 1 :]))


def _fewer_batches(plan: Plan) -> Iterator[Plan]:
    """Yield ``plan`` with one micro-batch less, or with one mini-batch less of a partition."""
    if plan.stream:
        if len(plan.stream) > 1:
            yield replace(plan, stream=plan.stream[:-1])
        for number, batches in enumerate(plan.stream):
            for fewer in _one_less(batches):
                stream = (*plan.stream[:number], fewer, *plan.stream[number + 1 :])
                yield replace(plan, stream=stream, batches=stream[0])
        return
    for batches in _one_less(plan.batches, least=1):
        resized = plan.resized and (sum(batches), *(0 for _ in plan.resized[1:]))
        yield replace(plan, batches=batches, resized=resized)


def _one_less(batches: tuple[int, ...], least: int = 0) -> Iterator[tuple[int, ...]]:
    """Yield the mini-batches with one less for each partition that has more than the minimum."""
    for worker, count in enumerate(batches):
        if count > least:
            yield (*batches[:worker], count - 1, *batches[worker + 1 :])


def _faults_for(plan: Plan, workers: int) -> tuple[Fault, ...]:
    """Return the faults that concern one of ``workers`` partitions."""
    return tuple(fault for fault in plan.faults if fault.place < workers and fault.scope != f"w{workers}")


def _simpler(fault: Fault) -> Iterator[Fault]:
    if fault.at > 1:
        yield replace(fault, at=fault.at // 2)
        yield replace(fault, at=fault.at - 1)
    if abs(fault.amount) > 1.0:
        yield replace(fault, amount=float(round(fault.amount / 2)))
