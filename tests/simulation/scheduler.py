"""Tasks of which one runs at a time: a baton goes from one to the next as a seed says, and time passes when all wait.

Each task is a greenlet, a stack of its own within one thread: to hand the baton on costs as much as a call, where
threads cost turns of the system's scheduler.

Rules:

1. The task that holds the baton runs; it hands it on only within `Scheduler.wait`, `Scheduler.pass_on` and at its end.
2. Nothing here depends on real time, on addresses of objects or on the order of a set: the same seed gives the same
   sequence of hand-overs, whose digest is `Scheduler.digest`.
3. A killed task raises `Killed` at its next blocking call and at every later one, so that no ``finally`` talks after
   death. A stopped process' tasks wait until it goes on, even if they are woken.
4. Checks of the run take place after each step of a process that is `Process.watched`: they look at what is theirs.
5. An exception that a task lets out ends the whole run: it is a finding, or a mistake of the simulation.
"""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Callable
from heapq import heappop, heappush

from greenlet import getcurrent, greenlet

#: Hand-overs after which a run is taken for one that never ends.
_MOST_STEPS = 200_000
_MASK = (1 << 61) - 1


class Killed(BaseException):
    """The task's process is dead, or the run is over."""


class Finding(Exception):
    """A promise was broken.

    Args:
        kind: a short name, by which two runs are known to break the same one.
        text: what was expected and what came.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class Process:
    """What lives and dies together.

    Args:
        name: for people.
        host: the machine that it runs on.
    """

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.alive = True
        #: Whether `Scheduler.on_step` is called after its steps.
        self.watched = False
        self.stopped = False
        #: When it went on after it was stopped last.
        self.continued = -math.inf
        self.exit_code: int | None = None
        self.tasks: list[Task] = []
        #: Those that something woke while the process was stopped.
        self.held: list[Task] = []
        #: Called once, when it has ended.
        self.at_end: list[Callable[[], None]] = []
        #: Who waits for its end.
        self.waiters: list[Task] = []


class Task:
    """A thread of a process."""

    __slots__ = (
        *("dead", "ended", "generation", "joiners", "name", "number", "process", "queue", "stack", "target"),
        "woken",
    )

    def __init__(self, process: Process, target: Callable[[], object], name: str, number: int) -> None:
        self.process, self.target, self.name, self.number = process, target, name, number
        #: None before it was given the baton for the first time.
        self.stack: greenlet | None = None
        self.dead = self.ended = False
        #: Rises with each wait: tells a timer of an earlier one.
        self.generation = 0
        #: Where it waits; None: nowhere but for time, or it does not wait.
        self.queue: list[Task] | None = None
        self.woken = False
        self.joiners: list[Task] = []


class Scheduler:
    """One run.

    Args:
        seed: of every choice.
        on_step: called with a watched process before each hand-over by one of its tasks.
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
        #: Takes what a story is made of.
        self.tell: Callable[[str], None] = lambda text: None
        self.now = 0.0
        self.digest = 0
        self.steps = 0
        self.finding: BaseException | None = None
        #: How often a task that could go on hands the baton on all the same.
        self.yielding = 0.1
        self.current: Task
        self._choosing = False
        #: Whether the run has ended, and all that is left unwinds.
        self.over = False
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task | None, int, Callable[[], None] | None]] = []
        self._order = 0
        self._tasks: list[Task] = []
        self._main = getcurrent()
        #: The task that goes on when one has ended; None: no task is left.
        self._following: Task | None = None

    # ---- from outside

    def run(self, process: Process, main: Callable[[], object]) -> None:
        """Runs ``main`` in a task of ``process``, and what that starts, until it returns; raises what was found."""
        self.start(process, main, "main")
        self._following = self._ready.pop()
        while self._following is not None:  # a task that ends comes back here
            self._pass_baton(self._following)
        if self.finding is not None:
            raise self.finding

    # ---- what tasks do

    def start(self, process: Process, target: Callable[[], object], name: str) -> Task:
        """A new task, which can run from now on."""
        task = Task(process, target, name, len(self._tasks))
        self._tasks.append(task)
        process.tasks.append(task)
        self._make_ready(task)
        return task

    def require_alive(self) -> Task:
        """The current task; raises `Killed` if it is dead."""
        task = self.current
        if task.dead or self.over:
            raise Killed
        return task

    @property
    def silent(self) -> bool:
        """Whether what the current task does must have no effect: it is dead."""
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
        self._hand_over(task)
        return task.woken

    def pass_on(self, *, always: bool = False) -> None:
        """Lets others go first, sometimes."""
        task = self.current
        if task.dead or self.over:
            raise Killed
        if always or self._draw() < self.yielding:
            task.generation += 1
            self._make_ready(task)
            self._hand_over(task)

    def wake(self, task: Task) -> None:
        """Ends the wait of ``task``."""
        if task.queue is not None:
            task.queue.remove(task)
            task.queue = None
        task.generation += 1
        task.woken = True
        self._make_ready(task)

    def wake_all(self, queue: list[Task]) -> None:
        """Ends all waits in ``queue``."""
        while queue:
            self.wake(queue[-1])

    def wake_one(self, queue: list[Task]) -> None:
        """Ends one of them."""
        if queue:
            self.wake(queue[int(self.random.random() * len(queue))])

    def wake_at(self, queue: list[Task], time: float) -> None:
        """Ends the waits of those who are in ``queue`` now when it is ``time``, unless they end before."""
        for task in queue:
            self._at(time, task, None)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Let the task that has the baton in so many seconds run ``call()``, which must not wait."""
        self._at(self.now + seconds, None, call)

    # ---- processes

    def kill(self, process: Process, exit_code: int = -9) -> None:
        """Ends ``process``; the current task may be one of its."""
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
        """As SIGSTOP, and SIGCONT so many seconds later."""
        if not process.alive or process.stopped:
            return
        process.stopped = True
        moved = [task for task in self._ready if task.process is process and not task.dead]
        for task in moved:
            self._ready.remove(task)
        process.held.extend(moved)
        self.later(seconds, lambda: self._go_on(process))

    def _go_on(self, process: Process) -> None:
        process.stopped, process.continued = False, self.now
        held, process.held = process.held, []
        for task in held:
            self._make_ready(task)

    # ---- the baton

    def fail(self, finding: BaseException) -> None:
        """Ends the run with ``finding``; the first one counts."""
        if self.finding is None:
            self.finding = finding
        self.over = True

    def people(self) -> str:
        """Who is there, for the text of a finding."""
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
        """The body of a task, which has just been given the baton."""
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

    def _pass_baton(self, task: Task) -> None:
        self.current = task
        if task.stack is None:
            task.stack = greenlet(self._enter, self._main)
            task.stack.switch(task)
        else:
            task.stack.switch()

    def _hand_over(self, task: Task) -> None:
        """``task``, which is the current one and waits or is ready, gives the baton away until it is chosen again."""
        following = self._choose()
        assert following is not None, "a task that waits has not ended"
        if following is not task:
            self._pass_baton(following)
        if task.dead or self.over:
            raise Killed

    def _choose(self) -> Task | None:
        """Who is next; None where every task has ended."""
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
            raise Finding("endless", f"a run must end. Received: {self.steps} hand-overs, {self.now:.0f} s")
        timers, before = self._timers, self.now
        while not self._ready or (timers and timers[0][0] <= self.now):
            if not timers:
                raise Finding("stuck", f"every wait must end. Received: all wait forever: {self.people()}")
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
