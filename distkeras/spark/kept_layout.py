"""Rows that a session has already spread over partitions or read, for the next job on the same ones.

Giving each row its partition is a shuffle, which costs a small model more than its training. A cross-validation trains
on the same rows again and again; where Spark itself keeps them (``cache``, ``persist``), the files of that shuffle are
as good the second time. So are the validation rows that the driver has read. Importing this module loads neither
pyspark nor Keras.

Whether rows are the same is never guessed from a plan. The user's DataFrame must be rows that Spark keeps, of which at
most columns were picked and renamed; everything else, filters and expressions included, is laid out again each time. So
all that decides the layout is known: the object that keeps the rows, which of its columns are used under which names,
the settings of the session, and what `Arrangement` lists. Spark must have all of the rows when a job comes: those that
it has lost, or that were dropped behind its back, it computes again, from sources that may have changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from distkeras.spark.cluster import context_of, is_stopped

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

#: Most columns of a DataFrame whose plan is looked at: each costs some calls of the JVM.
_MOST_COLUMNS = 200
_T = TypeVar("_T")


@dataclass(frozen=True)
class Arrangement:
    """Everything that decides how the rows of a DataFrame are laid out, except those rows themselves.

    Args:
        columns: names of its columns that the layout is computed from.
        made_by: all other arguments of that computation.
    """

    source: DataFrame
    columns: tuple[str, ...]
    made_by: Hashable


@dataclass(frozen=True)
class _LayoutKey:
    """What two layouts share if their rows are the same."""

    cache: Any  # the JVM object that keeps the rows
    ordinals: tuple[tuple[str, int], ...]  # of each column of the arrangement among those that are kept
    settings: dict[str, str]  # of the session
    made_by: Hashable  # of the arrangement


class _Latest(Generic[_T]):
    """The latest value that was made of rows that Spark keeps, until another one comes or its session ends."""

    def __init__(self) -> None:
        self._kept: tuple[_LayoutKey, SparkSession, _T] | None = None
        self._lock = threading.Lock()

    def _find(self, key: _LayoutKey, session: SparkSession) -> _T | None:
        with self._lock:
            kept = self._kept
            if kept is not None and is_stopped(kept[1]):
                kept = self._kept = None
        context = context_of(session)
        if kept is None or context is None or not _same(kept[0], key, context):
            return None
        return kept[2] if _is_stored(key.cache, context) else None

    def _keep(self, key: _LayoutKey, session: SparkSession, value: _T) -> None:
        with self._lock:
            self._kept = key, session, value


class KeptLayout(_Latest["DataFrame"]):
    """Keeps the latest layout until another one comes or its session ends; Spark then removes the files."""

    def of(self, df: DataFrame, arrangement: Arrangement | None) -> DataFrame:
        """Return the rows of ``df`` as they already lie, if they do; else ``df``, kept from now on if that is sound.

        Under Spark Connect, which hides plans, ``df`` comes back as it is. Runs the job that spreads the rows, where
        Spark plans adaptively.

        Args:
            df: from `ordering.partitioned`.
            arrangement: what ``df`` was computed from; None: never keep it.
        """
        session = df.sparkSession
        key = _key_of(arrangement)
        if key is None:
            return df
        if (kept := self._find(key, session)) is not None:
            return kept
        from pyspark.sql import DataFrame

        # What has run once, Spark does not run again for the same RDD; a DataFrame's plan makes a new RDD each time.
        rdd = df._jdf.queryExecution().toRdd()  # noqa: SLF001 - PySpark has no public way to a plan
        laid_out = DataFrame(session._jsparkSession.internalCreateDataFrame(rdd, df._jdf.schema(), False), session)  # noqa: SLF001 - the same
        self._keep(key, session, laid_out)
        return laid_out


class KeptRows(_Latest[_T]):
    """Keeps what was last read of rows on the driver, until something else is read or its session ends."""

    def of(self, arrangement: Arrangement | None, read: Callable[[], _T], fits: Callable[[_T], bool]) -> _T:
        """Return what ``read`` returned for the same rows before, if that was kept; else what it returns now.

        Args:
            arrangement: everything that decides what ``read`` returns; None: never keep it.
            read: reads the rows.
            fits: returns whether a value is small enough to be kept.
        """
        key = _key_of(arrangement)
        if arrangement is None or key is None:
            return read()
        session = arrangement.source.sparkSession
        if (kept := self._find(key, session)) is not None:
            return kept
        value = read()
        if fits(value):
            self._keep(key, session, value)
        return value


def _is_stored(cache: Any, context: SparkContext) -> bool:
    """Return whether Spark has all rows of ``cache``: what was lost or dropped is computed again, and may be others."""
    number = cache.cachedColumnBuffers().id()
    for rdd in context._jsc.sc().getRDDStorageInfo():  # noqa: SLF001 - PySpark has no public way to what is stored
        if rdd.id() == number:
            return bool(rdd.numCachedPartitions() >= rdd.numPartitions() * rdd.storageLevel().replication())
    return False


def _same(kept: _LayoutKey, key: _LayoutKey, context: SparkContext) -> bool:
    jvm: Any = context._jvm  # noqa: SLF001 - PySpark has no public way to the JVM
    cache = jvm.java.util.IdentityHashMap()  # Spark's objects are equal where their descriptions are
    cache.put(kept.cache, True)
    rest = (key.ordinals, key.settings, key.made_by)
    return bool(cache.containsKey(key.cache)) and (kept.ordinals, kept.settings, kept.made_by) == rest


def _key_of(arrangement: Arrangement | None) -> _LayoutKey | None:
    """Return None where the rows are anything else than columns of rows that Spark keeps, and under Spark Connect."""
    if arrangement is None or context_of(session := arrangement.source.sparkSession) is None:
        return None
    names = arrangement.source.columns
    folded = [name.casefold() for name in names]  # where Spark does not tell them apart, it refuses the column
    alone = all(name in names and folded.count(name.casefold()) == 1 for name in arrangement.columns)
    if len(names) > _MOST_COLUMNS or not alone:
        return None
    # A DataFrame remembers what was kept when it was first looked at; one that is made from it does not.
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
    """Return the id of the attribute that a projection passes on as ``identity``; None if it computes something."""
    for place in range(listed.size()):
        expression = listed.apply(place)
        if expression.exprId() == identity:
            if _kind(expression) == "Alias":
                expression = expression.child()
            return expression.exprId() if _kind(expression) == "AttributeReference" else None
    return None


def _kind(node: Any) -> str:
    return str(node.getClass().getName()).rpartition(".")[2]
