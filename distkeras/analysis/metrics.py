"""Metrics of a run's history and commits: curves, the efficiencies of the thesis, staleness, gap, scale factors.

``history`` has the columns worker, epoch, iteration, timestamp, loss, each metric, samples: one row per mini-batch.
``commits`` has clock, worker, sequence, staleness, steps and more: one row per update of the center variable. Both may
be Spark or pandas DataFrames, and a simulation's `Trace` may stand for ``commits``, but where its history is asked for
too; results are plain numbers or pandas DataFrames. All functions raise EmptyDataError for a DataFrame without rows,
and MissingColumnError for one without a column that they read. `analysis.implicit_momentum` measures the momentum that
asynchrony implies.

Reference:
    Hermans: On Scalable Deep Learning and Parallelizing Gradient Descent, 2017, sections 1.3 and 3.4.
    Hakimi et al.: Taming Momentum in a Distributed Asynchronous Environment, 2019, appendix B.3 (the gap).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
        names = ("clock", "worker", "staleness", "steps", "scale", "gap", "normalized_gap")
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
        ConfigurationError: a worker's id that is not an integer of at least 0.
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


Mode = Literal["max", "min"]


def temporal_efficiency(
    a: Any, b: Any, metric: str = "accuracy", *, how: Literal["linear", "step"] = "linear"
) -> float:
    """Return how much more of ``metric`` run ``a`` had over time than run ``b``: Eq 3.4 of the thesis.

    ::

        TE(a, b) = (integral from 0 to m of f_a(t) dt) / (integral from 0 to m of f_b(t) dt)
        m = min(end of a, end of b)

    f is the metric against the time since the run's own first completed step, over the steps of all workers; steps of
    one moment count as their mean. Above 1, ``a`` is ahead. Meant for metrics that are better when larger: a loss
    turns the reading round. The integral is exact for the chosen curve; nothing is sampled.

    Args:
        a: history of the run that is judged.
        b: history of the run that it is compared to.
        metric: column of both.
        how: ``"linear"``: f is straight between two steps; ``"step"``: f keeps a step's value until the next.

    Returns:
        The ratio; infinity when only b's area is zero, NaN when both are.

    Raises:
        ConfigurationError: a run has steps at one moment only, so that no time passes.
    """
    curves = [_curve(history, metric) for history in (a, b)]
    end = min(times[-1] for times, _ in curves)
    if end <= 0:
        raise ConfigurationError(f"`a` and `b` must each span some time. Received: a common span of {end} s")
    area_a, area_b = (_area(times, values, end, how) for times, values in curves)
    return _ratio(area_a, area_b)


def _curve(history: Any, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return distinct times in seconds, ascending from 0, and the metric's mean at each."""
    frame = as_pandas(history, ("timestamp", metric))
    curve = frame[metric].astype(float).groupby(seconds_since_first(frame["timestamp"])).mean()
    return curve.index.to_numpy(float), curve.to_numpy()


def _area(times: np.ndarray, values: np.ndarray, end: float, how: str) -> float:
    before = times < end
    if how == "linear":
        values = np.append(values[before], np.interp(end, times, values))
        times = np.append(times[before], end)
        return float(np.sum(np.diff(times) * (values[1:] + values[:-1]) / 2))
    if how == "step":
        return float(np.sum(np.diff(np.append(times[before], end)) * values[before]))
    raise ConfigurationError(f"`how` must be 'linear' or 'step'. Received: how={how!r}")


def updates_to_target(
    history: Any, commits: Any, metric: str, target: float, *, mode: Mode = "max", window: int = 1
) -> int | None:
    """Return the updates of the center variable until the training metric reaches a target: the SE of section 1.3.

    Steps are ordered by the commit that carried them (clock), not by timestamps, so that clocks of different machines
    do not matter: a worker's iteration belongs to the commit whose steps, summed in its order of sequence, contain it.

    Args:
        history: the run's history.
        commits: the run's commits.
        metric: column of ``history``.
        target: value to reach.
        mode: ``"max"``: reached at or above the target; ``"min"``: at or below it (a loss).
        window: steps of the trailing mean that is compared to the target; 1 takes each mini-batch by itself, which
            chance may decide.

    Returns:
        The number of updates up to and including the commit with which the target is reached; None if it never is.

    Raises:
        ConfigurationError: ``window`` is not positive, or ``mode`` is another word.
    """
    if window < 1 or mode not in ("max", "min"):
        raise ConfigurationError(
            f"`window` must be positive and `mode` 'max' or 'min'. Received: window={window}, mode={mode!r}"
        )
    steps = as_pandas(history, ("worker", "iteration", metric)).sort_values(["worker", "iteration"])
    updates = as_pandas(commits, ("clock", "worker", "sequence", "steps")).sort_values("clock", ignore_index=True)
    updates["update"] = np.arange(1, len(updates) + 1)
    updates = updates.sort_values(["worker", "sequence"])
    updates["until"] = updates.groupby("worker")["steps"].cumsum()
    parts = []
    for worker, own in steps.groupby("worker"):
        theirs = updates[updates["worker"] == worker]
        place = np.searchsorted(theirs["until"].to_numpy(), own["iteration"].to_numpy(), side="right")
        carried = place < len(theirs)
        parts.append(own[carried].assign(update=theirs["update"].to_numpy()[place[carried]]))
    ordered = pd.concat(parts).sort_values(["update", "iteration"])
    trailing = ordered[metric].rolling(window).mean()
    reached = ordered["update"][trailing >= target if mode == "max" else trailing <= target]
    return None if reached.empty else int(reached.iloc[0])


