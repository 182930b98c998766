"""A synchronous rule's round: what its workers have contributed since the one before it ended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distkeras.ps.center.buffers import Buffer
from distkeras.ps.protocol.messages import Commit


@dataclass
class Round:
    """The present round. Its end is `Center`'s, which has the rule's kernel for it.

    Args:
        moving_statistics: sum of those contributed, each times its steps.
        total: sum of the payloads; None before the first.
        steps: behind the moving statistics.
        skipped: contributions that were left out for their NaN or infinity: their workers have arrived.
        began, previous_began: clock when it and the round before it began.
    """

    moving_statistics: np.ndarray
    total: Buffer | None = None
    steps: int = 0
    skipped: int = 0
    began: int = 0
    previous_began: int = 0

    def contribute(self, part: Buffer) -> None:
        """Adds a payload, which the round takes over."""
        if self.total is None:
            self.total = part
        else:
            self.total.array += part.array
            part.drop()

    def contribute_moving_statistics(self, commit: Commit) -> None:
        """Adds those of ``commit``, by its steps."""
        self.moving_statistics += commit.moving_statistics * commit.steps
        self.steps += commit.steps

    def take_moving_statistics(self) -> np.ndarray:
        """Their mean over the steps of the round, which has none then."""
        mean = self.moving_statistics / self.steps
        self.moving_statistics = np.zeros_like(self.moving_statistics)
        self.steps = 0
        return mean

    def end(self, clock: int) -> None:
        """The next round begins at ``clock``, with nothing contributed."""
        self.total = None
        self.previous_began, self.began = self.began, clock
