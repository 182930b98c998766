"""Notice that a process ends soon: SIGTERM, and SIGHUP, which Spark's daemon sends when its executor ends.

A process that uses the notice may finish what it has in hand, for some seconds; any other one ends at once, as by
default. The daemon sends SIGHUP twice, and a machine that is shut down sends SIGTERM before: all that is one notice.
Importing this module loads neither pyspark nor Keras.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: The signals that give notice.
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
#: Seconds that a process may take from the notice to its end.
END_SECONDS = 20


class Notice:
    """Notice for this process, from `given_by_signals`."""

    def __init__(self) -> None:
        #: The signal that has given notice; None: none has.
        self.given: signal.Signals | None = None
        self._users = 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the process go on after a notice within the context, for `END_SECONDS` at most."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    def is_given(self) -> bool:
        """Return whether notice was given."""
        return self.given is not None

    def give(self, number: int) -> None:
        """Give notice, once; end the process at once if it is not used."""
        if self.given is not None:
            return
        if not self._users:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.given = signal.Signals(number)
        signal.alarm(END_SECONDS)  # its default action ends the process


@contextmanager
def given_by_signals() -> Iterator[Notice]:
    """Yield a notice that `SIGNALS` give within the context; outside the main thread, none do."""
    notice = Notice()
    if threading.current_thread() is not threading.main_thread():
        yield notice
        return

    before: dict[int, Any] = {each: signal.signal(each, lambda number, _frame: notice.give(number)) for each in SIGNALS}
    try:
        yield notice
    finally:
        if notice.is_given():
            signal.alarm(0)  # Spark may use the process again
        for number, handler in before.items():
            signal.signal(number, handler)
