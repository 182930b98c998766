"""Trains on three executors while processes are killed and stopped, connections cut, and the snapshot disk filled.

Checks that every job ends well, that every mini-batch counts once, that the accuracy is that of an undisturbed job, and
that nothing is left behind. The seed decides which faults come when; targets are drawn among those alive. Linux only;
needs the package psutil (the extra `tests` brings it).
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaos import leftovers, targets
from chaos.disk import Disk
from chaos.injector import Injector
from chaos.jobs import POINTS, Outcome, Work, checked, counted, counting, ended, pictures, session
from chaos.plan import KINDS, plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Seconds that one job may take at most, faults and all; then it is interrupted, and counts as hanging.
LIMIT = 1200.0


@dataclass(frozen=True)
class Size:
    """Rows and epochs of both kinds of job."""

    rows: int = 12_000
    epochs: int = 6
    counted_rows: int = 1000
    counted_epochs: int = 8


FULL, TINY = Size(), Size(rows=1500, epochs=2, counted_rows=120, counted_epochs=4)


@dataclass
class Tally:
    """All that has been seen."""

    outcomes: list[Outcome] = field(default_factory=list)
    survived: int = 0
    differences: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(prog="python scripts/chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of disturbed training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (default: %(default)s)")
    parser.add_argument(
        "--rule", default="asgd", help="of the jobs with pictures, one that steps at the server (default: %(default)s)"
    )
    parser.add_argument("--tiny", action="store_true", help="small jobs, whose accuracy means nothing: a smoke test")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="for the log (default: out)")
    return parser.parse_args(argv)


def say(text: str) -> None:
    """Prints ``text`` with the time."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


class Range:
    """Runs jobs on one session, each with a fresh folder for snapshots on the small disk."""

    def __init__(self, spark: SparkSession, disk: Disk, scratch: Path, tally: Tally) -> None:
        self._spark = spark
        self._disk = disk
        self._scratch = scratch
        self._tally = tally
        self._jobs = 0

    def run(self, work: Work, disturbing: Callable[[], Any] = nullcontext) -> tuple[Work, Outcome]:
        """One job, inside ``disturbing()``; the first of its kind tells which mini-batches there are."""
        from distkeras.ps.checkpoint.checkpointer import Checkpoint
        from distkeras.ps.errors import DistkerasError
        from distkeras.ps.transport.deadlines import Deadlines

        self._jobs += 1
        folder = self._disk.folder / f"job-{self._jobs}"
        before = set(threading.enumerate())
        trainer = work.trainer(deadlines=Deadlines(lease=30.0))
        try:
            with watched(), disturbing():
                model = trainer.train(work.frame(self._spark), checkpoint=Checkpoint(str(folder), every=25))
            work = work if work.batches else counted(work, trainer)
            outcome = checked(work, trainer, model)
        except (DistkerasError, KeyboardInterrupt) as error:
            told = f"{type(error).__name__}: {error}"
            outcome = Outcome(expected=work.expected, lost=work.expected, problems=(told,))
        left = leftovers.of_a_job(before) + leftovers.drafts(folder)
        self._tally.left += left
        shutil.rmtree(folder, ignore_errors=True)
        return work, replace(outcome, problems=(*outcome.problems, *(f"left behind: {one}" for one in left)))


@contextmanager
def watched() -> Iterator[None]:
    """Interrupts the main thread when the context takes longer than `LIMIT`."""

    def interrupt() -> None:
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        signal.raise_signal(signal.SIGINT)

    timer = threading.Timer(LIMIT, interrupt)
    timer.name, timer.daemon = "chaos-watch", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def disturb(works: Sequence[Work], injector: Injector, grounds: Range, tally: Tally) -> None:
    """Jobs of all kinds in turns, undisturbed ones first, until the plan is worked off."""
    accuracy: dict[str, float] = {}
    known = []
    for work in works:
        work, outcome = grounds.run(work)
        known.append(work)
        say(f"undisturbed {told(work, outcome)}")
        tally.broken += [f"undisturbed {work.name}: {problem}" for problem in outcome.problems]
        if outcome.accuracy is not None:
            accuracy[work.name] = outcome.accuracy
    number = 0
    while not injector.done:
        work = known[number % len(known)]
        number += 1
        faults = sum(injector.injected.values())
        _, outcome = grounds.run(work, injector.disturbing)
        say(f"job {number} {told(work, outcome)}")
        problems = list(outcome.problems)
        if outcome.accuracy is not None:
            difference = outcome.accuracy - accuracy[work.name]
            tally.differences.append(difference)
            if abs(difference) > POINTS and works[0].rows == FULL.rows:
                problems.append(f"the accuracy must be within {POINTS:g} point. Received: {difference:+.2f}")
        tally.outcomes.append(replace(outcome, problems=tuple(problems)))
        tally.broken += [f"job {number}, {work.name}: {problem}" for problem in problems]
        if outcome.committed == outcome.expected:
            tally.survived += sum(injector.injected.values()) - faults


