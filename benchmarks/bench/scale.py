"""A growing number of clients, each of which computes for 50 ms (it sleeps) between two exchanges of 19.2 MB.

The limit is the bare server with the same clients and pauses: it is bound by the pauses at first, and by processor and
memory later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from bench.measure import Case, Factory
from bench.processes import status
from bench.ps import MEDIUM
from bench.rig import rig

SECTION = "scale"

CLIENTS = (1, 2, 4, 8, 16, 32, 64)
#: The number of clients that saturates the server. With the most clients, its rate must not be much lower.
_SATURATING = 16
_COMPUTE = 0.05


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    return [partial(clients, count, 1.0 if quick else 2.0) for count in CLIENTS]


@contextmanager
def clients(count: int, seconds: float) -> Iterator[list[Case]]:
    """Yield the cases of ``count`` clients; the largest count is also compared with smaller ones."""
    with rig(MEDIUM, count) as built:

        def rate(side: str, active: int | None = None) -> float:
            return built.fleet.run(side, seconds, pause=_COMPUTE, active=active).rate

        def resources() -> str:
            threads, peak = status(built.pids["ours"], "Threads"), status(built.pids["ours"], "VmHWM") / 2**20
            return f"server: {threads} threads, {peak:.2f} GiB at most"

        name = f"{count} client{'s' * (count > 1)}"
        found = [
            Case(
                SECTION,
                name,
                "exchanges/s",
                lambda: rate("ours"),
                lambda: rate("limit"),
                echo=lambda: rate("echo"),
                target_limit=0.80,
                note=resources,
            )
        ]
        if count == max(CLIENTS):
            found.append(
                Case(
                    SECTION,
                    f"{name} compared with {_SATURATING}",
                    "exchanges/s",
                    lambda: rate("ours"),
                    lambda: rate("ours", _SATURATING),
                    target_limit=0.90,
                    note="limit: the same server with fewer clients at work",
                )
            )
        yield found
