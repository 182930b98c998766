"""A plan of faults: each has a worker, a breakpoint and a kind. `faults.job.Job` executes the plan.

    plan = Faults()
    plan.at(worker=0, phase="mid-commit", step=3).kill()
    plan.at(worker=1, phase="between-epochs").kill_server()
    with Job(tmp_path, make("downpour", window=2), plan) as job:
        job.run()
        job.check()

A worker reaches the same breakpoint in every run and waits there for the fault, after which it continues. Nothing
depends on time, except for waits until a deadline has passed. At the end every fault must have happened.
"""

from __future__ import annotations

import dataclasses
import threading

from support.patience import patience

#: In the order in which a worker reaches them.
PHASES = (
    "handshake",  # Half of the proof is sent.
    "model",  # Half of the request is sent.
    "pull",  # Half of the request is sent.
    "mid-commit",  # Half of the frame is sent.
    "after-commit",  # The commit is applied, and its reply is not read.
    "mid-reply",  # The first bytes of the center are read.
    "between-epochs",
    "end",  # The last commit is answered, and Leave is not sent.
    "leave",  # Leave is sent, and its answer is not read.
)
FAULTS = ("kill", "cut", "stop", "slow", "kill_server")

#: No operation in these tests takes longer, in seconds.
PATIENCE = patience(100)


class ServerHandle:
    """A handle of a worker that waits at its breakpoint until the test releases it."""

    def __init__(self) -> None:
        self._reached, self._go = threading.Event(), threading.Event()

    def reach(self) -> None:
        self._reached.set()
        assert self._go.wait(PATIENCE), "the test does not release a worker that waits at its breakpoint"

    def wait(self) -> None:
        """Wait until the worker has reached its breakpoint."""
        assert self._reached.wait(PATIENCE), "a worker does not reach its breakpoint"

    def release(self) -> None:
        self._go.set()


@dataclasses.dataclass
class Fault:
    """One fault of a plan."""

    number: int
    worker: int
    phase: str
    step: int | None
    attempt: int | None
    kind: str = ""
    #: Seconds of a suspension, or bytes a second of a slow connection.
    amount: float = 0.0
    claimed: bool = False
    fired: bool = False
    hold: ServerHandle | None = None

    def __str__(self) -> str:
        return f"{self.kind} of worker {self.worker} at {self.phase}, step {self.step}"


class FaultBuilder:
    """The choice of the fault at a breakpoint."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def kill(self) -> None:
        """Send SIGKILL to the worker's process."""
        self._set_fault("kill")

    def cut(self) -> None:
        """Shut the connection down."""
        self._set_fault("cut")

    def stop(self, seconds: float) -> None:
        """Send SIGSTOP to the worker's process, and SIGCONT after ``seconds``."""
        self._set_fault("stop", seconds)

    def slow(self, bytes_per_second: float) -> None:
        """Limit the connection to so many bytes a second from then on."""
        self._set_fault("slow", bytes_per_second)

    def kill_server(self) -> None:
        """Send SIGKILL to the server's process, and restart it when it is dead."""
        self._set_fault("kill_server")

    def hold(self) -> ServerHandle:
        """Let the worker wait until the handle is released."""
        self._set_fault("hold")
        self._fault.hold = ServerHandle()
        return self._fault.hold

    def _set_fault(self, kind: str, amount: float = 0.0) -> None:
        assert not self._fault.kind, "a breakpoint has one fault"
        self._fault.kind, self._fault.amount = kind, amount


class Faults:
    """A plan. Each fault happens once, to the first attempt that reaches its breakpoint."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self._lock = threading.Lock()

    def at(self, *, worker: int, phase: str, step: int | None = None, attempt: int | None = None) -> FaultBuilder:
        """Add a breakpoint.

        Args:
            worker: the worker's number.
            phase: one of `PHASES`.
            step: the number of its partition's commits that were applied before; None: any number.
            attempt: the attempt's number; None: the first attempt that reaches the breakpoint.
        """
        assert phase in PHASES, phase
        self.faults.append(Fault(len(self.faults), worker, phase, step, attempt))
        return FaultBuilder(self.faults[-1])

    def ahead(self, worker: int, attempt: int) -> list[Fault]:
        """Return the faults that may still happen to an attempt."""
        return [
            fault
            for fault in self.faults
            if fault.worker == worker and not fault.claimed and fault.attempt in (None, attempt)
        ]

    def claim(self, number: int) -> Fault | None:
        """Return the fault to the first caller, whose attempt reached its breakpoint first, and None to later ones."""
        with self._lock:
            fault = self.faults[number]
            if fault.claimed:
                return None
            fault.claimed = True
            return fault

    def check(self) -> None:
        """Check that each fault has happened."""
        silent = [str(fault) for fault in self.faults if not fault.fired]
        assert not silent, f"never happened: {silent}"
