"""Which faults come when: a pure function of the seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Each kind of fault, with the shortest and the longest time that it lasts, in seconds.
KINDS: dict[str, tuple[float, float]] = {
    "kill worker": (0.0, 0.0),
    "kill executor": (0.0, 0.0),
    "kill server": (0.0, 0.0),
    "stop worker": (1.0, 20.0),
    "stop executor": (1.0, 15.0),
    "stop server": (0.5, 5.0),
    "freeze server": (30.0, 60.0),
    "fork driver": (1.0, 30.0),
    "kill driver": (0.0, 0.0),
    "double driver": (0.0, 0.0),
    "cut connections": (0.0, 0.0),
    "cut off host": (2.0, 45.0),
    "fill disk": (2.0, 12.0),
    "slow store": (5.0, 20.0),
    "tear store": (5.0, 20.0),
    "throw garbage": (0.0, 0.0),
}

#: Kinds that hit a driver of a job in processes of its own; they wait for such a job.
OF_DRIVERS = ("kill driver", "double driver")

#: When the first fault comes, and the mean time from one to the next, in seconds.
FIRST, GAP = 3.0, 9.0
#: How often a fault comes at once after the one before it.
BURST = 0.2


@dataclass(frozen=True)
class PlannedFault:
    """One fault to inject.

    Args:
        at: when, in seconds of disturbed training.
        kind: one of `KINDS`.
        lasts: seconds until it is undone; 0 where there is nothing to undo.
        pick: in [0, 1): which of the targets alive.
        seed: of all other random choices.
    """

    at: float
    kind: str
    lasts: float
    pick: float
    seed: int


def plan(seed: int, seconds: float) -> list[PlannedFault]:
    """The faults of ``seconds`` of training, in the order of their times.

    The kinds come in rounds, each in an order of its own, so that any stretch of a round's length has them all. A
    longer plan of the same seed begins with the shorter one.
    """
    rng = np.random.default_rng(seed)
    faults: list[PlannedFault] = []
    at = FIRST
    while True:
        for number in rng.permutation(len(KINDS)):
            kind, (shortest, longest) = list(KINDS.items())[number]
            # All are drawn for every kind: what one needs must not move the others.
            lasts, pick, own = rng.uniform(shortest, longest), rng.random(), int(rng.integers(2**31))
            burst, gap = rng.random() < BURST, GAP * rng.uniform(0.5, 1.5)
            if faults and not burst:
                at += gap
            if at >= seconds:
                return faults
            faults.append(PlannedFault(at, kind, float(lasts), float(pick), own))
