"""Worlds whose time a test moves: what ends at a deadline ends where the test says so, on any machine."""

from __future__ import annotations

from distkeras.ps.world.world import World


class HandWorld(World):
    """The system's own, with a clock that only the test moves."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class LateWorld(World):
    """The system's own, whose clock can be set ahead, by so many seconds."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead
