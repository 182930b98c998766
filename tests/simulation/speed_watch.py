"""Checks, under any fault, of windows that follow the workers' speeds."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from distkeras.ps.center.center import Center
from simulation.scheduler import Finding, Process

#: The allowed relative error of a quotient.
_ROUNDED = Fraction(1, 10**8)
#: The least duration of a window, in seconds.
_SHORTEST = 1e-9


class Times(NamedTuple):
    """Times of a window in seconds, by the worker's clock; what the server measures lies in between.

    Args:
        requested: when the worker requested the center that its window begins with.
        had: when it received that center.
        sent: when it first sent the window's commit.
    """

    requested: float
    had: float
    sent: float


class SpeedWatch:
    """A record of each attempt's speed and of the windows that its server may give it.

    Args:
        longest: the window of the fastest worker; None if windows do not follow speeds.
    """

    def __init__(self, longest: int | None) -> None:
        self._longest = longest
        #: The attempt that was measured last and its speed, by center and partition.
        self._measured: dict[tuple[Center, int], tuple[int, float | None]] = {}
        #: The valid windows at each clock, by driver, incarnation and partition.
        self._windows: dict[tuple[Process, int, int], dict[int, set[int]]] = {}

    def see_commit(self, center: Center, worker: int, steps: int, times: Times, now: float) -> None:
        """Check, when a commit is applied, that its worker's speed is that of its latest window."""
        if self._longest is None:
            return
        lease = center.leases[worker]
        low = steps / max(now - times.requested, _SHORTEST)
        high = steps / max(times.sent - times.had, _SHORTEST)
        if lease.speed is None or not low * (1 - 1e-9) <= lease.speed <= high * (1 + 1e-9):
            raise Finding(
                "speed", f"the speed of partition {worker} must be {low:.6g} to {high:.6g}. Received: {lease.speed}"
            )
        self._measured[center, worker] = (lease.attempt, lease.speed)

    def see(self, center: Center, driver: Process) -> None:
        """Check that speeds are the measured ones of present attempts, and record the windows that follow from them."""
        if self._longest is None:
            return
        speeds: dict[int, Fraction] = {}
        for worker, lease in center.leases.items():
            attempt, speed = self._measured.get((center, worker), (lease.attempt, None))
            if attempt != lease.attempt:
                self._measured[center, worker] = (lease.attempt, None)
                speed = None
            if lease.speed != speed:
                raise Finding(
                    "speed", f"the speed of partition {worker} must be {speed}, as measured. Received: {lease.speed}"
                )
            if speed is not None and not lease.finished:
                speeds[worker] = Fraction(speed)
        for worker, lease in center.leases.items():
            right: set[int] = {self._longest}
            if worker in speeds:
                share = self._longest * speeds[worker] / max(speeds.values())
                right = {max(1, math.floor(share * (1 + sign * _ROUNDED))) for sign in (-1, 1)}
            if not lease.finished:
                windows = self._windows.setdefault((driver, center.incarnation, worker), {})
                windows.setdefault(center.clock, set()).update(right)

    def check_announced(self, driver: Process, incarnation: int, worker: int, clock: int, window: int) -> None:
        """Check that the next window that a reply has announced was valid at the reply's clock."""
        right = {0}
        if self._longest is not None:
            known = self._windows.get((driver, incarnation, worker), {}).get(clock)
            if known is None:
                return  # The server has died since, before it was checked.
            right = known
        if window not in right:
            text = f"partition {worker} must have a window of {sorted(right)} steps after clock {clock}"
            raise Finding("window", f"{text}. Received: {window}")


class AccountOfWindows:
    """A record of the expected lengths and start times of an attempt's windows.

    Args:
        follows: whether windows follow speeds.
        pulls_first: trait of the rule.
        now: start time of the attempt, in seconds.
    """

    def __init__(self, *, follows: bool, pulls_first: bool, now: float) -> None:
        self._follows, self._pulls_first = follows, pulls_first
        self.begin(now)

    def begin(self, now: float) -> None:
        """Record the start of a loop, with a pull."""
        self._times = Times(now, now, now)
        #: The number of the last commit, and the times of its window.
        self._sent = (0, self._times)
        self._begun = False
        self._announced: list[int] = []
        #: Steps of the window that was refused last; 0 if none was, or if it was applied since.
        self._refused = 0

    def sent(self, requested: float, now: float, window: int) -> None:
        """Record a center that was requested at ``requested``, and the window that the answer names."""
        if not (self._pulls_first and self._begun):
            requested = self._times.requested if self._pulls_first else requested
            self._times, self._begun = Times(requested, now, now), True
            self._announced.append(window)

    def commits(self, steps: int, *, last: bool, overlapped: bool) -> None:
        """Check that the worker has computed a window of the expected length; the ``last`` one may be shorter."""
        announced = self._announced[-2 if overlapped and len(self._announced) > 1 else -1]
        expected = self._refused or announced
        if self._follows and steps != expected and not (last and steps < expected):
            raise Finding("window", f"a window must have {expected} steps. Received: {steps}")

    def sends(self, sequence: int, now: float) -> Times:
        """Record that commit ``sequence`` is sent, for the first time or again; return the times of its window."""
        if self._sent[0] != sequence:
            self._sent = sequence, self._times._replace(sent=now)
        return self._sent[1]

    def refused(self, steps: int) -> None:
        """Record that the window is to be computed again."""
        self._refused = steps

    def applied(self, requested: float, now: float, window: int) -> None:
        """Record that the window is applied; for a rule that pulls before it commits, the answer names the next
        window.
        """
        self._refused = 0
        if self._pulls_first:
            self._times = Times(requested, now, now)
            self._announced.append(window or self._announced[-1])