def statistical_efficiency(
    run: tuple[Any, Any],
    baseline: tuple[Any, Any],
    metric: str,
    target: float,
    *,
    mode: Mode = "max",
    window: int = 1,
) -> float:
    """Return the updates that the baseline needs for a target, over those that ``run`` needs: Eq 1.4 of the thesis.

    ::

        SE(baseline) / SE(run),   SE = updates of the center variable until `metric` reaches `target`

    The thesis' baseline is DOWNPOUR. Above 1, ``run`` needs fewer updates. Rules that take several local steps an
    update gain by that alone: see `temporal_efficiency` for a fair comparison.

    Args:
        run: (history, commits) of the run that is judged.
        baseline: (history, commits) of the run that it is compared to.
        metric, target, mode, window: as for `updates_to_target`.

    Returns:
        The ratio; 0 if only the baseline reaches the target, infinity if only ``run`` does, NaN if neither.

    Raises:
        ConfigurationError: as for `updates_to_target`.
    """
    needed, reference = (
        updates_to_target(history, commits, metric, target, mode=mode, window=window)
        for history, commits in (run, baseline)
    )
    if needed is None and reference is None:
        return math.nan
    if needed is None:
        return 0.0
    return math.inf if reference is None else reference / needed


def hardware_efficiency(history: Any) -> float:
    """Return the seconds that an epoch takes: the HE of section 1.3.

    ::

        HE = (time of the last step - time of the first completed step) / number of epochs

    The first step itself, in which a worker also compiles its model, is left out. Workers share each epoch's data, so
    that one epoch is over when all of them are through it.
    """
    frame = as_pandas(history, ("epoch", "timestamp"))
    return float(seconds_since_first(frame["timestamp"]).max() / frame["epoch"].nunique())


def efficiencies(
    runs: Mapping[str, tuple[Any, Any]],
    baseline: str,
    metric: str,
    target: float,
    *,
    mode: Mode = "max",
    window: int = 1,
) -> pd.DataFrame:
    """Return the three efficiencies of several runs as ratios to one of them: above 1 is better than the baseline.

    Args:
        runs: (history, commits) by name, such as the rule's.
        baseline: name of the run that all are compared to; the thesis takes DOWNPOUR.
        metric, target, mode, window: as for `updates_to_target`; the temporal efficiency is that of ``metric`` too,
            and has its inverse taken where ``mode`` is ``"min"``.

    Returns:
        A row a run, in the order given, with the columns ``statistical`` (`statistical_efficiency`), ``hardware``
        (the baseline's `hardware_efficiency`, in seconds, over the run's) and ``temporal`` (`temporal_efficiency`).

    Raises:
        ConfigurationError: ``baseline`` is not among ``runs``; otherwise as for the three functions.
    """
    if baseline not in runs:
        raise ConfigurationError(f"`baseline` must be one of {', '.join(runs)}. Received: baseline={baseline!r}")
    reference = tuple(as_pandas(frame, ()) for frame in runs[baseline])
    rows = {}
    for name, run in runs.items():
        own = tuple(as_pandas(frame, ()) for frame in run)
        temporal = temporal_efficiency(own[0], reference[0], metric)
        rows[name] = {
            "statistical": statistical_efficiency(
                (own[0], own[1]), (reference[0], reference[1]), metric, target, mode=mode, window=window
            ),
            "hardware": _ratio(hardware_efficiency(reference[0]), hardware_efficiency(own[0])),
            "temporal": temporal if mode == "max" else _ratio(1.0, temporal),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def _ratio(a: float, b: float) -> float:
    if b == 0:
        return math.nan if a == 0 else math.copysign(math.inf, a)
    return a / b
