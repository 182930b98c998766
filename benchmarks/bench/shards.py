"""A center that is divided among shards, compared with one server: on loopback, on slow links, in little memory.

On loopback, all processes share the cores of this machine. On links, each server process is on a host of its own: a
network namespace whose cable to a switch is shaped as in section `link`. The worker is at the switch, without a limit.
Nothing goes through shared memory, which a divided center does not use, unless a case names it.
"""

from __future__ import annotations

import os
import resource
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil

from bench.link import BURST, NETWORK, QUEUE, NoLinkError, bring_up, enter, run_tool, shape, unnamed_namespace
from bench.measure import Case, Factory
from bench.processes import Caller, ExchangeClient, Fleet, cpu_seconds
from bench.ps import MEDIUM, TURNS
from bench.rig import MOVE, WorkerExchange, center_server, driver_of, elements, publish
from bench.shard_tables import table_case
from distkeras.ps.errors import DistkerasError
from distkeras.ps.protocol.framing import KEY_BYTES
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess, StartRequest, spawn_server
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.server.shard_role import ShardRole
from distkeras.ps.settings import ServerSettings
from distkeras.ps.shards.processes import build
from distkeras.ps.shards.shard_server import ShardDispatcher
from distkeras.ps.transport.client import Address
from distkeras.ps.world.processes import Child

SECTION = "shards"
#: The targets relative to one server: with two shards on loopback, and, by the number of shards, on links of that rate.
ON_LOOPBACK, ON_LINKS, GBPS = 0.9, {2: 1.8, 4: 3.4}, 1
#: In limited memory, a process has that of an idle server, that of one center, and these bytes for buffers and threads,
#: whose stacks are small. One server needs two centers, because vectors arrive in memory of their own.
_SLACK, _STACK = 32 << 20, 1 << 20
_COMMITS = 3

_settings = partial(ServerSettings, make("downpour"), workers=1)


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section; those of vectors on links and in limited memory are smaller with ``quick``."""
    return [
        partial(_loopback, elements(MEDIUM), 0.5),
        partial(_links, *((5_000_000, 1.0) if quick else (25_000_000, 6.0))),
        partial(_memory, 10_000_000 if quick else 100_000_000),
        lambda: table_case(SECTION, 1_200_000, _idle(), _spawned),
    ]


@contextmanager
def _loopback(size: int, seconds: float) -> Iterator[list[Case]]:
    """Yield cases of one worker, with one server and with two shards: a rate, and the work of all processes."""
    with ExitStack() as stack:
        connect: dict[str, Callable[[int], ExchangeClient]] = {}
        pids = dict[str, list[int]]()
        for side, shards in {"one": 1, "shared": 1, "two": 2}.items():
            server = stack.enter_context(center_server(size, _settings(shards=shards)))
            exchange = partial(WorkerExchange, address=server.address, size=size, shards=shards)
            connect[side] = partial(exchange, shared=side == "shared")
            pids[side] = [server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))]
        fleet = stack.enter_context(Fleet(1, connect))
        for side in connect:
            fleet.run(side, seconds)

        def rate(side: str) -> float:
            return fleet.run(side, seconds).rate

        def per_processor_second(side: str) -> float:
            processes = [*fleet.pids, *pids[side]]
            before = sum(map(cpu_seconds, processes))
            exchanges = fleet.run(side, seconds).exchanges
            return exchanges / (sum(map(cpu_seconds, processes)) - before)

        one, shared, two = (partial(rate, side) for side in connect)
        case = partial(Case, SECTION, limit=None, turns=TURNS)
        name, note = f"loopback, {4e-6 * size:.3g} MB", "naive: one server, over its connection"
        yield [
            case(f"{name}, one", "exchanges/s", ours=one),
            case(f"{name}, two shards", "exchanges/s", ours=two, naive=one, target_naive=ON_LOOPBACK, note=note),
            case(
                f"{name}, two shards, processor",
                "exchanges/processor second",
                ours=partial(per_processor_second, "two"),
                naive=partial(per_processor_second, "one"),
                note="of the worker and all servers; naive: one server, over its connection",
            ),
            case(
                f"{name}, two shards, shared memory",
                "exchanges/s",
                ours=two,
                naive=shared,
                note="naive: one server, shared memory",
            ),
        ]


@contextmanager
def _links(size: int, seconds: float) -> Iterator[list[Case]]:
    """Yield cases of one worker, and of servers on hosts of their own."""
    with ExitStack() as stack:
        missing, counts = "", {shards: shards + (shards > 1) for shards in (1, *ON_LINKS)}
        try:
            switch, hosts = stack.enter_context(_network(sum(counts.values())))
        except NoLinkError as error:
            missing = str(error)
        else:
            connect: dict[str, Callable[[int], ExchangeClient]] = {}
            for shards, count in counts.items():
                address = _started(stack, shards, [hosts.pop() for _ in range(count)])
                connect[str(shards)] = partial(_exchange, switch=switch, address=address, size=size, shards=shards)
            fleet = stack.enter_context(Fleet(1, connect))
            for side in connect:
                fleet.run(side, 0.0, count=2)

        def rate(shards: int) -> float:
            return fleet.run(str(shards), seconds).rate

        name = f"{GBPS} Gbit/s links, {4e-6 * size:.3g} MB"
        yield [
            Case(
                SECTION,
                f"{name}, {shards} shards",
                "exchanges/s",
                partial(rate, shards),
                None,
                partial(rate, 1),
                target_naive=target,
                missing=missing,
                note=f"naive: one server (burst {BURST[GBPS]}, queue {QUEUE})",
            )
            for shards, target in ON_LINKS.items()
        ]


@contextmanager
def _network(count: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the namespace of a switch, and those and addresses of hosts, whose cables to it are shaped at both ends.

    The namespaces have no names: they and their devices are removed with the processes that hold them.
    """
    net, hosts = next(NETWORK.subnets(new_prefix=24)), list[tuple[str, str]]()
    first, *addresses = map(str, net.hosts())
    with ExitStack() as stack:
        switch = f"/proc/{stack.enter_context(unnamed_namespace())}/ns/net"
        at_switch = partial(run_tool, "nsenter", f"--net={switch}")
        at_switch("ip", "link", "add", "switch", "type", "bridge")
        bring_up(at_switch, "switch", first, net)
        for number, address in enumerate(addresses[:count]):
            holder, near, far = stack.enter_context(unnamed_namespace()), f"near{number}", f"far{number}"
            hosts.append((f"/proc/{holder}/ns/net", address))
            at_host = partial(run_tool, "nsenter", f"--net={hosts[-1][0]}")
            at_switch("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", str(holder))
            at_switch("ip", "link", "set", near, "master", "switch", "up")
            bring_up(at_host, far, address, net)
            shape(at_switch, near, GBPS)
            shape(at_host, far, GBPS)
        yield switch, hosts


