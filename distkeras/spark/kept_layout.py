"""Reuse of rows that a session has already spread over partitions by the next job on the same rows.

Assigning rows to partitions is a shuffle, which takes longer than the training of a small model. A cross-validation
trains on the same rows again and again; if Spark itself keeps them (``cache``, ``persist``), the files of that shuffle
are reused. Importing this module loads neither pyspark nor Keras.

Whether rows are the same is never guessed from a plan. The user's DataFrame must consist of rows that Spark keeps, of
which columns may only be selected and renamed; everything else, filters and expressions included, is laid out again
each time. So everything that determines the layout is known: the object that keeps the rows, which of its columns are
used under which names, the settings of the session, and the fields of `Arrangement`. Spark must have all of the rows
when a job starts: rows that were lost or evicted are computed again, from sources that may have changed.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distkeras.spark.cluster import context_of, is_stopped

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

#: The most columns of a DataFrame whose plan is examined: each costs some calls of the JVM.
_COLUMNS_MAX = 200


@dataclass(frozen=True)
class Arrangement:
    """Everything that determines the layout of the rows of a DataFrame, except those rows themselves.

    Args:
        columns: names of the columns of ``source`` from which the layout is computed.
        made_by: all other arguments of that computation.
    """

    source: DataFrame
    columns: tuple[str, ...]
    made_by: Hashable


@dataclass(frozen=True)
class _LayoutKey:
    """The key of a layout: equal keys mean equal rows."""

    cache: Any  # the JVM object that keeps the rows
    ordinals: tuple[tuple[str, int], ...]  # for each column of the arrangement, its number among the kept columns
    settings: dict[str, str]  # of the session
    made_by: Hashable  # of the arrangement


class KeptLayout:
    """Keeps the latest layout until the next one or its session's end; Spark then removes the files."""

    def __init__(self) -> None:
        self._kept: tuple[_LayoutKey, SparkSession, DataFrame] | None = None
        self._lock = threading.Lock()

    def _find(self, key: _LayoutKey, session: SparkSession) -> DataFrame | None:
        with self._lock:
            kept = self._kept
            if kept is not None and is_stopped(kept[1]):
                kept = self._kept = None
        context = context_of(session)
        if kept is None or context is None or not _same(kept[0], key, context):
            return None
        return kept[2] if _is_stored(key.cache, context) else None

    def of(self, df: DataFrame, arrangement: Arrangement | None) -> DataFrame:
        """Return the kept layout of the rows of ``df``; if there is none, lay them out, and keep that if possible.

        Under Spark Connect, which hides plans, ``df`` is returned unchanged. With adaptive planning, this runs the job
        that spreads the rows.

        Args:
            df: from `ordering.partitioned`.
            arrangement: identifies how ``df`` was computed; None: never keep its layout.
        """
        session = df.sparkSession
        key = _key_of(arrangement)
        if key is None:
            return df
        if (kept := self._find(key, session)) is not None:
            return kept
        from pyspark.sql import DataFrame

        # Spark does not repeat the shuffle of the same RDD, but a DataFrame's plan makes a new RDD each time.
        rdd = df._jdf.queryExecution().toRdd()  # noqa: SLF001 - PySpark has no public way to a plan
        laid_out = DataFrame(session._jsparkSession.internalCreateDataFrame(rdd, df._jdf.schema(), False), session)  # noqa: SLF001 - the same
        with self._lock:
            self._kept = key, session, laid_out
        return laid_out


def _is_stored(cache: Any, context: SparkContext) -> bool:
    """Return whether Spark has all rows of ``cache``: lost rows are computed again, and may differ."""
    number = cache.cachedColumnBuffers().id()
    for rdd in context._jsc.sc().getRDDStorageInfo():  # noqa: SLF001 - PySpark has no public way to what is stored
        if rdd.id() == number:
            return bool(rdd.numCachedPartitions() >= rdd.numPartitions() * rdd.storageLevel().replication())
    return False


def _same(kept: _LayoutKey, key: _LayoutKey, context: SparkContext) -> bool:
    jvm: Any = context._jvm  # noqa: SLF001 - PySpark has no public way to the JVM
    cache = jvm.java.util.IdentityHashMap()  # `equals` of Spark's objects compares their descriptions
    cache.put(kept.cache, True)
    rest = (key.ordinals, key.settings, key.made_by)
    return bool(cache.containsKey(key.cache)) and (kept.ordinals, kept.settings, kept.made_by) == rest


def _key_of(arrangement: Arrangement | None) -> _LayoutKey | None:
    """Return the key of an arrangement; None if its rows are not columns of rows that Spark keeps, or under Connect."""
    if arrangement is None or context_of(session := arrangement.source.sparkSession) is None:
        return None
    names = arrangement.source.columns
    folded = [name.casefold() for name in names]  # Spark may refuse names that differ only in case
    alone = all(name in names and folded.count(name.casefold()) == 1 for name in arrangement.columns)
    if len(names) > _COLUMNS_MAX or not alone:
        return None
    # A DataFrame's plan has the cached data of its first use; that of a new DataFrame has the current ones.
    plan = arrangement.source.select("*")._jdf.queryExecution().withCachedData()  # noqa: SLF001 - PySpark has no public way to a plan
    outputs = plan.output()
    identities = {name: outputs.apply(names.index(name)).exprId() for name in arrangement.columns}
    while (kind := _kind(plan)) != "InMemoryRelation":
        if kind == "Project":
            listed = plan.projectList()
            origins = {name: _origin(listed, identity) for name, identity in identities.items()}
            if None in origins.values():
                return None
            identities = origins
        elif kind != "SubqueryAlias":
            return None
        plan = plan.child()
    kept = plan.output()
    places = [kept.apply(place).exprId() for place in range(kept.size())]
    if any(identity not in places for identity in identities.values()):
        return None
    ordinals = tuple((name, places.index(identity)) for name, identity in identities.items())
    return _LayoutKey(plan.cacheBuilder(), ordinals, dict(session.conf.getAll), arrangement.made_by)


def _origin(listed: Any, identity: Any) -> Any:
    """Return the id of the attribute that a projection selects as ``identity``; None if it is an expression."""
    for place in range(listed.size()):
        expression = listed.apply(place)
        if expression.exprId() == identity:
            if _kind(expression) == "Alias":
                expression = expression.child()
            return expression.exprId() if _kind(expression) == "AttributeReference" else None
    return None


def _kind(node: Any) -> str:
    return str(node.getClass().getName()).rpartition(".")[2]
