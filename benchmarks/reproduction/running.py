"""Runs jobs in processes and keeps each result as soon as it is there, so that an interruption loses little."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from reproduction.claims import Job

#: Processes share the cores, and sums are added up in one order.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def identity(job: Job) -> str:
    """The job's function and arguments: what a kept result is found by.

    What a function takes from its module, such as a grid of rates, is not in it: who changes that deletes what is kept.
    """
    assert isinstance(job, functools.partial)
    return f"{job.func.__module__}.{job.func.__qualname__}{job.args}{job.keywords or ''}"


def timed(job: Job) -> tuple[Any, float]:
    """The job's result, and the processor's seconds that it took."""
    started = time.process_time()
    result = job()
    return result, time.process_time() - started


def kept(path: Path) -> dict[str, tuple[Any, float]]:
    """What earlier runs have left in ``path``; a line that an interruption cut off is not taken."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            key, result, seconds = json.loads(line)
        except ValueError:
            continue
        found[key] = (result, seconds)
    return found


def run_all(jobs: Mapping[str, Job], processes: int, path: Path) -> dict[str, tuple[Any, float]]:
    """Every job's result and its seconds, in the order of the jobs; what ``path`` has is not run again."""
    started, done = time.monotonic(), kept(path)
    missing = {identity(job): (name, job) for name, job in jobs.items() if identity(job) not in done}
    os.environ.update(dict.fromkeys(THREADS, "1"))  # not forked: the processes load numpy after this
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool, path.open("a") as file:
        keys: dict[Future[Any], str] = {pool.submit(timed, job): key for key, (_, job) in missing.items()}
        for number, future in enumerate(as_completed(keys), 1):
            key, (result, seconds) = keys[future], future.result()
            done[key] = (result, seconds)
            file.write(f"\n{json.dumps([key, result, round(seconds, 2)])}\n")  # ends a line that was cut off
            file.flush()
            print(f"{number} of {len(keys)}: {missing[key][0]}, {time.monotonic() - started:.0f} s", flush=True)
    return {name: done[identity(job)] for name, job in jobs.items()}
