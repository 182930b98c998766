"""Metrics of a run's history and commits: curves, the time of an epoch, staleness, gap, scale factors.

``history`` has the columns worker, epoch, iteration, timestamp, loss, each metric, samples: one row per mini-batch.
``commits`` has clock, worker, sequence, staleness, steps and more: one row per update of the center variable. Both may
be Spark or pandas DataFrames, and a simulation's `Trace` may stand for ``commits``, but where its history is asked for
too; results are plain numbers or pandas DataFrames. All functions raise EmptyDataError for a DataFrame without rows,
and MissingColumnError for one without a column that they read.

Reference:
    Hermans: On Scalable Deep Learning and Parallelizing Gradient Descent, 2017, sections 1.3 and 3.4.
    Hakimi et al.: Taming Momentum in a Distributed Asynchronous Environment, 2019, appendix B.3 (the gap).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd

from distkeras.metric_columns import elements_of
from distkeras.ps.errors import ConfigurationError, EmptyDataError, LedgerError, MissingColumnError
from distkeras.ps.simulation.virtual_job import Trace


def as_pandas(frame: Any, columns: Sequence[str]) -> pd.DataFrame:
    """Return a copy in pandas of a Spark or pandas DataFrame, or of the commits of a simulation's trace.

    It has a column for each number of an array.
    """
    if isinstance(frame, Trace):
        names = ("clock", "worker", "trained_by", "staleness", "steps", "scale", "gap", "normalized_gap")
        frame = pd.DataFrame({name: getattr(frame, name) for name in names})
    result = with_elements(frame if isinstance(frame, pd.DataFrame) else frame.toPandas())
    for column in columns:
        if column not in result.columns:
            raise MissingColumnError(
                f"The DataFrame must have this column. Received: columns={list(result.columns)}", column=column
            )
    if result.empty:
        raise EmptyDataError("The DataFrame must have a row. Received: none")
    return result


def with_elements(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a copy of a table with a column for each number of its arrays: "f1_score[0]" and so on."""
    columns: dict[Any, Any] = {}
    for name, values in frame.items():
        if len(values) and values.dtype == object and isinstance(values.iloc[0], np.ndarray | list):
            numbers = np.stack(values.to_list())
            columns |= dict(zip(elements_of(str(name), numbers.shape[1:]), numbers.T, strict=True))
        else:
            columns[name] = values
    return pd.DataFrame(columns, index=frame.index)


def seconds_since_first(timestamps: pd.Series) -> pd.Series:
    """Return float64 seconds since the first of ``timestamps``."""
    times = pd.to_datetime(timestamps)
    return (times - times.min()).dt.total_seconds()


#: Columns of a history that are not metrics.
HISTORY_KEYS = ("worker", "epoch", "iteration", "timestamp", "samples")


def per_worker(history: Any) -> pd.DataFrame:
    """Return each worker's own curve: the history by worker and iteration, with the column ``seconds`` in front.

    ``seconds`` is the time since the job's first completed step, of any worker.
    """
    frame = as_pandas(history, ("worker", "iteration", "timestamp"))
    frame.insert(0, "seconds", seconds_since_first(frame["timestamp"]))
    return frame.sort_values(["worker", "iteration"], ignore_index=True)


