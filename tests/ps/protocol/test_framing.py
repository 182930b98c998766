"""The protocol without a socket: round trips, one byte at a time, garbage, bounds, handshake."""

from __future__ import annotations

import contextlib
import itertools
import struct
import typing
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distkeras.ps.errors import AuthenticationError, ConfigurationError, LocalProtocolError, RemoteProtocolError
from distkeras.ps.protocol import messages
from distkeras.ps.protocol.framing import MAGIC, VERSION, Connection, EndOfStream, Limits, Reader, encode
from distkeras.ps.protocol.messages import MESSAGES, Ack, Commit, Fault, Publish

KEY = b"k" * 32
INT64 = st.integers(-(2**63), 2**63 - 1)


def joined(buffers) -> bytes:
    return b"".join(bytes(buffer) for buffer in buffers)


def feed(reader, data: bytes, step: int | None = None) -> list:
    """Gives ``data`` to a Reader, ``step`` bytes at a time; returns its events."""
    events = []
    while data:
        space = reader.space()
        count = min(len(space), len(data), step or len(data))
        space[:count] = data[:count]
        data = data[count:]
        event = reader.received(count)
        if event is not None:
            events.append(event)
    return events


def equal(a, b) -> bool:
    if type(a) is not type(b):
        return False
    for name, value in vars(a).items():
        other = getattr(b, name)
        if isinstance(value, np.ndarray):
            if value.dtype != other.dtype or not np.array_equal(value, other, equal_nan=value.dtype.kind == "f"):
                return False
        elif isinstance(value, tuple):
            if len(value) != len(other) or not all(map(np.array_equal, value, other)):
                return False
        elif value != other and not (value != value and other != other):
            return False
    return True


def arrays(dtype):
    return st.integers(0, 20).map(lambda size: np.arange(size).astype(dtype))


def fields_of(kind):
    return typing.get_type_hints(kind, include_extras=True)


def any_message():
    """Every message type, with any values of its fields' types."""
    strategies = {
        int: INT64,
        bool: st.booleans(),
        float: st.floats(),
        str: st.text(max_size=20),
        messages.Bytes: arrays("u1"),
        messages.Floats: arrays("<f4"),
        messages.Doubles: arrays("<f8"),
        tuple[messages.Floats, ...]: st.lists(arrays("<f4"), max_size=2).map(tuple),
        tuple[messages.Bytes, ...]: st.lists(arrays("u1"), max_size=2).map(tuple),
    }
    kinds = [st.builds(kind, **{name: strategies[hint] for name, hint in fields_of(kind).items()}) for kind in MESSAGES]
    return st.one_of(kinds)


def commit(*parts: np.ndarray) -> Commit:
    return Commit(3, 1, 1, 7, 0, 4, 5, False, True, 0.1, 1.0, 0.0, parts, history=np.arange(8.0))


def scatter(reader: Reader, data: bytes, sizes: Iterator[int]) -> list[Any]:
    """What comes of reads of these sizes into all the spaces there are."""
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
def test_one_read_may_fill_several_arrays(step):
    message = commit(np.arange(10, dtype=np.float32), np.ones(3, np.float32))
    events = scatter(Reader(Limits()), joined(encode(message)), itertools.repeat(step))
    assert equal(events.pop(), message)
    assert set(events) <= {None}


@settings(max_examples=200)
@given(any_message(), st.lists(st.integers(1, 400), min_size=1, max_size=5))
def test_a_read_may_end_anywhere(message, sizes):
    reader = Reader(Limits())
    for _ in range(2):
        events = scatter(reader, joined(encode(message)), itertools.cycle(sizes))
        assert equal(events.pop(), message)
        assert set(events) <= {None}


@pytest.mark.parametrize("more", [1, 10, 300])
def test_a_peer_that_does_not_wait_for_the_answer(more):
    data = joined(encode(Ack(1, 2, 3, 4))) + b"D" * more
    with pytest.raises(RemoteProtocolError, match="wait for the answer"):
        scatter(Reader(Limits()), data, itertools.repeat(10_000))


