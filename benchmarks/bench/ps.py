"""The parameter server: exchanges compared with a bare server, an echo and a plain one; memory, time, kernels.

Servers and clients (`processes.Fleet`) run in separate processes, as in production, over loopback, with the same socket
buffers. An exchange is a commit with its history, checked and entered in the ledger, answered by the new center. The
limit's server (`bare`) receives, checks, adds and sends; the echo's sends back what it received.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from bench import kernels, relays
from bench.measure import Case, Factory
from bench.naive import Shapes
from bench.processes import cpu_seconds, status
from bench.rig import Rig, dense, elements, rig

SECTION = "ps"

MEDIUM = dense(784, 1000, 2000, 1000, 10)  # 19.2 MB
SMALL = dense(784, 128, 128, 10)  # 0.47 MB
LARGE: Shapes = ((5000, 5000),)  # 100 MB
#: Rules that send a view, or keep a vector for each worker, and their targets relative to a server that only adds.
OTHER_RULES = {"dana_dc": 0.5, "dana_zero": 0.6, "lwp": 0.6, "smega2": 0.6, "multi_asgd": 0.7, "dana_slim": 0.8}
#: Turns of half a second or more in a round.
TURNS = 6
#: Memory relative to that of the center, the rule's state and a buffer per connection: for interpreter and ledger.
_HEADROOM = 1.1


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    seconds = 0.5
    return [
        partial(exchanges, SMALL, 1, seconds, 0.80, 4),
        partial(exchanges, SMALL, 8, seconds, 0.80, 4),
        partial(exchanges, SMALL, 64, seconds, 0.80, 4),
        partial(exchanges, MEDIUM, 1, seconds, 0.80, 7),
        partial(exchanges, MEDIUM, 8, seconds, 0.80, 10),
        *(partial(other_rule, rule, 8, seconds, target) for rule, target in OTHER_RULES.items()),
        partial(relays.loads, SECTION, MEDIUM, 8),
        partial(memory, 4, 2 * seconds),
        *kernels.cases(quick),
    ]


@contextmanager
def exchanges(
    shapes: Shapes, clients: int, seconds: float, target_limit: float, target_naive: float
) -> Iterator[list[Case]]:
    """Yield cases of plain additions; with the medium model, also of the server's processor time."""
    with rig(shapes, clients, sides=("ours", "shared", "limit", "echo", "naive")) as built:
        found = [
            Case(
                SECTION,
                _name(shapes, clients, "downpour"),
                "exchanges/s",
                lambda: built.fleet.run("ours", seconds).rate,
                lambda: built.fleet.run("limit", seconds).rate,
                lambda: built.fleet.run("naive", seconds).rate,
                target_limit,
                target_naive,
                turns=TURNS,
                echo=lambda: built.fleet.run("echo", seconds).rate,
            )
        ]
        if shapes == MEDIUM:
            found += _through_shared_memory(built, _name(shapes, clients, "downpour"), seconds)
            found.append(
                Case(
                    SECTION,
                    f"server's processor time, {_name(shapes, clients, 'downpour')}",
                    "exchanges/processor second",
                    lambda: _exchanges_per_cpu_second(built, "ours", seconds),
                    lambda: _exchanges_per_cpu_second(built, "limit", seconds),
                    lambda: _exchanges_per_cpu_second(built, "naive", seconds),
                    target_naive=6,
                    turns=TURNS,
                    echo=lambda: _exchanges_per_cpu_second(built, "echo", seconds),
                )
            )
        yield found


def _through_shared_memory(built: Rig, name: str, seconds: float) -> list[Case]:
    """Return cases of clients that share memory with their server, and of the processor time of all processes."""
    clients = built.fleet.pids

    def run(side: str) -> float:
        return built.fleet.run(side, seconds).rate

    def per_cpu_second(side: str) -> float:
        return _exchanges_per_cpu_second(built, side, seconds, clients)

    note = "limit: a raw echo over the connection; naive: the same server over the connection"
    return [
        Case(
            SECTION,
            f"{name}, shared memory",
            "exchanges/s",
            lambda: run("shared"),
            lambda: run("echo"),
            lambda: run("ours"),
            target_limit=1.6 if len(clients) == 1 else 1.3,
            turns=TURNS,
            note=note,
        ),
        Case(
            SECTION,
            f"processor time of server and clients, {name}, shared memory",
            "exchanges/processor second",
            lambda: per_cpu_second("shared"),
            lambda: per_cpu_second("echo"),
            lambda: per_cpu_second("ours"),
            target_limit=1.6,
            turns=TURNS,
            note=note,
        ),
    ]


@contextmanager
def other_rule(rule: str, clients: int, seconds: float, target_limit: float) -> Iterator[Case]:
    """Yield the case of a rule that does more than add, compared with the same bare server, which only adds."""
    with rig(MEDIUM, clients, rule=rule) as built:
        yield Case(
            SECTION,
            _name(MEDIUM, clients, rule),
            "exchanges/s",
            lambda: built.fleet.run("ours", seconds).rate,
            lambda: built.fleet.run("limit", seconds).rate,
            echo=lambda: built.fleet.run("echo", seconds).rate,
            target_limit=target_limit,
            turns=TURNS,
        )


@contextmanager
def memory(clients: int, seconds: float) -> Iterator[list[Case]]:
    """Yield cases of a large model: exchanges, and the server's peak memory."""
    bound = 4 * elements(LARGE) * (1 + clients) * _HEADROOM / 1024
    with rig(LARGE, clients) as built:
        yield [
            Case(
                SECTION,
                _name(LARGE, clients, "downpour"),
                "exchanges/s",
                lambda: built.fleet.run("ours", seconds).rate,
                lambda: built.fleet.run("limit", seconds).rate,
                echo=lambda: built.fleet.run("echo", seconds).rate,
                target_limit=0.80,
                turns=TURNS,
            ),
            Case(
                SECTION,
                f"peak memory, {_name(LARGE, clients, 'downpour')}",
                "1/KiB",
                lambda: 1 / status(built.pids["ours"], "VmHWM"),
                lambda: 1 / bound,
                target_limit=1.0,
                note="limit: center and a buffer a connection, + 10 %",
            ),
        ]


def _name(shapes: Shapes, clients: int, rule: str) -> str:
    megabytes = 4 * elements(shapes) / 1e6
    return f"{megabytes:.3g} MB, {clients} client{'s' * (clients > 1)}, {rule}"


def _exchanges_per_cpu_second(built: Rig, side: str, seconds: float, clients: Sequence[int] = ()) -> float:
    """Return the exchanges per second of processor time, of the server and of ``clients``."""
    pids = (built.pids[side], *clients)
    before = sum(map(cpu_seconds, pids))
    exchanges = built.fleet.run(side, seconds).exchanges
    return exchanges / (sum(map(cpu_seconds, pids)) - before)
