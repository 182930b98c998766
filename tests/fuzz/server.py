"""A running server under attack: it must keep serving, and its center must be bitwise the undisturbed one."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distkeras.ps.center.commit_log import COMMIT
from distkeras.ps.protocol.framing import Limits
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.transport.driver_client import DriverClient
from fuzz.parser import HANG, ROOM, Violation
from fuzz.peers import ADDRESSES, Attacker, HonestWorker


class ServerLog(logging.Handler):
    """A handler that counts the server's log records, which its driver forwards, and does not print them."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals = 0
        #: Lines that are no records, such as those of an unexpected exception.
        self.strange: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Count ``record``."""
        text = record.getMessage()
        self.refusals += record.name.endswith(".admission")
        if record.name.endswith(".process") or "Traceback" in text:
            self.strange.append(text)

    def __enter__(self) -> ServerLog:
        logger = logging.getLogger("distkeras")
        logger.addHandler(self)
        logger.propagate = False
        return self

    def __exit__(self, *exc_info: object) -> None:
        logger = logging.getLogger("distkeras")
        logger.removeHandler(self)
        logger.propagate = True


def memory(pid: int, name: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def threads(pid: int) -> int:
    """Return the number of threads of a process."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


@dataclass(frozen=True)
class Aftermath:
    """The state after an attack.

    Args:
        steps: the number of the honest worker's commits.
        center: the center, float32 ``(size,)``.
        commits: the commit log.
        threads: the number of the server's threads above that before the attack.
        grown: the largest growth of the server's memory, in bytes.
    """

    steps: int
    center: np.ndarray
    commits: np.ndarray
    threads: int
    grown: int


def live(count: int, seed: int, *, size: int = 20_000, attackers: int = 3) -> Counter[str]:
    """Send ``count`` inputs to a server while an honest worker trains; return the number of inputs by outcome.

    Raises:
        Violation: the worker, the server or a connection was harmed.
    """
    deadlines = Deadlines(handshake=5.0, frame=5.0)
    limits = Limits(body=4 * size + (16 << 20))  # This is the server's own limit.
    settings = ServerSettings(make("downpour", window=1), workers=1, deadlines=deadlines)
    with ServerLog() as log, ServerProcess(settings) as process:
        attacks = [Attacker(process.address, seed + number, size, limits) for number in range(attackers)]
        honest = HonestWorker(process.address, size)
        after = attacked(process, honest, attacks, count // attackers)
        process.close()  # The server's last log records have arrived.
    if log.strange or log.refusals > 2 * ADDRESSES[0] * ADDRESSES[1]:
        raise Violation(f"the server said {log.refusals} times that it refused a peer, and {log.strange}")
    by_itself = compare_with_undisturbed(after)
    outcomes = sum((attack.outcomes for attack in attacks), Counter[str]())
    outcomes.update(
        {
            "honest: commits": after.steps,
            "honest: connections cut": honest.cuts,
            "server: lines of log about refused peers": log.refusals,
            "server: bytes of memory more": after.grown,
            "server: bytes of memory more where undisturbed": by_itself,
            "server: threads more": after.threads,
        }
    )
    return outcomes


def attacked(process: ServerProcess, honest: HonestWorker, attacks: list[Attacker], inputs: int) -> Aftermath:
    """Attack the server with ``inputs`` inputs of each attacker while the honest worker trains.

    Raises:
        Violation: an attacker or the worker failed, or threads are left.
    """
    driver = DriverClient(process.address)
    driver.publish(np.zeros(honest.size, np.float32))
    honest.start()
    driver.observe(0, HANG)
    threads_before, memory_before = threads(process.pid), memory(process.pid, "VmRSS")
    running = [threading.Thread(target=attack.send, args=(inputs,), daemon=True) for attack in attacks]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    honest.over.set()
    honest.join(HANG)
    for error in (*(attack.error for attack in attacks), honest.error):
        if error is not None:
            raise Violation(f"met {error!r}") from error
    if honest.is_alive():
        raise Violation("the honest worker hangs")
    after = Aftermath(
        honest.steps,
        driver.center().center.copy(),
        driver.drain(0, honest.steps + 1).commits.view(COMMIT),
        # The driver's own thread is one of those; the honest worker's thread has ended.
        threads=threads_left(process.pid, threads_before) - threads_before,
        grown=memory(process.pid, "VmHWM") - memory_before,
    )
    driver.close()
    return after


def threads_left(pid: int, before: int) -> int:
    """Wait until a process has at most ``before`` threads; return their number.

    Raises:
        Violation: the process still has more threads at the deadline.
    """
    deadline = time.monotonic() + HANG
    while (left := threads(pid)) > before:
        if time.monotonic() > deadline:
            raise Violation(f"{left} threads are left of {before}")
        time.sleep(0.1)
    return left


def compare_with_undisturbed(after: Aftermath) -> int:
    """Compare with an undisturbed server; return the bytes by which that server grows.

    Raises:
        Violation: the ledger, the center or the memory differs.
    """
    steps = after.steps
    if after.commits["first_batch"].tolist() != list(range(steps)) or set(after.commits["worker"].tolist()) != {0}:
        raise Violation("the ledger is not exact")
    expected, by_itself = undisturbed(steps, after.center.size)
    if not np.array_equal(after.center, expected):
        raise Violation("the center is not the undisturbed one")
    if after.grown > by_itself + ROOM:
        raise Violation(f"the server has grown by {after.grown} bytes, and by {by_itself} where it was not disturbed")
    return by_itself


def undisturbed(steps: int, size: int) -> tuple[np.ndarray, int]:
    """Return the center after ``steps`` steps of the worker alone, and the bytes by which the server grew."""
    with ServerProcess(ServerSettings(make("downpour", window=1), workers=1)) as process:
        driver = DriverClient(process.address)
        driver.publish(np.zeros(size, np.float32))
        before = memory(process.pid, "VmRSS")
        alone = HonestWorker(process.address, size, steps)
        alone.run()
        if alone.error is not None:
            raise alone.error
        center, grown = driver.center().center.copy(), memory(process.pid, "VmHWM") - before
        driver.close()
    return center, grown
