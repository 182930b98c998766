"""Sums over the whole vector, of which each shard has the shares of its blocks: see `Rule.reduces`.

A shard that applies a commit waits for the sum. All shards apply the same tickets in the same order, so each of them
sends its shares of the same commit next, and none of them waits for another one's later ticket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distkeras.ps.center.center import Center
from distkeras.ps.rules.base import Rule, Vector


class PartialCenter(Center):
    """The center of a shard's slice; ``add_up`` returns the sum of the shares of all shards."""

    def __init__(
        self, rule: Rule, vector: Vector, *, add_up: Callable[[Sequence[float]], float], **options: Any
    ) -> None:
        super().__init__(rule, vector, **options)
        self._add_up = add_up

    def _total(self, partials: Sequence[float]) -> float:
        return self._add_up(partials)


class Totals:
    """The shares that have arrived at the sequencer, by ticket; its caller holds one lock around every call."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._shares: dict[int, dict[int, np.ndarray]] = {}
        self._left: dict[int, int] = {}

    def add(self, ticket: int, shard: int, shares: np.ndarray) -> None:
        """Note the shares of ``shard``."""
        self._shares.setdefault(ticket, {})[shard] = shares.reshape(-1)

    def complete(self, ticket: int) -> bool:
        """Return whether all shards have sent their shares."""
        return len(self._shares[ticket]) == self._shards

    def take(self, ticket: int) -> float:
        """Return the sum, for one of the shards; forget it after the last one."""
        total = math.fsum(np.concatenate([*self._shares[ticket].values()]).tolist())
        left = self._left[ticket] = self._left.get(ticket, self._shards) - 1
        if not left:
            del self._left[ticket], self._shares[ticket]
        return total
