"""The rows that a session laid out last, for the next job that trains on the same ones.

To give each row its partition is a shuffle, which costs a small model more than its training. A cross-validation trains
on the same rows again and again; where Spark itself keeps them (``cache``, ``persist``), the files of that shuffle are
as good the second time. This module knows when that is so, and loads neither pyspark nor Keras.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distkeras.cluster.session import context_of, is_stopped

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class _Layout:
    """Rows that were laid out.

    Args:
        plan: what they are made by, of the JVM's Catalyst.
        caches: what the plan reads; a map of the JVM's that knows objects, not what they are equal to.
        df: the same rows, as they lie.
    """

    plan: Any
    caches: Any
    df: DataFrame


class KeptLayout:
    """Keeps one layout, the latest, until another one comes or its session ends; Spark then removes the files."""

    def __init__(self) -> None:
        self._kept: _Layout | None = None
        self._lock = threading.Lock()

    def of(self, df: DataFrame) -> DataFrame:
        """The rows of ``df``, as they were laid out before if they were, and kept if they may be kept.

        They may if nothing but rows that Spark keeps goes into them, by functions that always return the same. Whatever
        was kept anew since, as after ``unpersist``, was never laid out before. Spark Connect tells nobody: there, and
        where they may not be kept, ``df`` comes back as it is.

        Starts the job that spreads the rows, where Spark plans adaptively.

        Args:
            df: from `ordering.partitioned`.
        """
        session = df.sparkSession
        context = context_of(session)
        if context is None:
            return df
        execution = df._jdf.queryExecution()  # noqa: SLF001 - PySpark has no public way to a plan
        plan = execution.withCachedData()
        caches = _caches(plan)
        if not caches or not plan.deterministic():
            return df
        with self._lock:
            kept = self._kept
            if kept is not None and is_stopped(kept.df.sparkSession):
                kept = self._kept = None
        if kept is not None and kept.plan.sameResult(plan) and all(map(kept.caches.containsKey, caches)):
            return kept.df
        from pyspark.sql import DataFrame

        jvm: Any = context._jvm  # noqa: SLF001 - likewise, to the JVM
        known = jvm.java.util.IdentityHashMap()
        for cache in caches:
            known.put(cache, True)
        # What has run once, Spark does not run again for the same RDD; a DataFrame's plan makes a new RDD each time.
        rows = session._jsparkSession.internalCreateDataFrame(execution.toRdd(), df._jdf.schema(), False)  # noqa: SLF001 - likewise
        layout = _Layout(plan, known, DataFrame(rows, session))
        with self._lock:
            self._kept = layout
        return layout.df


def _caches(plan: Any) -> list[Any]:
    """What keeps the rows that a plan reads; empty where something else is read, too."""
    leaves = plan.collectLeaves()
    found = [leaves.apply(number) for number in range(leaves.size())]
    if any(leaf.getClass().getSimpleName() != "InMemoryRelation" for leaf in found):
        return []
    return [leaf.cacheBuilder() for leaf in found]
