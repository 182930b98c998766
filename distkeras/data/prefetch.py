"""An iterator that is worked off by a thread of its own, ahead of who consumes it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from distkeras.ps.errors import ConfigurationError, DeadlineError, JobStoppedError, LocalProtocolError

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Yields the items of `items`, which a thread computes up to `depth` ahead from `start` on.

    The end of the items ends the iteration, and what the thread raises is raised to the consumer with its traceback,
    after the items before it. Either side can end the other: no wait goes on after the thread has ended or
    `close` was called. One thread at a time may consume.

    Args:
        items: consumed by the thread.
        depth: items to hold ready, at least 1.
        name: of the thread.
        timeout: seconds that the consumer waits for an item.
        what: the item, and from where: what the consumer has waited for in vain.
        worker: who consumes, for error texts.

    Raises:
        ConfigurationError: `depth` is below 1.
    """

    def __init__(
        self,
        items: Iterable[T],
        depth: int,
        *,
        name: str = "distkeras-prefetch",
        timeout: float = 3600.0,
        what: str = "the next item",
        worker: int | None = None,
    ) -> None:
        if depth < 1:
            raise ConfigurationError(f"`depth` must be at least 1. Received: depth={depth!r}")
        # Items change hands in bulk: a switch of threads costs more than a small batch. What the consumer holds and
        # what lies ready are together `depth` at most.
        self._most_ready = (depth + 1) // 2
        self._ready: deque[T] = deque()
        self._taken: deque[T] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self._closed = False
        self._timeout, self._what, self._worker = timeout, what, worker
        self._thread = threading.Thread(target=self._run, args=(items,), name=name, daemon=True)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def start(self) -> None:
        """Starts the thread; once."""
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """The next item.

        Raises:
            JobStoppedError: `close` was called. That is no end of data, and must not pass for it.
            DeadlineError: nothing came.
            LocalProtocolError: `start` was not called.
        """
        if not self._taken:
            if self._thread.ident is None:
                raise LocalProtocolError("items must be read after `start`. Received: a thread that does not run")
            with self._changed:
                if not self._changed.wait_for(lambda: self._ready or self._ended or self._closed, self._timeout):
                    raise DeadlineError(f"waited {self._timeout:g} s for {self._what}", worker=self._worker)
                self._taken, self._ready = self._ready, self._taken
                self._changed.notify_all()
        if self._closed:
            raise JobStoppedError("items must be read before `close`. Received: closed=True")
        if self._taken:
            return self._taken.popleft()
        if self._error is not None:
            raise self._error
        raise StopIteration

    def close(self, timeout: float) -> None:
        """Ends the thread after the item that it is at; may be called from any other thread, and again.

        Args:
            timeout: seconds to wait for that.

        Raises:
            DeadlineError: it is still at that item.
        """
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread.ident is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise DeadlineError(
                f"the thread {self._thread.name!r} must end within {timeout:g} s of being told to. "
                "Received: it is still waiting for its input"
            )

    def _run(self, items: Iterable[T]) -> None:
        error: BaseException | None = None
        try:
            for item in items:
                if not self._put(item):
                    break
        except BaseException as raised:  # noqa: BLE001 - nothing is swallowed: the consumer raises it
            error = raised
        finally:
            with self._changed:
                self._ended, self._error = True, error
                self._changed.notify_all()

    def _put(self, item: T) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < self._most_ready or self._closed)
            if not self._closed:
                self._ready.append(item)
                self._changed.notify_all()
            return not self._closed
