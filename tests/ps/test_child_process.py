"""A child process whose exit status several threads read at the same time."""

from __future__ import annotations

import os
import sys
import threading

from support.patience import patience

from distkeras.ps.world.processes import ChildProcess


def test_wait_sees_the_exit_while_other_threads_poll_the_exit_status() -> None:
    # `subprocess` lets one thread at a time collect the status; a second thread gets None while the first one does so.
    for _ in range(30):
        child = ChildProcess([sys.executable, "-I", "-S", "-c", "input()"], os.environ)

        def poll(child: ChildProcess = child) -> None:
            while child.exit_code is None:
                pass

        threads = [threading.Thread(target=poll) for _ in range(3)]
        for thread in threads:
            thread.start()
        child.kill()
        exited = child.wait(patience(10))
        for thread in threads:
            thread.join(patience(10))
        child.end_input(b"")
        child.close()
        assert exited
        assert child.exit_code == -9
