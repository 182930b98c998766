"""Exchanges over a network instead of loopback: the server is here, its client is behind a shaped `cable`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from bench.cable import BURST, QUEUE, NoLinkError, enter, shaped
from bench.measure import Case, Factory
from bench.processes import Fleet
from bench.ps import MEDIUM
from bench.rig import WorkerExchange, elements
from distkeras.ps.protocol.compression import FORMATS
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient

SECTION = "link"
_SIZE = elements(MEDIUM)


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    return [partial(_formats, gbps, 0.4 if quick else 2.5) for gbps in BURST]


@contextmanager
def _formats(gbps: int, seconds: float) -> Iterator[list[Case]]:
    """Yield cases of shorter wire formats and float32 over the same link, with a client that computes nothing."""
    with ExitStack() as stack:
        missing = ""
        try:
            link = stack.enter_context(shaped(gbps))
        except NoLinkError as error:
            missing = str(error)
        else:
            settings = ServerSettings(make("downpour"), workers=len(FORMATS), host=link.host)
            server = stack.enter_context(ServerProcess(settings))
            driver = DriverClient(server.address)
            driver.publish(np.zeros(_SIZE, np.float32))
            driver.close()
            exchange = partial(_exchange, namespace=link.namespace, address=server.address)
            sides = {name: partial(exchange, worker=worker, wire_format=name) for worker, name in enumerate(FORMATS)}
            fleet = stack.enter_context(Fleet(1, sides))
            for side in sides:
                fleet.run(side, seconds / 4)

        def rate(side: str) -> float:
            return fleet.run(side, seconds).rate

        yield [
            Case(
                SECTION,
                f"{4 * _SIZE / 1e6:.3g} MB exchange, {name}, {gbps} Gbps",
                "exchanges/s",
                partial(rate, name),
                None,
                partial(rate, FORMATS[0]),
                missing=missing,
                note=f"naive: {FORMATS[0]} (burst {BURST[gbps]}, queue {QUEUE})",
            )
            for name in FORMATS[1:]
        ]


def _exchange(number: int, *, namespace: str, worker: int, address: Address, wire_format: str) -> WorkerExchange:
    enter(namespace)
    return WorkerExchange(worker, address, _SIZE, wire_format)