def averaged(history: Any, every: float) -> pd.DataFrame:
    """Return one curve for all workers: loss and metrics averaged over spans of time.

    A span's value is the mean over its steps, of any worker, weighted by their samples: with per-batch means this is
    the mean over the span's samples.

    Args:
        every: length of a span in seconds.

    Returns:
        One row per span that holds a step: ``seconds`` (the mean time of its steps since the job's first), loss and
        metrics, ``samples`` and ``steps`` (their counts in the span).

    Raises:
        ConfigurationError: ``every`` is not positive.
    """
    if not every > 0:
        raise ConfigurationError(f"`every` must be a positive number of seconds. Received: every={every}")
    frame = per_worker(as_pandas(history, (*HISTORY_KEYS, "loss")))
    values = [name for name in frame.columns if name not in (*HISTORY_KEYS, "seconds")]
    span = (frame["seconds"] // every).astype(np.int64)
    weighted = frame[values].mul(frame["samples"], axis=0).groupby(span).sum()
    groups = frame.groupby(span)
    samples = groups["samples"].sum()
    result = weighted.div(samples, axis=0)
    result.insert(0, "seconds", groups["seconds"].mean())
    return result.assign(samples=samples, steps=groups.size()).reset_index(drop=True)


#: What `over_commits` and `values` take: columns of ``commits``, and one that only a simulation has.
MEASURES = ("staleness", "gap", "normalized_gap", "scale")

Measure = Literal["staleness", "gap", "normalized_gap", "scale"]


def staleness_histogram(commits: Any, by_worker: bool = True) -> pd.DataFrame:
    """Return how often each staleness occurred.

    Staleness is the number of commits by others between a worker's pull and its commit; its mean tends to one less than
    the number of workers, regardless of their speeds.

    Args:
        commits: the run's commits, or a simulation's trace.
        by_worker: count each worker's commits apart.

    Returns:
        Counts (int64), indexed by ``staleness`` 0, 1, ... up to the largest that occurred, without gaps; a column for
        each worker's id, or the one column ``commits``.
    """
    frame = as_pandas(commits, ("staleness", "worker"))
    every = pd.RangeIndex(int(frame["staleness"].max()) + 1, name="staleness")
    if by_worker:
        counts = pd.crosstab(frame["staleness"], frame["worker"])
    else:
        counts = frame["staleness"].value_counts().to_frame("commits")
    return counts.reindex(every, fill_value=0).astype(np.int64)


def values(commits: Any, measure: Measure) -> pd.Series:
    """Return one measure of every commit, float64, indexed by its clock.

    * ``staleness``, tau: commits by others between the worker's pull and its commit.
    * ``gap``: ``||center - sent|| / sqrt(size)``, the root mean square of how far each parameter has moved since the
      worker was sent it, as the commit arrives; measured under ``Monitoring(measure_gap=True)`` only.
    * ``normalized_gap``: the gap over the Euclidean norm of the payload. The reference of both is what the worker was
      *sent*, which for rules with a look-ahead is not the center. A simulation's trace has it, a job's commits do not.
    * ``scale``: mean over the parameters of the factor that the rule put on the payload (ADAG's s, DynSGD's
      1 / (tau + 1)); 1 where it has none.

    Args:
        commits: the run's commits, or a simulation's trace.
        measure: one of `MEASURES`.

    Raises:
        ConfigurationError: another word, or a gap that was not measured.
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
    """Return how a measure changes over a run: its mean and its spread over stretches of consecutive commits.

    Args:
        commits, measure: as for `values`.
        points: the number of stretches, of equally many commits (the last ones of one less); fewer if there are fewer
            commits.

    Returns:
        One row per stretch: ``commit`` (the middle of its clocks), ``mean``, ``low`` and ``high`` (tenth and ninetieth
        percentile of its commits).

    Raises:
        ConfigurationError: ``points`` is not positive; otherwise as for `values`.
    """
    if points < 1:
        raise ConfigurationError(f"`points` must be positive. Received: points={points}")
    series = values(commits, measure).dropna()
    parts = np.array_split(np.arange(len(series)), min(points, len(series)))
    clocks, samples = series.index.to_numpy(float), series.to_numpy()
    return pd.DataFrame(
        {
            "commit": [clocks[part].mean() for part in parts],
            "mean": [samples[part].mean() for part in parts],
            "low": [np.quantile(samples[part], 0.1) for part in parts],
            "high": [np.quantile(samples[part], 0.9) for part in parts],
        }
    )


def recorded_schedule(commits: Any) -> list[int]:
    """Return the order of commits of a real run, for ``simulate(schedule=…)``: worker ids by clock.

    ::

        trace = simulate(rule, gradient.theta0, gradient, workers=trainer.settings.num_workers,
                         schedule=recorded_schedule(trainer.commits), learning_rate=0.05)

    The order of commits fixes the staleness of each, once a worker has begun: simulated workers are all sent the center
    at clock 0. One that joined late, or was tried again, took in truth a later center than in the replay, so its next
    commit is less stale on record. A run whose workers all began before the first commit replays exactly.

    Raises:
        LedgerError: the clocks are not 0, 1, 2 …, each once, so that a commit is missing or there twice.
        ConfigurationError: a worker's id that is not an integer of at least 0; or mini-batches that another worker
            than their own trained: virtual workers do not lend in a replay.
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
    if "trained_by" in frame and (lent := (frame["trained_by"] != workers)).any():
        raise ConfigurationError(
            "`commits` must be of a job with `Executors(lends=False)`: in a replay, no worker trains mini-batches of "
            f"another one. Received: {int(lent.sum())} commits of such"
        )
    schedule: list[int] = workers.tolist()
    return schedule


def hardware_efficiency(history: Any) -> float:
    """Return the seconds that an epoch takes: the HE of section 1.3.

    ::

        HE = (time of the last step - time of the first completed step) / number of epochs

    The first step itself, in which a worker also compiles its model, is left out. Workers share each epoch's data, so
    that one epoch is over when all of them are through it.
    """
    frame = as_pandas(history, ("epoch", "timestamp"))
    return float(seconds_since_first(frame["timestamp"]).max() / frame["epoch"].nunique())
