"""The project's server and the bare one, each in its own process, with the same clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from bench import bare
from bench.processes import ExchangeClient, Fleet, serving
from distkeras.ps.protocol.loop import NO_FLOATS, CommitRecord
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.shards.spread_client import SpreadWorkerClient
from distkeras.ps.shards.spread_driver import SpreadDriverClient
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.relay_group import RelayGroup
from distkeras.ps.transport.worker_client import WorkerClient

#: The shapes of a model's arrays.
Shapes = tuple[tuple[int, ...], ...]
#: Mini-batches of a commit, each with a row of history: timestamp, samples, loss and a metric.
STEPS = 5
HISTORY = np.tile(np.array([1.8e9, 32, 0.5, 0.9]), (STEPS, 1))
ETA = MOVE = 1e-3
_WARM_UP = 0.3


def dense(*widths: int) -> Shapes:
    """Return the shapes of the kernels and biases of dense layers between these widths."""
    return tuple(shape for pair in pairwise(widths) for shape in (pair, pair[1:]))


def elements(shapes: Shapes) -> int:
    """Return the number of elements of all arrays together."""
    return sum(math.prod(shape) for shape in shapes)


class WorkerExchange:
    """A worker's client, which commits a payload with its history and receives the new center.

    With ``shared``, vectors are in memory that it shares with the server; a ``group`` is the number of workers in it;
    ``shards`` are those of the center.
    """

    def __init__(
        self,
        number: int,
        address: Address,
        size: int,
        wire_format: str = "float32",
        *,
        shared: bool = False,
        group: int | None = None,
        shards: int = 1,
    ) -> None:
        relays = None if group is None else RelayGroup(lambda: "127.0.0.1", "", group)
        options: dict[str, Any] = {"wire_format": wire_format, "shared_parts": int(shared), "group": relays}
        metrics = ("loss", "accuracy")
        kind = SpreadWorkerClient if shards > 1 else WorkerClient
        self._client = kind(address, worker=number, attempt=0, size=size, metrics=metrics, **options)
        self._client.join()  # There is no pull yet, because with some rules it waits for all other workers.
        self._parts = self._client.payload(1)
        self._parts[0].fill(MOVE)
        self._batch = 0

    def exchange(self) -> None:
        """Commit, and receive the center; before the first commit, pull."""
        if self._batch == 0:
            self._client.pull()
        first, self._batch = self._batch, self._batch + STEPS
        request = CommitRecord(
            epoch=0,
            first=first,
            last=self._batch - 1,
            epoch_end=False,
            wants_center=True,
            learning_rate=ETA,
            scale=1.0,
            parts=self._parts,
            moving_statistics=NO_FLOATS,
            history=HISTORY,
        )
        self._client.commit(request)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


@dataclass(frozen=True)
class Rig:
    """The servers of a case's sides, by name, and the clients that are connected to all of them."""

    pids: dict[str, int]
    fleet: Fleet


def driver_of(address: Address, shards: int) -> DriverClient:
    """Return a driver's client for a center that is divided among ``shards``."""
    return SpreadDriverClient(address) if shards > 1 else DriverClient(address)


def publish(address: Address, size: int, shards: int = 1) -> None:
    """Publish a center of ``size`` zeros, float32."""
    with closing(driver_of(address, shards)) as driver:
        driver.publish(np.zeros(size, np.float32))


@contextmanager
def center_server(size: int, settings: ServerSettings) -> Iterator[ServerProcess]:
    """Yield the project's server, whose center has ``size`` elements, float32, zeros at first."""
    with ServerProcess(settings) as server:
        publish(server.address, size, settings.shards)
        yield server


@contextmanager
def rig(
    shapes: Shapes, clients: int, *, rule: str = "downpour", sides: Sequence[str] = ("ours", "limit")
) -> Iterator[Rig]:
    """Yield a warm `Rig` with some of the sides "ours", "shared" and "limit"; ``rule`` is that of the project's."""
    size, chosen = elements(shapes), make(rule)
    settings = ServerSettings(chosen, workers=clients, learning_rate=ETA if chosen.traits.gradient else None)
    connect: dict[str, Callable[[int], ExchangeClient]] = {}
    pids = {}
    with ExitStack() as stack:
        for side in (side for side in ("ours", "shared") if side in sides):
            server = stack.enter_context(center_server(size, settings))
            exchange = partial(WorkerExchange, address=server.address, size=size, shared=side == "shared")
            connect[side], pids[side] = exchange, server.pid
        if "limit" in sides:
            other = stack.enter_context(serving(partial(bare.server, size)))
            connect["limit"], pids["limit"] = partial(bare.BareClient, address=other.address, size=size), other.pid
        fleet = stack.enter_context(Fleet(clients, connect))
        for side in connect:
            fleet.run(side, _WARM_UP)
        yield Rig(pids, fleet)
