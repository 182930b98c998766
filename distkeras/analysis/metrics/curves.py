"""Loss and metrics of a run's steps against time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from distkeras.analysis.metrics.frames import as_pandas, seconds_since_first
from distkeras.ps.errors import ConfigurationError

#: Columns of a history that are not metrics.
HISTORY_KEYS = ("worker", "epoch", "iteration", "timestamp", "samples")


def per_worker(history: Any) -> pd.DataFrame:
    """Each worker's own curve: the history ordered by (worker, iteration), with the column ``seconds`` put in front.

    ``seconds`` is the time since the job's first completed step, whichever worker took it.

    Raises:
        EmptyDataError: there is no row.
        MissingColumnError: a column of a history is missing.
    """
    frame = as_pandas(history, ("worker", "iteration", "timestamp"))
    frame.insert(0, "seconds", seconds_since_first(frame["timestamp"]))
    return frame.sort_values(["worker", "iteration"], ignore_index=True)


def averaged(history: Any, every: float) -> pd.DataFrame:
    """One curve for all workers: loss and metrics averaged over spans of time.

    A span's value is the mean over its steps, of any worker, weighted by their samples: with per-batch means this is
    the mean over the span's samples.

    Args:
        history: the history.
        every: length of a span in seconds.

    Returns:
        One row a span that holds a step: ``seconds`` (the mean time of its steps since the job's first), loss and
        metrics, ``samples`` and ``steps`` (their counts in the span).

    Raises:
        ConfigurationError: ``every`` is not positive.
        EmptyDataError, MissingColumnError: as for `per_worker`.
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
