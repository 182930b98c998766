"""How long a test waits: longer where the machine is slower, as measured once in each process.

`patience` limits what only a hang would reach, and `brief` is for a deadline that a test lets pass: a test should give
all other deadlines `patience`, so that no honest work runs against a short one.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable

from distkeras.ps.transport.deadlines import Deadlines

#: Seconds that `_work` takes on an idle machine of the kind that the limits in the tests were written for.
REFERENCE = 0.25
#: Load may come after the measurement.
SLACK = 3.0


def _work() -> None:
    """Processes start, and an interpreter computes: for longer than the slices of time in which a quota is given."""
    for _ in range(5):
        subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True, timeout=600)
    sum(number * number for number in range(3_000_000))


@functools.cache
def slowdown() -> float:
    """How many times slower than the reference this machine is now, at least 1."""
    began = time.monotonic()
    _work()
    return max(1.0, (time.monotonic() - began) / REFERENCE)


def patience(seconds: float) -> float:
    """The limit, in seconds, of something that takes less than ``seconds`` on the machine of reference."""
    return seconds * SLACK * slowdown()


def brief(seconds: float) -> float:
    """A deadline that is to pass: ``seconds`` on the machine of reference."""
    return seconds * slowdown()


#: Deadlines of which none passes unless something hangs.
PATIENT = Deadlines(
    connect=patience(20),
    handshake=patience(20),
    frame=patience(20),
    publish=patience(20),
    gather=patience(20),
    reply=patience(20),
    lease=patience(20),
    reconnect=patience(20),
    close=patience(20),
)


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Waits until ``condition()`` is true, which takes less than ``seconds`` on the machine of reference.

    It is asked less often the longer that takes: many tests wait at once, and some conditions are expensive.
    """
    began = time.monotonic()
    deadline = began + patience(seconds)
    while not condition():
        now = time.monotonic()
        assert now < deadline
        time.sleep(min(max(0.01, (now - began) / 10), 0.1))