def told(work: Work, outcome: Outcome) -> str:
    """One line about a job."""
    accuracy = "" if outcome.accuracy is None else f", accuracy {outcome.accuracy:.2f} %"
    return (
        f"{work.name}: {outcome.committed} of {outcome.expected} mini-batches, {outcome.duplicated} duplicated, "
        f"{outcome.lost} lost, {outcome.attempts} attempts, {outcome.lives} lives of the server, "
        f"{outcome.seconds:.0f} s{accuracy}{''.join('; ' + problem for problem in outcome.problems)}"
    )


def report(tally: Tally, injector: Injector, log: Path) -> str:
    """All figures in one place."""
    faults = sum(injector.injected.values())
    failures = log.read_text(errors="replace").count("a snapshot failed")
    lines = ["", "faults injected"]
    lines += [f"  {kind:<16} {injector.injected[kind]:4d}" for kind in KINDS]
    lines += [
        f"  {'all':<16} {faults:4d}, survived {tally.survived}; found nothing to hit: {injector.missed.total()}",
        f"snapshots that failed on the full disk, and came later: {failures}",
        f"jobs {len(tally.outcomes)}, broken {sum(bool(outcome.problems) for outcome in tally.outcomes)}",
        f"mini-batches expected {sum(one.expected for one in tally.outcomes)}, "
        f"committed {sum(one.committed for one in tally.outcomes)}, "
        f"duplicated {sum(one.duplicated for one in tally.outcomes)}, "
        f"lost {sum(one.lost for one in tally.outcomes)}",
        "accuracy against the undisturbed job, in points: "
        + (" ".join(f"{difference:+.2f}" for difference in tally.differences) or "-"),
        f"left behind: {len(tally.left)}",
        *(f"  {one}" for one in tally.left),
    ]
    if tally.survived != faults:
        tally.broken.append(f"{faults - tally.survived} faults were not survived")
    lines += [f"BROKEN: {problem}" for problem in tally.broken] or ["every promise was kept"]
    return "\n".join(lines)


def log_to(path: Path) -> None:
    """Sends what this process, the JVMs, the workers and the server write to standard error into a file."""
    with path.open("wb") as log:
        os.dup2(log.fileno(), 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = arguments(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / f"chaos-{options.seed}.log"
    log_to(log)
    import keras  # noqa: F401 - its threads are nobody's leftovers

    faults = plan(options.seed, 60 * options.minutes)
    size, tally = (TINY if options.tiny else FULL), Tally()
    before = leftovers.Before(targets.mark())
    scratch = Path(tempfile.mkdtemp(prefix="chaos-"))
    disk = Disk(scratch / "disk")
    say(f"{len(faults)} faults of {len({fault.kind for fault in faults})} kinds planned; snapshots go to {disk.how}")
    try:
        spark = session(scratch)
        say(f"Spark {spark.version} is up")
        try:
            works = [
                pictures(scratch, rows=size.rows, epochs=size.epochs, rule=options.rule),
                counting(scratch, rows=size.counted_rows, epochs=size.counted_epochs),
            ]
            injector = Injector(faults, disk, say)
            disturb(works, injector, Range(spark, disk, scratch, tally), tally)
        finally:
            ended(spark)
        tally.left += before.left() + leftovers.files(scratch, "local", "tmp", "work")
        tally.broken += [f"left behind: {one}" for one in tally.left]
        print(report(tally, injector, log))
    finally:
        disk.close()
        shutil.rmtree(scratch, ignore_errors=True)
    return 1 if tally.broken else 0
