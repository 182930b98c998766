"""Train on executors of three hosts while faults of every kind are injected.

The targets are Python workers, executors, the parameter server (next to its driver, or a task in the cluster, which may
get a second attempt too) and drivers (killed, and two at once on one checkpoint). Connections and whole hosts are cut
off; the disk of the snapshots is full, their store (files, or one of S3's protocol) slow or failing within an
operation; and strangers connect to the port. Long tasks get second attempts by Spark's speculation.

Some jobs are streams, which publish versions, some have relays, in some the workers exchange with each other, and some
train a model for each group; their weights count how often each row moved the center. The kind "sequence" has rows of
any length in buckets, and counts the steps of each row.

The program checks that every job succeeds, that every mini-batch counts once, that the accuracy is that of an
undisturbed job, and that nothing is left behind. The seed determines the kinds and times of faults; targets are drawn
among those alive. It needs Linux and the package psutil (of the extra `tests`). Hosts are cut off if this user may make
network namespaces.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.s3 import CLIENT, S3

from chaos import targets
from chaos.cluster import SECOND_ATTEMPT, Cluster, stop_session
from chaos.drivers import Drivers
from chaos.groups import groups_job
from chaos.hosts import Before, Disk, Hosts, drafts_left, files_left, left_by_a_job
from chaos.injector import KINDS, Injector, PlannedFault, Scene, plan
from chaos.jobs import (
    POINTS,
    WORKERS,
    JobResult,
    JobSpec,
    counting_job,
    deadlines,
    image_job,
    in_cluster,
    in_s3,
    members_job,
    relays_job,
    sequence_job,
    shards_job,
    stream_job,
    table_job,
    wide_stream_job,
)
from chaos.store import Store
from distkeras.ps.checkpoint.checkpointer import SNAPSHOT_FAILED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Seconds that one job may take at most, including its faults; then it is interrupted and counts as hanging.
LIMIT = 1200.0


@dataclass(frozen=True)
class JobSizes:
    """Rows and epochs of each kind of job; the stream has two epochs, and workers share the counted rows evenly."""

    rows: int = 12_000
    epochs: int = 6
    counted_rows: int = 1002
    counted_epochs: int = 8
    stream_rows: int = 400
    micro_batches: int = 20
    groups: int = 1500


FULL = JobSizes()
TINY = JobSizes(rows=1500, epochs=2, counted_rows=126, counted_epochs=4, stream_rows=60, micro_batches=5, groups=20)
#: The kinds of jobs.
JOBS = (
    "images",
    "cluster",
    "table",
    "sequence",
    "stream",
    "wide-stream",
    "relays",
    "shards",
    "cluster-shards",
    "members",
    "s3",
    "groups",
    "counting",
)


@dataclass
class Findings:
    """The observations of a whole run."""

    outcomes: list[JobResult] = field(default_factory=list)
    survived: int = 0
    differences: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python tests/chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of disturbed training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (default: %(default)s)")
    parser.add_argument(
        "--rule", default="asgd", help="of the image jobs, one that steps at the server (default: %(default)s)"
    )
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS, help="kinds of jobs (default: all)")
    parser.add_argument("--tiny", action="store_true", help="small jobs, whose accuracy means nothing: a smoke test")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="for the log (default: out)")
    return parser.parse_args(argv)


def say(text: str) -> None:
    """Print ``text`` with the time."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


class JobRunner:
    """A runner of jobs, each with a fresh folder for snapshots on the small disk.

    Args:
        spark: the session of the jobs whose driver is this process.
        scene: the disk, and the record of drivers in processes of their own.
        scratch: folder for the files of those drivers.
        findings: the record of leftovers.
    """

    def __init__(self, spark: SparkSession, scene: Scene, scratch: Path, findings: Findings) -> None:
        self._spark = spark
        self._scene = scene
        self._scratch = scratch
        self._findings = findings
        self._jobs = 0

    def run(self, spec: JobSpec, disturbing: Callable[[], Any] = nullcontext) -> tuple[JobSpec, JobResult]:
        """Run one job inside ``disturbing()``; the first job of a kind determines its mini-batches."""
        from distkeras.ps.errors import DistkerasError

        folder = self._folder(spec)
        before = set(threading.enumerate())
        trainer = spec.trainer(deadlines=deadlines())
        try:
            with watched(), disturbing():
                model = spec.train(self._spark, trainer, folder)
            spec = spec.with_batches_counted(trainer)
            outcome = spec.check(trainer, model)
        except (DistkerasError, KeyboardInterrupt) as error:
            problem = f"{type(error).__name__}: {error}"
            outcome = JobResult(expected=spec.expected, lost=spec.expected, problems=(problem,))
        return spec, self._cleaned(outcome, before, folder, spec.checkpoint(folder))

    def run_drivers(self, spec: JobSpec, disturbing: Callable[[], Any]) -> JobResult:
        """Run one job whose drivers are processes of their own, inside ``disturbing()``."""
        folder, before = self._folder(spec), set(threading.enumerate())
        drivers = self._scene.drivers = Drivers(spec, folder, self._scratch, LIMIT)
        try:
            with disturbing():
                outcome = drivers.run()
        finally:
            self._scene.drivers = None
        return self._cleaned(outcome, before, folder, str(folder))

    def _folder(self, spec: JobSpec) -> Path:
        self._jobs += 1
        folder = self._scene.disk.folder / f"job-{self._jobs}"
        if spec.micro_batches:  # Spark does not survive a full disk below its own files, so those are on another one.
            query = self._scratch / f"query-{self._jobs}"
            query.mkdir()
            folder.mkdir()
            (folder / "query").symlink_to(query)
        return folder

    def _cleaned(self, outcome: JobResult, before: set[threading.Thread], folder: Path, place: str) -> JobResult:
        left = left_by_a_job(before) + drafts_left(place, self._scene.store)
        self._findings.left += left
        shutil.rmtree(folder, ignore_errors=True)
        return replace(outcome, problems=(*outcome.problems, *(f"left behind: {one}" for one in left)))


