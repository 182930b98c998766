"""The choice of the tables that travel by rows, by a job's options, its model and the job that it resumes."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distkeras.keras_model.recipe import Recipe
from distkeras.keras_model.tables import CutModel, cut, embedding_names
from distkeras.keras_model.variables import has_rows_at_server
from distkeras.ps.checkpoint.snapshots import saved_job
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.events import Events
from distkeras.ps.settings import ServerSettings, WorkerSettings
from distkeras.ps.validate import reason_against
from distkeras.settings import TrainSettings

if TYPE_CHECKING:
    import keras

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TableChoice:
    """Chooses the tables of a job that travel by rows, by its options, its model and the job that it resumes."""

    training: TrainSettings
    server: ServerSettings
    worker: WorkerSettings
    recipe: Recipe
    shapes: Sequence[tuple[int, ...]]
    stream: bool
    resumed: str | None

    def cut(self, model: keras.Model, build: Callable[[], keras.Model]) -> CutModel:
        """Return the tables of ``model`` that travel by rows, and the reason why each other one stays dense.

        The recipe builds ``model``, and ``build`` returns one with the state of its optimizer.
        """
        chosen: str | Sequence[str] | None = self.training.tables
        wide, names = has_rows_at_server(model), embedding_names(model)
        if self.stream and wide:
            raise ConfigurationError(
                "`model` must have no WideEmbedding for `train_stream`, whose tables are dense. Received: one"
            )
        if (not names and chosen == "auto") or (chosen == "dense" and not wide):
            return CutModel({})
        reason = reason_against_tables(self.server, self.worker, self.training)
        if reason is not None and wide:
            raise ConfigurationError(f"the rows of a WideEmbedding cannot travel: {reason}")
        if chosen not in ("auto", "dense"):
            _require_none(reason, '`tables` must be "auto" or "dense"', f"tables={chosen!r}")
            return self._cut(model, build, chosen)
        saved = None if chosen == "dense" else self._saved_tables()
        if saved:
            _require_none(reason, "`checkpoint` must hold a job with dense tables", f"one whose {saved} travel by rows")
            return self._cut(model, build, saved)
        reason = reason or (self._reason_to_leave_all(saved) if chosen == "auto" else "it was chosen")
        if wide:
            return self._cut(model, build, "auto" if reason is None else None)
        if reason is None:
            try:
                return self._cut(model, build, "auto")
            except (ValueError, TypeError, NotImplementedError) as error:  # layers may be the user's
                reason = f"the model cannot be cut: {type(error).__name__}: {error}"
        return CutModel(dict.fromkeys(names, reason))

    def _cut(
        self, model: keras.Model, build: Callable[[], keras.Model], choose: str | Sequence[str] | None
    ) -> CutModel:
        model = build() if self.recipe.optimizer_state else model
        with _own_random_numbers():
            return cut(
                model,
                self.recipe,
                window=self.worker.rule.window,
                batch_size=self.training.batch_size,
                choose=choose,
                shapes=self.shapes,
            )

    def _saved_tables(self) -> list[str] | None:
        """Return the tables by rows of the resumed job, which must stay the same; None: no job is resumed."""
        saved = None if self.resumed is None else saved_job(self.resumed)
        return None if saved is None else list(saved.get("tables") or ())

    def _reason_to_leave_all(self, saved: Sequence[str] | None) -> str | None:
        """Return why all tables that were not named stay dense; None if they may travel."""
        reasons = {
            "the tables of a stream are dense": self.stream,
            "they are dense in the job that is resumed": saved is not None and not saved,
            f"{self.recipe.backend} may add up their rows in another order": self.recipe.backend != "tensorflow",
        }
        return next((reason for reason, applies in reasons.items() if applies), None)


def _require_none(reason: str | None, expected: str, received: str) -> None:
    if reason is not None:
        raise ConfigurationError(f"{expected}. Received: {received}; {reason}")


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Restore Python's random state afterwards: Keras takes seeds from it for layers that the user builds next."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def reason_against_tables(server: ServerSettings, worker: WorkerSettings, training: TrainSettings) -> str | None:
    """Return why the options of a job keep all tables dense; None if they do not."""
    if not worker.rule.traits.rows:
        return f"rule {worker.rule.name!r} may move rows that a commit does not name"
    return reason_against("tables by rows", server, worker, training)


def report_tables(cut: CutModel, events: Events) -> None:
    """Log which tables of a model travel by rows, and why the others stay dense."""
    if not (cut.tables or cut.kept_dense):
        return
    travel = ", ".join(f"{table.name!r} ({table.rows} rows of {table.width})" for table in cut.tables)
    parts = [f"by rows: {travel}"] if travel else []
    parts += [f"{name!r} stays dense: {reason}" for name, reason in cut.kept_dense.items()]
    events.report(log, "tables", "tables of the model: %s", "; ".join(parts), level=logging.INFO)
