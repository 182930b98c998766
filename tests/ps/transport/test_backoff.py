"""Pauses between attempts, measured by a manual clock."""

from __future__ import annotations

from distkeras.ps.transport.deadlines import Backoff
from distkeras.ps.world.world import World


class Clock(World):
    """A manual clock, which advances only while a thread sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.seconds += seconds


def test_pauses_double_up_to_the_longest_and_are_drawn_from_their_upper_half() -> None:
    clock = Clock()
    backoff = Backoff(first=1.0, longest=5.0, world=clock)
    assert all(backoff.pause() for _ in range(6))
    for pause, nominal in zip(clock.pauses, [1.0, 2.0, 4.0, 5.0, 5.0, 5.0], strict=True):
        assert nominal / 2 <= pause <= nominal


def test_there_is_no_pause_beyond_the_deadline() -> None:
    clock = Clock()
    backoff = Backoff(first=1.0, longest=8.0, timeout=20.0, world=clock)
    while backoff.pause():
        pass
    assert 12.0 < clock.seconds <= 20.0  # The next pause could be 8 s.
    assert not backoff.pause()


def test_two_processes_do_not_retry_at_the_same_moment() -> None:
    clocks = [Clock(), Clock()]
    for clock in clocks:
        assert Backoff(longest=1.0, world=clock).pause()
    assert clocks[0].pauses != clocks[1].pauses