def test_a_reader_lets_go_of_what_it_has_read():
    """Its connection may live long and hear no more: a published model must not stay in memory for that."""
    reader = Reader(Limits())
    (message,) = feed(reader, joined(encode(commit(np.ones(5, np.float32)))))
    part = weakref.ref(message.parts[0])
    del message
    assert part() is None


@settings(max_examples=200)
@given(st.lists(any_message(), min_size=1, max_size=3), st.sampled_from([None, 1, 7]))
def test_round_trip_in_any_pieces(sent, step):
    reader = Reader(Limits())
    events = feed(reader, b"".join(joined(encode(message)) for message in sent), step)
    assert len(events) == len(sent)
    assert all(map(equal, sent, events))


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_garbage_gives_a_protocol_error_or_waits_for_more(data):
    reader = Reader(Limits(body=1000))
    with contextlib.suppress(RemoteProtocolError):
        feed(reader, data)


@settings(max_examples=300)
@given(any_message(), st.data())
def test_a_damaged_frame_gives_a_protocol_error_a_message_or_waits(message, data):
    frame = bytearray(joined(encode(message)))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    reader = Reader(Limits(fields=4096, body=4096))
    with contextlib.suppress(RemoteProtocolError):
        feed(reader, bytes(frame))


def test_the_end_of_the_stream_is_an_event_between_frames_and_an_error_within_one():
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
def test_a_bad_header_is_refused_before_anything_is_allocated(header, text):
    def allocate(*_):
        raise AssertionError("allocated")

    with pytest.raises(RemoteProtocolError, match=text):
        feed(Reader(Limits(), allocate), header)


def test_arrays_are_received_into_the_memory_that_is_given():
    memory = np.zeros(3, np.float32)

    def allocate(kind, dtype, size):
        return memory if (dtype, size) == (np.float32, 3) else np.empty(size, dtype)

    reader = Reader(Limits(), allocate)
    (message,) = feed(reader, joined(encode(Publish(np.array([1, 2, 3], np.float32)))))
    assert message.center is memory
    np.testing.assert_array_equal(memory, [1, 2, 3])


def test_arrays_are_sent_without_a_copy():
    vector = np.zeros(5, np.float32)
    buffers = encode(Publish(vector))
    vector[:] = 7
    np.testing.assert_array_equal(np.frombuffer(buffers[1], np.float32), vector)


@pytest.mark.parametrize(
    "vector", [np.zeros(3, np.int64), np.zeros(3), np.zeros((4, 4), np.float32)[:, 1], np.zeros(2, ">f4")]
)
def test_arrays_that_do_not_travel_are_a_local_error(vector):
    with pytest.raises(LocalProtocolError, match="contiguous"):
        encode(Publish(vector))


def test_an_array_of_another_dtype_is_refused_before_anything_is_allocated():
    def allocate(*_):
        raise AssertionError("allocated")

    fields = struct.pack(">IBQ", 0, 1, 3)  # ModelFile has no strings, and an array of bytes: here come three float32
    header = HEADER.pack(MAGIC, VERSION, MESSAGES.index(messages.ModelFile), 1, len(fields) - 4, 12)
    with pytest.raises(RemoteProtocolError, match="arrays of dtypes"):
        feed(Reader(Limits(), allocate), header + fields[4:])


def test_a_string_that_takes_the_room_of_the_next_ones_length_is_refused():
    fields = struct.pack(">qqqI", 0, -1, -1, 12) + bytes(12)  # a Fault: three numbers, three strings
    header = HEADER.pack(MAGIC, VERSION, MESSAGES.index(Fault), 0, len(fields), 0)
    with pytest.raises(RemoteProtocolError, match="`column` must end within the fields"):
        feed(Reader(Limits()), header + fields)


def test_half_a_surrogate_pair_travels_as_its_escape():
    (fault,) = feed(Reader(Limits()), joined(encode(Fault(0, "file \udcff"))))
    assert fault.message == "file \\udcff"


