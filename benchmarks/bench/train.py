"""Whole jobs on Spark: their steady rate, the limit of the cores, and the time outside of training."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpu_process import Workload, best_fit
from bench.measure import Case, Factory
from bench.workload import PATIENCE, WORKERS, answer, bare_loop, build, rows, session, steady_rate
from distkeras import Dashboard, Monitoring, Trainer
from distkeras.ps import rules

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SECTION = "train"
#: The backend of the workers.
BACKEND = os.environ.get("KERAS_BACKEND", "tensorflow")


@dataclass(frozen=True)
class Job:
    """One training: model, rule, and how often it exchanges.

    Args:
        model: M or S.
        rule: name of the rule.
        window: mini-batches between two exchanges.
        batch: rows of a mini-batch.
        epochs: number of epochs; the first one is not measured.
        target_limit, target_naive: targets relative to independent processes, and to plain Keras.
    """

    model: str
    rule: str
    window: int
    batch: int
    epochs: int
    target_limit: float | None
    target_naive: float | None

    @property
    def name(self) -> str:
        """Return its name in the table."""
        often = "every batch" if self.window == 1 else f"window {self.window}"
        backend = "" if BACKEND == "tensorflow" else f"{BACKEND}, "
        return f"{backend}{self.model}, {WORKERS} workers, {self.rule.upper()}, {often}, batches of {self.batch}"


JOBS = (
    Job("M", "agn", 10, 128, 4, 0.90, 0.95),
    Job("M", "downpour", 1, 128, 4, 0.75, None),
    Job("S", "agn", 10, 32, 6, None, 0.8),
    Job("S", "downpour", 1, 32, 6, None, None),
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
        frame = spark.read.parquet(write_parquet(Path(directory) / "rows", x, y, files=WORKERS)).cache()
        frame.write.format("noop").mode("overwrite").save()
        ceiling = None
        if BACKEND == "tensorflow":
            ceiling = stack.enter_context(_Ceiling(WHOLE.model, WHOLE.batch, count // WHOLE.batch))
        sizes = dict.fromkeys((job.model, job.batch) for job in JOBS)
        plain = {size: stack.enter_context(best_fit(Workload(*size, steps=count // size[1]))) for size in sizes}
        _steady(WHOLE, frame)  # After this job, the workers have loaded their modules.
        yield [
            *(
                _rate(job, frame, None if ceiling is None else ceiling.rate, *plain[job.model, job.batch])
                for job in JOBS
            ),
            _watched(frame),
            _whole_job(frame),
        ]


def _rate(
    job: Job, frame: DataFrame, ceiling: Callable[[], float] | None, fit: Callable[[], float], which: str
) -> Case:
    """Return the case of a job's rate; ``fit`` measures that of plain Keras in steps a second, and is ``which``."""
    limit = None if job.target_limit is None else ceiling
    return Case(
        SECTION,
        job.name,
        "samples/s",
        lambda: _steady(job, frame),
        limit,
        lambda: fit() * job.batch,
        None if limit is None else job.target_limit,
        job.target_naive,
        note="epochs >= 2"
        + ("; limit: two processes of one thread without exchange" if limit else "")
        + f"; naive: {which}",
    )


def _watched(frame: DataFrame) -> Case:
    """Return the case of a job with many commits, with a dashboard compared with none."""
    return Case(
        SECTION,
        f"{OFTEN.name}, with a dashboard",
        "samples/s",
        lambda: _steady(OFTEN, frame, watched=True),
        None,
        lambda: _steady(OFTEN, frame),
        target_naive=0.99,
        turns=2,
        note="naive: without one",
    )


def _trainer(job: Job) -> Trainer:
    return Trainer(
        build(job.model),
        rules.make(job.rule, window=job.window),
        num_workers=WORKERS,
        batch_size=job.batch,
        num_epoch=job.epochs,
        monitoring=Monitoring(progress=False),
    )


def _steady(job: Job, frame: DataFrame, *, watched: bool = False) -> float:
    """Return the `steady_rate` of one training."""
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


class _Ceiling:
    """A context manager of independent processes that train on rows in their own memory.

    Args:
        model: M or S.
        batch: rows of a mini-batch.
        steps: number of steps of one process in one run.
    """

    def __init__(self, model: str, batch: int, steps: int) -> None:
        self._samples = steps * batch
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(WORKERS)]
        self._pipes = [here for here, _ in pairs]
        self._processes = [
            context.Process(target=_independent, args=(there, model, batch, steps), daemon=True) for _, there in pairs
        ]

    def __enter__(self) -> _Ceiling:
        for process in self._processes:
            process.start()
        self.rate()
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send(False)
        for process in self._processes:
            process.join(PATIENCE)

    def rate(self) -> float:
        """Return the samples a second of all processes together."""
        for pipe in self._pipes:
            pipe.send(True)
        spans = [answer(pipe) for pipe in self._pipes]
        return float(sum(self._samples / (ended - began) for began, ended in spans))


def _independent(pipe: Connection, name: str, batch: int, steps: int) -> None:
    for variable in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
        os.environ[variable] = "1"
    x, y = rows(steps * batch)
    stacked = x.reshape(steps, batch, -1), y.reshape(steps, batch)
    run = bare_loop(build(name), batch)
    while pipe.recv():
        began = time.time()
        run(*stacked)
        pipe.send((began, time.time()))