@contextmanager
def watched() -> Iterator[None]:
    """Interrupt the main thread if the context takes longer than `LIMIT`."""

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


def disturb(specs: Sequence[JobSpec], injector: Injector, runner: JobRunner, findings: Findings) -> None:
    """Run jobs of all kinds in turns, undisturbed ones first, until all planned faults were injected."""
    accuracy: dict[str, float] = {}
    known = []
    for spec in specs:
        spec, outcome = runner.run(spec)
        known.append(spec)
        say(f"undisturbed {describe(spec, outcome)}")
        findings.broken += [f"undisturbed {spec.name}: {problem}" for problem in outcome.problems]
        if outcome.accuracy is not None:
            accuracy[spec.name] = outcome.accuracy
    number, with_drivers, turns = 0, False, itertools.cycle(known)
    counted = [spec for spec in known if spec.in_own_drivers]
    driven = itertools.cycle(counted)
    while not injector.done:
        number += 1
        faults = sum(injector.injected.values())
        if injector.waiting and counted and not with_drivers:
            spec = next(driven)
            if spec.micro_batches and "kill driver" not in injector.waiting:
                spec = next(driven)
            with_drivers, spec = True, replace(spec, name=f"{spec.name}, with drivers of its own")
            outcome = runner.run_drivers(spec, injector.disturbing)
        else:
            with_drivers, spec = False, next(turns)
            _, outcome = runner.run(spec, injector.disturbing)
        say(f"job {number} {describe(spec, outcome)}")
        problems = list(outcome.problems)
        if outcome.accuracy is not None:
            difference = outcome.accuracy - accuracy[spec.name]
            findings.differences.append(difference)
            if abs(difference) > POINTS and specs[0].rows == FULL.rows:
                problems.append(f"the accuracy must be within {POINTS:g} point. Received: {difference:+.2f}")
        findings.outcomes.append(replace(outcome, problems=tuple(problems)))
        findings.broken += [f"job {number}, {spec.name}: {problem}" for problem in problems]
        if outcome.committed == outcome.expected:
            findings.survived += sum(injector.injected.values()) - faults
    injector.give_up_waiting()


def describe(spec: JobSpec, outcome: JobResult) -> str:
    """Return one line about a job."""
    accuracy = "" if outcome.accuracy is None else f", accuracy {outcome.accuracy:.2f} %"
    return (
        f"{spec.name}: {outcome.committed} of {outcome.expected} {spec.unit}, {outcome.duplicated} duplicated, "
        f"{outcome.lost} lost, {outcome.attempts} attempts, {outcome.incarnations} incarnations of the server, "
        f"{outcome.seconds:.0f} s{accuracy}{''.join('; ' + problem for problem in outcome.problems)}"
    )


def report(findings: Findings, injector: Injector, hosts: Hosts, log: Path) -> str:
    """Return all figures of a run."""
    faults = sum(injector.injected.values())
    text = log.read_text(errors="replace")
    lines = ["", "faults injected"]
    lines += [f"  {kind:<16} {injector.injected[kind]:4d}" for kind in KINDS]
    lines += [
        f"  {'all':<16} {faults:4d}, survived {findings.survived}; found nothing to hit: {injector.missed.total()}",
        *([f"  no host was cut off: {hosts.whole}"] if hosts.whole else []),
        f"snapshots that failed, and came later: {text.count(SNAPSHOT_FAILED)}",
        f"second attempts, by speculation: {text.count(SECOND_ATTEMPT)}",
        f"jobs {len(findings.outcomes)}, broken {sum(bool(outcome.problems) for outcome in findings.outcomes)}",
        f"mini-batches, and rows of streams and groups, expected {sum(one.expected for one in findings.outcomes)}, "
        f"committed {sum(one.committed for one in findings.outcomes)}, "
        f"duplicated {sum(one.duplicated for one in findings.outcomes)}, "
        f"lost {sum(one.lost for one in findings.outcomes)}",
        "accuracy against the undisturbed job, in points: "
        + (" ".join(f"{difference:+.2f}" for difference in findings.differences) or "-"),
        f"left behind: {len(findings.left)}",
        *(f"  {one}" for one in findings.left),
    ]
    if findings.survived != faults:
        findings.broken.append(f"{faults - findings.survived} faults were not survived")
    lines += [f"BROKEN: {problem}" for problem in findings.broken] or ["every promise was kept"]
    return "\n".join(lines)


