"""A job whose drivers are processes of their own, so that they can be killed, and two can run at once.

The next driver continues from the checkpoint of the previous one. Of two drivers at once the newer one owns the job:
the older one ends with an `OwnershipLostError`, unless it was done by then.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.jobs import JobResult, JobSpec

_PROGRAM = Path(__file__).with_name("driver.py")
_POLL_SECONDS = 0.2
#: The number of driver faults in one job; each one costs the start of a driver.
_MOST_FAULTS = 4
#: Seconds that the older of two drivers may live after the newer one has ended, and that any process may take to die.
_PATIENCE, _DEATH = 180.0, 30.0


@dataclass
class _Driver:
    folder: Path
    process: subprocess.Popen[bytes]
    began_with: str
    killed: bool = False


class Drivers:
    """One such job. One thread calls `run`, and another one `kill` and `double`.

    Args:
        spec: a counting job, with its mini-batches counted; or a stream.
        checkpoint: the folder of its snapshots.
        scratch: folder for the drivers' own files.
        limit: seconds that the job may take.
    """

    def __init__(self, spec: JobSpec, checkpoint: Path, scratch: Path, limit: float) -> None:
        self._spec, self._checkpoint, self._scratch = spec, checkpoint, scratch
        self._deadline = time.monotonic() + limit
        self._lock = threading.Lock()
        self._drivers: list[_Driver] = []
        self._faults, self._over = 0, False

    # ---- faults; each returns what was done, or None if it is impossible now

    def kill(self) -> str | None:
        """Kill the newest driver if it has made progress since it started."""
        with self._lock:
            if not self._makes_progress():
                return None
            driver = self._drivers[-1]
            driver.killed = True
            self._faults += 1
            driver.process.kill()
            return f"process {driver.process.pid}; another one continues"

    def double(self) -> str | None:
        """Start another driver while the newest one runs and has made progress; a stream never has two drivers.

        Spark allows only one query at a time for a checkpoint.
        """
        with self._lock:
            if self._spec.micro_batches or not self._makes_progress():
                return None
            before, now = self._drivers[-1].process.pid, self._start().process.pid
            self._faults += 1
            return f"process {now} at the same time as {before}"

    def _makes_progress(self) -> bool:
        last = self._drivers[-1]
        if self._over or self._faults >= _MOST_FAULTS or last.killed or last.process.poll() is not None:
            return False
        newest = self._newest()
        return _epoch(newest) > _epoch(last.began_with) and not newest.endswith("-000000000000")

    def _newest(self) -> str:
        folder = self._checkpoint / "center" if self._spec.micro_batches else self._checkpoint
        return max((path.stem for path in folder.glob("snapshot-*.dks")), default="")

    # ---- the job

    def run(self) -> JobResult:
        """Run the job, and return its outcome."""
        with self._lock:
            self._start()
        try:
            while (ended := self._ended()) is None:
                if time.monotonic() > self._deadline:
                    return self._problem("the job must end in time")
                time.sleep(_POLL_SECONDS)
            return self._judged(ended)
        finally:
            self._end_all()

    def _start(self) -> _Driver:
        folder = self._scratch / f"{self._checkpoint.name}-driver-{len(self._drivers)}"
        folder.mkdir()
        order: dict[str, Any] = {"folder": str(folder), "checkpoint": str(self._checkpoint)}
        order |= {"rows": self._spec.rows, "epochs": self._spec.epochs, "batches": self._spec.batches}
        order |= {"micro_batches": self._spec.micro_batches, "data": self._spec.folder}
        began_with = self._newest()
        with (folder / "log").open("wb") as log:
            command = [sys.executable, str(_PROGRAM), json.dumps(order)]
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._drivers.append(_Driver(folder, process, began_with))
        return self._drivers[-1]

    def _ended(self) -> _Driver | None:
        """Return the newest driver if it has ended and no other one follows."""
        with self._lock:
            newest = self._drivers[-1]
            if newest.process.poll() is None:
                return None
            if newest.killed and newest.process.returncode:
                self._start()
                return None
            self._over = True
            return newest

    def _judged(self, winner: _Driver) -> JobResult:
        outcome = _read_outcome(winner)
        if "result" not in outcome:
            return self._problem(f"the last driver must end successfully. Received: {outcome['text']}")
        result = JobResult(**outcome["result"] | {"problems": tuple(outcome["result"]["problems"])})
        problems = list(result.problems)
        for loser in self._drivers:
            if loser is winner or loser.killed:
                continue
            try:
                loser.process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                problems.append(f"driver {loser.process.pid} must end as the other one has the job. Received: it lives")
                continue
            lost = _read_outcome(loser)
            problems += lost["result"]["problems"] if "result" in lost else []
            if "result" not in lost and lost["error"] != "OwnershipLostError":
                problems.append(f"the older driver must end with an OwnershipLostError. Received: {lost['text']}")
        return JobResult(**vars(result) | {"problems": tuple(problems)})

    def _problem(self, text: str) -> JobResult:
        expected = self._spec.expected
        return JobResult(expected=expected, lost=expected, problems=(text,))

    def _end_all(self) -> None:
        with self._lock:
            self._over = True
            for driver in self._drivers:
                if driver.process.poll() is None:
                    driver.process.kill()
                driver.process.wait(_DEATH)


def _epoch(snapshot: str) -> str:
    """Return the epoch of the latest claim; see `distkeras.ps.checkpoint.ownership`."""
    return snapshot.split("-")[1] if snapshot else ""


def _read_outcome(driver: _Driver) -> dict[str, Any]:
    try:
        outcome: dict[str, Any] = json.loads((driver.folder / "outcome").read_text())
    except FileNotFoundError:
        tail = (driver.folder / "log").read_text(errors="replace")[-3000:]
        return {"error": "", "text": f"exit {driver.process.returncode}: {tail}"}
    return outcome
