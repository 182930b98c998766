"""Staleness, gap, scale factors and the order of a run's commits.

Reference:
    Hakimi et al.: Taming Momentum in a Distributed Asynchronous Environment, 2019, appendix B.3 (the gap).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pandas as pd

from distkeras.analysis.metrics.frames import as_pandas
from distkeras.ps.errors import ConfigurationError, LedgerError

#: What `over_commits` and `values` take: columns of ``commits``, and one that only a simulation has.
MEASURES = ("staleness", "gap", "normalized_gap", "scale")

Measure = Literal["staleness", "gap", "normalized_gap", "scale"]


def staleness_histogram(commits: Any, by_worker: bool = True) -> pd.DataFrame:
    """How often each staleness occurred.

    Staleness is the number of commits by others between a worker's pull and its commit; its mean tends to one less than
    the number of workers, whatever their speeds.

    Args:
        commits: the run's commits, or a simulation's trace.
        by_worker: count each worker's commits apart.

    Returns:
        Counts (int64), indexed by ``staleness`` 0, 1, ... up to the largest that occurred, without gaps; a column for
        each worker's id, or the one column ``commits``.

    Raises:
        EmptyDataError, MissingColumnError: as for `per_worker`.
    """
    frame = as_pandas(commits, ("staleness", "worker"))
    every = pd.RangeIndex(int(frame["staleness"].max()) + 1, name="staleness")
    if by_worker:
        counts = pd.crosstab(frame["staleness"], frame["worker"])
    else:
        counts = frame["staleness"].value_counts().to_frame("commits")
    return counts.reindex(every, fill_value=0).astype(np.int64)


def values(commits: Any, measure: Measure) -> pd.Series:
    """One measure of every commit, float64, indexed by its clock.

    * ``staleness``, tau: commits by others between the worker's pull and its commit.
    * ``gap``: ``||center - sent|| / sqrt(size)``, the root mean square of how far each parameter has moved since the
      worker was sent it, as the commit arrives; measured under ``measure_gap=True`` only.
    * ``normalized_gap``: the gap over the Euclidean norm of the payload. The reference of both is what the worker was
      *sent*, which for rules with a look-ahead is not the center. A simulation's trace has it, a job's commits do not.
    * ``scale``: mean over the parameters of the factor that the rule put on the payload (ADAG's s, DynSGD's
      1 / (tau + 1)); 1 where it has none.

    Args:
        commits: the run's commits, or a simulation's trace.
        measure: one of `MEASURES`.

    Raises:
        ConfigurationError: another word, or a gap that was not measured.
        EmptyDataError, MissingColumnError: as for `per_worker`.
    """
    if measure not in MEASURES:
        raise ConfigurationError(f"`measure` must be one of {', '.join(MEASURES)}. Received: measure={measure!r}")
    frame = as_pandas(commits, ("clock", measure)).sort_values("clock")
    series = pd.Series(frame[measure].to_numpy(float), index=frame["clock"].to_numpy(), name=measure)
    if series.isna().all():
        raise ConfigurationError(
            f"`commits` must come from a run with measure_gap=True, to hold the {measure}. Received: none measured"
        )
    return series


def over_commits(commits: Any, measure: Measure, *, points: int = 100) -> pd.DataFrame:
    """How a measure goes on over a run: its mean and its spread over stretches of consecutive commits.

    Args:
        commits, measure: as for `values`.
        points: the number of stretches, of equally many commits (the last ones of one less); fewer if there are fewer
            commits.

    Returns:
        One row a stretch: ``commit`` (the middle of its clocks), ``mean``, ``low`` and ``high`` (tenth and ninetieth
        percentile of its commits).

    Raises:
        ConfigurationError: ``points`` is not positive; otherwise as for `values`.
        EmptyDataError, MissingColumnError: as for `per_worker`.
    """
    if points < 1:
        raise ConfigurationError(f"`points` must be positive. Received: points={points}")
    series = values(commits, measure).dropna()
    parts = np.array_split(np.arange(len(series)), min(points, len(series)))
    clocks, taken = series.index.to_numpy(float), series.to_numpy()
    return pd.DataFrame(
        {
            "commit": [clocks[part].mean() for part in parts],
            "mean": [taken[part].mean() for part in parts],
            "low": [np.quantile(taken[part], 0.1) for part in parts],
            "high": [np.quantile(taken[part], 0.9) for part in parts],
        }
    )


def recorded_schedule(commits: Any) -> list[int]:
    """The order of commits of a real run, for ``simulate(schedule=…)``: worker ids by clock.

    ::

        trace = simulate(rule, gradient.theta0, gradient, workers=trainer.settings.num_workers,
                         schedule=recorded_schedule(trainer.commits), learning_rate=0.05)

    The order of commits fixes the staleness of each, once a worker has begun: simulated workers are all sent the center
    at clock 0. One that joined late, or was tried again, took in truth a later center than in the replay, so its next
    commit is less stale on record. A run whose workers all began before the first commit replays exactly.

    Args:
        commits: the run's commits.

    Raises:
        LedgerError: the clocks are not 0, 1, 2 …, each once, so that a commit is missing or there twice.
        ConfigurationError: a worker's id that is not an integer of at least 0.
        EmptyDataError, MissingColumnError: as for `per_worker`.
    """
    frame = as_pandas(commits, ("clock", "worker")).sort_values("clock")
    clocks = frame["clock"].to_numpy()
    wrong = np.flatnonzero(clocks != np.arange(len(clocks)))
    if wrong.size:
        raise LedgerError(f"`commits` must have each clock once, from 0 on. Received: {clocks[wrong[0]]} at {wrong[0]}")
    workers = frame["worker"].to_numpy()
    if workers.dtype.kind not in "iu" or workers.min() < 0:
        raise ConfigurationError(
            f"`commits` must have workers that are integers of at least 0. Received: {workers.dtype}, {workers.min()}"
        )
    schedule: list[int] = workers.tolist()
    return schedule
