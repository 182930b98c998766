"""Framing without a socket: round trips, one byte at a time, garbage, limits, and vectors in shared memory."""

from __future__ import annotations

import contextlib
import itertools
import struct
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.ps.frames import feed, joined, same_message, shake_hands, some_commit

from distkeras.ps.errors import LocalProtocolError, RemoteProtocolError
from distkeras.ps.protocol import driver_messages, framing, loop, messages
from distkeras.ps.protocol.driver_messages import Publish
from distkeras.ps.protocol.framing import MAGIC, VERSION, Connection, EndOfStream, Limits, Reader, decode, encode
from distkeras.ps.protocol.messages import Ack, CenterReply, Commit, Fault, Message, PeerVector
from distkeras.ps.protocol.registry import MESSAGES
from distkeras.ps.protocol.shared_slots import SLOTS_MAX, TOKEN_BYTES, SharedSlots, SlotSizes
from distkeras.ps.protocol.tables import Ids

ROOMY = Limits(arrays=16)
INT64 = st.integers(-(2**63), 2**63 - 1)


def arrays(dtype: str) -> st.SearchStrategy[np.ndarray]:
    return st.integers(0, 20).map(lambda size: np.arange(size).astype(dtype))


def fields_of(kind: type[Message]) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def any_message() -> st.SearchStrategy[Message]:
    """Return a strategy that draws every message type with any values of its fields' types."""
    strategies = {
        int: INT64,
        bool: st.booleans(),
        float: st.floats(),
        str: st.text(max_size=20),
        loop.Bytes: arrays("u1"),
        loop.Floats: arrays("<f4"),
        loop.Rows: st.tuples(st.integers(0, 4), st.integers(1, 4)).map(np.ones) | st.just(loop.NO_ROWS),
        tuple[loop.Floats, ...]: st.lists(arrays("<f4"), max_size=2).map(tuple),
        tuple[loop.Bytes, ...]: st.lists(arrays("u1"), max_size=2).map(tuple),
        tuple[Ids, ...]: st.lists(arrays("<i8"), max_size=2).map(tuple),
        Ids: arrays("<i8"),
    }
    kinds = [st.builds(kind, **{name: strategies[hint] for name, hint in fields_of(kind).items()}) for kind in MESSAGES]
    return st.one_of(kinds)


def commit(*parts: np.ndarray) -> Commit:
    return some_commit(*parts, worker=3, sequence=7, first=4, last=5, history=np.arange(8.0).reshape(2, 4))


def test_a_partly_received_header_requests_only_its_remaining_bytes() -> None:
    """A read that waits until its spaces are full must not wait for bytes that the peer has no reason to send."""
    reader, data = Reader(Limits()), joined(encode(Ack(1, 2, 3, 4)))
    header = len(reader.spaces()[0])
    reader.spaces()[0][:5] = data[:5]
    assert reader.received(5) is None
    assert sum(map(len, reader.spaces())) == header - 5


def scatter(reader: Reader, data: bytes, sizes: Iterator[int]) -> list[Any]:
    """Return the results of reads of these sizes, each into all available spaces."""
    events = []
    while data:
        left, filled = next(sizes), 0
        for space in reader.spaces():
            count = min(len(space), len(data), left)
            space[:count], data, left = data[:count], data[count:], left - count
            filled += count
        events.append(reader.received(filled))
    return events


@pytest.mark.parametrize("step", [1, 7, 60, 1000])
def test_one_read_may_fill_several_arrays(step: int) -> None:
    message = commit(np.arange(10, dtype=np.float32), np.ones(3, np.float32))
    events = scatter(Reader(Limits()), joined(encode(message)), itertools.repeat(step))
    assert same_message(events.pop(), message)
    assert set(events) <= {None}


@examples(80)
@given(any_message(), st.lists(st.integers(1, 400), min_size=1, max_size=5))
def test_a_read_may_end_anywhere(message: Message, sizes: list[int]) -> None:
    reader = Reader(ROOMY)
    for _ in range(2):
        events = scatter(reader, joined(encode(message)), itertools.cycle(sizes))
        assert same_message(events.pop(), message)
        assert set(events) <= {None}


@pytest.mark.parametrize("more", [1, 10, 300])
def test_a_peer_that_does_not_wait_for_the_answer_is_refused(more: int) -> None:
    data = joined(encode(Ack(1, 2, 3, 4))) + b"D" * more
    with pytest.raises(RemoteProtocolError, match="wait for the answer"):
        scatter(Reader(Limits()), data, itertools.repeat(10_000))


def test_a_reader_keeps_no_reference_to_a_message() -> None:
    """Its connection may be open and idle for long, and must not keep a published model in memory."""
    reader = Reader(Limits())
    (message,) = feed(reader, joined(encode(commit(np.ones(5, np.float32)))))
    part = weakref.ref(message.parts[0])
    del message
    assert part() is None


