"""Worlds whose time a test controls, so that deadlines end at the same point on any machine."""

from __future__ import annotations

from distkeras.ps.world.world import World


class HandWorld(World):
    """The system's world, except that its clock is manual."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class LateWorld(World):
    """The system's world, except that its clock can be set ahead by some seconds."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead
