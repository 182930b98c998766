"""The parameter server: exchanges compared with a bare server; processor time, shared memory, relays, kernels.

Servers and clients (`processes.Fleet`) run in separate processes, as in production, over loopback, with the same socket
buffers. An exchange is a commit with its history, checked and entered in the ledger, answered by the new center. The
limit's server (`bare`) receives, checks, adds and sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from bench import kernels
from bench.measure import Case, Factory, Run
from bench.processes import ExchangeClient, Fleet, cpu_seconds
from bench.rig import Rig, Shapes, WorkerExchange, center_server, dense, elements, rig
from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient

SECTION = "ps"

MEDIUM = dense(784, 1000, 2000, 1000, 10)  # 19.2 MB
SMALL = dense(784, 128, 128, 10)  # 0.47 MB
#: Rules that send a view, or keep a vector for each worker, and their targets relative to a server that only adds.
OTHER_RULES = {"dana_dc": 0.5, "dana_zero": 0.6, "lwp": 0.6, "smega2": 0.6, "multi_asgd": 0.7, "dana_slim": 0.8}
#: The numbers of groups, and the targets: windows per second of the server's processor time, relative to no groups.
GROUPS = {1: 4.0, 2: 2.5, 8: 0.8}
#: Windows of each worker in a run with groups.
GROUP_WINDOWS = 10
#: Turns of half a second or more in a round.
TURNS = 6


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    seconds = 0.5
    return [
        *(partial(exchanges, SMALL, clients, seconds) for clients in (1, 8, 64)),
        *(partial(exchanges, MEDIUM, clients, seconds) for clients in (1, 8)),
        *(partial(other_rule, rule, 8, seconds, target) for rule, target in OTHER_RULES.items()),
        partial(loads, MEDIUM, 8),
        *kernels.cases(quick),
    ]


#: A case of what servers and clients exchange.
case_of = partial(Case, SECTION, turns=TURNS)


@contextmanager
def exchanges(shapes: Shapes, clients: int, seconds: float) -> Iterator[list[Case]]:
    """Yield cases of plain additions; with the medium model, also of processor time and of shared memory."""
    with rig(shapes, clients, sides=("ours", "shared", "limit")) as built:
        name = _name(shapes, clients, "downpour")
        sides = _rates(built, seconds)
        plain = case_of(name, "exchanges/s", sides["ours"], sides["limit"], target_limit=0.8)
        yield [plain, *(_of_medium(built, name, seconds) if shapes == MEDIUM else ())]


def _of_medium(built: Rig, name: str, seconds: float) -> list[Case]:
    """Return cases of the server's processor time, and of clients that share memory with their server."""
    unit, note = "exchanges/processor second", "naive: the same server over the connection"
    rates = _rates(built, seconds)
    alone = {side: partial(_exchanges_per_cpu_second, built, side, seconds) for side in built.pids}
    together = {side: partial(alone[side], built.fleet.pids) for side in built.pids}
    both = f"processor time of server and clients, {name}, shared memory"
    return [
        case_of(f"server's processor time, {name}", unit, alone["ours"], alone["limit"]),
        case_of(f"{name}, shared memory", "exchanges/s", rates["shared"], None, rates["ours"], note=note),
        case_of(both, unit, together["shared"], None, together["ours"], note=note),
    ]


@contextmanager
def other_rule(rule: str, clients: int, seconds: float, target_limit: float) -> Iterator[Case]:
    """Yield the case of a rule that does more than add, compared with the same bare server, which only adds."""
    with rig(MEDIUM, clients, rule=rule) as built:
        rates, name = _rates(built, seconds), _name(MEDIUM, clients, rule)
        yield case_of(name, "exchanges/s", rates["ours"], rates["limit"], target_limit=target_limit)


def _rates(built: Rig, seconds: float) -> dict[str, Run]:
    """Return functions that measure the exchanges a second, by side."""

    def rate(side: str) -> float:
        return built.fleet.run(side, seconds).rate

    return {side: partial(rate, side) for side in built.pids}


def _name(shapes: Shapes, clients: int, rule: str) -> str:
    megabytes = 4 * elements(shapes) / 1e6
    return f"{megabytes:.3g} MB, {clients} client{'s' * (clients > 1)}, {rule}"


def _exchanges_per_cpu_second(built: Rig, side: str, seconds: float, clients: Sequence[int] = ()) -> float:
    """Return the exchanges per second of processor time, of the server and of ``clients``."""
    pids = (built.pids[side], *clients)
    before = sum(map(cpu_seconds, pids))
    exchanges = built.fleet.run(side, seconds).exchanges
    return exchanges / (sum(map(cpu_seconds, pids)) - before)


@contextmanager
def loads(shapes: Shapes, workers: int) -> Iterator[list[Case]]:
    """Yield cases of the server's load from ``workers`` workers, over connections."""
    size, servers = elements(shapes), dict[str, ServerProcess]()
    connect: dict[str, Callable[[int], ExchangeClient]] = {}
    with ExitStack() as stack:
        for relays in (None, *GROUPS):
            side = str(relays)
            settings = ServerSettings(make("downpour"), workers=workers, relays=relays)
            servers[side] = server = stack.enter_context(center_server(size, settings))
            group = None if relays is None else workers
            connect[side] = partial(WorkerExchange, address=server.address, size=size, group=group)
        fleet = stack.enter_context(Fleet(workers, connect))
        for side in connect:
            fleet.run(side, 0.0, count=1)

        def windows_per_cpu_second(side: str) -> float:
            before = cpu_seconds(servers[side].pid)
            exchanges = fleet.run(side, 0.0, count=GROUP_WINDOWS).exchanges
            return exchanges / (cpu_seconds(servers[side].pid) - before)

        def note(side: str) -> str:
            driver = DriverClient(servers[side].address)
            commits = driver.drain().commits.view(COMMIT)
            driver.close()
            sent = np.count_nonzero(commits["bytes"]) / len(commits)
            received = commits["bytes"].sum() / (len(commits) * 4 * size)
            return f"a window takes {sent:.3g} commits and {received:.3g} vectors to the server; naive: without groups"

        yield [
            Case(
                SECTION,
                f"{4e-6 * size:.3g} MB, {workers} workers in {relays} group{'s' * (relays > 1)}",
                "windows/server's processor second",
                partial(windows_per_cpu_second, str(relays)),
                None,
                partial(windows_per_cpu_second, "None"),
                target_naive=target,
                turns=2,
                note=partial(note, str(relays)),
            )
            for relays, target in GROUPS.items()
        ]
