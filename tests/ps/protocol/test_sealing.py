"""Frames that a man in the middle changes, repeats, drops, reorders or sends back to their sender: all are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import examples
from support.ps.frames import deliver, feed, joined, same_message, shake_hands, some_commit

from distkeras.ps.errors import AuthenticationError, RemoteProtocolError
from distkeras.ps.protocol.driver_messages import Publish, PublishRows, TableRows
from distkeras.ps.protocol.framing import (
    KEY_BYTES,
    TAG_BYTES,
    TAGGED_BYTES_MAX,
    Connection,
    Limits,
    Nonces,
    Reader,
    Seal,
    encode,
)
from distkeras.ps.protocol.messages import Ack, CenterReply, Fault, Message, Pull

KEY = b"k" * KEY_BYTES
SEALED = "the tag of a frame does not match"
HISTORY = np.arange(8.0).reshape(2, 4)
SHORT, LONGER = np.ones(TAGGED_BYTES_MAX // 4, np.float32), np.ones(TAGGED_BYTES_MAX // 4 + 1, np.float32)


def pair() -> tuple[Connection, Connection]:
    """Return a client and a server after the handshake."""
    client, server = Connection(server=False, key=KEY), Connection(server=True, key=KEY)
    shake_hands(client, server)
    return client, server


def center(vector: np.ndarray, **fields: Any) -> CenterReply:
    return CenterReply(1, 2, 3, 4, 0.1, vector, **fields)


@pytest.mark.parametrize(
    "message",
    [
        Ack(1, 2, 3, 4),
        Fault(0, "text", column="x"),
        some_commit(SHORT, LONGER, history=HISTORY),
        some_commit(packed=(np.ones(2 * TAGGED_BYTES_MAX, np.uint8),), history=np.zeros((TAGGED_BYTES_MAX, 3))),
        center(LONGER, moving_statistics=SHORT),
        Publish(LONGER, model=np.ones(TAGGED_BYTES_MAX + 1, np.uint8)),
    ],
    ids=lambda message: type(message).__name__ if isinstance(message, Message) else None,
)
def test_frames_arrive_as_they_were_sent(message: Message) -> None:
    client, server = pair()
    for sender, receiver in ((client, server), (server, client), (client, server)):
        events, _ = deliver(receiver, sender.send(message))
        assert same_message(events[0], message)


COVERED = [Ack(1, 2, 3, 4), Pull(0, 1, 1), Fault(0, "text"), some_commit(np.ones(5, np.float32), history=HISTORY)]


@examples(100)
@given(st.sampled_from(COVERED), st.data())
def test_a_frame_with_a_changed_byte_is_not_accepted(message: Message, data: st.DataObject) -> None:
    client, server = pair()
    frame = bytearray(joined(client.send(message)))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        events, _ = deliver(server, [bytes(frame)])
    except RemoteProtocolError:
        return
    assert events == []  # The reader waits for more bytes.


def deliver_changed(message: Message) -> list[Any]:
    """Deliver a frame in which the last byte of the last array is changed; return the events."""
    client, server = pair()
    frame = bytearray(joined(client.send(message)))
    frame[-1] ^= 0x80
    return deliver(server, [bytes(frame)])[0]


@pytest.mark.parametrize(
    ("message", "covered"),
    [
        (some_commit(SHORT), True),
        (some_commit(LONGER), False),
        (some_commit(packed=(np.ones(TAGGED_BYTES_MAX + 1, np.uint8),)), False),
        (some_commit(LONGER, history=np.zeros((TAGGED_BYTES_MAX, 3))), True),  # The history follows the vector.
        (center(SHORT), True),
        (center(LONGER), False),
        (center(SHORT, moving_statistics=LONGER), False),
        (Publish(LONGER), True),
        (Publish(LONGER, model=np.ones(TAGGED_BYTES_MAX + 1, np.uint8)), True),
        (some_commit(LONGER, wants=(np.arange(TAGGED_BYTES_MAX),)), True),  # Row numbers are not a vector.
        (some_commit(LONGER, touched=(np.arange(TAGGED_BYTES_MAX),), moved=(LONGER,)), False),
        (center(LONGER, rows=(LONGER,)), False),
        (PublishRows(0, 0, LONGER), True),
        (TableRows(0, 0, LONGER), False),
    ],
)
def test_tags_cover_all_but_the_long_vectors(message: Message, covered: bool) -> None:
    """The exceptions are the long vectors of commits and of the center."""
    if covered:
        with pytest.raises(RemoteProtocolError, match=SEALED):
            deliver_changed(message)
    else:
        assert len(deliver_changed(message)) == 1


def replayed(frames: list[bytes]) -> list[bytes]:
    return [frames[0], frames[0]]


def left_out(frames: list[bytes]) -> list[bytes]:
    return [frames[0], frames[2]]


def reordered(frames: list[bytes]) -> list[bytes]:
    return [frames[1]]


@pytest.mark.parametrize("tamper", [replayed, left_out, reordered])
def test_a_repeated_missing_or_reordered_frame_is_refused(tamper: Callable[[list[bytes]], list[bytes]]) -> None:
    client, server = pair()
    frames = [joined(client.send(Pull(0, 1, 1))) for _ in range(3)]
    *fine, last = tamper(frames)
    for frame in fine:
        deliver(server, [frame])
    with pytest.raises(RemoteProtocolError, match=SEALED):
        deliver(server, [last])


def test_no_two_frames_of_a_connection_have_the_same_tag() -> None:
    """Otherwise a recorded frame could be sent again once the counter of frames has wrapped around."""
    seal, frames = Seal(KEY), (1 << 16) + 2
    assert len({seal.tag(Pull, b"head", ()) for _ in range(frames)}) == frames


def test_a_frame_is_valid_in_one_direction_of_one_connection() -> None:
    client, _ = pair()
    frame = joined(client.send(Ack(1, 2, 3, 4)))
    for other in (client, pair()[1]):
        with pytest.raises(RemoteProtocolError, match=SEALED):
            deliver(other, [frame])


def test_a_frame_without_a_tag_is_refused() -> None:
    _, server = pair()
    with pytest.raises(RemoteProtocolError, match=SEALED):
        deliver(server, [*encode(Pull(0, 1, 1)), bytes(TAG_BYTES)])


def test_a_man_in_the_middle_cannot_change_a_nonce() -> None:
    client, server = Connection(server=False, key=KEY), Connection(server=True, key=KEY)
    (challenge,) = feed(Reader(Limits()), joined(server.start()))  # A man in the middle can read it.
    _, answer = deliver(client, encode(dataclasses.replace(challenge, nonce=challenge.nonce ^ 1)))
    with pytest.raises(AuthenticationError, match="the client does not hold"):
        deliver(server, answer)


def test_the_proof_is_not_the_key_of_the_seal() -> None:
    nonces = Nonces(np.zeros(32, np.uint8), np.ones(32, np.uint8))
    tags = {nonces.seal(KEY, role).tag(Ack, b"head", []) for role in (b"server", b"client")}
    tags.add(Seal(nonces.proof(KEY, b"server").tobytes()).tag(Ack, b"head", []))  # The proof is public.
    assert len(tags) == 3
    assert "kkk" not in repr(nonces.seal(KEY, b"server"))
