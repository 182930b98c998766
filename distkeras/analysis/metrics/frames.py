"""Tables of a run, from Spark, pandas or the simulator, as pandas has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from distkeras.ps.errors import EmptyDataError, MissingColumnError
from distkeras.ps.simulation.trace import Trace


def as_pandas(frame: Any, columns: Sequence[str]) -> pd.DataFrame:
    """A copy of ``frame`` in pandas.

    Args:
        frame: Spark or pandas DataFrame, or a simulation's trace, which stands for its commits.
        columns: what it must have.

    Raises:
        EmptyDataError: there is no row.
        MissingColumnError: a column is missing.
    """
    if isinstance(frame, Trace):
        names = ("clock", "worker", "staleness", "steps", "scale", "gap", "normalized_gap")
        frame = pd.DataFrame({name: getattr(frame, name) for name in names})
    for column in columns:
        if column not in frame.columns:
            raise MissingColumnError(
                f"The DataFrame must have this column. Received: columns={list(frame.columns)}", column=column
            )
    result = frame.copy() if isinstance(frame, pd.DataFrame) else frame.toPandas()
    if result.empty:
        raise EmptyDataError("The DataFrame must have a row. Received: none")
    return result


def seconds_since_first(timestamps: pd.Series) -> pd.Series:
    """float64, in seconds since the first of ``timestamps``."""
    times = pd.to_datetime(timestamps)
    return (times - times.min()).dt.total_seconds()
