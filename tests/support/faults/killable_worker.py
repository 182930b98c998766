"""A toy worker as a process of its own, which reports its breakpoints and waits for orders: see `faults.job`.

It reads its settings, one line of JSON, from standard input. At each of its breakpoints it writes a line and waits
for the order to continue; its last line reports its result.
"""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from distkeras.ps import rules
from distkeras.ps.errors import DistkerasError
from distkeras.ps.protocol.framing import EndOfStream
from distkeras.ps.protocol.loop import Loop
from distkeras.ps.protocol.messages import Message, Welcome
from distkeras.ps.transport import client as transport_client
from distkeras.ps.transport.client import Address, Channel
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.relay_group import RelayGroup
from distkeras.ps.transport.worker_client import WorkerClient
from distkeras.ps.worker.loop import run_worker, work
from distkeras.ps.world.streams import Stream
from support.ps.toy_model import ToyBatch, ToyReplica, batches

#: Bytes that a slow connection transfers at a time.
_PIECE = 128
#: The kinds of frames of which half is sent at their breakpoint, and of those that are sent completely.
_HALF_SENT = {"the": "handshake", "FetchModel": "model", "Pull": "pull", "Commit": "mid-commit"}
_SENT = {"Commit": "after-commit", "Leave": "leave"}


class Breakpoints:
    """The phases at which this worker stops, each after a number of applied commits (None: any number)."""

    def __init__(self, breakpoints: list[dict[str, Any]], order_timeout: float) -> None:
        self._left = breakpoints
        self._order_timeout = order_timeout
        self.client: WorkerClient

    def wants(self, phase: str) -> dict[str, Any] | None:
        for entry in self._left:
            if entry["phase"] == phase and entry["step"] in (None, self.client.sequence):
                return entry
        return None

    def reached(self, phase: str, connection: BreakpointChannel | None) -> None:
        """If there is a breakpoint, report it and perform the order that follows."""
        entry = self.wants(phase)
        if entry is None:
            return
        self._left.remove(entry)
        tell(at=entry["number"], sequence=self.client.sequence)
        if not select.select([sys.stdin], [], [], self._order_timeout)[0]:
            raise TimeoutError(f"no order at {phase}")
        order = json.loads(sys.stdin.readline())
        if connection is not None and order["order"] == "cut":
            connection.hang_up()
        elif connection is not None and order["order"] == "slow":
            connection.slow_down(order["rate"])
        tell(did=entry["number"], connected=connection is not None)


