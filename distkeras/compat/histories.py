"""dist-keras' histories: a list with a dictionary for each mini-batch, and what its functions made of that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

#: Columns of a history table that are no metric.
_FIXED = ("worker", "epoch", "iteration", "timestamp", "samples")


def history_list(table: pa.Table) -> list[dict[str, Any]]:
    """One dictionary a mini-batch, by worker and iteration.

    Args:
        table: `JobRecords.history`.

    Returns:
        ``worker_id``; ``iteration``, from 1; ``history``: loss and metrics; ``timestamp``: seconds since 1970.
    """
    metrics = [table[name].to_numpy() for name in table.column_names if name not in _FIXED]
    seconds = table["timestamp"].cast(pa.int64()).to_numpy() / 1e6
    steps = zip(table["worker"].to_pylist(), table["iteration"].to_pylist(), seconds.tolist(), strict=True)
    values = np.column_stack(metrics).tolist()
    return [
        {"worker_id": number, "iteration": iteration + 1, "history": entry, "timestamp": timestamp}
        for (number, iteration, timestamp), entry in zip(steps, values, strict=True)
    ]


def executor_history(history: Iterable[dict[str, Any]], worker: int) -> list[dict[str, Any]]:
    """The entries of one worker, by iteration."""
    return sorted((entry for entry in history if entry["worker_id"] == worker), key=lambda entry: entry["iteration"])


def averaged_history(history: Iterable[dict[str, Any]]) -> np.ndarray:
    """Means over the workers that came so far.

    Returns:
        float64 ``(steps, metrics)``, the loss first; ``(0, 0)`` where there is no entry.
    """
    by_worker: dict[int, list[Sequence[float]]] = {}
    for entry in sorted(history, key=lambda entry: entry["iteration"]):
        by_worker.setdefault(entry["worker_id"], []).append(entry["history"])
    columns = [np.atleast_2d(np.asarray(rows, np.float64).reshape(len(rows), -1)) for rows in by_worker.values()]
    if not columns:
        return np.empty((0, 0))
    total = np.zeros((max(map(len, columns)), columns[0].shape[1]))
    count = np.zeros((len(total), 1))
    for rows in columns:
        total[: len(rows)] += rows
        count[: len(rows)] += 1
    return total / count
