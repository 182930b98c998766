"""Both ends of a wire format in memory: one decodes what the other encodes, and invalid replies are refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.ps.frames import some_commit

from distkeras.ps.center.buffers import Pool
from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.protocol.compression import Int8, PeerFormat, WorkerFormat
from distkeras.ps.protocol.loop import NO_FLOATS
from distkeras.ps.protocol.messages import CenterReply
from distkeras.ps.server.job_state import PeerVectors

SIZE = 7


def reply(center: np.ndarray) -> CenterReply:
    return CenterReply(1, 0, 0, 0, 0.0, center)


def vector(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


def take() -> np.ndarray:
    return np.empty(SIZE, np.float32)


def take_bytes() -> np.ndarray:
    return np.empty(Int8(SIZE).nbytes, np.uint8)


def test_float32_vectors_are_sent_unchanged() -> None:
    assert WorkerFormat("float32", SIZE).nbytes is None
    vectors, answer = PeerVectors(), reply(vector(0))
    vectors.agree(None, Pool(SIZE))
    assert vectors.encode(answer, whole=False) is answer


def test_the_first_reply_is_whole_and_later_replies_are_differences() -> None:
    worker, peer = WorkerFormat("int8", SIZE), PeerFormat(Int8(SIZE))
    first = peer.encode(reply(vector(0)), take_bytes, whole=False)
    assert not first.packed.size
    known, out = first.center, take()
    for seed in range(1, 5):
        center = vector(seed)
        answer = peer.encode(reply(center), take_bytes, whole=False)
        assert (answer.center.size, answer.packed.size) == (0, worker.nbytes)
        worker.decode(answer, known, out)
        np.testing.assert_allclose(out, center, atol=0.05)
        known, out = out, take()
    assert not peer.encode(reply(vector(9)), take_bytes, whole=True).packed.size


def test_the_residual_is_added_to_the_next_commit_until_it_is_reset() -> None:
    worker, peer = WorkerFormat("int8", SIZE), PeerFormat(Int8(SIZE))
    small = np.zeros(SIZE, np.float32)
    small[:2] = 127.0, 0.4

    def sent() -> np.ndarray:
        packed = worker.encode((small,))
        message = some_commit(packed=packed)
        part = take()
        peer.decode(message, [part])
        return part

    assert [float(sent()[1]) for _ in range(3)] == [0.0, 1.0, 0.0]
    worker.forget_residuals()
    assert [float(sent()[1]) for _ in range(2)] == [0.0, 1.0]


def test_a_difference_to_an_unknown_center_is_refused() -> None:
    worker, out = WorkerFormat("int8", SIZE), take()
    change = dataclasses.replace(reply(NO_FLOATS), packed=np.zeros(Int8(SIZE).nbytes, np.uint8))
    with pytest.raises(RemoteProtocolError, match="whole before a change of it"):
        worker.decode(change, None, out)
    worker.decode(change, vector(0), out)
    np.testing.assert_array_equal(out, vector(0))
    with pytest.raises(RemoteProtocolError, match=f"Received: 0 elements and {SIZE} bytes"):
        worker.decode(dataclasses.replace(change, packed=change.packed[:SIZE]), vector(0), out)
