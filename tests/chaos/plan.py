"""A plan of faults and their times, which depends only on the seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Each kind of fault with its shortest and longest duration, in seconds.
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

#: Kinds that concern a driver of a job in processes of its own; they wait for such a job.
OF_DRIVERS = ("kill driver", "double driver")

#: The time of the first fault, and the mean time between two faults, in seconds.
FIRST, GAP = 3.0, 9.0
#: The probability that a fault follows immediately on the previous one.
BURST = 0.2


@dataclass(frozen=True)
class PlannedFault:
    """One fault to inject.

    Args:
        at: time of the fault, in seconds of disturbed training.
        kind: one of `KINDS`.
        lasts: seconds until it is undone; 0 if there is nothing to undo.
        pick: in [0, 1); selects one of the targets that are alive.
        seed: seed of all other random choices.
    """

    at: float
    kind: str
    lasts: float
    pick: float
    seed: int


def plan(seed: int, seconds: float) -> list[PlannedFault]:
    """Return the faults of ``seconds`` of training, in the order of their times.

    Each round contains all kinds in a new order, so that every period of two rounds has them all. A longer plan of the
    same seed starts with the shorter one.
    """
    rng = np.random.default_rng(seed)
    faults: list[PlannedFault] = []
    at = FIRST
    while True:
        for number in rng.permutation(len(KINDS)):
            kind, (shortest, longest) = list(KINDS.items())[number]
            # Values are drawn for every kind, so that what one kind needs does not change the others.
            lasts, pick, own = rng.uniform(shortest, longest), rng.random(), int(rng.integers(2**31))
            burst, gap = rng.random() < BURST, GAP * rng.uniform(0.5, 1.5)
            if faults and not burst:
                at += gap
            if at >= seconds:
                return faults
            faults.append(PlannedFault(at, kind, float(lasts), float(pick), own))
