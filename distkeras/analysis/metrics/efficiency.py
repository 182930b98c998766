"""The efficiencies of the thesis: how good a run is over time, over updates, and how long its epochs take.

Reference:
    Hermans: On Scalable Deep Learning and Parallelizing Gradient Descent, 2017, sections 1.3 and 3.4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pandas as pd

from distkeras.analysis.metrics.frames import as_pandas, seconds_since_first
from distkeras.ps.errors import ConfigurationError

Mode = Literal["max", "min"]


def temporal_efficiency(
    a: Any, b: Any, metric: str = "accuracy", *, how: Literal["linear", "step"] = "linear"
) -> float:
    """How much more of ``metric`` run ``a`` had over time than run ``b``: Eq 3.4 of the thesis.

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
        EmptyDataError, MissingColumnError: as for `per_worker`.
    """
    curves = [_curve(history, metric) for history in (a, b)]
    end = min(times[-1] for times, _ in curves)
    if end <= 0:
        raise ConfigurationError(f"`a` and `b` must each span some time. Received: a common span of {end} s")
    area_a, area_b = (_area(times, values, end, how) for times, values in curves)
    return _ratio(area_a, area_b)


def _curve(history: Any, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Distinct times in seconds, ascending from 0, and the metric's mean at each."""
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
    """Updates of the center variable until the training metric reaches a target: the SE of section 1.3.

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
        EmptyDataError, MissingColumnError: as for `per_worker`.
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
    """Updates that the baseline needs for a target, over those that ``run`` needs: Eq 1.4 of the thesis.

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
        ConfigurationError, EmptyDataError, MissingColumnError: as for `updates_to_target`.
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
    """Seconds an epoch takes: the HE of section 1.3.

    ::

        HE = (time of the last step - time of the first completed step) / number of epochs

    The first step itself, in which a worker also compiles its model, is left out. Workers share each epoch's data, so
    that one epoch is over when all of them are through it.

    Raises:
        EmptyDataError, MissingColumnError: as for `per_worker`.
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
    """The three efficiencies of several runs against one of them, all as ratios: above 1 is better than the baseline.

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
        EmptyDataError, MissingColumnError: as for `per_worker`.
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
