"""What happened in a simulation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.rules.base import Vector


@dataclass(frozen=True)
class Trace:
    """What happened, one entry a commit, in clock order.

    Args:
        theta: the center at the end.
        worker: who committed.
        staleness: commits by others since the worker was last sent the center, tau.
        time: virtual time at which the commit was applied; its number, under an explicit schedule.
        steps: local steps behind it.
        scale: mean scale factor.
        gap: ``||center - sent|| / sqrt(size)`` before it was applied; NaN unless measured.
        normalized_gap: gap over the norm of the payload; NaN unless measured.
        centers: the center after each commit, shape ``(commits, size)``, if kept.
    """

    theta: Vector
    worker: np.ndarray
    staleness: np.ndarray
    time: np.ndarray
    steps: np.ndarray
    scale: np.ndarray
    gap: np.ndarray
    normalized_gap: np.ndarray
    centers: np.ndarray | None

    @property
    def clock(self) -> np.ndarray:
        """The commits' numbers."""
        return np.arange(len(self.worker))
