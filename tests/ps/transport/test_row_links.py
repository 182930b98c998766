"""Mini-batches travel from one worker to another, from any position on, as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT

from distkeras.ps.errors import MemberLostError, RemoteProtocolError
from distkeras.ps.protocol.driver_messages import Goodbye
from distkeras.ps.protocol.framing import Limits
from distkeras.ps.protocol.loop import Position
from distkeras.ps.protocol.messages import FetchBatches, Hello, SentBatch
from distkeras.ps.transport.client import dial
from distkeras.ps.transport.row_links import AHEAD, RawBatch, RowClient, RowServer, arrays_of, layout_of

KEY = bytes(range(32))
BATCHES, EPOCHS = 2 * AHEAD + 3, 3


def batch(epoch: int, number: int) -> RawBatch:
    rows = 4 if number < BATCHES - 1 else 1
    arrays: list[Any] = [
        np.full((rows, 2), 10 * epoch + number, np.float32),
        np.arange(rows, dtype=np.int64),
        np.empty((rows, 0), np.float32),
        np.zeros((rows, 3, 2), np.uint8)[:, ::2],
    ]
    return RawBatch(epoch, number, number == BATCHES - 1, 7 * number, arrays)


def batches(epoch: int, number: int) -> Iterator[RawBatch]:
    for own in range(epoch, EPOCHS):
        for place in range(number if own == epoch else 0, BATCHES):
            yield batch(own, place)


@pytest.fixture
def server() -> Iterator[RowServer]:
    rows = RowServer("127.0.0.1", KEY, PATIENT, batches, workers=2)
    yield rows
    rows.close()


def client(
    server: RowServer, begin: tuple[int, int], key: bytes = KEY, end: Callable[[], Position] = lambda: (EPOCHS, 0)
) -> RowClient:
    return RowClient(server.address, key, PATIENT, hello=Hello(5, 1, 3, 0), begin=begin, end=end)


def assert_equal(found: RawBatch, expected: RawBatch) -> None:
    assert found[:-1] == expected[:-1]
    for own, other in zip(found.arrays, expected.arrays, strict=True):
        assert own.dtype == other.dtype
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("begin", [(0, 0), (0, BATCHES - 1), (1, AHEAD), (2, BATCHES - 1), (3, 0)])
def test_a_worker_gets_all_mini_batches_from_its_position_on(server: RowServer, begin: tuple[int, int]) -> None:
    found = list(client(server, begin))
    assert len(found) == (EPOCHS - begin[0]) * BATCHES - begin[1]
    for own, expected in zip(found, batches(*begin), strict=True):
        assert_equal(own, expected)


@pytest.mark.parametrize("end", [(0, 1), (0, AHEAD), (1, 0), (1, AHEAD + 2)])
def test_no_mini_batch_is_sent_from_the_end_on(server: RowServer, end: Position) -> None:
    found = list(client(server, (0, 0), end=lambda: end))
    assert len(found) == end[0] * BATCHES + end[1]


def test_a_worker_is_sent_what_it_asks_for_and_no_more(server: RowServer) -> None:
    channel = dial(server.address, KEY, PATIENT, limits=Limits(), read_ahead=False)
    channel.send(Hello(5, 1, 3, 0))
    requests = [((0, 2), (0, 4), AHEAD), ((1, BATCHES - 1), (2, 1), AHEAD), ((0, 0), (EPOCHS, 0), 3)]
    for begin, end, count in requests:
        channel.send(FetchBatches(*begin, *end, count))
    channel.send(Goodbye())  # no request for mini-batches: the connection ends
    found = []
    while isinstance(sent := channel.receive(PATIENT.reply, "a mini-batch"), SentBatch):
        found.append((sent.epoch, sent.batch))
    assert found == [(0, 2), (0, 3), (1, BATCHES - 1), (2, 0), (0, 0), (0, 1), (0, 2)]
    channel.close()


def test_an_end_may_come_nearer(server: RowServer) -> None:
    ends = iter([(EPOCHS, 0)])
    found = list(client(server, (0, 0), end=lambda: next(ends, (0, AHEAD))))
    assert len(found) == AHEAD


def test_several_workers_get_them_at_a_time(server: RowServer) -> None:
    pairs = zip(client(server, (0, 0)), client(server, (0, 0)), strict=True)
    for one, other in pairs:
        assert_equal(one, other)


def test_a_worker_without_the_key_gets_none(server: RowServer) -> None:
    with pytest.raises(MemberLostError, match="must send the rows of its partition"):
        next(iter(client(server, (0, 0), bytes(32))))


def test_a_worker_whose_peer_ends_finds_that_out(server: RowServer) -> None:
    rows = iter(client(server, (0, 0)))
    next(rows)
    server.close()
    with pytest.raises(MemberLostError, match="must send the rows of its partition"):
        list(rows)


@pytest.mark.parametrize("layout", ["", "{}", "[]", '[["|O", 4]]', '[["<f4", 3]]', '[["<f4", -1, "x"]]', '[["<f4"]]'])
def test_a_layout_that_is_not_that_of_the_arrays_is_an_error(layout: str) -> None:
    with pytest.raises(RemoteProtocolError, match="the layout of its arrays"):
        arrays_of(SentBatch(0, 0, False, 0, layout, (np.zeros(16, np.uint8),)))


def test_a_layout_describes_any_arrays() -> None:
    arrays = batch(0, 0).arrays
    sent = SentBatch(0, 0, False, 0, layout_of(arrays), tuple(np.frombuffer(a.tobytes(), np.uint8) for a in arrays))
    for own, other in zip(arrays_of(sent), arrays, strict=True):
        np.testing.assert_array_equal(own, other)