def _started(stack: ExitStack, shards: int, hosts: Sequence[tuple[str, str]]) -> Address:
    """Start a server, or a sequencer and its shards, each on one of ``hosts``; return the address for clients."""
    key, address = secrets.token_bytes(KEY_BYTES), ("", 0)
    for number, (namespace, host) in enumerate(hosts):
        role = ShardRole(number - 1, *address, incarnation=1) if number else None
        request = StartRequest(_settings(shards=shards, host=host), key, shard=role)
        with patch.dict(os.environ, {"OPENBLAS_NUM_THREADS": "1"}):  # as `spawn_server` sets it
            process = stack.enter_context(Caller())
        place = process.call(_serve, namespace, request)
        address = address if number else place
    return Address(*address, key)


_SERVERS = list[ParameterServer]()  # of this process


def _serve(namespace: str, request: StartRequest) -> tuple[str, int]:
    """Start one server in this process; a sequencer is started without its shards."""
    enter(namespace)
    server, _ = build(request)
    _SERVERS.append(server)
    server.start()
    if isinstance(server.dispatcher, ShardDispatcher):
        server.dispatcher.register(server.address)
    return server.address


def _exchange(number: int, *, switch: str, address: Address, size: int, shards: int) -> WorkerExchange:
    enter(switch)
    publish(address, size, shards)
    return WorkerExchange(number, address, size, shards=shards)


@contextmanager
def _memory(size: int) -> Iterator[Case]:
    """Yield a case of processes whose memory is too small for the whole center and a vector that arrives."""
    most, errors = _idle() + 4 * size, list[str]()

    def of_shards() -> float:
        try:
            _trained(size, 1, most)
        except DistkerasError as error:
            errors.append(error.message)
            return _trained(size, 4, most)
        raise ValueError(f"one server must need more than {most} bytes")

    yield Case(
        SECTION,
        f"limited memory, {4e-6 * size:.3g} MB, 4 shards",
        "trained elements",
        of_shards,
        lambda: float(size),
        target_limit=1.0,
        once=True,
        note=lambda: f"limit: all elements; with {most / 1e6:.0f} MB a process, one server ends the job: {errors[-1]}",
    )


def _idle() -> int:
    """Return the bytes of data that a server without a center may have, with `_SLACK`."""
    with ServerProcess(_settings(), ahead=_spawned()) as idle:
        pages = int(Path(f"/proc/{idle.pid}/statm").read_text().split()[5])
    return pages * resource.getpagesize() + _SLACK


def _trained(size: int, shards: int, most: int) -> float:
    """Return how many elements are as expected after some commits to processes of ``most`` bytes each."""
    expected = np.cumsum(np.full(_COMMITS, MOVE, np.float32), dtype=np.float32)[-1]
    with ServerProcess(_settings(shards=shards), ahead=_spawned(most)) as server:
        publish(server.address, size, shards)
        with closing(WorkerExchange(0, server.address, size, shards=shards)) as worker:
            for _ in range(_COMMITS):
                worker.exchange()
        with closing(driver_of(server.address, shards)) as driver:
            return float(np.count_nonzero(driver.center().center == expected))


def _spawned(most: int = resource.RLIM_INFINITY) -> Child:
    """Return a server's process that may have ``most`` bytes of data, as each of its children."""
    stack = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK, stack[1]))  # a process takes it over as it starts
    try:
        child = spawn_server()
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, stack)
    resource.prlimit(child.pid, resource.RLIMIT_DATA, (most, most))
    return child