def log_to(path: Path) -> None:
    """Redirect the standard error of this process, the JVMs, the workers and the server to a file."""
    with path.open("wb") as log:
        os.dup2(log.fileno(), 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program, and return the exit status."""
    options = arguments(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / f"chaos-{options.seed}.log"
    log_to(log)
    import keras  # noqa: F401 - its threads then count as there before, and not as left behind

    size, findings = (TINY if options.tiny else FULL), Findings()
    os.environ |= CLIENT
    with ExitStack() as stack:
        s3 = stack.enter_context(S3().serving())
        before = Before(targets.mark())
        scratch = Path(tempfile.mkdtemp(prefix="chaos-"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        disk = Disk(scratch / "disk")
        stack.callback(disk.close)
        hosts = Hosts(WORKERS)
        stack.callback(hosts.close)
        scene = Scene(disk, Store(scratch / "orders", s3), hosts)
        faults = [fault for fault in plan(options.seed, 60 * options.minutes) if not _spared(fault, hosts)]
        kinds = len({fault.kind for fault in faults})
        say(f"{len(faults)} faults of {kinds} kinds planned; snapshots go to {disk.how}")
        if hosts.whole:
            say(f"no host is cut off: {hosts.whole}")
        injector = Injector(faults, scene, say)
        _train(options, size, scratch, injector, scene, findings)
        findings.left += before.left() + files_left(scratch, "local", "tmp", "work")
        findings.broken += [f"left behind: {one}" for one in findings.left]
        print(report(findings, injector, hosts, log))
    return 1 if findings.broken else 0


def _spared(fault: PlannedFault, hosts: Hosts) -> bool:
    return fault.kind == "cut off host" and bool(hosts.whole)


def _train(
    options: argparse.Namespace, size: JobSizes, scratch: Path, injector: Injector, scene: Scene, findings: Findings
) -> None:
    cluster = Cluster(scene.hosts, scratch)
    try:
        spark = cluster.session()
        say(f"Spark {spark.version} is up")
        try:
            specs = [spec for name, spec in _specs(size, scratch, scene, options).items() if name in options.jobs]
            disturb(specs, injector, JobRunner(spark, scene, scratch, findings), findings)
        finally:
            stop_session(spark)
    finally:
        cluster.close()


def _specs(size: JobSizes, scratch: Path, scene: Scene, options: argparse.Namespace) -> dict[str, JobSpec]:
    """Return the jobs by their kinds."""
    rows, epochs = size.counted_rows, size.counted_epochs
    streamed = {"rows": size.stream_rows, "epochs": 2, "micro_batches": size.micro_batches}
    return {
        "images": image_job(scratch, rows=size.rows, epochs=size.epochs, rule=options.rule),
        # These jobs are longer, so that a server's second attempt starts before they end.
        "cluster": in_cluster(counting_job(scratch / "cluster", rows=rows, epochs=4 * epochs)),
        "table": table_job(scratch, rows=rows, epochs=epochs),
        "sequence": sequence_job(scratch, rows=rows, epochs=epochs),
        "stream": stream_job(scratch, **streamed),
        "wide-stream": wide_stream_job(scratch, **streamed),
        "shards": shards_job(scratch / "shards", rows=size.rows // 4, epochs=size.epochs),
        "cluster-shards": in_cluster(shards_job(scratch / "cluster-shards", rows=size.rows // 4, epochs=size.epochs)),
        "relays": relays_job(scratch / "relays", rows=rows, epochs=epochs),
        # Within one node, the workers share memory; the seed decides whether there is one node.
        "members": members_job(scratch / "members", rows=rows, epochs=epochs, nodes=1 if options.seed % 2 else WORKERS),
        "s3": in_s3(counting_job(scratch / "s3", rows=rows, epochs=epochs), scene.store.s3.uri("chaos")),
        "groups": groups_job(scratch / "groups", groups=size.groups, epochs=epochs),
        "counting": counting_job(scratch, rows=rows, epochs=epochs),
    }
