"""Real sequencers and shards over loopback sockets equal one server, to the bit."""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience, until
from support.ps.divided_server import DividedServer
from support.ps.running_server import Running
from support.ps.toy_model import ToyReplica, batches

from distkeras.ps.errors import NonFiniteError, ServerLostError, ShapeError
from distkeras.ps.protocol.loop import CommitRecord, Loop, Reply
from distkeras.ps.protocol.messages import Ack
from distkeras.ps.protocol.shard_messages import PartStored, RegisterShard, SendPart, TakeTickets
from distkeras.ps.rules import make
from distkeras.ps.shards.spread_driver import SpreadDriverClient
from distkeras.ps.transport.client import Client
from distkeras.ps.transport.worker_client import RestartFromCenter, WorkerClient
from distkeras.ps.worker.loop import work

SIZE = 3 * 64 * 1024 + 17


class Stepping:
    """A worker of either kind of client, which performs one exchange at a time."""

    def __init__(self, client: WorkerClient, rule: Any, steps: int, seed: int) -> None:
        self.client, self.over = client, False
        rng = np.random.default_rng(seed)
        values = [rng.normal(size=client.size).astype(np.float32) for _ in range(steps)]
        welcome = client.join()
        replica = ToyReplica(client.size, 0.1, None, np.float32)
        source = batches(values, start=(welcome.epoch, welcome.batch))
        self._loop: Loop = work(rule, replica, source, lambda: client.payload(rule.traits.parts))
        self._reply: Reply | None = None
        self._request: Any = next(self._loop)

    def step(self) -> None:
        """Perform the next exchange, and compute up to the one after it."""
        request = self._request
        reply = self.client.commit(request) if isinstance(request, CommitRecord) else self.client.pull()
        try:
            self._request = self._loop.send(reply)
            while not isinstance(self._request, CommitRecord) and not _is_pull(self._request):
                self._request = self._loop.send(None)
        except StopIteration:
            self.over = True
            self.client.leave()


def _is_pull(request: Any) -> bool:
    return type(request).__name__ == "PullRequest"


def trained(server: Any, rule: Any, *, workers: int, order: list[int], **options: Any) -> np.ndarray:
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(contextlib.closing(server.client(number, size=SIZE, **options)))
            for number in range(workers)
        ]
        steppers = [Stepping(client, rule, 6, number) for number, client in enumerate(clients)]
        for worker in order:
            if not steppers[worker].over:
                steppers[worker].step()
        while not all(stepper.over for stepper in steppers):
            for stepper in steppers:
                if not stepper.over:
                    stepper.step()
        return server.driver.center().center.copy()


@pytest.mark.parametrize("name", ["downpour", "dynsgd", "dc_asgd", "asgdm", "adag", "aeasgd", "mla", "fedbuff"])
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_equal_to_one_server(name: str, shards: int) -> None:
    rule = make(name, window=2) if not make(name).traits.gradient else make(name)
    start = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
    order = [0, 1, 0, 0, 1, 1, 1, 0]
    with Running(rule, size=SIZE, start=start) as one:
        expected = trained(one, rule, workers=2, order=order)
        records = one.driver.drain().commits
    with DividedServer(rule, start, shards=shards) as many:
        received = trained(many, rule, workers=2, order=order)
        assert len(many.driver.drain().commits) == len(records)
    np.testing.assert_array_equal(received, expected)


@pytest.mark.parametrize("algorithm", [11, 12])
def test_a_rule_with_a_norm_over_all_elements_equals_one_server(algorithm: int) -> None:
    """The shards add up the shares of their blocks."""
    rule = make("adag", window=2, form="4.7norm", algorithm=algorithm)
    start = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
    with Running(rule, size=SIZE, start=start) as one:
        expected = trained(one, rule, workers=2, order=[0, 1, 1])
    with DividedServer(rule, start, shards=3) as many:
        received = trained(many, rule, workers=2, order=[0, 1, 1])
    np.testing.assert_array_equal(received, expected)


@pytest.mark.parametrize("wire_format", ["bfloat16", "int8"])
def test_wire_formats_equal_one_server(wire_format: str) -> None:
    rule = make("downpour", window=2)
    start = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
    with Running(rule, size=SIZE, start=start) as one:
        expected = trained(one, rule, workers=2, order=[0, 1, 1], wire_format=wire_format)
    with DividedServer(rule, start, shards=2) as many:
        received = trained(many, rule, workers=2, order=[0, 1, 1], wire_format=wire_format)
    np.testing.assert_array_equal(received, expected)


def test_the_center_of_a_failed_job_can_be_read() -> None:
    rule = make("downpour", window=2)
    start = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
    with DividedServer(rule, start, shards=2) as many:
        trained(many, rule, workers=2, order=[0, 1, 0])
        before = many.driver.center().center.copy()
        many.driver.stop("the user has pressed Ctrl-C")
        np.testing.assert_array_equal(many.driver.center().center, before)


def test_many_clients_of_a_driver_read_at_the_same_time() -> None:
    start = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
    with DividedServer(make("downpour"), start, shards=2) as many:

        def read() -> np.ndarray:
            with contextlib.closing(SpreadDriverClient(many.address, PATIENT)) as client:
                return np.stack([client.center().center for _ in range(3)])

        with ThreadPoolExecutor(24) as pool:
            for centers in [future.result(patience(60)) for future in [pool.submit(read) for _ in range(24)]]:
                np.testing.assert_array_equal(centers, [start] * 3)


