"""A call in a thread of its own, whose outcome is asked for later: a commit, while the next window is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from distkeras.ps.world.world import World

_T = TypeVar("_T")

#: Seconds after which a thread that has nothing to do looks around.
_IDLE = 60.0


class Posting(Generic[_T]):
    """Makes one call at a time, in one thread; it ends with `close`.

    Args:
        world: its threads.
        name: of the thread.
    """

    def __init__(self, world: World, name: str) -> None:
        self._changed = world.condition()
        self._now = world.monotonic
        self._call: Callable[[], _T] | None = None
        self._outcome: list[_T | BaseException] = []
        self._closed = False
        self._thread = world.thread(self._run, name)
        self._thread.start()

    def post(self, call: Callable[[], _T]) -> None:
        """Begins ``call``; the one before has ended."""
        with self._changed:
            self._call = call
            self._outcome.clear()
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Whether the call has ended, or does so within ``timeout`` seconds."""
        deadline = self._now() + timeout
        with self._changed:
            while not self._outcome:
                left = deadline - self._now()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def outcome(self) -> _T:
        """What the call returned; it has ended.

        Raises:
            BaseException: what it raised.
        """
        outcome = self._outcome[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        """The thread ends, after the call that is under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            outcome: _T | BaseException
            try:
                outcome = call()
            except BaseException as error:  # noqa: BLE001 - handed to who asks for the outcome, which raises it
                outcome = error
            with self._changed:
                self._outcome.append(outcome)
                self._changed.notify_all()

    def _next(self) -> Callable[[], _T] | None:
        with self._changed:
            while self._call is None and not self._closed:
                self._changed.wait(_IDLE)
            call, self._call = self._call, None
            return call
