"""Rows to validate on, and the center's loss and metrics on them while a job runs."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from distkeras.callbacks import Callback, CallbackContext, TrainingSetup
from distkeras.data.schema import quoted
from distkeras.metric_columns import in_columns, with_arrays
from distkeras.ps.errors import ConfigurationError, DeadlineError, MissingColumnError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from distkeras.data.batches import Batch

#: Rows to validate on while training, at most.
ROWS_MAX = 10_000


def split(
    df: DataFrame, columns: Iterable[str], indicator: str | None, share: float, seed: int
) -> tuple[DataFrame, DataFrame | None]:
    """Return the rows to train on, and those to validate on, if any.

    They are those in which the boolean column ``indicator`` is true, or a ``share``, chosen by a hash of their values
    in ``columns``: the same rows whenever Spark computes them.
    """
    from pyspark.sql import functions as F

    if indicator is not None:
        kinds = {field.name: field.dataType.simpleString() for field in df.schema.fields}
        if kinds.get(indicator) != "boolean":
            raise MissingColumnError(
                f"`validation_indicator_col` must be a boolean column. Received: {kinds.get(indicator)}",
                column=indicator,
            )
        chosen = F.coalesce(F.col(quoted(indicator)), F.lit(False))
        return df.where(~chosen), df.where(chosen)
    if not share:
        return df, None
    values = [F.col(quoted(name)) for name in columns]
    # Another seed than that of the row order, whose hash decides which partition a row goes to.
    chosen = F.pmod(F.xxhash64(F.lit(f"validation {seed}"), *values), F.lit(1 << 30)) < int(share * (1 << 30))
    return df.where(~chosen), df.where(chosen)


def require_alone(others: Any) -> None:
    """Raise ConfigurationError if rows to validate on are given, and some are to be left out of training as well."""
    if others:
        raise ConfigurationError(
            "`validation_data` must not be given with `validation_split` or `validation_indicator_col`, which leave "
            f"rows out of training. Received: validation_data and {others!r}"
        )


#: Centers that wait for their evaluation, at most: epochs that are shorter than an evaluation make some wait.
_WAITING_MAX = 8
#: Seconds that one evaluation may take.
_EVALUATION_SECONDS = 3600.0


class ValidationCurve(Callback):
    """Evaluates the center on rows of a DataFrame, on the driver, in a thread of its own.

    The center is fetched when a point is due, and evaluated as soon as the earlier ones are. So there is a point for
    each epoch, even if an evaluation takes longer than an epoch, as long as no more than eight centers wait. Epochs
    that end between two statuses of the server, which are at least 0.1 s apart (5 s in the cluster), share a point.

    Args:
        df: validation data, with the trainer's columns.
        max_rows: more rows than these are sampled: the same ones each time.
        every: `every_epochs`, `every_commits` or `every_seconds` of `Callback`. Default: an epoch.

    Attributes:
        points: a dictionary for each evaluation: epoch, clock, seconds since the beginning, rows, loss and metrics.
        sampled: there were more rows than ``max_rows``, or as many.

    Raises:
        ConfigurationError: an argument cannot work.
        EmptyDataError: ``df`` has no rows.
        DeadlineError: an evaluation takes longer than an hour.
    """

    def __init__(self, df: DataFrame, max_rows: int = ROWS_MAX, **every: Any) -> None:
        super().__init__(**every if any(value is not None for value in every.values()) else {"every_epochs": 1.0})
        self.points: list[dict[str, Any]] = []
        self.sampled = False
        self._df, self._max_rows = df, max_rows
        self._batch: Batch | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: list[Future[dict[str, Any]]] = []

    def on_begin(self, setup: TrainingSetup) -> None:
        """Read the rows."""
        self.points, self._waiting = [], []
        self._batch = setup.read_rows(self._df, self._max_rows)
        self.sampled = len(self._batch.x[0]) >= self._max_rows
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="distkeras-validation")

    def on_center(self, context: CallbackContext) -> None:
        """Fetch the center, and have it evaluated."""
        self._collect(_WAITING_MAX - 1)
        assert self._thread is not None, "`on_begin` comes first"
        context.center  # noqa: B018 - fetched now, whenever its turn comes
        self._waiting.append(self._thread.submit(self._evaluate, context))

    def on_end(self, context: CallbackContext) -> None:
        """Evaluate what is waiting, and the last center."""
        self._collect(0)
        if not self.points or self.points[-1]["clock"] != context.center.clock:
            self.points.append(self._evaluate(context))
        self._close()

    def on_failure(self, error: BaseException) -> None:
        """Evaluate no more."""
        self._close()

    def _evaluate(self, context: CallbackContext) -> dict[str, Any]:
        assert self._batch is not None, "`on_begin` comes first"
        values = context.evaluate(self._batch)
        place = {"epoch": context.status.epochs, "clock": context.clock, "seconds": context.seconds}
        return {**place, "rows": len(self._batch.x[0]), **in_columns(with_arrays(values))}

    def _collect(self, most: int) -> None:
        """Take in evaluations until at most so many wait; raises what one raised."""
        while self._waiting and (len(self._waiting) > most or self._waiting[0].done()):
            try:
                point = self._waiting.pop(0).result(_EVALUATION_SECONDS)
            except TimeoutError:
                raise DeadlineError(
                    f"waited {_EVALUATION_SECONDS:g} s for an evaluation on the driver. "
                    "Fewer `validation_rows` take less time"
                ) from None
            if not self.points or self.points[-1]["clock"] != point["clock"]:
                self.points.append(point)

    def _close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