def test_what_is_not_a_message_is_a_local_error():
    with pytest.raises(LocalProtocolError, match="one of the protocol's"):
        encode("hello")


class TestHandshake:
    def pair(self, client_key=KEY, server_key=KEY):
        return Connection(server=False, key=client_key), Connection(server=True, key=server_key)

    def give(self, to: Connection, buffers):
        """Bytes to one end; returns its messages and what it wants sent."""
        data, events, out = joined(buffers), [], []
        while data:
            space = to.space()
            count = min(len(space), len(data))
            space[:count] = data[:count]
            data = data[count:]
            event, answer = to.received(count)
            out += answer
            if event is not None:
                events.append(event)
        return events, out

    def shake(self, client, server):
        _, answer = self.give(client, server.start())
        _, proof = self.give(server, answer)
        self.give(client, proof)

    def test_both_ends_prove_the_key_and_then_talk(self):
        client, server = self.pair()
        self.shake(client, server)
        assert client.authenticated
        assert server.authenticated
        events, _ = self.give(server, client.send(Ack(1, 2, 3, 4)))
        assert equal(events[0], Ack(1, 2, 3, 4))

    def test_a_client_with_another_key_is_refused(self):
        client, server = self.pair(client_key=b"x" * 32)
        _, answer = self.give(client, server.start())
        with pytest.raises(AuthenticationError, match="the client must hold"):
            self.give(server, answer)
        assert not server.authenticated

    def test_a_server_with_another_key_is_refused(self):
        client, _ = self.pair()
        _, imposter = self.pair(server_key=b"x" * 32)
        self.give(client, imposter.start())
        forged = messages.Proof(imposter._proof(b"server", imposter._nonce, client._nonce))
        with pytest.raises(AuthenticationError, match="the server must hold"):
            self.give(client, encode(forged))
        assert not client.authenticated

    def test_a_replayed_answer_is_refused(self):
        client, server = self.pair()
        _, answer = self.give(client, server.start())
        another = Connection(server=True, key=KEY)
        with pytest.raises(AuthenticationError):
            self.give(another, answer)

    @pytest.mark.parametrize(
        "message",
        [Ack(1, 2, 3, 4), Fault(0, "x"), Publish(np.zeros(4, np.float32)), messages.FetchModel(), messages.Abort("x")],
    )
    def test_nothing_else_is_read_before_it_is_over(self, message):
        _, server = self.pair()
        with pytest.raises(RemoteProtocolError, match="must be one of Answer"):
            self.give(server, encode(message))

    def test_its_frames_are_small(self):
        _, server = self.pair()
        with pytest.raises(RemoteProtocolError, match="at most"):
            self.give(server, encode(messages.Answer(np.zeros(33, np.uint8), np.zeros(32, np.uint8))))

    def test_nothing_is_sent_before_it_is_over(self):
        client, _ = self.pair()
        with pytest.raises(LocalProtocolError, match="handshake"):
            client.send(Ack(1, 2, 3, 4))

    def test_it_is_not_repeated(self):
        client, server = self.pair()
        self.shake(client, server)
        with pytest.raises(RemoteProtocolError):
            self.give(client, encode(messages.Challenge(np.zeros(32, np.uint8))))

    def test_the_key_stays_out_of_the_repr(self):
        assert "kkk" not in repr(self.pair()[0])

    def test_a_short_key_is_refused(self):
        with pytest.raises(ConfigurationError, match="32 bytes"):
            Connection(server=True, key=b"short")


def test_limits_are_checked_per_frame():
    client, server = TestHandshake().pair()
    TestHandshake().shake(client, server)
    server.bound(Limits(body=8))
    commit = Commit(0, 0, 1, 1, 0, 0, 0, False, True, 0.1, 1.0, 0.0, (np.zeros(3, np.float32),))
    with pytest.raises(RemoteProtocolError, match="at most"):
        TestHandshake().give(server, client.send(commit))
