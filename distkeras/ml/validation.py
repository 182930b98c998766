"""The curve of a fit: loss and metrics of the center over the rows that were left out, while training goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from distkeras.callbacks import Callback, CallbackContext, TrainingSetup
from distkeras.ps.errors import DeadlineError, EmptyDataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from distkeras.data.batches import Batch

#: Centers that wait for their evaluation, at most: epochs that are shorter than an evaluation make some wait.
_WAITING_MAX = 8
#: Seconds that one evaluation may take.
_EVALUATION_SECONDS = 3600.0


class ValidationCurve(Callback):
    """Evaluates the center on rows of a DataFrame, on the driver, in a thread of its own.

    The center is fetched when a point is due, and evaluated as soon as the earlier ones are. So there is a point for
    each epoch, even if an evaluation takes longer than an epoch, as long as no more than eight centers wait.

    Args:
        df: validation data, with the trainer's columns.
        max_rows: more rows than these are sampled: the same ones each time.
        every_epochs, every_commits, every_seconds: between two points; see `Callback`. Default: an epoch.

    Attributes:
        points: a dictionary for each evaluation: epoch, clock, seconds since the beginning, rows, loss and metrics.
        sampled: there were more rows than ``max_rows``, or as many.

    Raises:
        ConfigurationError: an argument cannot work.
        EmptyDataError: ``df`` has no rows.
        DeadlineError: an evaluation takes longer than an hour.
    """

    def __init__(
        self,
        df: DataFrame,
        max_rows: int,
        *,
        every_epochs: float | None = None,
        every_commits: int | None = None,
        every_seconds: float | None = None,
    ) -> None:
        if (every_epochs, every_commits, every_seconds) == (None, None, None):
            every_epochs = 1.0
        super().__init__(every_commits=every_commits, every_seconds=every_seconds, every_epochs=every_epochs)
        self.points: list[dict[str, float]] = []
        self.sampled = False
        self._df, self._max_rows = df, max_rows
        self._batch: Batch | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: list[Future[dict[str, float]]] = []

    def on_begin(self, setup: TrainingSetup) -> None:
        """Read the rows."""
        self.points, self._waiting = [], []
        self._batch = setup.read_rows(self._df, self._max_rows)
        if self._batch is None:
            raise EmptyDataError("the rows to validate on must be some. Received: none")
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

    def _evaluate(self, context: CallbackContext) -> dict[str, float]:
        assert self._batch is not None, "`on_begin` comes first"
        values = context.evaluate(self._batch)
        place = {"epoch": context.status.epochs, "clock": context.clock, "seconds": context.seconds}
        return {**place, "rows": len(self._batch.x[0]), **values}

    def _collect(self, most: int) -> None:
        """Take in evaluations until at most so many wait; raises what one raised."""
        while self._waiting and (len(self._waiting) > most or self._waiting[0].done()):
            try:
                point = self._waiting.pop(0).result(_EVALUATION_SECONDS)
            except TimeoutError:
                raise DeadlineError(f"waited {_EVALUATION_SECONDS:g} s for an evaluation on the driver") from None
            if not self.points or self.points[-1]["clock"] != point["clock"]:
                self.points.append(point)

    def _close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
