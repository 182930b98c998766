"""Frames whose vectors are in shared memory: what they contain instead of the bytes, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.ps.frames import shake_hands, some_commit

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.protocol.framing import Connection, Limits
from distkeras.ps.protocol.messages import Ack, CenterReply, Commit, Message, PeerVector
from distkeras.ps.protocol.shared_slots import SLOTS_MAX, TOKEN_BYTES, SharedSlots, SlotSizes

KEY = bytes(range(32))
SIZES = SlotSizes(5, parts=2)
PACKED = SlotSizes(5, parts=1, packed=7)


class Pair:
    """Both ends of a connection that share memory: the worker's and the server's."""

    def __init__(self, sizes: SlotSizes = SIZES) -> None:
        memory = memoryview(bytearray(sizes.nbytes))
        self.worker, self.server = SharedSlots(sizes, memory, server=False), SharedSlots(sizes, memory, server=True)
        self.client_end = Connection(server=False, key=KEY)
        self.server_end = Connection(server=True, key=KEY)
        shake_hands(self.client_end, self.server_end)
        self.client_end.share(self.worker)
        self.server_end.share(self.server)

    def send(self, message: Message, *, by_worker: bool = True) -> tuple[Any, int]:
        """Send a message; return what arrives, and the number of bytes that travel."""
        source, sink = (self.client_end, self.server_end)[:: 1 if by_worker else -1]
        data = b"".join(bytes(buffer) for buffer in source.send(message))
        rest, event = memoryview(data), None
        while rest:
            space = sink.spaces()[0]
            count = min(len(space), len(rest))
            space[:count], rest = rest[:count], rest[count:]
            event, _ = sink.received(count)
        return event, len(data)


def reply(center: np.ndarray, **fields: Any) -> CenterReply:
    return CenterReply(1, 2, 3, 3, 0.0, center, **fields)


def test_a_payload_in_its_slots_does_not_travel() -> None:
    pair = Pair()
    parts = pair.worker.payload(1)
    for number, part in enumerate(parts):
        part[...] = np.arange(5) + number
    event, traveled = pair.send(some_commit(*parts))
    plain, longer = pair.send(some_commit(*(part.copy() for part in parts)))
    assert longer == traveled + 2 * 5 * 4
    for arrived in (event, plain):
        assert isinstance(arrived, Commit)
        np.testing.assert_array_equal(arrived.parts, [np.arange(5), np.arange(5) + 1])
    parts[0][...] = -1.0  # This is for the next commit: the server has its own copy.
    assert event.parts[0].tolist() == [0, 1, 2, 3, 4]


def test_an_encoded_payload_in_its_slot_does_not_travel() -> None:
    pair = Pair(PACKED)
    (packed,) = pair.worker.packed_payload()
    packed[...] = range(7)
    event, traveled = pair.send(some_commit(packed=(packed,)))
    _, longer = pair.send(some_commit(packed=(packed.copy(),)))
    assert longer == traveled + 7
    assert event.packed[0].tolist() == list(range(7))


def test_centers_alternate_between_two_slots() -> None:
    pair = Pair()
    centers = [np.full(5, number, np.float32) for number in range(3)]
    events = [pair.send(reply(center), by_worker=False)[0] for center in centers[:2]]
    assert [event.center[0] for event in events] == [0, 1]
    third, _ = pair.send(reply(centers[2], moving_statistics=np.ones(5, np.float32)), by_worker=False)
    assert [event.center[0] for event in (*events, third)] == [2, 1, 2]  # The third center is in the slot of the first.
    assert third.moving_statistics.tolist() == [1] * 5


def test_an_encoded_center_and_a_whole_center_alternate_between_two_slots() -> None:
    pair = Pair(PACKED)
    whole, _ = pair.send(reply(np.arange(5, dtype=np.float32)), by_worker=False)
    packed, _ = pair.send(reply(np.empty(0, np.float32), packed=np.arange(7, dtype=np.uint8)), by_worker=False)
    assert whole.center.tolist() == [0, 1, 2, 3, 4]
    assert packed.packed.tolist() == list(range(7))


TABLES = SlotSizes(2, parts=1, rows=(6, 4))


def test_rows_have_slots_of_their_own() -> None:
    pair = Pair(TABLES)
    (payload,) = pair.worker.payload(0)
    payload[...] = np.arange(12)
    dense, users, items = payload[:2], payload[2:6], payload[8:9]
    event, traveled = pair.send(some_commit(dense, moved=(users, items)))
    copies = (users.copy(), items.copy())
    _, longer = pair.send(some_commit(dense.copy(), moved=copies))
    assert longer == traveled + 4 * (2 + 4 + 1)
    assert [part.tolist() for part in (*event.parts, *event.moved)] == [[0, 1], [2, 3, 4, 5], [8]]
    payload[...] = -1.0  # This is for the next commit: the server has its own copy.
    assert event.moved[0].tolist() == [2, 3, 4, 5]


def test_rows_of_replies_alternate_between_two_slots() -> None:
    pair = Pair(TABLES)
    events = []
    for number in range(3):
        users, items = pair.server.rows_of_reply([6, 2])
        assert users is not None
        assert items is not None
        users.fill(number)
        items.fill(number)
        center = np.full(2, number, np.float32)
        event, traveled = pair.send(reply(center, rows=(users, items)), by_worker=False)
        _, longer = Pair(TABLES).send(reply(center, rows=(users.copy(), items.copy())), by_worker=False)
        assert longer == traveled + 4 * (6 + 2)
        events.append(event)
    assert [[part.tolist() for part in event.rows] for event in events[1:]] == [[[n] * 6, [n] * 2] for n in (1, 2)]
    assert events[0].rows[0].tolist() == [2] * 6  # The third reply's rows are in the slot of the first.


def test_rows_travel_if_there_are_more_tables_than_slots() -> None:
    sizes = SlotSizes(2, parts=1, rows=(3,) * 12)
    assert sizes.slots <= SLOTS_MAX
    pair = Pair(sizes)
    (payload,) = pair.worker.payload(0)
    payload[...] = np.arange(38)
    moved = tuple(payload[2:].reshape(12, 3))
    pair.server_end.set_limits(Limits(arrays=16))
    event, _ = pair.send(some_commit(payload[:2], moved=moved))
    np.testing.assert_array_equal(event.moved, moved)
    rows = pair.server.rows_of_reply([3] * 12)
    assert [row is None for row in rows] == [number >= sizes.per_area - 1 for number in range(12)]


def test_more_rows_than_a_slot_has_are_refused() -> None:
    pair = Pair(TABLES)
    false_slots = SlotsWithFalseNumber(TABLES, memoryview(bytearray(TABLES.nbytes)), server=False)
    false_slots.slot = 1
    pair.client_end.share(false_slots)
    with pytest.raises(RemoteProtocolError, match=r"a slot must be one of .* or with rows"):
        pair.send(some_commit(np.ones(7, np.float32)))


def test_a_center_of_another_size_travels() -> None:
    pair = Pair()
    event, _ = pair.send(reply(np.ones(4, np.float32)), by_worker=False)
    assert event.center.tolist() == [1] * 4


def test_a_server_cannot_write_to_payloads() -> None:
    pair = Pair()
    for slot in range(SIZES.payloads):
        with pytest.raises(ValueError, match="read-only"):
            pair.server.read(slot, np.dtype("<f4"), 5)[0] = 1.0


@pytest.mark.parametrize("by_worker", [True, False])
def test_vectors_of_members_alternate_between_two_slots_and_are_not_copied(by_worker: bool) -> None:
    pair = Pair(SlotSizes(5, parts=1))
    answer, _ = pair.send(PeerVector(0, 7, np.full(5, 9, np.float32)), by_worker=not by_worker)
    sent = [PeerVector(0, 7, np.full(5, number, np.float32)) for number in range(3)]
    events, traveled = zip(*[pair.send(message, by_worker=by_worker) for message in sent], strict=True)
    # The third vector is in the slot of the first.
    assert [event.vector[0] for event in (*events, answer)] == [2, 1, 2, 9]
    assert all(event.vector.base is not None for event in events)
    own = (pair.worker if by_worker else pair.server).next_vector()
    own.fill(3)
    assert [event.vector[0] for event in events] == [2, 3, 2]  # This is the slot that the next vector uses.
    fourth, _ = pair.send(PeerVector(0, 7, own), by_worker=by_worker)
    fifth, _ = pair.send(PeerVector(0, 7, np.full(5, 4, np.float32)), by_worker=by_worker)
    assert [event.vector[0] for event in (fourth, fifth)] == [3, 4]
    empty, bare = pair.send(PeerVector(0, 7, np.empty(0, np.float32), members=0), by_worker=by_worker)
    assert {*traveled} == {bare}
    assert (empty.vector.size, empty.members) == (0, 0)


def test_the_server_finds_only_the_token_that_the_worker_has_written() -> None:
    pair = Pair()
    token = bytes(range(TOKEN_BYTES))
    assert not pair.server.has_token(token)
    pair.worker.write_token(token)
    assert pair.server.has_token(token)
    assert not pair.server.has_token(bytes(TOKEN_BYTES))


class SlotsWithFalseNumber(SharedSlots):
    """Slots that claim one fixed slot for every vector that is not empty."""

    slot = 0

    def slot_of(self, kind: type[Message], name: str, array: np.ndarray) -> int | None:
        return self.slot if array.size else None


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        (SIZES.payloads, some_commit(np.ones(5, np.float32))),
        (SIZES.slots, some_commit(np.ones(5, np.float32))),
        (SLOTS_MAX - 1, some_commit(np.ones(5, np.float32))),
        (0, some_commit(np.ones(4, np.float32))),
        (0, some_commit(packed=(np.ones(5, np.uint8),))),
        (0, some_commit(packed=(np.ones(20, np.uint8),))),
        (0, some_commit(history=np.ones((1, 5)))),
        (0, reply(np.ones(5, np.float32))),
        (SIZES.payloads, PeerVector(0, 7, np.ones(5, np.float32))),
    ],
    ids=[
        "a reply's slot",
        "no slot",
        "far away",
        "too short",
        "bytes",
        "as many bytes",
        "float64",
        "a reply",
        "its own",
    ],
)
def test_a_worker_may_name_payloads_only(slot: int, message: Message) -> None:
    pair = Pair()
    false_slots = SlotsWithFalseNumber(SIZES, memoryview(bytearray(SIZES.nbytes)), server=False)
    false_slots.slot = slot
    pair.client_end.share(false_slots)
    with pytest.raises(RemoteProtocolError, match="a slot must be one of"):
        pair.send(message)


def test_a_server_may_name_replies_only() -> None:
    pair = Pair()
    pair.server_end.share(SlotsWithFalseNumber(SIZES, memoryview(bytearray(SIZES.nbytes)), server=True))
    with pytest.raises(RemoteProtocolError, match="a slot must be one of"):
        pair.send(reply(np.ones(5, np.float32)), by_worker=False)


def test_an_end_without_shared_memory_names_and_accepts_no_slot() -> None:
    pair = Pair()
    pair.server_end.share(None)
    with pytest.raises(RemoteProtocolError, match="share no memory"):
        pair.send(some_commit(*pair.worker.payload(0)))
    other = Pair()
    other.client_end.share(None)
    event, _ = other.send(some_commit(*other.worker.payload(0)))
    assert event.parts[0].tolist() == [0] * 5
    assert isinstance(other.send(Ack(1, 2, 3, 4))[0], Ack)
