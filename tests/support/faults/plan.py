"""A plan of faults: which worker has one, where, and of which kind. `faults.job.Job` carries it out.

    plan = Faults()
    plan.at(worker=0, phase="mid-commit", step=3).kill()
    plan.at(worker=1, phase="between-epochs").kill_server()
    with Job(tmp_path, make("downpour", window=2), plan) as job:
        job.run()
        job.check()

A worker reaches the same breakpoint in every run and asks there; the fault happens then, and it goes on. So nothing
depends on time, but a wait for a deadline to pass. At the end every fault must have happened.
"""

from __future__ import annotations

import dataclasses
import threading

from support.patience import patience

#: In the order in which a worker comes through them.
PHASES = (
    "handshake",  # half of the proof is out
    "model",  # half of the request is out
    "pull",  # half of the request is out
    "mid-commit",  # half of the frame is out
    "after-commit",  # the commit is applied, and no answer read
    "mid-reply",  # the first bytes of the center are read
    "between-epochs",
    "end",  # the last commit is answered, and Leave not sent
    "leave",  # Leave is out, and no answer read
)
FAULTS = ("kill", "cut", "stop", "slow", "kill_server")

#: Nothing in these tests takes as long, in seconds.
PATIENCE = patience(100)


class ServerHandle:
    """A worker that waits at its breakpoint for as long as a test wants."""

    def __init__(self) -> None:
        self._reached, self._go = threading.Event(), threading.Event()

    def reach(self) -> None:
        self._reached.set()
        assert self._go.wait(PATIENCE), "a worker is held forever"

    def wait(self) -> None:
        """Until the worker is there."""
        assert self._reached.wait(PATIENCE), "a worker does not come to its breakpoint"

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
    #: Seconds of a stop, bytes a second of a slow line.
    amount: float = 0.0
    claimed: bool = False
    fired: bool = False
    hold: ServerHandle | None = None

    def __str__(self) -> str:
        return f"{self.kind} of worker {self.worker} at {self.phase}, step {self.step}"


class FaultBuilder:
    """Says what happens at a breakpoint."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def kill(self) -> None:
        """SIGKILL to the worker's process."""
        self._set_fault("kill")

    def cut(self) -> None:
        """The connection is shut down."""
        self._set_fault("cut")

    def stop(self, seconds: float) -> None:
        """SIGSTOP to the worker's process, and SIGCONT after ``seconds``."""
        self._set_fault("stop", seconds)

    def slow(self, bytes_per_second: float) -> None:
        """The connection only dribbles from then on."""
        self._set_fault("slow", bytes_per_second)

    def kill_server(self) -> None:
        """SIGKILL to the server's process, which is restarted when it is dead."""
        self._set_fault("kill_server")

    def hold(self) -> ServerHandle:
        """The worker waits."""
        self._set_fault("hold")
        self._fault.hold = ServerHandle()
        return self._fault.hold

    def _set_fault(self, kind: str, amount: float = 0.0) -> None:
        assert not self._fault.kind, "a breakpoint has one fault"
        self._fault.kind, self._fault.amount = kind, amount


class Faults:
    """A plan. Each fault happens once, to the first attempt that comes to its breakpoint."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self._lock = threading.Lock()

    def at(self, *, worker: int, phase: str, step: int | None = None, attempt: int | None = None) -> FaultBuilder:
        """A breakpoint.

        Args:
            worker: who.
            phase: one of `PHASES`.
            step: commits of its partition that were applied before; None: at the first chance.
            attempt: the number of the attempt that is meant; None: the first that comes there.
        """
        assert phase in PHASES, phase
        self.faults.append(Fault(len(self.faults), worker, phase, step, attempt))
        return FaultBuilder(self.faults[-1])

    def ahead(self, worker: int, attempt: int) -> list[Fault]:
        """What may still happen to an attempt."""
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
        """Each fault has happened."""
        silent = [str(fault) for fault in self.faults if not fault.fired]
        assert not silent, f"never happened: {silent}"
