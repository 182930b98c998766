"""An attempt of a worker: a process that can be suspended, resumed and killed."""

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

#: The folder that contains `support`.
_TESTS = Path(__file__).parents[2]


class Attempt:
    """A worker process."""

    def __init__(self, job: Job, worker: int, number: int) -> None:
        self.worker, self.number = worker, number
        #: The welcome that it received.
        self.welcome: dict[str, Any] | None = None
        #: Whether it joined, continued after a breakpoint, and ended.
        self.joined, self.went_on, self.over = threading.Event(), threading.Event(), threading.Event()
        self._killed = False
        self._line = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.faults.killable_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # The folder must be named: with PYTHONSAFEPATH a script does not find modules in its own folder.
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
            "reported": job.workers * job.batches,
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
        with contextlib.suppress(BrokenPipeError):  # `receive` reports the worker's death.
            self._process.stdin.write(json.dumps(what).encode() + b"\n")

    def receive(self, timeout: float = PATIENCE) -> dict[str, Any] | None:
        """Return its next line, or None at the end of its output."""
        assert self._process.stdout is not None
        descriptor, deadline = self._process.stdout.fileno(), time.monotonic() + timeout
        while b"\n" not in self._line:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"worker {self.worker}, attempt {self.number}, does not send a line"
            piece = os.read(descriptor, 65536)
            if not piece:
                return None
            self._line += piece
        line, _, self._line = self._line.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        """Kill the process, on request of a test or the plan."""
        self._killed = True
        self._process.kill()

    def stop(self) -> None:
        """Suspend the process; return when it is suspended."""
        self._process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> int:
        """Wait for the end of the process; return its exit code."""
        try:
            return self._process.wait(PATIENCE)
        finally:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    def was_killed(self) -> bool:
        """Wait for the end of the process; check that the test or the plan killed it."""
        code = self.end()
        assert self._killed, f"worker {self.worker}, attempt {self.number}, ended: {code}"
        return code == -signal.SIGKILL
