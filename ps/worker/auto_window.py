"""How many steps between two exchanges, where the user leaves that to be measured."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Callable

from distkeras.ps.rules.base import AUTO, Rule
from distkeras.ps.validate import invalid

log = logging.getLogger(__name__)

#: Windows that are measured, after a first one in which models are compiled.
MEASURED = 5
#: Steps of the longest window that is chosen.
LONGEST = 1000
#: Steps of a window while exchanges are measured, where the rule's own is a whole epoch.
_WHILE_MEASURED = 10


class AutoWindow:
    """One worker's communication window, chosen from what its first exchanges take.

    With C seconds a step and X an exchange (medians), a window of lambda steps spends X / (X + lambda C) of the time
    on communication: lambda is the smallest one that keeps this within ``share``. Where exchanges overlap with
    compute it is the smallest one that hides them: lambda C >= X.

    Args:
        rule: with the window "auto".
        share: of the time, in (0, 1).
        overlap: exchanges are to overlap with compute; while they are measured, they do not.
        now: clock, seconds.

    Attributes:
        rule: with the window in force.
        chosen: whether that is the measured one.

    Raises:
        ConfigurationError: the rule's window is a number.
    """

    def __init__(
        self, rule: Rule, share: float = 0.1, *, overlap: bool = False, now: Callable[[], float] = time.monotonic
    ) -> None:
        if rule.window != AUTO:
            raise invalid("window", rule.window, repr(AUTO))
        self.rule = dataclasses.replace(rule, window=type(rule).window or _WHILE_MEASURED)
        self.chosen = False
        self._share, self._overlap, self._now = share, overlap, now
        self._step_seconds: list[float] = []
        self._exchange_seconds: list[float] = []
        self._began, self._warming_up = 0.0, True
        #: Of the present window.
        self._steps_taken, self._compute_seconds = 0, 0.0

    def start(self) -> None:
        """Compute or an exchange begins."""
        self._began = self._now()

    def computed(self, steps: int) -> None:
        """``steps`` steps of a window have ended."""
        self._steps_taken += steps
        self._compute_seconds += self._now() - self._began

    def exchanged(self) -> Rule:
        """A window's exchange has ended. Returns `rule`."""
        took, step = self._now() - self._began, self._compute_seconds / self._steps_taken
        self._steps_taken, self._compute_seconds = 0, 0.0
        if self._warming_up:
            self._warming_up = False
        elif not self.chosen:
            self._exchange_seconds.append(took)
            self._step_seconds.append(step)
            if len(self._step_seconds) == MEASURED:
                self._choose(statistics.median(self._step_seconds), statistics.median(self._exchange_seconds))
        return self.rule

    def _choose(self, step: float, exchange: float) -> None:
        hidden = 1.0 if self._overlap else (1 - self._share) / self._share
        window = min(max(1, math.ceil(hidden * exchange / max(step, 1e-9))), LONGEST)
        self.rule, self.chosen = dataclasses.replace(self.rule, window=window), True
        text = "the communication window is %d: a step takes %.3g ms, an exchange %.3g ms"
        log.info(text, window, 1e3 * step, 1e3 * exchange)
