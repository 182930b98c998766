"""Members over real connections: invalid messages between them, and the memory that they share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, until
from support.ps.clocks import counting_pieces

from distkeras.ps.errors import MemberLostError, RemoteProtocolError
from distkeras.ps.protocol.messages import PeerVector
from distkeras.ps.transport.members import MemberLinks, Membership, Purpose
from distkeras.ps.world.world import World

SIZE = 5
THETA = np.arange(SIZE, dtype=np.float32)
#: What the second member sends instead of its parameters after step 7.
WRONG = {
    "must send a PeerVector of step 7": PeerVector(Purpose.PARAMETERS, 8, THETA),
    "must send PARAMETERS": PeerVector(Purpose.GRADIENT, 7, THETA, members=1),
}


@contextmanager
def connected(count: int, nodes: int, **options: Any) -> Iterator[list[MemberLinks]]:
    """Yield the links of so many connected members, distributed over these nodes."""
    with ExitStack() as stack:
        make = partial(MemberLinks, "127.0.0.1", b"k" * 32, attempt=0, size=SIZE, deadlines=PATIENT, **options)
        links = [stack.enter_context(closing(make(worker=worker))) for worker in range(count)]
        places = tuple((worker, *link.address) for worker, link in enumerate(links))
        call_concurrently(
            [partial(link.connect, Membership(places, nodes, rank, 9)) for rank, link in enumerate(links)]
        )
        yield links


def call_concurrently(calls: list[Any]) -> list[Any]:
    """Call each function in a thread of its own; return the results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [wait.result() for wait in [pool.submit(call) for call in calls]]


@pytest.fixture
def members() -> Iterator[tuple[MemberLinks, MemberLinks]]:
    """Yield the links of two connected members, each on a node of its own."""
    with connected(2, nodes=2) as (first, second):
        yield first, second


@pytest.mark.parametrize("message", WRONG)
def test_an_unexpected_message_is_refused(members: tuple[MemberLinks, MemberLinks], message: str) -> None:
    first, second = members
    second._send(0, WRONG[message])  # noqa: SLF001 - no member does this
    with pytest.raises(RemoteProtocolError, match=message):
        first.sum_parameters(7, THETA, cast=False)


def test_a_failed_posted_sum_raises_before_its_connections_are_used_again(
    members: tuple[MemberLinks, MemberLinks],
) -> None:
    first, second = members
    first.post(6, THETA)
    second._send(0, WRONG["must send PARAMETERS"])  # noqa: SLF001 - no member does this
    with pytest.raises(RemoteProtocolError, match="of step 6"):
        first.wait_for_posted(7)


class NoMemory(World):
    """A system without anonymous files."""

    def share(self, size: int) -> Any:
        raise OSError(38, "no anonymous files")


class OtherUser(World):
    """A system on which a process may not map another's memory."""

    def map_shared(self, place: str, size: int) -> memoryview:
        raise PermissionError(13, "not yours")


#: How a node of three members exchanges, and how many pieces are mapped: two for each member but the first.
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "shared memory": ({}, 4),
    "switched off": ({"shared": False}, 0),
    "none is available": ({"world": NoMemory()}, 0),
    "it cannot be mapped": ({"world": OtherUser()}, 0),
}


def gradient_or_none(worker: int, step: int) -> np.ndarray | None:
    """Return a member's gradient, or None after its last row; a lower rank has more rows."""
    if step > 3 - worker:
        return None
    return np.random.default_rng((worker, step)).normal(size=SIZE).astype(np.float32)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no anonymous files")
@pytest.mark.parametrize("way", WAYS)
def test_a_node_computes_the_same_numbers_with_and_without_shared_memory(way: str) -> None:
    options, expected_pieces = WAYS[way]
    pieces = counting_pieces()
    with connected(3, nodes=1, **options) as links:
        assert pieces(os.getpid()) == expected_pieces

        def work(worker: int) -> list[tuple[bytes, int]]:
            done = []
            for step in range(5):
                own = gradient_or_none(worker, step)
                if own is not None:
                    memory = links[worker].memory_of_gradient()
                    memory[...] = own
                    own = memory
                total, count, _ = links[worker].sum_gradients(step, own, 0.1)
                done.append((total.tobytes(), count))
                source = step % 3
                sent = THETA + step if worker == source else None
                done.append((links[worker].broadcast(step, source, sent).tobytes(), source))
            return done

        first, *others = call_concurrently([partial(work, worker) for worker in range(3)])
    assert others == [first, first]
    expected: list[tuple[bytes, int]] = []
    for step in range(5):
        present = [one for one in (gradient_or_none(worker, step) for worker in range(3)) if one is not None]
        total = np.empty(0, np.float32)
        for number, one in enumerate(present):
            total = total + one if number else one
        expected += [(total.tobytes(), len(present)), ((THETA + step).tobytes(), step % 3)]
    assert first == expected
    until(lambda: pieces(os.getpid()) == 0)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no anonymous files")
def test_a_member_that_is_lost_while_it_writes_contributes_nothing() -> None:
    pieces = counting_pieces()
    with connected(2, nodes=1) as (first, second):
        slots = second._links[0].connection.slots  # noqa: SLF001 - the memory that it writes to
        assert slots is not None
        slots._vectors[1][:3] = 7.0  # noqa: SLF001 - half of a gradient whose frame is not sent
        second.close()
        with pytest.raises(MemberLostError, match="worker 1, with which worker 0 exchanges, is lost"):
            first.sum_gradients(0, THETA.copy(), 0.1)
        del slots
    until(lambda: pieces(os.getpid()) == 0)
