"""Faults planted in what the driver sets for the workers."""

from __future__ import annotations

from typing import Any

from distkeras.ps.center.driver_values import DriverValues
from distkeras.ps.server.dispatcher import Dispatcher
from distkeras.ps.worker import loop
from simulation.planting import Patch, mutation, nothing


@mutation
def _values_are_not_restored() -> list[Patch]:
    """A restarted server has nothing of what the driver has set."""
    return [(DriverValues, "restore", nothing)]


@mutation
def _values_are_acknowledged_before_they_are_saved() -> list[Patch]:
    """A server acknowledges what the driver sets, and saves it with a later commit."""
    answer = Dispatcher._on_set_values  # noqa: SLF001 - a fault within

    def early(self: Any, peer: Any, message: Any) -> Any:
        self._wait_until_saved = nothing
        try:
            return answer(self, peer, message)
        finally:
            del self._wait_until_saved

    return [(Dispatcher, "_on_set_values", early)]


@mutation
def _values_are_taken_once() -> list[Patch]:
    """A worker keeps what the driver had set when it began."""
    take = loop._Worker._take_values  # noqa: SLF001 - a fault within

    def first(self: Any, reply: Any) -> None:
        if not self._version:
            take(self, reply)

    return [(loop._Worker, "_take_values", first)]  # noqa: SLF001 - as above
