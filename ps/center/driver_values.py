"""Numbers that the driver sets for all workers during the job: the learning rate, and small variables of the model.

A number has a place, which means the same in every process: place 0 is the learning rate, and the model decides on the
others. Replies carry the numbers to the workers, and snapshots have them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from distkeras.ps.errors import ConfigurationError, RemoteProtocolError
from distkeras.ps.protocol.driver_messages import SetValues
from distkeras.ps.protocol.loop import NO_ROWS
from distkeras.ps.rules.base import Rule
from distkeras.ps.rules.schedules import Constant, Schedule

#: The place of the learning rate: the worker optimizer's or, for gradient rules, the server's.
RATE = 0
#: The most numbers that may be set, so that replies stay small.
VALUES_MAX = 4096


class Values(NamedTuple):
    """Numbers that were set: float64 ``(numbers, 2)``, places ascending; ``version`` 0: none, and it rises."""

    version: int = 0
    rows: np.ndarray = NO_ROWS


class DriverValues:
    """The numbers that were set so far, as ``current``, which is replaced by each change."""

    def __init__(self) -> None:
        self.current = Values()
        #: By place, the number of the request that set it last. Not saved, as no request outlives its server.
        self._numbers: dict[int, int] = {}
        #: The learning rates, each with the clock of the first commit that it applies to.
        self._rates: list[tuple[int, float]] = []

    def set(self, request: SetValues, clock: int) -> bool:
        """Set numbers, of the right shape, from the commit at ``clock`` on; return whether one has changed.

        A place keeps what a later request has set: callbacks make theirs side by side, and any of them may arrive late.
        """
        before = {int(place): float(value) for place, value in self.current.rows}
        rows = {int(place): float(value) for place, value in request.rows}
        due = [place for place in rows if self._numbers.get(place, 0) < request.number]
        self._numbers |= dict.fromkeys(due, request.number)
        after = before | {place: rows[place] for place in due}
        if after == before:
            return False
        if after.get(RATE) != before.get(RATE):
            self._rates.append((clock, after[RATE]))
        self.current = Values(self.current.version + 1, np.array(sorted(after.items()), np.float64))
        return True

    def rate(self, clock: int, otherwise: Callable[[int], float]) -> float:
        """Return the learning rate that was set for the commit at ``clock``, or what it is ``otherwise``."""
        for since, rate in reversed(self._rates):
            if since <= clock:
                return rate
        return otherwise(clock)

    def state(self) -> dict[str, Any]:
        return {"version": self.current.version, "rows": self.current.rows.tolist(), "rates": self._rates}

    def restore(self, state: dict[str, Any]) -> None:
        self._rates = [(clock, rate) for clock, rate in state["rates"]]
        self.current = Values(state["version"], np.array(state["rows"], np.float64).reshape(-1, 2))


def set_values(values: DriverValues, request: SetValues, clock: int, rule: Rule, schedule: Schedule | None) -> bool:
    """Set what a driver requests for all workers, from the commit at ``clock`` on; return whether a number has changed.

    ``schedule`` is that of the server's learning rate. A repeated or late request changes nothing.
    """
    rows = request.rows
    known = {int(place) for place, _ in values.current.rows}
    if rows.ndim != 2 or rows.shape[1:] != (2,) or not np.isfinite(rows).all():
        raise RemoteProtocolError(f"values must be rows of place and finite value. Received: shape {rows.shape}")
    places = rows[:, 0]
    if (places < 0).any() or (places != np.floor(places)).any() or len(known.union(map(int, places))) > VALUES_MAX:
        raise RemoteProtocolError(f"values must have at most {VALUES_MAX} places from 0 on. Received: {len(rows)} rows")
    if rule.traits.peers:
        raise ConfigurationError(
            f"the learning rate and variables of the model must not be set during a job of rule {rule.name!r}, "
            "whose workers step together without the server. Give `worker_optimizer` a schedule of Keras"
        )
    if RATE in places and not isinstance(schedule, Constant | None):
        raise ConfigurationError(
            f"the learning rate must not be set during a job whose `learning_rate` is a schedule. Received: {schedule}"
        )
    return values.set(request, clock)
