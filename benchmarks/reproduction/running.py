"""Functions that run jobs in processes and save each result immediately, so that an interruption loses little."""

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

#: Set to 1, since processes share the cores, and so that sums have one order.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def identity(job: Job) -> str:
    """Return the job's function and arguments, which are the key of a saved result.

    Values that a function reads from its module, such as a grid of rates, are not included: after a change of them,
    delete the saved results.
    """
    assert isinstance(job, functools.partial)
    return f"{job.func.__module__}.{job.func.__qualname__}{job.args}{job.keywords or ''}"


def timed(job: Job) -> tuple[Any, float]:
    """Return the job's result, and its processor time in seconds."""
    started = time.process_time()
    result = job()
    return result, time.process_time() - started


def kept(path: Path) -> dict[str, tuple[Any, float]]:
    """Return the results of earlier runs in ``path``; a partial line of an interrupted run is skipped."""
    results = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            key, result, seconds = json.loads(line)
        except ValueError:
            continue
        results[key] = (result, seconds)
    return results


def run_all(jobs: Mapping[str, Job], processes: int, path: Path) -> dict[str, tuple[Any, float]]:
    """Return every job's result and its seconds, in the order of the jobs; those in ``path`` are not run again."""
    started, done = time.monotonic(), kept(path)
    missing = {identity(job): (name, job) for name, job in jobs.items() if identity(job) not in done}
    os.environ.update(dict.fromkeys(THREADS, "1"))  # Spawned processes load numpy after this.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool, path.open("a") as file:
        keys: dict[Future[Any], str] = {pool.submit(timed, job): key for key, (_, job) in missing.items()}
        for number, future in enumerate(as_completed(keys), 1):
            key, (result, seconds) = keys[future], future.result()
            done[key] = (result, seconds)
            file.write(f"\n{json.dumps([key, result, round(seconds, 2)])}\n")  # The first newline ends a partial line.
            file.flush()
            print(f"{number} of {len(keys)}: {missing[key][0]}, {time.monotonic() - started:.0f} s", flush=True)
    return {name: done[identity(job)] for name, job in jobs.items()}
