"""A job with a `plan` of faults: real worker processes (`killable_worker`), and a real server process.

A killed worker is started again under a higher attempt number, as Spark does; a server is restarted from its
snapshots. At the end no process, thread, open file, port or half-written snapshot may be left.

Mini-batch b of worker w has a gradient of 1 at one element of its own. With a rule that adds the workers' steps to
the center, the center at the end therefore shows how often each mini-batch counted, exactly.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.errors import ServerLostError
from distkeras.ps.rules import Rule
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.driver_client import DriverClient
from support.faults.attempt import Attempt
from support.faults.plan import PATIENCE, Fault, Faults
from support.patience import PATIENT, brief, patience

#: A stop of `LONG` seconds outlasts `frame` and `handshake`; a peer that misses them because it is slow reconnects.
DEADLINES = dataclasses.replace(PATIENT, handshake=brief(2), frame=brief(2))
LONG = brief(2.5)
SIZE, LARGE = 501, 1_000_003
#: The folder that contains `support`.
_TESTS = Path(__file__).parents[2]
_T = TypeVar("_T")


class Job:
    """A server process with snapshots, and for each partition a thread that starts attempts and injects faults.

    Args:
        folder: the folder for the snapshots.
        rule: the update rule; one that steps at the server has a learning rate of 1.
        plan: the faults.
        workers, batches, epochs: their numbers, with ``batches`` mini-batches for each partition and epoch.
        size: the number of the model's elements. A vector of `LARGE` is longer than the buffers of its socket.
        every: the number of commits from one snapshot to the next; None: no snapshots.
        deadlines: the deadlines of server and workers.
        groups: the number of groups of workers; None: no groups.
    """

    def __init__(  # noqa: PLR0913 - keywords, of which a test gives few
        self,
        folder: Path,
        rule: Rule,
        plan: Faults | None = None,
        *,
        workers: int = 2,
        batches: int = 6,
        epochs: int = 2,
        size: int = SIZE,
        every: int | None = 2,
        deadlines: Deadlines = DEADLINES,
        tls: bool = False,
        groups: int | None = None,
    ) -> None:
        self.groups = groups
        self.rule, self.plan, self.deadlines, self.folder = rule, plan or Faults(), deadlines, folder
        self.workers, self.batches, self.epochs, self.size = workers, batches, epochs, size
        gc.collect()
        self._before = _resources()
        self.process = ServerProcess(
            ServerSettings(
                rule,
                workers=workers,
                learning_rate=1.0 if rule.traits.gradient else None,
                deadlines=deadlines,
                checkpoint=None if every is None else Checkpoint(str(folder), every=every),
                relays=groups,
            ),
            tls=tls,
        )
        self.process.start()
        self.attempts: list[Attempt] = []
        #: The last line of each attempt, by its number.
        self.ended: dict[int, dict[str, Any]] = {}
        self.errors: list[BaseException] = []
        self.restarts = 0
        self._over = False
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._driver = DriverClient(self.process.address, deadlines)
        self._publish()

    def _publish(self) -> None:
        self._driver.publish(np.zeros(self.size, np.float32), model=b"the model")

    def elements(self, worker: int) -> list[int]:
        """Return the element at which each mini-batch of a partition has a gradient of 1."""
        return list(range(worker * self.batches, (worker + 1) * self.batches))

    # ---- execution

    def attempt(self, worker: int) -> Attempt:
        """Start an attempt under the next number."""
        with self._lock:
            made = Attempt(self, worker, len(self.attempts))
            self.attempts.append(made)
            if self._over:
                made.kill()
        return made

    def run(self) -> None:
        """Run every partition to its end."""
        for worker in range(self.workers):
            self.start(worker)
        self.wait()

    def start(self, worker: int) -> None:
        """Start a partition's attempts, one after the other, until one of them ends successfully."""

        def run() -> None:
            while not (self.supervise(self.attempt(worker)) or self._over):
                pass

        self._in_thread(run)

    def start_one(self, worker: int) -> Attempt:
        """Start a single attempt."""
        attempt = self.attempt(worker)
        self._in_thread(lambda: self.supervise(attempt))
        return attempt

    def _in_thread(self, run: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001 - raised by `wait`
                self.errors.append(error)

        thread = threading.Thread(target=guarded, name=f"faults-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        for thread in self._threads:
            while thread.is_alive() and not self.errors:
                assert time.monotonic() < deadline, "a partition does not end"
                thread.join(0.2)
        if self.errors:
            raise self.errors[0]

    def supervise(self, attempt: Attempt) -> bool:
        """Inject the planned faults into ``attempt``; return whether it completed its partition."""
        fault: Fault | None = None
        while (news := attempt.receive()) is not None:
            if "at" in news:
                fault = self.plan.claim(news["at"])
                order = {"order": "go"} if fault is None else self._inject(fault, attempt, news["sequence"])
                if order is None:
                    break
                attempt.tell(order)
                if fault is not None and fault.kind == "kill_server":
                    self.revive()
            elif "did" in news:
                attempt.went_on.set()
                if fault is not None:
                    fault.fired = fault.kind not in ("cut", "slow") or news["connected"]
            elif "joined" in news:
                attempt.welcome = news
                attempt.joined.set()
            else:
                assert "done" in news, f"worker {attempt.worker}, attempt {attempt.number}: {news.get('error', news)}"
                self.ended[attempt.number] = news
                assert attempt.end() == 0
                attempt.over.set()
                return True
        assert attempt.was_killed()
        return False

    def _inject(self, fault: Fault, attempt: Attempt, sequence: int) -> dict[str, Any] | None:
        """Inject ``fault``; return the order for the worker, or None if it is dead."""
        if fault.phase == "after-commit":
            self.until_applied(fault.worker, sequence + 1)
        if fault.kind == "kill":
            attempt.kill()
            fault.fired = True
            return None
        if fault.kind == "stop":
            attempt.stop()
            threading.Event().wait(fault.amount)
            attempt.wake()
        elif fault.kind == "kill_server":
            self.kill_server()
        elif fault.hold is not None:
            fault.fired = True  # The test may kill the worker there.
            fault.hold.reach()
        return {"order": fault.kind, "rate": fault.amount}

    def kill_server(self) -> None:
        with self._lock:
            os.kill(self.process.pid, signal.SIGKILL)
            assert self.process.exited(PATIENCE)

    def revive(self) -> None:
        """Restart the dead server from its snapshots."""
        with self._lock:
            self._driver.close()
            self.process.restart()
            self.restarts += 1
            self._publish()

    # ---- inspection

    def ask(self, call: Callable[[DriverClient], _T]) -> _T:
        """Return ``call(driver)`` of the driver's client; repeat it while another thread restarts the server."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                with self._lock:
                    return call(self._driver)
            except ServerLostError:
                assert time.monotonic() < deadline

    def commits(self) -> np.ndarray:
        """Return the ledger: `records.COMMIT`, in clock order."""
        return self.ask(lambda driver: driver.drain()).commits.view(COMMIT)

    def center(self) -> np.ndarray:
        return self.ask(lambda driver: driver.center()).center

    def until_applied(self, worker: int, sequence: int) -> None:
        """Wait until a commit is in the ledger, or the server has been restarted."""
        deadline, lives = time.monotonic() + PATIENCE, self.restarts
        while lives == self.restarts:  # A commit that a server loses is applied again only when the worker continues.
            commits = self.commits()
            if sequence in commits["sequence"][commits["worker"] == worker]:
                return
            assert time.monotonic() < deadline, f"commit {sequence} of worker {worker} is not applied"
            clock = len(commits)
            self.ask(lambda driver: driver.observe(clock, 0.2))  # noqa: B023 - called at once

    def until_finished(self, partitions: int) -> None:
        """Wait until so many partitions have ended."""
        deadline = time.monotonic() + PATIENCE
        while self.ask(lambda driver: driver.observe(-1, 0.0)).finished < partitions:
            assert time.monotonic() < deadline, f"{partitions} partitions do not end"
            threading.Event().wait(0.05)

    def check(self) -> None:
        """Check that the ledger has every partition's mini-batches of every epoch once and in order, with history."""
        records = self.ask(lambda driver: driver.drain())
        commits = records.commits.view(COMMIT)
        names = ["clock", "worker", "incarnation", "sequence", "epoch", "first_batch", "last_batch"]
        assert commits["clock"].tolist() == list(range(len(commits))), commits[names]
        for worker in range(self.workers):
            own = commits[commits["worker"] == worker]
            assert own["sequence"].tolist() == list(range(1, len(own) + 1))
            counted = [
                (row["epoch"], batch) for row in own for batch in range(row["first_batch"], row["last_batch"] + 1)
            ]
            assert counted == [(epoch, batch) for epoch in range(self.epochs) for batch in range(self.batches)]
        samples = records.history[:, 1]
        assert samples.tolist() == [1.0] * (self.workers * self.epochs * self.batches)
        status = self.ask(lambda driver: driver.observe(-1, 0.0))
        assert (status.finished, status.clock) == (self.workers, len(commits))

    def counts(self, each: float) -> None:
        """Check that every mini-batch moved the center by minus ``each``, and that nothing else changed it."""
        expected = np.zeros(self.size, np.float32)
        expected[: self.workers * self.batches] = -each * self.epochs
        np.testing.assert_array_equal(self.center(), expected)

    def elastic(self) -> None:
        """Check that each step of the workers is in the center or in their own replicas, wherever these began."""
        total = self.center()[: self.workers * self.batches].astype(np.float64)
        for news in self.ended.values():
            assert news["begun"] == 1, "a replica that was restarted has lost its steps"
            total += news["moved"]
        np.testing.assert_allclose(total, -self.epochs, rtol=0, atol=1e-5)

    # ---- cleanup

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._over = True
        for fault in self.plan.faults:
            if fault.hold is not None:
                fault.hold.release()
        with self._lock:
            attempts = list(self.attempts)
        for attempt in attempts:
            attempt.kill()
        for thread in self._threads:
            thread.join(PATIENCE)
        for attempt in self.attempts:
            attempt.end()
        self._driver.close()
        self.process.close()
        if kind is not None:
            return
        self.plan.check()
        gc.collect()
        left = _leaked(self._before)
        assert not left, left
        with socket.create_server((self.process.address.host, self.process.address.port)):
            pass
        assert [name.name for name in self.folder.iterdir() if name.suffix != ".dks"] == []


def _resources() -> dict[str, Any]:
    """Return the child processes, threads and number of descriptors of this process."""
    me = psutil.Process()
    return {
        "children": {child.pid for child in me.children(recursive=True)},
        "threads": {thread.name for thread in threading.enumerate()},
        "files": me.num_fds(),
    }


def _leaked(before: dict[str, Any]) -> dict[str, Any]:
    """Return the resources gained since ``before``; wait for those that are still being released."""
    deadline = time.monotonic() + patience(10)
    while True:
        now = _resources()
        left = {name: now[name] - before[name] for name in ("children", "threads")}
        left["files"] = max(0, now["files"] - before["files"])
        left = {name: what for name, what in left.items() if what}
        if not left or time.monotonic() > deadline:
            return left
