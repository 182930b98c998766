"""One run of a plan, from its first process to its last, and the checks at its end."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from unittest import mock

import numpy as np

from distkeras.ps.checkpoint.ownership import parsed
from distkeras.ps.checkpoint.store import Store
from distkeras.ps.errors import (
    DeadlineError,
    DistkerasError,
    LedgerError,
    NonFiniteError,
    OwnershipLostError,
    ServerLostError,
    SnapshotError,
    WorkerError,
)
from distkeras.ps.server.process import StartRequest, serve
from distkeras.ps.server.start_report import StartReport, report_to_json
from distkeras.ps.shards.processes import accompany, build
from simulation import cluster, divided
from simulation.disk import Disk
from simulation.divided import DIRECTORY
from simulation.driver import Driver
from simulation.faults import Striker
from simulation.network import Network, VirtualStream
from simulation.plan import KINDS, NEED_CHECKPOINT, PHASES, Fault, Plan
from simulation.scheduler import Finding, Process, Scheduler, Task
from simulation.watch import LOSSY_DISK, Watch
from simulation.world import Surroundings, VirtualChild, VirtualWorld

#: Seconds that a server may outlive its driver, to save a last snapshot and to make up for suspensions.
_END_SECONDS = 130.0 + KINDS["stop server"][1]
#: The largest number of drivers of a run, in sequence or at the same time.
_MOST_DRIVERS = 8
#: How many servers a fault may kill before they serve, and how often a driver starts its first server.
_DEATHS = {"kill server": 1, "impostor": 1, "kill server twice": 2, "kill next server": 1, "crash in disk": 1}
_STARTS = 3
#: Faults that strike the present server and the start of the next one.
_STRIKE_TWICE = ("kill server twice", "stop at start")


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Args:
        finding: the promise that it broke; None if it broke none.
        error: the error that ended the job, if a fault excuses it; "" if the job ended successfully.
        digest: digest of the sequence of its steps.
        steps, sends, seconds: numbers of steps and sends, and its duration in virtual time.
        injected: the faults that were injected before the job ended.
        phases: the phases of a stream's micro-batches that were passed.
        story: lines about the events, if requested.
    """

    finding: Finding | None
    error: str
    digest: int
    steps: int
    sends: int
    seconds: float
    injected: tuple[Fault, ...]
    phases: tuple[str, ...]
    story: tuple[str, ...] = ()


def simulate(plan: Plan, *, story: bool = False) -> Outcome:
    """Run ``plan``, and record its story if requested."""
    logging.disable(logging.CRITICAL)
    run = _Run(plan, story=story)
    finding: Finding | None = None
    try:
        with ExitStack() as stack:
            if plan.cluster:
                stack.enter_context(mock.patch.multiple(cluster.MODULE, **cluster.patches(run.scheduler)))
            if plan.divided:
                stack.enter_context(divided.patched(run.surroundings))
            run.scheduler.run(Process("job", "nowhere"), run.main)
    except Finding as found:
        finding = found
    finally:
        logging.disable(logging.NOTSET)
    scheduler = run.scheduler
    return Outcome(
        finding,
        run.error,
        scheduler.digest,
        scheduler.steps,
        run.sends[""],
        scheduler.now,
        tuple(run.injected),
        tuple(phase for phase in PHASES if phase in run.sends),
        tuple(run.story or ()),
    )


