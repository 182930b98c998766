"""Faults in what rules hold back at the server."""

from __future__ import annotations

from typing import Any

from distkeras.ps.center.center import Center
from distkeras.ps.rules.fadas import FADAS
from distkeras.ps.rules.fedbuff import FedBuff
from simulation.planting import Patch, mutation, nothing


@mutation
def _buffers_are_not_drained() -> list[Patch]:
    """Movements that fill no buffer are lost with it."""
    return [(Center, "_drain", nothing)]


@mutation
def _buffers_are_drained_twice() -> list[Patch]:
    """What is in a buffer stays there when it is drained."""
    drain = Center._drain  # noqa: SLF001 - a fault within

    def twice(self: Center, workers: int) -> None:
        held = [vector.copy() for vector in self.model], dict(self.counters)
        drain(self, workers)
        vectors, self.counters = held
        for vector, before in zip(self.model, vectors, strict=True):
            vector[...] = before
        drain(self, workers)

    return [(Center, "_drain", twice)]


@mutation
def _a_drained_buffer_is_divided_by_what_it_holds() -> list[Patch]:
    """The last movements weigh more than all others."""

    def divided(begin: Any) -> Any:
        def begin_drain(self: Any, workers: int, counters: dict[str, int]) -> Any:
            count = counters.get("count", 0)
            scalars = begin(self, workers, counters)
            return scalars and (1 / count, *scalars[1:])

        return begin_drain

    return [(kind, "begin_drain", divided(kind.begin_drain)) for kind in (FedBuff, FADAS)]


@mutation
def _a_buffer_is_drained_for_the_workers_that_come() -> list[Patch]:
    """Where another number of workers goes on, the former ones' movements weigh as much as theirs."""
    begin = Center.begin_with_other_workers
    return [(Center, "begin_with_other_workers", lambda self, count, _: begin(self, count, self.workers))]
