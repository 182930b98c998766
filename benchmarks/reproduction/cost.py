"""The cost of a scale, estimated from a part of it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from reproduction.claims import Job, Scale
from reproduction.running import timed

#: A run's cost is proportional to its length: runs of this share of it are measured.
LENGTH = 1 / 16


def measure(claims: Mapping[str, Callable[[Scale], dict[str, Job]]], scale: Scale) -> dict[str, Any]:
    """Return the estimated processor hours of the scale, by claim, and the measured ones.

    Of the jobs of a claim that call the same function, three are measured, each over `LENGTH` of its runs: the first,
    which also computes values that all share, the second and the last, whose mean is taken for all others.
    """
    short = replace(scale, length=scale.length * LENGTH)
    hours, jobs, measured = {}, 0, []
    for name, of in claims.items():
        alike: dict[str, list[Job]] = defaultdict(list)
        for job in of(short).values():
            assert isinstance(job, functools.partial)
            alike[job.func.__name__].append(job)
        seconds = 0.0
        for group in alike.values():
            first, *others = [timed(group[place])[1] for place in sorted({0, min(1, len(group) - 1), len(group) - 1})]
            seconds += first + (len(group) - 1) * sum(others) / max(1, len(others))
            measured += [first, *others]
            jobs += len(group)
        hours[name] = round(seconds / LENGTH / 3600, 3)
        print(f"{name}: {hours[name]:.2f} hours of one core", flush=True)
    return {
        "scale": scale.name,
        "hours": hours,
        "jobs": jobs,
        "measured": len(measured),
        "seconds": round(sum(measured)),
    }