@examples(80)
@given(st.lists(any_message(), min_size=1, max_size=3), st.sampled_from([None, 1, 7]))
def test_messages_survive_a_round_trip_in_any_pieces(sent: list[Message], step: int | None) -> None:
    reader = Reader(ROOMY)
    events = feed(reader, b"".join(joined(encode(message)) for message in sent), step)
    assert len(events) == len(sent)
    assert all(map(same_message, sent, events))


@examples(100)
@given(any_message(), st.integers(0, 200))
def test_a_whole_frame_is_decoded_and_a_truncated_one_is_refused(message: Message, less: int) -> None:
    frame = joined(encode(message))
    assert same_message(message, decode(frame))
    for other in (frame[: -1 - less], frame + b"D", b"", frame + frame):
        with pytest.raises(RemoteProtocolError):
            decode(other)


@examples(100)
@given(st.binary(max_size=200))
def test_garbage_gives_a_protocol_error_or_waits_for_more(data: bytes) -> None:
    reader = Reader(Limits(body=1000))
    with contextlib.suppress(RemoteProtocolError):
        feed(reader, data)


@examples(100)
@given(any_message(), st.data())
def test_a_damaged_frame_gives_a_protocol_error_a_message_or_waits(message: Message, data: st.DataObject) -> None:
    frame = bytearray(joined(encode(message)))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    reader = Reader(Limits(fields=4096, body=4096, arrays=16))
    with contextlib.suppress(RemoteProtocolError):
        feed(reader, bytes(frame))


@examples(80)
@given(any_message(), st.data())
def test_the_cache_of_checked_tables_changes_no_result(message: Message, data: st.DataObject) -> None:
    """After a sound table, one that differs in its counts, bytes or body has the result that it has without a cache."""
    schema = framing._SCHEMAS[type(message)]  # noqa: SLF001 - the arguments of the cached function
    arrays, numbers = framing._arrays_of(message, schema)  # noqa: SLF001 - the arguments of the cached function
    table = b"".join(struct.pack(">BQ", code, array.size) for _, array, code in arrays)
    counts, body = [numbers[name] for name in schema.counted], sum(array.nbytes for _, array, _ in arrays)
    framing._checked_table(MESSAGES.index(type(message)), tuple(counts), table, body)  # noqa: SLF001 - the cache under test
    changes = st.integers(-2, 2)
    other = bytearray(table)
    if other:
        other[data.draw(st.integers(0, len(other) - 1))] ^= data.draw(st.sampled_from([0, 1, 2, 128]))
    arguments = (
        MESSAGES.index(type(message)),
        tuple(count + data.draw(changes) for count in counts),
        bytes(other),
        body + data.draw(changes),
    )

    def result(check: Callable[..., Any]) -> Any:
        try:
            return check(*arguments)
        except RemoteProtocolError as error:
            return str(error)

    assert result(framing._checked_table) == result(framing._checked_table.__wrapped__)  # noqa: SLF001 - the cache under test


@pytest.mark.parametrize("more", [4, -4])
def test_arrays_that_do_not_fill_the_body_are_refused(more: int) -> None:
    """Bytes left in the body would be read as the next frame. A layout that filled its body was accepted before."""
    frame = bytearray(joined(encode(commit(np.ones(5, np.float32)))))
    at = struct.calcsize(">4sBBHI")  # The offset of the body's size in the header.
    (body,) = struct.unpack_from(">Q", frame, at)
    assert body >= 20
    decode(bytes(frame))
    struct.pack_into(">Q", frame, at, body + more)
    with pytest.raises(RemoteProtocolError, match=f"must fill the body of {body + more} bytes"):
        feed(Reader(Limits()), bytes(frame))


def test_the_end_of_the_stream_is_an_event_between_frames_and_an_error_within_one() -> None:
    reader = Reader(Limits())
    frame = joined(encode(Ack(1, 2, 3, 4)))
    feed(reader, frame)
    assert reader.received(0) == EndOfStream()
    for cut in range(1, len(frame)):
        reader = Reader(Limits())
        feed(reader, frame[:cut])
        with pytest.raises(RemoteProtocolError, match="within one"):
            reader.received(0)


HEADER = struct.Struct(">4sBBHIQ")
ACK = MESSAGES.index(Ack)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (HEADER.pack(b"HTTP", VERSION, ACK, 0, 32, 0), "begin with"),
        (HEADER.pack(MAGIC, VERSION + 1, ACK, 0, 32, 0), "version must be"),
        (HEADER.pack(MAGIC, VERSION, 200, 0, 32, 0), "code 200"),
        (HEADER.pack(MAGIC, VERSION, ACK, 0, 2**32 - 1, 0), "at most"),
        (HEADER.pack(MAGIC, VERSION, ACK, 0, 32, 2**64 - 1), "at most"),
        (HEADER.pack(MAGIC, VERSION, ACK, 65535, 32, 0), "at most"),
        (HEADER.pack(MAGIC, VERSION, ACK, 0, 3, 0), "has more fields"),
    ],
)
def test_a_bad_header_is_refused_before_anything_is_allocated(header: bytes, text: str) -> None:
    def allocate(*_: Any) -> np.ndarray:
        raise AssertionError("allocated")

    with pytest.raises(RemoteProtocolError, match=text):
        feed(Reader(Limits(), allocate), header)


