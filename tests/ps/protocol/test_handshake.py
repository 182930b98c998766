"""The handshake of two ends in memory: keys, replays, strangers, limits."""

from __future__ import annotations

import numpy as np
import pytest
from support.ps.frames import deliver, same_message, shake_hands, some_commit

from distkeras.ps.errors import AuthenticationError, ConfigurationError, LocalProtocolError, RemoteProtocolError
from distkeras.ps.protocol import driver_messages, messages
from distkeras.ps.protocol.driver_messages import Publish
from distkeras.ps.protocol.framing import KEY_BYTES, Connection, Limits, Nonces, encode
from distkeras.ps.protocol.messages import Ack, Fault, Message

KEY, ANOTHER_KEY = b"k" * KEY_BYTES, b"x" * KEY_BYTES


def pair(client_key: bytes = KEY, server_key: bytes = KEY) -> tuple[Connection, Connection]:
    return Connection(server=False, key=client_key), Connection(server=True, key=server_key)


def test_both_ends_prove_the_key_before_they_exchange_messages() -> None:
    client, server = pair()
    shake_hands(client, server)
    assert client.authenticated
    assert server.authenticated
    events, _ = deliver(server, client.send(Ack(1, 2, 3, 4)))
    assert same_message(events[0], Ack(1, 2, 3, 4))


def test_a_client_with_another_key_is_refused() -> None:
    client, server = pair(client_key=ANOTHER_KEY)
    _, answer = deliver(client, server.start())
    with pytest.raises(AuthenticationError, match="the client does not hold"):
        deliver(server, answer)
    assert not server.authenticated


def test_a_server_with_another_key_is_refused() -> None:
    client, imposter = pair(server_key=ANOTHER_KEY)
    deliver(client, imposter.start())
    forged = messages.Proof(Nonces(imposter.nonce, client.nonce).proof(ANOTHER_KEY, b"server"))
    with pytest.raises(AuthenticationError, match="the server does not hold"):
        deliver(client, encode(forged))
    assert not client.authenticated


def test_the_proofs_of_the_two_ends_differ() -> None:
    nonces = Nonces(np.zeros(32, np.uint8), np.zeros(32, np.uint8))
    assert nonces.proof(KEY, b"server").tobytes() != nonces.proof(KEY, b"client").tobytes()


def test_a_replayed_answer_is_refused() -> None:
    client, server = pair()
    _, answer = deliver(client, server.start())
    another = Connection(server=True, key=KEY)
    with pytest.raises(AuthenticationError):
        deliver(another, answer)


def test_a_replayed_proof_is_refused() -> None:
    """A stranger that has recorded a server's proof cannot use it with another client."""
    client, server = pair()
    challenge = server.start()
    _, answer = deliver(client, challenge)
    _, proof = deliver(server, answer)
    another = Connection(server=False, key=KEY)
    deliver(another, challenge)
    with pytest.raises(AuthenticationError, match="the server does not hold"):
        deliver(another, proof)


@pytest.mark.parametrize(
    "message",
    [
        Ack(1, 2, 3, 4),
        Fault(0, "x"),
        Publish(np.zeros(4, np.float32)),
        messages.FetchModel(),
        driver_messages.Abort("x"),
    ],
)
def test_other_messages_are_refused_before_the_handshake_ends(message: Message) -> None:
    _, server = pair()
    with pytest.raises(RemoteProtocolError, match="must be one of Answer"):
        deliver(server, encode(message))


def test_a_large_frame_is_refused_during_the_handshake() -> None:
    _, server = pair()
    with pytest.raises(RemoteProtocolError, match="at most"):
        deliver(server, encode(messages.Answer(np.zeros(33, np.uint8), np.zeros(32, np.uint8))))


def test_no_message_is_sent_before_the_handshake_ends() -> None:
    client, _ = pair()
    with pytest.raises(LocalProtocolError, match="handshake"):
        client.send(Ack(1, 2, 3, 4))


def test_a_second_handshake_is_refused() -> None:
    client, server = pair()
    shake_hands(client, server)
    with pytest.raises(RemoteProtocolError):
        deliver(client, encode(messages.Challenge(np.zeros(32, np.uint8))))


def test_the_key_stays_out_of_the_repr() -> None:
    assert "kkk" not in repr(pair()[0])


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="32 bytes"):
        Connection(server=True, key=b"short")


def test_limits_are_checked_per_frame() -> None:
    client, server = pair()
    shake_hands(client, server)
    server.set_limits(Limits(body=8))
    commit = some_commit(np.zeros(3, np.float32))
    with pytest.raises(RemoteProtocolError, match="at most"):
        deliver(server, client.send(commit))