def test_a_worker_that_is_lost_between_its_parts_and_its_commit_leaves_no_trace() -> None:
    """The next attempt trains the same mini-batches, and the parts of the first one are dropped."""
    rule = make("downpour", window=2)
    start = np.zeros(SIZE, np.float32)
    with DividedServer(rule, start, shards=2, workers=1) as many:
        first = many.client(0, 0, size=SIZE)
        stepper = Stepping(first, rule, 6, 0)
        stepper.step()
        links = first._connected()  # noqa: SLF001 - a worker that dies at this point
        part = SendPart(1, 0, 0, 1, (np.full(links.cut.slices[0].stop, 7, np.float32),))
        links.each(lambda shard, link: link.request(part, PartStored) if shard == 0 else None)
        first.close()
        with contextlib.closing(many.client(0, 1, size=SIZE)) as second:
            stepper = Stepping(second, rule, 6, 0)
            while not stepper.over:
                stepper.step()
        received = many.driver.center().center
    with Running(rule, size=SIZE, start=start, workers=1) as one:
        np.testing.assert_array_equal(received, trained(one, rule, workers=1, order=[]))


@pytest.mark.parametrize("most", [0, 1])
def test_a_part_that_is_not_finite_is_skipped_or_ends_the_job_as_on_one_server(most: int) -> None:
    """The error names the element by its place in the whole vector, although a shard has found it."""
    rule, start = make("downpour", window=1), np.zeros(SIZE, np.float32)
    payload = np.ones(SIZE, np.float32)
    payload[SIZE - 3] = np.nan
    seen = []
    servers: list[Any] = [
        Running(rule, size=SIZE, start=start, workers=1, max_skipped=most),
        DividedServer(rule, start, shards=3, workers=1, max_skipped=most),
    ]
    for server in servers:
        with server, contextlib.closing(server.client(0, 0, size=SIZE)) as client:
            client.join()
            client.pull()
            record = CommitRecord(0, 0, 0, False, True, 0.1, 1.0, (payload,), history=np.zeros((1, 3)))
            with pytest.raises(RestartFromCenter if most else NonFiniteError) as caught:
                client.commit(record)
            seen.append("" if most else str(caught.value))
            if most:
                client.pull()
                assert (
                    client.commit(replace(record, first=1, last=1, parts=(np.ones(SIZE, np.float32),))).center
                    is not None
                )
                np.testing.assert_array_equal(server.driver.center().center, np.ones(SIZE))
    assert seen[0] == seen[1]
    assert most or f"element {SIZE - 3}" in seen[0]


def test_a_shard_of_an_earlier_server_is_sent_away() -> None:
    """It has outlived its server, and has found the next one at the same address."""
    with DividedServer(make("downpour"), np.zeros(SIZE, np.float32), shards=2) as many:
        for message in (RegisterShard(0, "127.0.0.1", 1, incarnation=2), TakeTickets(0, 0, 0.0, incarnation=2)):
            with contextlib.closing(Client(many.address, PATIENT)) as client:
                text = re.escape("shard 0 must be of incarnation 1. Received: 2")
                with pytest.raises(ServerLostError, match=text):
                    client.request(message, Ack)
        assert many.driver.center().center.size == SIZE


@pytest.mark.parametrize("wrong", [{"size": SIZE - 1}, {"size": SIZE, "moving_statistics": 2}], ids=str)
def test_a_worker_with_another_model_is_refused_as_by_one_server(wrong: dict[str, int]) -> None:
    rule, start = make("downpour"), np.zeros(SIZE, np.float32)
    texts = []
    servers: list[Any] = [Running(rule, size=SIZE, start=start), DividedServer(rule, start, shards=2)]
    for server in servers:
        with server, contextlib.closing(server.client(0, 0, **wrong)) as client:
            with pytest.raises(ShapeError) as caught:
                client.join()
            texts.append(str(caught.value))
    assert texts[0] == texts[1]


def hung_up(client: Client) -> bool:
    return client.channel is None or client.channel.hung_up()


@pytest.mark.slow
@pytest.mark.parametrize("silent", ["a shard", "a shard and the sequencer"])
def test_a_connection_that_was_silent_for_too_long_loses_no_commit(silent: str) -> None:
    """The server has closed it; the worker connects again, and sends its commit once."""
    lease = brief(0.5) if silent == "a shard" else PATIENT.lease  # heartbeats go to the sequencer, several in a lease
    deadlines = replace(PATIENT, silence=brief(1.0), lease=lease)
    start = np.zeros(SIZE, np.float32)
    with DividedServer(make("downpour", window=1), start, shards=2, workers=1, deadlines=deadlines) as many:
        with contextlib.closing(many.client(0, 0, size=SIZE)) as client:
            client.join()
            client.pull()
            for number in range(2):
                until(lambda: all(hung_up(link) for link in client._connected()._links))  # noqa: SLF001 - its end
                until(lambda: silent == "a shard" or hung_up(client))
                elements = np.full(SIZE, number + 1, np.float32)
                client.commit(CommitRecord(0, number, number, False, True, 0.1, 1.0, (elements,)))
            assert client.sequence == 2
        # The server has closed the first connection of the driver, too.
        with contextlib.closing(SpreadDriverClient(many.address, deadlines)) as driver:
            np.testing.assert_array_equal(driver.center().center, np.full(SIZE, 3, np.float32))
