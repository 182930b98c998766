"""An attempt of a worker: a process that can be stopped, woken and killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.faults.plan import PATIENCE

if TYPE_CHECKING:
    from support.faults.job import Job

#: Where `support` is found.
_TESTS = Path(__file__).parents[2]


class Attempt:
    """One worker process."""

    def __init__(self, job: Job, worker: int, number: int) -> None:
        self.worker, self.number = worker, number
        #: The answer that it got when it joined.
        self.welcome: dict[str, Any] | None = None
        #: Whether it joined, went on from a breakpoint, and came to its end.
        self.joined, self.went_on, self.over = threading.Event(), threading.Event(), threading.Event()
        self._killed = False
        self._line = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.faults.killable_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # Its folder by name: with PYTHONSAFEPATH a script does not find its neighbors.
            env=os.environ
            | {
                "OPENBLAS_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")]),
            },
        )
        settings = {
            "address": {**dataclasses.asdict(job.process.address), "key": job.process.address.key.hex()},
            "rule": job.rule.name,
            "hyper_parameters": job.rule.config(),
            "worker": worker,
            "workers": job.workers,
            "groups": job.groups,
            "attempt": number,
            "size": job.size,
            "told": job.workers * job.batches,
            "values": job.elements(worker),
            "epochs": job.epochs,
            "deadlines": dataclasses.asdict(job.deadlines),
            "order_timeout": PATIENCE,
            "breakpoints": [
                {"number": fault.number, "phase": fault.phase, "step": fault.step}
                for fault in job.plan.ahead(worker, number)
            ],
        }
        self.tell(settings)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # of its death `receive` tells
            self._process.stdin.write(json.dumps(what).encode() + b"\n")

    def receive(self, timeout: float = PATIENCE) -> dict[str, Any] | None:
        """Its next line; None at the end of all."""
        assert self._process.stdout is not None
        descriptor, deadline = self._process.stdout.fileno(), time.monotonic() + timeout
        while b"\n" not in self._line:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"worker {self.worker}, attempt {self.number}, says nothing"
            piece = os.read(descriptor, 65536)
            if not piece:
                return None
            self._line += piece
        line, _, self._line = self._line.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        """As a test does, or the plan."""
        self._killed = True
        self._process.kill()

    def stop(self) -> None:
        """Returns when it is stopped."""
        self._process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> int:
        """Waits for its end; returns its exit code."""
        try:
            return self._process.wait(PATIENCE)
        finally:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    def was_killed(self) -> bool:
        """At its end: whether that was meant."""
        code = self.end()
        assert self._killed, f"worker {self.worker}, attempt {self.number}, ended: {code}"
        return code == -signal.SIGKILL
