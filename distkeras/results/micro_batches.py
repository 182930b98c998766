"""What became of the latest micro-batch of a stream: the handle, the log, the dashboard and Prometheus read it here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: How the names end of those of a source's metrics that say what waits there, such as Kafka's maxOffsetsBehindLatest.
_WAITING = ("BehindLatest", "Outstanding")


@dataclass(frozen=True)
class MicroBatchProgress:
    """What became of one micro-batch.

    Args:
        batch: its number, as Spark counts them.
        rows: that it has.
        steps: mini-batches that were committed.
        seconds: from when Spark handed it over until a snapshot covered it.
        lag: seconds since the micro-batch before was handed over. No row of this one has waited longer between its
            arrival at the source and the snapshot, if the source had no backlog. None: it is the first one.
        loss: mean over its mini-batches, weighted by rows; NaN without rows.
        clock: commits that the center has.
        repeated: all of it had counted before: Spark has sent it again, and its rows were only compared.
        backlog: what waits at the sources, by Spark's names: such as maxOffsetsBehindLatest of Kafka, and
            numFilesOutstanding of Delta. Of several sources, the largest. Empty: they do not report it. None: Spark has
            not reported on the micro-batch yet.
    """

    batch: int
    rows: int
    steps: int
    seconds: float
    lag: float | None
    loss: float
    clock: int
    repeated: bool = False
    backlog: Mapping[str, float] | None = None

    def __str__(self) -> str:
        if self.repeated:
            return f"micro-batch {self.batch} had counted before, with the same {self.rows} rows"
        behind = "" if self.lag is None else f", at most {self.lag:.1f} s behind"
        return f"micro-batch {self.batch}: {self.rows} rows in {self.seconds:.2f} s, loss {self.loss:.4f}{behind}"


def backlog_of(sources: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return what waits at some sources.

    Args:
        sources: of Spark's `StreamingQueryProgress`. Of a mean, a least and a greatest value, the greatest is taken.
    """
    backlog: dict[str, float] = {}
    for source in sources:
        for name, value in (source.get("metrics") or {}).items():
            if name.endswith(_WAITING) and not name.startswith(("avg", "min")):
                backlog[name] = max(float(value), backlog.get(name, 0.0))
    return backlog
