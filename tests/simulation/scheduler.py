"""Tasks of which one runs at a time: a seed decides which one is next, and time passes when all wait.

Each task is a greenlet, a stack of its own within one thread. Switching tasks costs as much as a call, whereas
switching threads needs the system's scheduler.

Rules:

1. The current task runs until it calls `Scheduler.wait` or `Scheduler.pass_on`, or ends.
2. Nothing here depends on real time, on addresses of objects or on the order of a set: the same seed gives the same
   sequence of switches, whose digest is `Scheduler.digest`.
3. A killed task raises `Killed` at its next blocking call and at every later one, so that no ``finally`` acts after
   death. The tasks of a suspended process wait until it is resumed, even if they are woken.
4. The run is checked after each step of a process that is `Process.watched`.
5. An uncaught exception of a task ends the whole run: it is a finding, or an error of the simulation.
"""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Callable
from heapq import heappop, heappush

from greenlet import getcurrent, greenlet

#: The number of switches after which a run is considered endless. Refusals and small buffers make some runs long.
_MOST_STEPS = 500_000
_MASK = (1 << 61) - 1


class Killed(BaseException):
    """The error that the task's process is dead or the run is over."""


class Finding(Exception):
    """The error that a promise was broken.

    Args:
        kind: short name of the promise, by which runs are compared.
        text: what was expected and what was received.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class Process:
    """A process, whose tasks are killed together.

    Args:
        name: name for messages.
        host: machine of the process.
    """

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.alive = True
        #: Whether `Scheduler.on_step` is called after its steps.
        self.watched = False
        self.stopped = False
        #: The time at which the process was last resumed.
        self.continued = -math.inf
        self.exit_code: int | None = None
        self.tasks: list[Task] = []
        #: The tasks that were woken while the process was suspended.
        self.held: list[Task] = []
        #: Called once when the process has ended.
        self.at_end: list[Callable[[], None]] = []
        #: The tasks that wait for its end.
        self.waiters: list[Task] = []


class Task:
    """A thread of a process."""

    __slots__ = (
        *("dead", "ended", "generation", "joiners", "name", "number", "process", "queue", "stack", "target"),
        "woken",
    )

    def __init__(self, process: Process, target: Callable[[], object], name: str, number: int) -> None:
        self.process, self.target, self.name, self.number = process, target, name, number
        #: The greenlet; None before the task runs for the first time.
        self.stack: greenlet | None = None
        self.dead = self.ended = False
        #: The number of waits so far, which distinguishes timers of earlier ones.
        self.generation = 0
        #: The queue in which the task waits; None if it waits only for time or does not wait.
        self.queue: list[Task] | None = None
        self.woken = False
        self.joiners: list[Task] = []


class Scheduler:
    """The scheduler of one run.

    Args:
        seed: seed of every choice.
        on_step: called with a watched process before each switch from one of its tasks.
        on_time: called when time has passed.
    """

    def __init__(
        self,
        seed: int,
        on_step: Callable[[Process], None] = lambda process: None,
        on_time: Callable[[], None] = lambda: None,
    ) -> None:
        self.random = random.Random(seed)
        self._draw = self.random.random
        self.on_step, self.on_time = on_step, on_time
        #: Called with each line of the story.
        self.tell: Callable[[str], None] = lambda text: None
        self.now = 0.0
        self.digest = 0
        self.steps = 0
        self.finding: BaseException | None = None
        #: The probability that a task that could continue yields nevertheless.
        self.yielding = 0.1
        self.current: Task
        self._choosing = False
        #: Whether the run has ended, so that the remaining tasks unwind.
        self.over = False
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task | None, int, Callable[[], None] | None]] = []
        self._order = 0
        self._tasks: list[Task] = []
        self._main = getcurrent()
        #: The task that runs after one has ended; None if no task is left.
        self._following: Task | None = None

    # ---- calls from outside

    def run(self, process: Process, main: Callable[[], object]) -> None:
        """Run ``main`` in a task of ``process``, and the tasks that it starts, until it returns; raise a finding."""
        self.start(process, main, "main")
        self._following = self._ready.pop()
        while self._following is not None:  # A task that ends returns to this point.
            self._run_next(self._following)
        if self.finding is not None:
            raise self.finding

    # ---- calls of tasks

    def start(self, process: Process, target: Callable[[], object], name: str) -> Task:
        """Start a new task, which can run from now on."""
        task = Task(process, target, name, len(self._tasks))
        self._tasks.append(task)
        process.tasks.append(task)
        self._make_ready(task)
        return task

    def require_alive(self) -> Task:
        """Return the current task; raise `Killed` if it is dead."""
        task = self.current
        if task.dead or self.over:
            raise Killed
        return task

    @property
    def silent(self) -> bool:
        """Return whether the current task is dead, so that its actions must have no effect."""
        return self.over or (self.current.dead and not self._choosing)

    def wait(self, queue: list[Task] | None, timeout: float | None) -> bool:
        """Wait in ``queue`` until this task is woken, or for ``timeout`` seconds; return whether it was woken."""
        task = self.current
        if task.dead or self.over:
            raise Killed
        task.generation += 1
        task.woken, task.queue = False, queue
        if queue is not None:
            queue.append(task)
        if timeout is not None:
            self._order += 1
            time = self.now + timeout if timeout > 0.0 else self.now
            heappush(self._timers, (time, self._order, task, task.generation, None))
        self._switch_from(task)
        return task.woken

    def pass_on(self, *, always: bool = False) -> None:
        """Let other tasks run first, with some probability."""
        task = self.current
        if task.dead or self.over:
            raise Killed
        if always or self._draw() < self.yielding:
            task.generation += 1
            self._make_ready(task)
            self._switch_from(task)

    def wake(self, task: Task) -> None:
        """End the wait of ``task``."""
        if task.queue is not None:
            task.queue.remove(task)
            task.queue = None
        task.generation += 1
        task.woken = True
        self._make_ready(task)

    def wake_all(self, queue: list[Task]) -> None:
        """End all waits in ``queue``."""
        while queue:
            self.wake(queue[-1])

    def wake_one(self, queue: list[Task]) -> None:
        """End one of the waits in ``queue``."""
        if queue:
            self.wake(queue[int(self.random.random() * len(queue))])

    def wake_at(self, queue: list[Task], time: float) -> None:
        """End the waits that are in ``queue`` now at ``time``, unless they end before."""
        for task in queue:
            self._at(time, task, None)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call ``call()``, which must not wait, in the task that is current after ``seconds``."""
        self._at(self.now + seconds, None, call)

    # ---- processes

    def kill(self, process: Process, exit_code: int = -9) -> None:
        """Kill ``process``; the current task may be one of its tasks."""
        if not process.alive:
            return
        process.alive, process.exit_code = False, exit_code
        self.tell(f"{process.name} ends ({exit_code})")
        for task in process.tasks:
            if not task.ended and not task.dead:
                self._mark_dead(task)
        process.held.clear()
        for call in process.at_end:
            call()
        self.wake_all(process.waiters)

    def _mark_dead(self, task: Task) -> None:
        task.dead = True
        if task is self.current and not self._choosing:
            return
        if task.queue is not None:
            task.queue.remove(task)
            task.queue = None
        task.generation += 1
        if task not in self._ready:
            self._ready.append(task)

    def stop(self, process: Process, seconds: float) -> None:
        """Suspend a process as SIGSTOP does, and resume it after ``seconds`` as SIGCONT does."""
        if not process.alive or process.stopped:
            return
        process.stopped = True
        moved = [task for task in self._ready if task.process is process and not task.dead]
        for task in moved:
            self._ready.remove(task)
        process.held.extend(moved)
        self.later(seconds, lambda: self._resume(process))

    def _resume(self, process: Process) -> None:
        process.stopped, process.continued = False, self.now
        held, process.held = process.held, []
        for task in held:
            self._make_ready(task)

    # ---- switches of tasks

    def fail(self, finding: BaseException) -> None:
        """End the run with ``finding``; only the first one counts."""
        if self.finding is None:
            self.finding = finding
        self.over = True

    def people(self) -> str:
        """Return the living tasks, for the text of a finding."""
        return ", ".join(
            f"{task.process.name}/{task.name}" + (" (stopped)" if task.process.stopped else "")
            for task in self._tasks
            if not task.ended and not task.dead
        )

    def _at(self, time: float, task: Task | None, call: Callable[[], None] | None) -> None:
        self._order += 1
        heappush(self._timers, (time, self._order, task, task.generation if task is not None else 0, call))

    def _make_ready(self, task: Task) -> None:
        if task.process.stopped and not task.dead:
            task.process.held.append(task)
        else:
            self._ready.append(task)

    def _enter(self, task: Task) -> None:
        """Run the body of a task, which has just become the current one."""
        try:
            if not (task.dead or self.over):
                task.target()
        except Killed:
            pass
        except Finding as finding:
            self.fail(finding)
        except BaseException as error:  # noqa: BLE001 - every exception that a task lets out is a finding
            text = "".join(traceback.format_exception(error))
            self.fail(Finding("exception", f"{task.process.name}/{task.name} let out {text}"))
        task.ended = True
        self.wake_all(task.joiners)
        if task.number == 0:
            self.over = True
        self._following = self._choose()

    def _run_next(self, task: Task) -> None:
        self.current = task
        if task.stack is None:
            task.stack = greenlet(self._enter, self._main)
            task.stack.switch(task)
        else:
            task.stack.switch()

    def _switch_from(self, task: Task) -> None:
        """Switch from ``task``, which is the current one and waits or is ready, until it is chosen again."""
        following = self._choose()
        assert following is not None, "a task that waits has not ended"
        if following is not task:
            self._run_next(following)
        if task.dead or self.over:
            raise Killed

    def _choose(self) -> Task | None:
        """Return the next task; None if every task has ended."""
        self._choosing = True
        try:
            if self.current.process.watched and not self.over:
                self.on_step(self.current.process)
            if not self.over and (not self._ready or (self._timers and self._timers[0][0] <= self.now)):
                self._let_time_pass()
        except Finding as finding:
            self.fail(finding)
        self._choosing = False
        if self.over:
            return self._next_to_unwind()
        ready = self._ready
        if len(ready) > 1:
            place = int(self._draw() * len(ready))
            ready[place], ready[-1] = ready[-1], ready[place]
        task = ready.pop()
        self.steps += 1
        self.digest = (self.digest * 1_000_003 + task.number * 8191 + int(self.now * 1e6)) & _MASK
        return task

    def _let_time_pass(self) -> None:
        if self.steps > _MOST_STEPS:
            raise Finding("endless", f"a run must end. Received: {self.steps} switches, {self.now:.0f} s")
        timers, before = self._timers, self.now
        while not self._ready or (timers and timers[0][0] <= self.now):
            if not timers:
                raise Finding("stuck", f"every wait must end. Received: no task can run: {self.people()}")
            time, _, task, generation, call = heappop(timers)
            if task is None:
                self.now = max(self.now, time)
                assert call is not None
                call()
            elif task.generation == generation and not task.ended:
                self.now = max(self.now, time)
                self.wake(task)
                task.woken = False
        if self.now > before:
            self.on_time()

    def _next_to_unwind(self) -> Task | None:
        for task in self._tasks:
            if not task.ended:
                if task.stack is not None:
                    return task
                task.ended = True
        return None
