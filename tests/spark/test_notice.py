"""Notice of a process' end: it is used within a context, and ends the process at once elsewhere."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
from support.patience import patience

from distkeras.spark import notice
from distkeras.spark.notice import Notice, given_by_signals

#: A process that gets ready, is sent a signal, and prints what it has used; `{use}` is within the context.
PROGRAM = """
import os, signal, sys, time
from distkeras.spark import notice
with notice.given_by_signals() as given:
    {use}
print("after", flush=True)
"""
USED = """with given.used():
        os.kill(os.getpid(), signal.{name})
        print(given.given.name, flush=True)"""


def run(use: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-c", PROGRAM.format(use=use)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)
    assert ended.stderr == ""
    return ended.returncode, ended.stdout.split()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_process_that_uses_the_notice_goes_on(name: str) -> None:
    assert run(USED.format(name=name)) == (0, [name, "after"])


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_process_that_does_not_use_it_ends_at_once(name: str) -> None:
    assert run(f"os.kill(os.getpid(), signal.{name}); print(1)") == (-signal.Signals[name], [])


def test_further_signals_are_the_same_notice() -> None:
    """Spark's daemon sends SIGHUP twice, and a machine that is shut down sends SIGTERM to all processes before."""
    kills = [f"os.kill(os.getpid(), signal.{name})" for name in ("SIGHUP", "SIGHUP", "SIGTERM")]
    for indent in (" " * 8, " " * 4):  # while the notice is used, and afterwards
        further = "".join(f"\n{indent}{kill}" for kill in kills)
        assert run(USED.format(name="SIGTERM") + further) == (0, ["SIGTERM", "after"])


def test_a_process_that_spark_uses_again_does_not_end_later() -> None:
    again = USED.format(name="SIGTERM") + "\nprint(signal.alarm(0), flush=True)\nif True:\n    pass"
    assert run(again) == (0, ["SIGTERM", "0", "after"])


def test_a_process_that_hangs_after_the_notice_ends() -> None:
    hangs = "notice.END_SECONDS = 1; used = given.used()\n    with used: os.kill(os.getpid(), 15); time.sleep(1000)"
    assert run(hangs) == (-signal.SIGALRM, [])


def test_handlers_are_those_of_before_afterwards() -> None:
    before = [signal.getsignal(number) for number in notice.SIGNALS]
    with given_by_signals():
        assert [signal.getsignal(number) for number in notice.SIGNALS] != before
    assert [signal.getsignal(number) for number in notice.SIGNALS] == before


def test_outside_the_main_thread_no_signal_gives_notice() -> None:
    found: list[Notice] = []

    def enter() -> None:
        with given_by_signals() as given:
            found.append(given)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(patience(10))
    assert found[0].given is None
