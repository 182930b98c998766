"""A job's driver: the real process handle and supervisor, with a simulated Spark that starts attempts until all
succeed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from functools import partial

import numpy as np

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.checkpoint.checkpointer import Checkpoint, StartMode
from distkeras.ps.errors import DistkerasError, JobStoppedError, WorkerError
from distkeras.ps.protocol.driver_messages import SetValues
from distkeras.ps.protocol.framing import KEY_BYTES
from distkeras.ps.protocol.messages import Ack
from distkeras.ps.rules.schedules import schedule_of
from distkeras.ps.server.process import ServerProcess, StartRequest
from distkeras.ps.server.start_report import ResumePoint
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import Address, make_certificate
from distkeras.ps.transport.driver_client import DriverClient, publication
from distkeras.results import JobRecords
from distkeras.training.cluster_server import ServerHandle
from distkeras.training.supervisor import Supervisor
from simulation.attempt import Attempt
from simulation.cluster import VirtualClusterServer
from simulation.divided import DIRECTORY
from simulation.plan import Layout, Plan
from simulation.scheduler import Finding, Process, Task
from simulation.tables import VISITS, check_tables, check_whole_center, read_rows, shapes_of, start_of
from simulation.value_watch import value_in
from simulation.visitor import Visitor
from simulation.watch import Watch
from simulation.world import Surroundings, VirtualWorld

#: Attempts of a partition that may fail.
_MOST_FAILURES = 30
#: Identifies the stream.
_STREAM = "clicks"
#: Seconds between two checks of the server by the driver; that it waits for news; and between two waits for news.
_LOOK, _POLL, _STATUS = 5.0, 1.0, 2.0
#: Seconds between two visits of a driver to rows that come and go.
_VISIT = 1.5
#: Seconds that an attempt may live when it is no longer needed, and that Spark takes to record a result.
_LINGERING, _NOTING = 10.0, 0.05
#: Seconds until a helper that has left takes a slot again.
_PAUSE = 5.0


class Executors:
    """The executors, which run each attempt of a job's tasks in a process of its own.

    Args:
        plan, watch, surroundings: plan, watch and surroundings of the run.
        layout: layout of the data.
        driver: their driver, after which they end soon.
        address: address of the server.
        first: the number of the first attempt.
    """

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        watch: Watch,
        surroundings: Surroundings,
        driver: Process,
        address: Address,
        first: int = 0,
    ) -> None:
        self._plan, self._layout, self._watch, self._surroundings = plan, layout, watch, surroundings
        self._driver, self._address = driver, address
        self._scheduler = surroundings.scheduler
        #: The number of attempts of all jobs of the driver.
        self.attempts = first
        self._failures = [0 for _ in layout.batches]
        #: The attempts of each partition, and then of each helper, which has none.
        self.running: list[dict[int, Process]] = [{} for _ in range(len(layout.batches) + plan.helpers)]
        self.done: set[int] = set()
        self.failure: DistkerasError | None = None
        self.news: list[Task] = []
        driver.at_end.append(self._lose)

    def start_all(self) -> None:
        """Start an attempt of each partition, and the helpers."""
        for worker in range(len(self.running)):
            self.start(worker)

    @property
    def ended(self) -> bool:
        """Return whether every partition is done."""
        return len(self.done) == len(self._layout.batches)

    def start(self, worker: int) -> None:
        """Start another attempt."""
        if self.ended or worker in self.done or not self._driver.alive or self.failure is not None:
            return
        attempt, self.attempts = self.attempts, self.attempts + 1
        process = Process(f"w{worker}a{attempt}", f"executor{attempt}")
        world = VirtualWorld(self._surroundings, process, f"w{worker}")
        self.running[worker][attempt] = process
        process.at_end.append(lambda: self._attempt_ended(worker, attempt))

        def main() -> None:
            try:
                Attempt(
                    self._plan, self._driver, self._layout, self._watch, world, self._address, worker, attempt
                ).run()
            except DistkerasError:
                self._scheduler.kill(process, 1)
            else:
                self._scheduler.kill(process, 0)

        self._scheduler.start(process, main, "main")

    def _attempt_ended(self, worker: int, attempt: int) -> None:
        process = self.running[worker].pop(attempt)
        if worker >= len(self._layout.batches):
            if not self.ended:
                self._scheduler.later(_PAUSE, lambda: self.start(worker))
            return
        if process.exit_code == 0:
            self.done.add(worker)
            for rival in list(self.running[worker].values()):
                self._end_attempt(rival)
            self._scheduler.wake_all(self.news)
            return
        if worker in self.done or not self._driver.alive:
            return
        self._failures[worker] += 1
        if self._failures[worker] > _MOST_FAILURES:
            text = f"partition {worker} must be trained. Received: {_MOST_FAILURES} failed attempts"
            self.failure = WorkerError(text)
            self._scheduler.wake_all(self.news)
        elif not self.running[worker]:
            self._scheduler.later(0.5, lambda: self.start(worker))

    def _end_attempt(self, process: Process) -> None:
        """Kill an attempt that Spark no longer needs; in a stream it may live until the next micro-batch."""
        seconds = _LINGERING * self._scheduler.random.random() if self._plan.stream else 0.0
        if seconds:
            self._scheduler.later(seconds, partial(self._scheduler.kill, process))
        else:
            self._scheduler.kill(process)

    def _lose(self) -> None:
        """Let executors detect after some time that their driver is dead."""
        for attempts in self.running:
            for process in attempts.values():
                self._scheduler.later(20.0 * self._scheduler.random.random(), partial(self._scheduler.kill, process))

    def end(self) -> None:
        """Kill the remaining attempts."""
        for attempts in self.running:
            for process in list(attempts.values()):
                self._scheduler.kill(process)


class Driver:
    """One life of a job's driver.

    Args:
        plan, watch, surroundings: plan, watch and surroundings of the run.
        process: process of the driver.
        life: number of this life; after the first one, there may be snapshots of an earlier one.
    """

    def __init__(self, plan: Plan, watch: Watch, surroundings: Surroundings, process: Process, life: int) -> None:
        self._plan, self._watch, self._surroundings = plan, watch, surroundings
        self.process = process
        self._life = life
        self._resume = life > 0 or bool(plan.stream)
        self.layout, self.epochs = plan.layout(life), plan.epochs_of(life)
        self._shapes = shapes_of(plan, watch.size)
        self._visitor: Visitor | None = None
        if len(self._shapes) > VISITS:
            self._visitor = Visitor(self._shapes[VISITS], surroundings.scheduler)
        surroundings.layouts[process] = self.layout
        watch.epochs[process], watch.shards[process] = self.epochs, plan.shards_of(life)
        self._clock = -1
        #: Whether a number for the workers is being set, and the numbers of such requests.
        self._sets, self._requests = False, itertools.count(1)
        self._world = VirtualWorld(surroundings, process, "driver")
        self.executors: Executors | None = None
        #: The micro-batch that the server is to train; None if it has none yet or the job trains no stream.
        self._present: int | None = None
        #: The center and the records, if the job ended successfully.
        self.center: np.ndarray | None = None
        self.commits: np.ndarray | None = None
        #: The error that ended the job.
        self.error: DistkerasError | None = None

    def run(self) -> None:
        """Train the job."""
        try:
            self._train()
        except DistkerasError as error:
            self.error = error
        finally:
            if self.executors is not None and not self._surroundings.scheduler.silent:
                self.executors.end()

    def _train(self) -> None:
        with contextlib.ExitStack() as stack:
            supervisor: ServerHandle
            if self._plan.cluster:
                supervisor = stack.enter_context(self._cluster_server())
            else:
                process = stack.enter_context(self._server_process())
                supervisor = stack.enter_context(Supervisor(process, self._publish, world=self._world))
            self._require_row_sum(supervisor.resumed)
            try:
                if self._plan.stream:
                    self._train_stream(supervisor)
                else:
                    self._await_tasks(supervisor)
            except DistkerasError:
                self._salvage(supervisor)
                raise
            self.center, self.commits, tables = supervisor.ask(self._collect)
            check_tables(tables, self.center, "at the end")
            if self._visitor is not None:
                supervisor.ask(self._visitor.check)

    def _train_stream(self, supervisor: ServerHandle) -> None:
        """Hand one micro-batch after the other to the driver, as Spark does, and record which ones are done."""
        streams = self._watch.streams
        while streams.noted + 1 < len(self._plan.stream):
            number = streams.noted + 1
            self.layout = self._plan.micro_batch(number, self._life)
            self._pass_phase("offered")
            clock = self._train_micro_batch(supervisor, number)
            self._pass_phase("checked")
            self._world.sleep(_NOTING)
            streams.note(number, clock)
            self._pass_phase("noted")

    def _train_micro_batch(self, supervisor: ServerHandle, number: int) -> int:
        """Return the clock after a micro-batch, all of whose rows have counted."""
        self._present = number
        begun = supervisor.ask(lambda driver: driver.begin_micro_batch(_STREAM, number))
        covered = self._is_covered()
        before = supervisor.ask(self._collect) if begun.complete else None
        self._await_tasks(supervisor)
        self._pass_phase("trained")
        records = supervisor.ask(lambda driver: JobRecords.drain_micro_batch(driver, _STREAM, number))
        began = ResumePoint(begun.clock, incarnation=0, exact=True, epoch=0, began_clock=begun.clock)
        records.check_exactly_once(dict(enumerate(self.layout.batches)), self.epochs, began)
        if covered and self._plan.altered:
            raise Finding("other rows", f"micro-batch {number} came with other rows. Received: no error")
        clock = begun.clock + int((records.commits_array["skipped"] == 0).sum())
        if before is not None and not self._watch.damaged:
            after = supervisor.ask(self._collect)
            # A restarted server lacks the records of a damaged log.
            more = len(before[1]) != len(after[1]) and "log rot" not in self._watch.struck
            if more or not np.array_equal(before[0], after[0]):
                raise Finding("repeated", f"micro-batch {number} was covered, and must change nothing more")
        return clock

    def _is_covered(self) -> bool:
        """Return whether the present server has trained some of the present rows."""
        child = self._surroundings.servers[-1]
        center = None if child.server is None else child.server.center
        return center is not None and any([lease.epoch or lease.batch for lease in center.leases.values()])

    def _pass_phase(self, phase: str) -> None:
        """Let a fault occur in this phase."""
        if self._plan.stream:
            self._watch.on_phase(phase)
            self._surroundings.scheduler.pass_on(always=True)

    def _await_tasks(self, supervisor: ServerHandle) -> None:
        plan, world = self._plan, self._world
        first = 0 if self.executors is None else self.executors.attempts
        executors = self.executors = Executors(
            plan, self.layout, self._watch, self._surroundings, self.process, supervisor.address, first
        )
        executors.start_all()
        self._pass_phase("begun")
        observer = supervisor.connect()
        failed: list[DistkerasError] = []
        world.thread(lambda: self._observe(observer, supervisor, executors, failed), "observer").start()
        if self._visitor is not None:
            world.thread(partial(self._visit, self._visitor, supervisor, executors, failed), "visitor").start()
        enough = plan.enough or math.inf
        while not executors.ended:
            self._surroundings.scheduler.wait(executors.news, _LOOK)
            failed += [] if executors.failure is None else [executors.failure]
            if failed:
                raise failed[0]
            supervisor.watch()
            if self._clock >= enough:
                # This is first, because the driver may be killed during the request.
                self._watch.end_early(self.process)
                supervisor.end_early("enough")
                enough = math.inf

    def _salvage(self, supervisor: ServerHandle) -> None:
        """Collect what a failed job has learned, as the real job does."""
        if not supervisor.alive():
            return
        try:
            supervisor.ask_once(lambda driver: driver.stop("the driver ended the job"))
            supervisor.ask_once(self._collect)
        except DistkerasError as failure:
            supervisor.abandon(failure)
            if self._watch.struck <= {"nan"}:
                text = "a failed job must leave its center to the driver"
                raise Finding("salvage", f"{text}. Received: {failure}") from failure

    def _settings(self) -> ServerSettings:
        plan = self._plan
        return ServerSettings(
            plan.make_rule(),
            workers=len(self.layout.batches),
            staleness_bound=plan.bound,
            measure_gap=plan.gap,
            max_skipped=plan.skipped,
            learning_rate=None if plan.learning_rate is None else schedule_of(plan.learning_rate),
            host=self.process.host,
            deadlines=plan.deadlines,
            checkpoint=Checkpoint(DIRECTORY, plan.every, plan.keep) if plan.every else None,
            tables=self._shapes,
            relays=plan.relays or None,
            lends=plan.lends,
            shards=plan.shards_of(self._life),
        )

    def _server_process(self) -> ServerProcess:
        return ServerProcess(
            self._settings(),
            resume=self._resume,
            job={"rows": 1},
            epochs=None if self._plan.stream else self.epochs,
            tls=self._plan.tls,
            world=self._world,
        )

    def _cluster_server(self) -> VirtualClusterServer:
        request = StartRequest(
            self._settings(),
            self._world.token(KEY_BYTES),
            certificate=make_certificate() if self._plan.tls else None,
            mode=StartMode(fresh=not self._resume, same_attempts=False, epochs=self.epochs),
            job={"rows": 1},
            token=self._world.token(4).hex(),
        )
        return VirtualClusterServer(
            request,
            publication(*self._start(), b"the model"),
            start_of(self._shapes),
            self._surroundings,
            self._world,
            self.layout.row_sum(),
        )

    def _require_row_sum(self, resumed: ResumePoint | None) -> None:
        """Check, if other partitions continue the job, that the server's checksum of all rows is right."""
        if resumed is not None and resumed.row_sum not in (None, self.layout.row_sum()):
            raise Finding("rows", f"the rows' sum must be {self.layout.row_sum()}. Received: {resumed.row_sum}")

    def _start(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the initial center and moving statistics."""
        return np.zeros(self._watch.size, np.float32), np.zeros(self._plan.statistics, np.float32)

    def _publish(self, driver: DriverClient) -> None:
        driver.publish(*self._start(), model=b"the model", tables=start_of(self._shapes))
        if self._present is not None:
            driver.begin_micro_batch(_STREAM, self._present)

    def _visit(
        self, visitor: Visitor, supervisor: ServerHandle, executors: Executors, failed: list[DistkerasError]
    ) -> None:
        """Remove rows and follow their changes, as the driver of a job does whose rows come and go."""
        driver = supervisor.connect()
        while not executors.ended:
            try:
                visitor.visit(driver)
            except JobStoppedError:
                return  # The next status has the error.
            except DistkerasError as error:
                if not driver.lost(error) and supervisor.alive():
                    failed.append(error)
                    self._surroundings.scheduler.wake_all(executors.news)
                    return
            self._world.sleep(_VISIT)

    def _observe(
        self, observer: DriverClient, supervisor: ServerHandle, executors: Executors, failed: list[DistkerasError]
    ) -> None:
        """Observe the server, as the thread of a job does that waits for its news."""
        while not executors.ended:
            try:
                self._clock = observer.observe(self._clock, _POLL).clock
                if self._plan.lists:
                    self._check_table(observer.list_workers())
                if self._plan.sets:
                    self._set_value(observer)
                if self._shapes:
                    check_whole_center(observer, self._shapes, self._watch.size)
            except DistkerasError as error:
                if observer.lost(error) or not supervisor.alive():
                    self._clock = -1
                    self._world.sleep(1.0)
                    continue
                failed.append(error)
                self._surroundings.scheduler.wake_all(executors.news)
                return
            supervisor.record_activity()
            self._world.sleep(max(_STATUS, supervisor.status_seconds))

    def _set_value(self, observer: DriverClient) -> None:
        if self._sets:  # The observer of an earlier micro-batch does; callbacks take turns, so that numbers rise.
            return
        rows, self._sets = self._watch.values.next(), True
        try:
            answer = observer.request(SetValues(rows, next(self._requests)), Ack)
        except JobStoppedError:
            return  # The next status has the error.
        finally:
            self._sets = False
        self._watch.note_value(self.process, answer.incarnation, answer.clock, value_in(rows))

    def _check_table(self, table: np.ndarray) -> None:
        """Raise a finding unless every partition in the table belongs to the job."""
        if not set(table[:, 0].astype(int)) <= set(range(len(self.layout.batches) + self._plan.helpers)):
            raise Finding("table", f"partitions must be those of the job. Received: {table.tolist()}")

    def _collect(self, driver: DriverClient) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        reply, records = driver.center(), driver.drain()
        tables = read_rows(driver, self._shapes, self._watch.size)
        return reply.center.copy(), records.commits.view(COMMIT), tables
