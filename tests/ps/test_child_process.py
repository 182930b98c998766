"""A child process whose exit status several threads ask for at the same time."""

from __future__ import annotations

import os
import sys
import threading

from support.patience import patience

from distkeras.ps.world.processes import ChildProcess


def test_the_end_is_seen_while_other_threads_ask_for_the_exit_status() -> None:
    # `subprocess` lets one thread at a time collect the status; another one that asks at that moment learns nothing.
    for _ in range(30):
        child = ChildProcess([sys.executable, "-I", "-S", "-c", "input()"], os.environ)

        def ask(child: ChildProcess = child) -> None:
            while child.exit_code is None:
                pass

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        child.kill()
        seen = child.wait(patience(10))
        for thread in threads:
            thread.join(patience(10))
        child.end_input(b"")
        child.close()
        assert seen
        assert child.exit_code == -9
