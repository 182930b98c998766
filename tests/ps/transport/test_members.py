"""Two members over real connections: what one must not take from the other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest

from distkeras.ps.errors import RemoteProtocolError
from distkeras.ps.protocol.messages import PeerVector
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.members import MemberLinks, Membership, Purpose

SIZE = 5
THETA = np.arange(SIZE, dtype=np.float32)
#: What the second member may send in place of its parameters after step 7.
WRONG = {
    "must send a PeerVector of step 7": PeerVector(Purpose.PARAMETERS, 8, THETA),
    "must send PARAMETERS": PeerVector(Purpose.GRADIENT, 7, THETA, members=1),
}


@pytest.fixture
def members() -> Iterator[tuple[MemberLinks, MemberLinks]]:
    """The members of two nodes, connected."""
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                closing(MemberLinks("127.0.0.1", b"k" * 32, worker=worker, attempt=0, size=SIZE, deadlines=Deadlines()))
            )
            for worker in range(2)
        )
        places = (0, *first.address), (1, *second.address)
        with ThreadPoolExecutor() as pool:
            waits = [
                pool.submit(link.connect, Membership(places, 2, rank, 9, True))
                for rank, link in ((0, first), (1, second))
            ]
            for wait in waits:
                wait.result()
        yield first, second


@pytest.mark.parametrize("message", WRONG)
def test_a_message_that_is_not_the_expected_one_is_an_error(
    members: tuple[MemberLinks, MemberLinks], message: str
) -> None:
    first, second = members
    second._send(0, WRONG[message])  # noqa: SLF001 - what no member does
    with pytest.raises(RemoteProtocolError, match=message):
        first.sum_parameters(7, THETA, cast=False)


def test_a_posted_sum_that_has_failed_is_an_error_before_its_connections_are_used_again(
    members: tuple[MemberLinks, MemberLinks],
) -> None:
    first, second = members
    first.post(6, THETA)
    second._send(0, WRONG["must send PARAMETERS"])  # noqa: SLF001 - what no member does
    with pytest.raises(RemoteProtocolError, match="of step 6"):
        first.settle(7)
