"""The waits of tests, which are longer on a slower machine, measured once in each process.

`patience` limits waits that end early unless something hangs, and `brief` is for deadlines that a test intends to
miss. All other deadlines of a test should have `patience`, so that a slow machine does not miss them.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable

from distkeras.ps.transport.deadlines import Deadlines

#: Seconds that `_work` takes on an idle reference machine, for which the limits in the tests were chosen.
REFERENCE = 0.25
#: The machine may be busier later than during the measurement.
SLACK = 3.0


def _work() -> None:
    """Start processes and compute, for longer than the time slices of a CPU quota."""
    for _ in range(5):
        subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True, timeout=600)
    sum(number * number for number in range(3_000_000))


@functools.cache
def slowdown() -> float:
    """Return how many times slower this machine is now than the reference machine, at least 1."""
    began = time.monotonic()
    _work()
    return max(1.0, (time.monotonic() - began) / REFERENCE)


def patience(seconds: float) -> float:
    """Return the limit, in seconds, of an operation that takes less than ``seconds`` on the reference machine."""
    return seconds * SLACK * slowdown()


def brief(seconds: float) -> float:
    """Return a deadline that the test intends to miss: ``seconds`` on the reference machine."""
    return seconds * slowdown()


#: Deadlines that are missed only if something hangs.
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
    """Wait until ``condition()`` is true, which takes less than ``seconds`` on the reference machine.

    The interval between two checks grows, because many tests wait at once and some conditions are expensive.
    """
    began = time.monotonic()
    deadline = began + patience(seconds)
    while not condition():
        now = time.monotonic()
        assert now < deadline
        time.sleep(min(max(0.01, (now - began) / 10), 0.1))
