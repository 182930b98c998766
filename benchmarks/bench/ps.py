"""The parameter server: exchanges compared with a bare server; processor time, shared memory, relays, kernels.

Servers and clients (`processes.Fleet`) run in separate processes, as in production, over loopback, with the same socket
buffers. An exchange is a commit with its history, checked and entered in the ledger, answered by the new center. The
limit's server (`bare`) receives, checks, adds and sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from bench import kernels, relays
from bench.measure import Case, Factory
from bench.processes import cpu_seconds
from bench.rig import Rig, Shapes, dense, elements, rig

SECTION = "ps"

MEDIUM = dense(784, 1000, 2000, 1000, 10)  # 19.2 MB
SMALL = dense(784, 128, 128, 10)  # 0.47 MB
#: Rules that send a view, or keep a vector for each worker, and their targets relative to a server that only adds.
OTHER_RULES = {"dana_dc": 0.5, "dana_zero": 0.6, "lwp": 0.6, "smega2": 0.6, "multi_asgd": 0.7, "dana_slim": 0.8}
#: Turns of half a second or more in a round.
TURNS = 6


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    seconds = 0.5
    return [
        *(partial(exchanges, SMALL, clients, seconds) for clients in (1, 8, 64)),
        *(partial(exchanges, MEDIUM, clients, seconds) for clients in (1, 8)),
        *(partial(other_rule, rule, 8, seconds, target) for rule, target in OTHER_RULES.items()),
        partial(relays.loads, SECTION, MEDIUM, 8),
        *kernels.cases(quick),
    ]


@contextmanager
def exchanges(shapes: Shapes, clients: int, seconds: float) -> Iterator[list[Case]]:
    """Yield cases of plain additions; with the medium model, also of processor time and of shared memory."""
    with rig(shapes, clients, sides=("ours", "shared", "limit")) as built:
        rate = _rate_of(built, seconds)
        name = _name(shapes, clients, "downpour")
        found = [
            Case(
                SECTION,
                name,
                "exchanges/s",
                partial(rate, "ours"),
                partial(rate, "limit"),
                target_limit=0.8,
                turns=TURNS,
            )
        ]
        if shapes == MEDIUM:
            found += _of_medium(built, name, seconds)
        yield found


def _of_medium(built: Rig, name: str, seconds: float) -> list[Case]:
    """Return cases of the server's processor time, and of clients that share memory with their server."""
    clients, rate, unit = built.fleet.pids, _rate_of(built, seconds), "exchanges/processor second"

    def alone(side: str) -> float:
        return _exchanges_per_cpu_second(built, side, seconds)

    def together(side: str) -> float:
        return _exchanges_per_cpu_second(built, side, seconds, clients)

    note = "naive: the same server over the connection"
    return [
        Case(
            SECTION,
            f"server's processor time, {name}",
            unit,
            partial(alone, "ours"),
            partial(alone, "limit"),
            turns=TURNS,
        ),
        Case(
            SECTION,
            f"{name}, shared memory",
            "exchanges/s",
            partial(rate, "shared"),
            None,
            partial(rate, "ours"),
            turns=TURNS,
            note=note,
        ),
        Case(
            SECTION,
            f"processor time of server and clients, {name}, shared memory",
            unit,
            partial(together, "shared"),
            None,
            partial(together, "ours"),
            turns=TURNS,
            note=note,
        ),
    ]


@contextmanager
def other_rule(rule: str, clients: int, seconds: float, target_limit: float) -> Iterator[Case]:
    """Yield the case of a rule that does more than add, compared with the same bare server, which only adds."""
    with rig(MEDIUM, clients, rule=rule) as built:
        rate = _rate_of(built, seconds)
        yield Case(
            SECTION,
            _name(MEDIUM, clients, rule),
            "exchanges/s",
            partial(rate, "ours"),
            partial(rate, "limit"),
            target_limit=target_limit,
            turns=TURNS,
        )


def _rate_of(built: Rig, seconds: float) -> Callable[[str], float]:
    """Return a function that measures the exchanges a second of a side."""
    return lambda side: built.fleet.run(side, seconds).rate


def _name(shapes: Shapes, clients: int, rule: str) -> str:
    megabytes = 4 * elements(shapes) / 1e6
    return f"{megabytes:.3g} MB, {clients} client{'s' * (clients > 1)}, {rule}"


def _exchanges_per_cpu_second(built: Rig, side: str, seconds: float, clients: Sequence[int] = ()) -> float:
    """Return the exchanges per second of processor time, of the server and of ``clients``."""
    pids = (built.pids[side], *clients)
    before = sum(map(cpu_seconds, pids))
    exchanges = built.fleet.run(side, seconds).exchanges
    return exchanges / (sum(map(cpu_seconds, pids)) - before)
