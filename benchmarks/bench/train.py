"""Whole jobs on Spark: their steady rate, the limit of the cores, and the time outside of training."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpu_process import Workload, best_fit, build
from bench.measure import Case, Factory
from bench.processes import Caller
from bench.whole_job import WORKERS
from bench.workload import bare_loop, rows, session, silent_trainer, steady_rate
from distkeras import Dashboard, Trainer
from distkeras.ps import rules

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SECTION = "train"
#: The backend of the workers.
BACKEND = os.environ.get("KERAS_BACKEND", "tensorflow")


@dataclass(frozen=True)
class Job:
    """One training. Mini-batches between two exchanges are a window; the first epoch is not measured.

    Targets are relative to independent processes, and to plain Keras. The rows are one in ``share`` of all.
    """

    model: str
    rule: str
    window: int
    batch: int
    epochs: int
    target_limit: float | None
    target_naive: float | None
    share: int = 1

    @property
    def name(self) -> str:
        """Return its name in the table."""
        often = "every batch" if self.window == 1 else f"window {self.window}"
        backend = "" if BACKEND == "tensorflow" else f"{BACKEND}, "
        return f"{backend}{self.model}, {WORKERS} workers, {self.rule.upper()}, {often}, batches of {self.batch}"

    def workload(self, count: int = 0) -> Workload:
        """Return its model, and an epoch of its share of ``count`` rows."""
        return Workload(self.model, self.batch, count // self.share // self.batch)


JOBS = (
    Job("M", "agn", 10, 128, 4, 0.90, 0.95),
    Job("M", "downpour", 1, 128, 4, 0.75, None),
    Job("S", "agn", 10, 32, 6, None, 0.8),
    Job("S", "downpour", 1, 32, 6, None, None),
    Job("C", "agn", 10, 32, 4, None, None, share=8),
    Job("R", "agn", 10, 32, 4, None, None, share=4),
)
#: The job whose start and end are measured.
WHOLE = JOBS[0]
#: The job with the most commits a second.
OFTEN = JOBS[3]


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    return [partial(_train, 8_000 if quick else 40_000)]


@contextmanager
def _train(count: int) -> Iterator[list[Case]]:
    from distkeras.data.datasets import write_parquet

    x, y = rows(count)
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="distkeras-bench-"))
        spark = stack.enter_context(session())
        frames = {}
        for share in dict.fromkeys((1, *(job.share for job in JOBS))):
            part = slice(count // share)
            written = write_parquet(Path(directory) / f"rows-{share}", x[part], y[part], files=WORKERS)
            frames[share] = spark.read.parquet(written).cache()
            frames[share].write.format("noop").mode("overwrite").save()
        frame = frames[1]
        ceiling = stack.enter_context(_ceiling(WHOLE.workload(count))) if BACKEND == "tensorflow" else None
        workloads = dict.fromkeys(job.workload(count) for job in JOBS)
        plain = {workload: stack.enter_context(best_fit(workload)) for workload in workloads}
        _steady(WHOLE, frame)  # After this job, the workers have loaded their modules.
        yield [
            *(_rate(job, frames[job.share], ceiling, *plain[job.workload(count)]) for job in JOBS),
            _watched(frame),
            _whole_job(frame),
        ]


def _rate(
    job: Job, frame: DataFrame, ceiling: Callable[[], float] | None, fit: Callable[[], float], which: str
) -> Case:
    """Return the case of a job's rate; ``fit`` measures that of plain Keras in steps a second, and is ``which``."""
    limit = None if job.target_limit is None else ceiling
    target = None if limit is None else job.target_limit
    of_limit = "; limit: two processes of one thread without exchange" if limit else ""
    note = f"epochs >= 2{of_limit}; naive: {which}"
    sides = (lambda: _steady(job, frame), limit, lambda: fit() * job.batch)
    return Case(SECTION, job.name, "samples/s", *sides, target, job.target_naive, note=note)


def _watched(frame: DataFrame) -> Case:
    """Return the case of a job with many commits, with a dashboard compared with none."""
    ours, naive = (partial(_steady, OFTEN, frame, watched=watched) for watched in (True, False))
    name, note = f"{OFTEN.name}, with a dashboard", "naive: without one"
    return Case(SECTION, name, "samples/s", ours, None, naive, target_naive=0.99, turns=2, note=note)


def _trainer(job: Job) -> Trainer:
    rule = rules.make(job.rule, window=job.window)
    return silent_trainer(build(job.workload()), rule, WORKERS, job.batch, job.epochs)


def _steady(job: Job, frame: DataFrame, *, watched: bool = False) -> float:
    trainer = _trainer(job)
    with Dashboard.of(trainer) if watched else nullcontext():
        trainer.train(frame)
    return steady_rate(trainer)


def _whole_job(frame: DataFrame) -> Case:
    """Return the case of the share of a job, from the call of `train` to its return, that is spent in training."""
    shares: list[dict[str, float]] = []

    def ours() -> float:
        trainer = _trainer(WHOLE)
        began = time.time()
        trainer.train(frame)
        whole = time.time() - began
        ((first,),) = trainer.commits.selectExpr("double(min(timestamp))").collect()
        ((last,),) = trainer.history.selectExpr("double(max(timestamp))").collect()
        timings = trainer.timings
        shares.append(
            {
                "driver before Spark": timings["start"] / whole,
                "Spark to the first commit": (first - began - timings["start"]) / whole,
                "last batch to Spark's end": (began + timings["start"] + timings["spark"] - last) / whole,
                "driver after Spark": (whole - timings["start"] - timings["spark"]) / whole,
            }
        )
        return float((last - first) / whole)

    def note() -> str:
        parts = ", ".join(f"{name} {statistics.median(s[name] for s in shares):.1%}" for name in shares[0])
        return f"warm executors; the rest of the job: {parts}"

    return Case(SECTION, f"share of a job that trains, {WHOLE.name}", "share", ours, lambda: 1.0, note=note)


@contextmanager
def _ceiling(workload: Workload) -> Iterator[Callable[[], float]]:
    """Yield a function that measures the samples a second of independent processes with rows in their own memory."""
    with ExitStack() as stack:
        processes = [stack.enter_context(Caller()) for _ in range(WORKERS)]

        def rate() -> float:
            for process in processes:
                process.begin(_independent, workload)
            return float(sum(process.result() for process in processes))

        rate()
        yield rate


@cache
def _loop(workload: Workload) -> Callable[[], None]:
    for variable in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
        os.environ[variable] = "1"
    shape = workload.steps, workload.batch
    x, y = rows(workload.steps * workload.batch)
    return partial(bare_loop(build(workload), workload.batch), x.reshape(*shape, -1), y.reshape(shape))


def _independent(workload: Workload) -> float:
    run = _loop(workload)
    began = time.time()
    run()
    return workload.steps * workload.batch / (time.time() - began)
