from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.patience import patience

from distkeras.data.source import Prefetcher
from distkeras.ps.errors import ConfigurationError, DeadlineError, JobStoppedError

SECONDS = patience(20)


def test_items_arrive_in_order_and_the_end_is_final() -> None:
    prefetcher = Prefetcher(range(100), 3)
    prefetcher.start()
    assert list(prefetcher) == list(range(100))
    assert list(prefetcher) == []
    prefetcher.close(SECONDS)


def test_the_thread_is_never_more_than_its_depth_ahead() -> None:
    consumed, ahead = 0, []

    def items() -> Iterator[int]:
        for produced in range(200):
            ahead.append(produced - consumed)
            yield produced

    prefetcher = Prefetcher(items(), 4)
    prefetcher.start()
    for _ in prefetcher:
        consumed += 1
    # Four items wait in the queue, and one may have been taken and not counted yet.
    assert max(ahead) <= 5


def test_an_error_follows_the_items_before_it_and_shows_its_origin() -> None:
    def failing_items() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    prefetcher = Prefetcher(failing_items(), 2)
    prefetcher.start()
    assert next(prefetcher) == 1
    for _ in range(2):
        with pytest.raises(OSError, match="gone") as caught:
            next(prefetcher)
    assert "failing_items" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_closing_ends_a_thread_that_waits_for_a_free_place() -> None:
    prefetcher = Prefetcher(iter(int, 1), 2, name="endless")
    prefetcher.start()
    next(prefetcher)
    prefetcher.close(SECONDS)
    prefetcher.close(SECONDS)
    assert "endless" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(JobStoppedError):
        next(prefetcher)


def test_closing_wakes_the_consumer_and_does_not_wait_forever() -> None:
    gate, waiting = threading.Event(), threading.Event()

    def blocked_items() -> Iterator[int]:
        waiting.set()
        gate.wait(SECONDS)
        yield 1

    prefetcher = Prefetcher(blocked_items(), 1, name="stuck")
    prefetcher.start()
    with ThreadPoolExecutor(1) as pool:
        consumer = pool.submit(next, prefetcher)
        assert waiting.wait(SECONDS)
        with pytest.raises(DeadlineError, match=r"waited 0\.01 s for the thread 'stuck' to end"):
            prefetcher.close(0.01)
        with pytest.raises(JobStoppedError):
            consumer.result(SECONDS)
    gate.set()
    prefetcher.close(SECONDS)


def test_a_consumer_does_not_wait_forever() -> None:
    gate = threading.Event()

    def late_items() -> Iterator[int]:
        gate.wait(SECONDS)
        yield 1

    prefetcher = Prefetcher(late_items(), 1, timeout=0.01, what="the first of all", worker=7)
    prefetcher.start()
    with pytest.raises(DeadlineError, match=r"waited 0\.01 s for the first of all \[worker/partition 7\]"):
        next(prefetcher)
    gate.set()
    prefetcher.close(SECONDS)


def test_a_depth_below_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Received: depth=0"):
        Prefetcher([], 0)