@dataclass
class Pipe:
    """A stream with other functions to read and write, in place of a channel's own stream."""

    read: Callable[[list[memoryview], float, bool], int]
    write: Callable[[list[memoryview], float], int]
    stream: Stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class BreakpointChannel(Channel):
    """A channel with breakpoints within its frames and after them."""

    breakpoints: Breakpoints

    def _send(self, buffers: list[bytes | memoryview], deadline: float, what: str) -> None:
        kind = what.split()[0]
        halfway = _HALF_SENT.get(kind, "")
        if buffers and self.breakpoints.wants(halfway):
            whole = memoryview(b"".join(buffers))
            super()._send([whole[: len(whole) // 2]], deadline, what)
            self.breakpoints.reached(halfway, self)
            buffers = [whole[len(whole) // 2 :]]
        super()._send(buffers, deadline, what)
        if kind in _SENT:
            self.breakpoints.reached(_SENT[kind], self)

    def receive(self, timeout: float, what: str) -> Message | EndOfStream:
        if not (what.endswith(("Pull", "Commit")) and self.breakpoints.wants("mid-reply")):
            return super().receive(timeout, what)
        pipe = self.stream

        def read_first_bytes(spaces: list[memoryview], timeout: float, whole: bool) -> int:
            if sum(map(len, spaces)) <= 4 * _PIECE:
                return pipe.read(spaces, timeout, whole)
            self.stream = pipe  # This is the vector, whose first bytes are about to arrive.
            count = pipe.read([spaces[0][:_PIECE]], timeout, False)
            self.breakpoints.reached("mid-reply", self)
            return count

        self.stream = Pipe(read_first_bytes, pipe.write, pipe)
        return super().receive(timeout, what)

    def slow_down(self, rate: float) -> None:
        """Transfer at most ``rate`` bytes a second from now on, in small pieces."""
        pipe = self.stream

        def dribble_in(spaces: list[memoryview], timeout: float, whole: bool) -> int:
            pause(_PIECE / rate)
            return pipe.read([spaces[0][:_PIECE]], timeout, False)

        def dribble_out(buffers: list[memoryview], timeout: float) -> int:
            pause(_PIECE / rate)
            return pipe.write([buffers[0][:_PIECE]], timeout)

        self.stream = Pipe(dribble_in, dribble_out, pipe)


class TrackingReplica(ToyReplica):
    """A replica that records the parameters with which it began, which is the center at that time."""

    began: np.ndarray | None = None

    def load(self, vector: np.ndarray) -> None:
        super().load(vector)
        if self.began is None:
            self.began = vector.copy()

    def explored(self) -> np.ndarray:
        """Return the sum of the replica's own steps so far."""
        return self.theta if self.began is None else self.theta - self.began


def pause(seconds: float) -> None:
    """Wait as long as a slow connection takes."""
    select.select([], [], [], seconds)


def tell(**news: Any) -> None:
    sys.stdout.write(json.dumps(news) + "\n")
    sys.stdout.flush()


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    worker, size, values = settings["worker"], settings["size"], settings["values"]
    deadlines = Deadlines(**settings["deadlines"])
    rule = rules.make(settings["rule"], **settings["hyper_parameters"])
    where = settings["address"]
    address = Address(where["host"], where["port"], bytes.fromhex(where["key"]), where["certificate"])
    group = None if settings["groups"] is None else RelayGroup(lambda: "127.0.0.1", "", settings["workers"])
    client = WorkerClient(
        address, worker=worker, attempt=settings["attempt"], size=size, deadlines=deadlines, group=group
    )
    BreakpointChannel.breakpoints = breakpoints = Breakpoints(settings["breakpoints"], settings["order_timeout"])
    breakpoints.client = client
    vars(transport_client)["Channel"] = BreakpointChannel
    replicas: list[TrackingReplica] = []

    def one_hot(theta: np.ndarray, element: int) -> np.ndarray:
        gradient = np.zeros_like(theta)
        gradient[element] = 1.0
        return gradient

    def stopping(source: Iterator[ToyBatch]) -> Iterator[ToyBatch]:
        for batch in source:
            if (batch.epoch > 0, batch.index) == (True, 0):
                breakpoints.reached("between-epochs", client.channel)  # type: ignore[arg-type]  # a `BreakpointChannel`
            yield batch
        breakpoints.reached("end", client.channel)  # type: ignore[arg-type]  # a `BreakpointChannel`

    def begin(welcome: Welcome) -> Loop:
        replicas.append(TrackingReplica(size, 1.0, one_hot, np.float32))
        source = batches(values, epochs=settings["epochs"], start=(welcome.epoch, welcome.batch))
        return work(rule, replicas[-1], stopping(source), lambda: client.payload(rule.traits.parts))

    try:
        welcome = client.join()
        tell(joined=True, finished=welcome.finished, sequence=welcome.sequence)
        if not welcome.finished:
            assert client.fetch_model() == b"the model"
        run_worker(client, welcome, begin)
        client.close()
    except DistkerasError as error:
        tell(error=f"{type(error).__name__}: {error}")
    else:
        if group is not None:
            group.close()
        moved = replicas[-1].explored()[: settings["reported"]].tolist() if replicas else None
        tell(done=True, begun=len(replicas), moved=moved)


if __name__ == "__main__":
    main()