def test_arrays_are_received_into_the_allocated_memory() -> None:
    memory = np.zeros(3, np.float32)

    def allocate(kind: type[Message], dtype: np.dtype, size: int) -> np.ndarray:
        return memory if (dtype, size) == (np.dtype(np.float32), 3) else np.empty(size, dtype)

    reader = Reader(Limits(), allocate)
    (message,) = feed(reader, joined(encode(Publish(np.array([1, 2, 3], np.float32)))))
    assert message.center is memory
    np.testing.assert_array_equal(memory, [1, 2, 3])


def test_arrays_are_sent_without_a_copy() -> None:
    vector = np.zeros(5, np.float32)
    buffers = encode(Publish(vector))
    vector[:] = 7
    np.testing.assert_array_equal(np.frombuffer(buffers[1], np.float32), vector)


@pytest.mark.parametrize(
    "vector", [np.zeros(3, np.int64), np.zeros(3), np.zeros((4, 4), np.float32)[:, 1], np.zeros(2, ">f4")]
)
def test_unsupported_arrays_are_a_local_error(vector: np.ndarray) -> None:
    with pytest.raises(LocalProtocolError, match="contiguous"):
        encode(Publish(vector))


def test_an_array_of_another_dtype_is_refused_before_anything_is_allocated() -> None:
    def allocate(*_: Any) -> np.ndarray:
        raise AssertionError("allocated")

    # ModelFile has no strings and one array of bytes; this header announces three float32.
    fields = struct.pack(">IBQ", 0, 1, 3)
    header = HEADER.pack(MAGIC, VERSION, MESSAGES.index(messages.ModelFile), 1, len(fields) - 4, 12)
    with pytest.raises(RemoteProtocolError, match="arrays of dtypes"):
        feed(Reader(Limits(), allocate), header + fields[4:])


def test_a_string_that_reaches_into_the_length_of_the_next_string_is_refused() -> None:
    fields = struct.pack(">qqqI", 0, -1, -1, 12) + bytes(12)  # A Fault has three numbers and three strings.
    header = HEADER.pack(MAGIC, VERSION, MESSAGES.index(Fault), 0, len(fields), 0)
    with pytest.raises(RemoteProtocolError, match="`column` must end within the fields"):
        feed(Reader(Limits()), header + fields)


def test_surplus_fields_are_refused() -> None:
    frame = joined(encode(Ack(1, 2, 3, 4)))
    fields = frame[HEADER.size :] + bytes(3)
    header = HEADER.pack(MAGIC, VERSION, ACK, 0, len(fields), 0)
    with pytest.raises(RemoteProtocolError, match=f"Ack has {len(fields) - 3} bytes of fields"):
        feed(Reader(Limits()), header + fields)


def test_half_a_surrogate_pair_is_sent_as_its_escape() -> None:
    (fault,) = feed(Reader(Limits()), joined(encode(Fault(0, "file \udcff"))))
    assert fault.message == "file \\udcff"


def test_an_object_that_is_not_a_message_is_a_local_error() -> None:
    with pytest.raises(LocalProtocolError, match="one of the protocol's"):
        encode(cast("Any", "hello"))


@pytest.mark.parametrize(
    ("rows", "columns"), [*((2, columns) for columns in (-1, 3, 5, 0, 2**63 - 1)), (0, 2**60), (0, 2**63 - 1)]
)
def test_incomplete_rows_are_refused_before_anything_is_allocated(rows: int, columns: int) -> None:
    def allocate(*_: Any) -> np.ndarray:
        raise AssertionError("allocated")

    frame = bytearray(joined(encode(driver_messages.WorkerTable(np.zeros((rows, 4))))))
    decode(bytes(frame))  # An equal layout with whole rows was accepted before.
    frame[HEADER.size : HEADER.size + 8] = struct.pack(">q", columns)
    with pytest.raises(RemoteProtocolError, match=f"`rows` must fill its rows of {columns} columns"):
        feed(Reader(Limits(), allocate), bytes(frame))


def test_rows_must_have_two_dimensions() -> None:
    with pytest.raises(LocalProtocolError, match="`rows` must have two dimensions"):
        encode(driver_messages.WorkerTable(np.zeros(4)))


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
    parts = pair.worker.payloads()[1]
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
    (payload,) = pair.worker.payloads()[0]
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
    (payload,) = pair.worker.payloads()[0]
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
        pair.send(some_commit(*pair.worker.payloads()[0]))
    other = Pair()
    other.client_end.share(None)
    event, _ = other.send(some_commit(*other.worker.payloads()[0]))
    assert event.parts[0].tolist() == [0] * 5
    assert isinstance(other.send(Ack(1, 2, 3, 4))[0], Ack)
