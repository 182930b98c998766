"""The project's server, the bare one, the echo and the plain one, each in its own process, with the same clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from bench import bare, echo, naive
from bench.naive import Shapes
from bench.processes import ExchangeClient, Fleet, serving
from distkeras.ps.protocol.messages import NO_FLOATS, CommitRecord
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.transport.relay_group import RelayGroup
from distkeras.ps.transport.worker_client import WorkerClient

#: Mini-batches behind a commit, each with a row of history: timestamp, samples, loss and a metric.
STEPS, HISTORY = 5, 4
ETA = 1e-3
_WARM_UP = 0.3


def dense(*widths: int) -> Shapes:
    """Shapes of the kernels and biases of dense layers between these widths."""
    return tuple(shape for pair in pairwise(widths) for shape in (pair, pair[1:]))


def elements(shapes: Shapes) -> int:
    """Numbers in all arrays together."""
    return sum(math.prod(shape) for shape in shapes)


class WorkerExchange:
    """A worker's client: commits a payload with its history, and is sent the fresh center.

    Args:
        number: of the client.
        address: the server's.
        size: elements of the center.
        wire_format: of both.
        shared: whether vectors are in memory that it shares with the server.
        group: the workers of the job, where they are in groups; None: they are not.
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
    ) -> None:
        metrics = ("loss", "accuracy")
        self._client = WorkerClient(
            address,
            worker=number,
            attempt=0,
            size=size,
            metrics=metrics,
            wire_format=wire_format,
            shared_parts=int(shared),
            group=None if group is None else RelayGroup(lambda: "127.0.0.1", "", group),
        )
        self._client.join()  # not yet a pull, which waits for all others where the rule needs them
        self._parts = self._client.payload(1)
        self._parts[0].fill(1e-3)
        self._history = np.tile(np.array([1.8e9, 32, 0.5, 0.9]), (STEPS, 1))
        self._batch = 0

    def exchange(self) -> None:
        """A commit, whose answer is the center; a pull before the first one."""
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
            history=self._history,
        )
        self._client.commit(request)


@dataclass(frozen=True)
class Rig:
    """Servers by the names of a case's sides, and the clients that are connected to all of them."""

    pids: dict[str, int]
    fleet: Fleet


@contextmanager
def rig(
    shapes: Shapes, clients: int, *, rule: str = "downpour", sides: Sequence[str] = ("ours", "limit", "echo")
) -> Iterator[Rig]:
    """A warm `Rig`.

    Args:
        shapes: of the model's arrays.
        clients: how many.
        rule: of the project's server, with its defaults.
        sides: "ours", and which of "shared", "limit", "echo" and "naive".
    """
    size = elements(shapes)
    connect: dict[str, Callable[[int], ExchangeClient]] = {}
    pids = {}
    with ExitStack() as stack:
        chosen = make(rule)
        for side in ("ours", "shared"):
            if side not in sides:
                continue
            settings = ServerSettings(chosen, workers=clients, learning_rate=ETA if chosen.traits.gradient else None)
            server = stack.enter_context(ServerProcess(settings))
            driver = DriverClient(server.address)
            driver.publish(np.zeros(size, np.float32))
            driver.close()
            exchange = partial(WorkerExchange, address=server.address, size=size, shared=side == "shared")
            connect[side], pids[side] = exchange, server.pid
        for side, make_server in (("limit", partial(bare.server, size)), ("echo", partial(echo.server, 4 * size))):
            if side in sides:
                other = stack.enter_context(serving(make_server))
                connect[side], pids[side] = partial(echo.EchoClient, address=other.address, size=size), other.pid
        if "naive" in sides:
            plain = stack.enter_context(serving(partial(naive.server, shapes)))
            connect["naive"], pids["naive"] = (
                partial(naive.NaiveClient, address=plain.address, shapes=shapes),
                plain.pid,
            )
        fleet = stack.enter_context(Fleet(clients, connect))
        for side in connect:
            fleet.run(side, _WARM_UP)
        yield Rig(pids, fleet)
