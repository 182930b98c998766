"""Locks, conditions, flags and threads of a virtual world; each blocking call may switch to another task."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from simulation.scheduler import Process, Scheduler, Task


class VirtualLock:
    """A simulated `threading.Lock`, or `threading.RLock` if ``reentrant``."""

    def __init__(self, scheduler: Scheduler, *, reentrant: bool = False) -> None:
        self._scheduler = scheduler
        self._reentrant = reentrant
        self.owner: Task | None = None
        self.count = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `world.Lock`."""
        scheduler = self._scheduler
        task = scheduler.current
        if self.owner is task and self._reentrant and not (task.dead or scheduler.over):
            self.count += 1
            return True
        if blocking:
            scheduler.pass_on()
        else:
            scheduler.require_alive()
        while self.owner is not None:
            if not blocking or (not scheduler.wait(self._waiting, None if timeout < 0 else timeout) and timeout >= 0):
                return False
        self.owner, self.count = task, 1
        return True

    def release(self) -> None:
        """See `world.Lock`."""
        if self._scheduler.silent:
            return
        self.count -= 1
        if self.count == 0:
            self.release_all()

    def release_all(self) -> int:
        """Release the lock however often it was acquired; return how often."""
        count, self.count, self.owner = self.count, 0, None
        self._scheduler.wake_one(self._waiting)
        return count

    def reacquire(self, count: int) -> None:
        """Acquire the lock again as often as `release_all` released it."""
        while self.owner is not None:
            self._scheduler.wait(self._waiting, None)
        self.owner, self.count = self._scheduler.current, count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class VirtualCondition:
    """A simulated `threading.Condition`."""

    def __init__(self, scheduler: Scheduler, lock: VirtualLock) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._waiting: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        """See `world.Condition`."""
        self._scheduler.require_alive()
        count = self._lock.release_all()
        woken = self._scheduler.wait(self._waiting, timeout)
        self._lock.reacquire(count)
        return woken

    def notify_all(self) -> None:
        """See `world.Condition`."""
        if not self._scheduler.silent:
            self._scheduler.wake_all(self._waiting)

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


class VirtualFlag:
    """A simulated `threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        """See `world.Flag`."""
        return self._set

    def set(self) -> None:
        """See `world.Flag`."""
        if not self._scheduler.silent:
            self._set = True
            self._scheduler.wake_all(self._waiting)

    def clear(self) -> None:
        """See `world.Flag`."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """See `world.Flag`."""
        self._scheduler.pass_on()
        if not self._set:
            self._scheduler.wait(self._waiting, timeout)
        return self._set


class VirtualThread:
    """A simulated `threading.Thread`."""

    def __init__(self, scheduler: Scheduler, process: Process, target: Callable[[], object], name: str) -> None:
        self._scheduler, self._process, self._target = scheduler, process, target
        self.name = name
        self._task: Task | None = None

    @property
    def ident(self) -> int | None:
        """See `world.Thread`."""
        return None if self._task is None else self._task.number

    def start(self) -> None:
        """See `world.Thread`."""
        self._scheduler.require_alive()
        self._task = self._scheduler.start(self._process, self._target, self.name)

    def join(self, timeout: float | None = None) -> None:
        """See `world.Thread`."""
        assert self._task is not None
        self._scheduler.require_alive()
        if not self._task.ended:
            self._scheduler.wait(self._task.joiners, timeout)

    def is_alive(self) -> bool:
        """See `world.Thread`."""
        return self._task is not None and not self._task.ended
