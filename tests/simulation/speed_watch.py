"""Checks of windows that follow the workers' speeds, which hold under any fault."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from distkeras.ps.center.center import Center
from simulation.scheduler import Finding, Process

#: By how much of itself a quotient may be off.
_ROUNDED = Fraction(1, 10**8)
#: Seconds that a window has at least lasted.
_SHORTEST = 1e-9


class Times(NamedTuple):
    """When a worker had what, as it knows itself: what its server measures lies in between. Seconds.

    Args:
        asked: when it asked for what its window begins from.
        had: when it had that.
        sent: when it sent the window's commit first.
    """

    asked: float
    had: float
    sent: float


class SpeedWatch:
    """Knows how fast each attempt was, and which windows its server may give it.

    Args:
        longest: the window of the fastest worker; None: windows do not follow speeds.
    """

    def __init__(self, longest: int | None) -> None:
        self._longest = longest
        #: By center and partition, the attempt that was measured last, and its speed.
        self._measured: dict[tuple[Center, int], tuple[int, float | None]] = {}
        #: By driver, incarnation and partition: the windows that were right at each clock.
        self._windows: dict[tuple[Process, int, int], dict[int, set[int]]] = {}

    def see_commit(self, center: Center, worker: int, steps: int, times: Times, now: float) -> None:
        """A commit is applied: its worker's speed is that of its latest window."""
        if self._longest is None:
            return
        lease = center.leases[worker]
        low = steps / max(now - times.asked, _SHORTEST)
        high = steps / max(times.sent - times.had, _SHORTEST)
        if lease.speed is None or not low * (1 - 1e-9) <= lease.speed <= high * (1 + 1e-9):
            raise Finding(
                "speed", f"the speed of partition {worker} must be {low:.6g} to {high:.6g}. Received: {lease.speed}"
            )
        self._measured[center, worker] = (lease.attempt, lease.speed)

    def see(self, center: Center, driver: Process) -> None:
        """Speeds are those that were measured, of present attempts; and what they make of the windows."""
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
        """What a reply at a clock has said of the next window was right then."""
        right = {0}
        if self._longest is not None:
            known = self._windows.get((driver, incarnation, worker), {}).get(clock)
            if known is None:
                return  # its server has died since, before it was looked at
            right = known
        if window not in right:
            text = f"partition {worker} must have a window of {sorted(right)} steps after clock {clock}"
            raise Finding("window", f"{text}. Received: {window}")


class AccountOfWindows:
    """Knows how long the windows of an attempt must be, and when they began.

    Args:
        follows: whether they follow speeds.
        pulls_first: the rule's trait.
        now: when the attempt began, seconds.
    """

    def __init__(self, *, follows: bool, pulls_first: bool, now: float) -> None:
        self._follows, self._pulls_first = follows, pulls_first
        self.begin(now)

    def begin(self, now: float) -> None:
        """A loop begins, with a pull."""
        self._times = Times(now, now, now)
        #: The number of the commit that was sent last, and the times of its window.
        self._sent = (0, self._times)
        self._begun = False
        self._announced: list[int] = []
        #: Steps of the window that was refused last; 0: none was, or it is applied.
        self._refused = 0

    def sent(self, asked: float, now: float, window: int) -> None:
        """The center came, which was asked for at ``asked``; the answer says how long a window is."""
        if not (self._pulls_first and self._begun):
            asked = self._times.asked if self._pulls_first else asked
            self._times, self._begun = Times(asked, now, now), True
            self._announced.append(window)

    def commits(self, steps: int, *, epoch_end: bool, overlapped: bool) -> None:
        """The worker has computed a window."""
        announced = self._announced[-2 if overlapped and len(self._announced) > 1 else -1]
        expected = self._refused or announced
        if self._follows and steps != expected and not (epoch_end and steps < expected):
            raise Finding("window", f"a window must have {expected} steps. Received: {steps}")

    def sends(self, sequence: int, now: float) -> Times:
        """Commit ``sequence`` is sent, for the first time or again; returns the times of its window."""
        if self._sent[0] != sequence:
            self._sent = sequence, self._times._replace(sent=now)
        return self._sent[1]

    def refused(self, steps: int) -> None:
        """The window is to be computed again."""
        self._refused = steps

    def applied(self, asked: float, now: float, window: int) -> None:
        """It is applied; of a rule that pulls before it commits, this answer says how long the next one is."""
        self._refused = 0
        if self._pulls_first:
            self._times = Times(asked, now, now)
            self._announced.append(window or self._announced[-1])