class _Run:
    def __init__(self, plan: Plan, *, story: bool) -> None:
        self.plan = plan
        self.story: list[str] | None = [] if story else None
        self.scheduler = scheduler = Scheduler(
            plan.seed, lambda process: self.watch.step(process), self._require_progress
        )
        scheduler.yielding = plan.yielding
        self.network = network = Network(scheduler, self._on_send)
        network.latency, network.capacity, network.fragmenting = plan.latency, plan.capacity, plan.fragmenting
        self.disk = Disk(
            scheduler,
            lambda: self.striker.on_disk(),
            lambda name: self.watch.wrote(name),
            lambda name, writer: self.watch.check_removal(name, writer),
        )
        self.disk.seconds = plan.disk
        if plan.stray:
            self.disk.put(f"{DIRECTORY}/backup of snapshot.dks", b"his own")
        self.surroundings = Surroundings(scheduler, network, self.disk, _serve)
        self.surroundings.neighbors = plan.neighbors
        self.watch = Watch(plan, self.surroundings, self.tell, self._on_phase)
        scheduler.tell = self.tell
        self.sends: dict[str, int] = {"": 0}
        self.injected: list[Fault] = []
        self.error = ""
        self._nans = 0
        self._patience = 300.0 + 3 * plan.deadlines.lease
        if plan.long:  # This allows a window of long steps, and its repetition if a server's end discards it.
            self._patience += 18 * plan.deadlines.lease
        stops = sum(fault.kind in ("stop server", "stop at start") for fault in plan.faults)
        # A server that is suspended while its driver publishes is killed after the time of a reply; so is the next
        # one.
        self._patience += max(0, stops - 1) * (plan.deadlines.reply + plan.deadlines.standstill + 10.0)
        self.drivers: list[Driver] = []
        self._due = {(fault.scope, fault.at): fault for fault in plan.faults}
        self.striker = Striker(self.surroundings, self.drivers, self._expect_driver)
        #: The drivers that are expected, and those that wait for their outcome.
        self._expected = 0
        self._news: list[Task] = []

    def tell(self, text: str) -> None:
        """Add an event to the story."""
        if self.story is not None:
            self.story.append(f"{self.scheduler.now:10.3f} s  {text}")

    # ---- the job

    def main(self) -> None:
        """Run lives of the driver until one of them ends by itself."""
        self._start_driver()
        while self._expected or any(driver.process.alive for driver in self.drivers):
            self.scheduler.wait(self._news, None)
        self._check_nothing_is_left()
        ended = [driver for driver in self.drivers if driver.process.exit_code == 0]
        winners = [driver for driver in ended if driver.error is None]
        for driver in winners:
            self._check_end(driver)
            self._require_last_states(driver)
        owners = [driver for driver in ended if not isinstance(driver.error, OwnershipLostError)]
        for driver in ended:
            if driver.error is not None:
                self._require_excuse(driver.error, [owner for owner in owners if owner is not driver])

    def _check_nothing_is_left(self) -> None:
        """Check that servers end with their drivers, within the time for a last snapshot."""
        deadline = self.scheduler.now + _END_SECONDS
        for child in self.surroundings.servers:
            for process in child.family:
                while process.alive:
                    if self.scheduler.now >= deadline:
                        raise Finding("left behind", f"a server must end with its driver. Received: {process.name}")
                    self.scheduler.wait(process.waiters, deadline - self.scheduler.now)

    def _start_driver(self) -> None:
        process = Process(f"driver{len(self.drivers)}", f"driver{len(self.drivers)}")
        process.at_end.append(lambda: self.scheduler.wake_all(self._news))
        driver = Driver(self.plan, self.watch, self.surroundings, process, len(self.drivers))
        self.drivers.append(driver)

        def live() -> None:
            driver.run()
            if self._may_begin_again(driver):
                self._expect_driver(30.0)
                driver.error = None
                self.scheduler.kill(process, 1)
            self.scheduler.kill(process, 0)

        self.scheduler.start(process, live, "main")

    def _may_begin_again(self, driver: Driver) -> bool:
        """Return whether a driver failed to start its job and reported that; nothing was done yet.

        In the cluster there are other reasons as well: its first servers died before they claimed anything, or came up
        too late. With another driver present, only a slow store makes them come up too late. A server next to the
        driver is started three times: three faults may kill all of them, and a claim of another driver ends one.
        """
        if driver.error is None or driver.executors is not None or len(self.drivers) >= _MOST_DRIVERS:
            return False
        alone = not any(other.process.alive for other in self.drivers if other is not driver)
        late = (OwnershipLostError, DeadlineError, ServerLostError)
        crawls = any(fault.kind == "store crawls" for fault in self.injected)
        in_vain = self.plan.cluster and ((alone and bool(self.injected)) or crawls) and isinstance(driver.error, late)
        deaths = sum(_DEATHS.get(fault.kind, 0) for fault in self.injected) + len(self.drivers) - 1
        all_died = isinstance(driver.error, ServerLostError) and deaths >= _STARTS
        return in_vain or all_died or isinstance(driver.error, SnapshotError)

    def _expect_driver(self, seconds: float) -> None:
        """Start another driver after ``seconds``, as a cluster manager does."""

        def come() -> None:
            self._expected -= 1
            self._start_driver()

        self._expected += 1
        self.scheduler.later(seconds, come)

    def _check_end(self, driver: Driver) -> None:
        """Check that a successful job has trained each mini-batch once, except where faults excuse it."""
        assert driver.commits is not None
        assert driver.center is not None
        rows = driver.commits
        layouts = [self.watch.layout_of(row) for row in rows]
        own = [layout.number == driver.layout.number for layout in layouts]
        first = min((int(row["epoch"]) for row, counts in zip(rows, own, strict=True) if counts), default=driver.epochs)
        first = first if driver.layout.number else 0
        micro_batches = [self.plan.micro_batch(number) for number in range(len(self.plan.stream))]
        for dealt in micro_batches or [driver.layout]:
            for worker, count in enumerate(dealt.batches):
                covered = [
                    (int(row["epoch"]), batch)
                    for row, layout in zip(rows, layouts, strict=True)
                    if (layout.number, layout.micro_batch) == (dealt.number, dealt.micro_batch)
                    and row["worker"] == worker
                    for batch in range(int(row["first_batch"]), int(row["last_batch"]) + 1)
                ]
                due = [(epoch, batch) for epoch in range(first, driver.epochs) for batch in range(count)]
                if not self._covers(covered, due):
                    raise Finding("records", f"partition {worker} must have {due}. Received: {covered}")
        self._check_result(driver, driver.center, rows)

    def _require_last_states(self, driver: Driver) -> None:
        """Check that a server that has ended by itself has left the last states of the workers' optimizers.

        A job that continues with more epochs begins with what the last snapshot has.
        """
        last = next(child for child in reversed(self.surroundings.servers) if child.driver is driver.process)
        center = None if last.server is None else last.server.center
        lossy = self.watch.struck - {"disk slow", "store crawls"} & LOSSY_DISK or self.watch.damaged
        if not self.plan.every or last.process.exit_code != 0 or center is None or lossy or len(self.drivers) > 1:
            return
        world = VirtualWorld(self.surroundings, self.scheduler.current.process, "job")
        store = Store(DIRECTORY, world)
        names = [name for name in map(parsed, store.names()) if name is not None and name.kind == "snapshot"]
        files = store.header(str(max(names, key=lambda name: name.age)))["optimizer_files"]
        for worker, kept in center.leases.states().items():
            file = files.get(str(worker))
            if file is None or not np.array_equal(store.load(file)[1]["content"], kept.state.content):
                text = f"the state of partition {worker} after commit {kept.sequence} must be in the last snapshot"
                raise Finding("last state", f"{text}. Received: {file}")

    def _covers(self, covered: list[tuple[int, int]], due: list[tuple[int, int]]) -> bool:
        """Return whether the records of a partition are correct."""
        if self.plan.lends:  # The shares of a partition are trained side by side.
            covered = sorted(covered)
        if "log" in self.striker.rotten:  # Some records may be lost, which is reported.
            return sorted(set(covered) & set(due)) == covered
        if self.watch.ends_early:
            return set(covered) <= set(due) if self.plan.lends else due[: len(covered)] == covered
        if self.watch.damaged and covered != due:  # The job's own check of its ledger finds this.
            self.error = "LedgerError"
            return set(covered) <= set(due) if self.plan.lends else due[: len(covered)] == covered
        return covered == due

    def _check_result(self, driver: Driver, center: np.ndarray, rows: np.ndarray) -> None:
        if self.watch.course is not None and not self.watch.ends_early:
            self.watch.course.check_end(center)
        last = self.watch.center_of(driver.process)
        if last is not None and not np.array_equal(center, last.current.array):
            text = f"the driver must read {last.current.array.tolist()}"
            raise Finding("result", f"{text}. Received: {center.tolist()}")
        whole = not (self.watch.ends_early or self.watch.damaged or self.plan.skipped > 0)
        # If the latest snapshot is damaged, the one of a job that has lost the checkpoint may be left, without its log.
        lacks = "log" in self.striker.rotten or (self.watch.damaged and last is not None and last.log.missing)
        if self.plan.sums and not lacks:
            counts = self.watch.by_ledger(rows)
            if not self.watch.adds_up(counts, center):
                raise Finding("result", f"the center must be {counts.tolist()}. Received: {center.tolist()}")
        due = center[: driver.epochs * self.plan.total]
        if self.plan.shows and whole and self.plan.total and not due.all():
            raise Finding("result", f"each mini-batch must count. Received: {center.tolist()}")
        if self.plan.sums and whole and not self.plan.resized and center.max() > 1.1:
            raise Finding("result", f"each mini-batch must count once. Received: {center.tolist()}")

    def _require_excuse(self, error: DistkerasError, others: list[Driver]) -> None:
        """Check that a job failed because its server died without a checkpoint, or another driver has taken it over."""
        # In the latter case, tasks may report it first; in the cluster, a late driver finds the other one's server.
        lost = (OwnershipLostError, WorkerError, *((DeadlineError, ServerLostError) if self.plan.cluster else ()))
        if others and isinstance(error, lost):
            return
        kinds = {fault.kind for fault in self.injected}
        # A worker that is absent repeatedly may be away for longer than the others wait for it.
        away = sum(fault.kind in ("vanish", "stop worker", "part") for fault in self.injected)
        # A driver that is unreachable repeatedly may be away for longer than the workers wait for it.
        cut_off = sum(fault.kind == "part" for fault in self.injected)
        # Workers of groups start together, and one whose window has too many long steps reaches the next server late.
        window = self.plan.make_rule().window if self.plan.relays and self.plan.long else 0
        assert isinstance(window, int), "workers of groups must have windows of a fixed length"
        late = window * self.plan.long_step > self.plan.deadlines.reply
        begins = "to run at once" in error.message or "to announce" in error.message
        # A server with shards sends before it is up, so each of its three starts may be struck.
        struck = [fault.kind for fault in self.injected if fault.kind in NEED_CHECKPOINT and self.plan.shards > 1]
        starts = sum(2 if kind in _STRIKE_TWICE else 1 for kind in struck)
        excused = (
            (not self.plan.every and kinds & {*NEED_CHECKPOINT})
            or self.watch.damaged
            or (isinstance(error, (NonFiniteError, WorkerError)) and self._nans > self.plan.skipped)
            or (isinstance(error, LedgerError) and self.plan.altered and len(self.drivers) > 1)
            or (isinstance(error, DeadlineError) and "to run at once" in error.message and away >= 3)
            or ("for the driver to" in error.message and cut_off >= 2)
            or (("before it had started" in error.message or "server to start" in error.message) and starts >= _STARTS)
            or (late and isinstance(error, DeadlineError) and begins)
            or (late and isinstance(error, WorkerError) and self.plan.cluster)  # The tasks of the job report it.
        )
        if excused:
            self.error = type(error).__name__
            return
        raise Finding("failed", f"the job must end successfully. Received: {type(error).__name__}: {error.message}")

    def _require_progress(self) -> None:
        if not self._expected and not any(driver.process.alive for driver in self.drivers):
            return  # The job is over; a suspended server will detect that when it is resumed.
        patience = self._patience + self.disk.full_until
        if self.scheduler.now - self.watch.progressed > patience:
            raise Finding(
                "no progress", f"a commit must come within {patience:.0f} s. Received: none; {self.scheduler.people()}"
            )

    # ---- faults

    def _on_phase(self, phase: str) -> None:
        """Record that a stream passes one of `PHASES` for the first time in the server's micro-batch."""
        self.sends[phase] = number = self.sends.get(phase, 0) + 1
        self.tell(f"phase {phase!r} {number}")
        fault = self._due.get((phase, number))
        if fault is not None:
            self._inject(fault)
            self.scheduler.later(0.0, lambda: self.striker.strike_place(fault))

    def _inject(self, fault: Fault) -> None:
        self.injected.append(fault)
        self.watch.struck.add(fault.kind)
        self.tell(str(fault))

    def _on_send(self, stream: VirtualStream) -> float | None:
        scope, share = stream.link.scope, None
        for name in ("", scope):
            self.sends[name] = number = self.sends.get(name, 0) + 1
            fault = self._due.get((name, number))
            if fault is not None:
                self._inject(fault)
                self._nans += fault.kind == "nan"
                cut = self.striker.strike(fault, stream)
                share = share if cut is None else cut
                self.watch.damaged = "snapshot" in self.striker.rotten
        return share


def _serve(child: VirtualChild) -> int:
    """Run the body of ``python -m distkeras.ps child``."""

    def request() -> StartRequest:
        line = child.input_line()
        if line is None:
            raise ServerLostError("the driver ended before it had sent the request to start a server")
        child.request = StartRequest.from_json(line.decode())
        return child.request

    def tell(report: StartReport) -> None:
        child.tell(report_to_json(report).encode() + b"\n")

    try:
        joined = partial(accompany, world=child.world)
        return serve(request, tell, child.wait_until_over, joined, child.world, child.require_driver, build)
    except DistkerasError:  # The traceback of the process goes to standard error.
        return 1
