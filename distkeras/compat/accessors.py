"""What dist-keras' trainers were asked and told once they were made: getters, setters, histories, counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from distkeras.cluster.failures import short_errors
from distkeras.compat import warn_porter
from distkeras.compat.histories import averaged_history, executor_history, history_list
from distkeras.compat.refusals import RULES, SUBMIT, refusal, refused
from distkeras.keras_model import archive
from distkeras.keras_model.recipe import recipe_of
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.validate import require_integer
from distkeras.trainer import Trainer

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

_SERVER = "`train` starts and stops the server, which is a process of its own"
_TIMES = "`train` takes the times: `get_training_time`, `timings`"

#: Methods from inside dist-keras' trainers, and what there is for each. Nothing calls them here, also not a subclass'.
_INSIDE = {
    "allocate_worker": RULES,
    "allocate_parameter_server": RULES,
    "average_models": RULES,
    "service": _SERVER,
    "start_service": _SERVER,
    "stop_service": _SERVER,
    "record_training_start": _TIMES,
    "record_training_end": _TIMES,
    "serialize": SUBMIT,
}


def only_table(df: DataFrame | None, dataframe: DataFrame | None) -> DataFrame:
    """The table to train on, which may be given under either name.

    Raises:
        ConfigurationError: both are given, or none.
    """
    found = df if dataframe is None else dataframe
    if found is None or (df is not None and dataframe is not None):
        raise ConfigurationError(f"`dataframe` must be given, once. Received: df={df!r}, dataframe={dataframe!r}")
    return found


class Histories(ABC):
    """Histories as lists and arrays; refusals of what was inside a trainer.

    Raises:
        ConfigurationError: a subclass defines one of the methods that nothing calls here.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _INSIDE.keys() & vars(cls).keys():
            raise refusal(f"{cls.__name__}.{name}", _INSIDE[name])

    @abstractmethod
    def get_history(self) -> list[dict[str, Any]]:
        """One dictionary a mini-batch: ``worker_id``, ``iteration`` from 1, ``history`` (loss, metrics), ``timestamp``.

        As a DataFrame it is `history`.
        """

    def get_executor_history(self, executor_id: int) -> list[dict[str, Any]]:
        """The entries of `get_history` of one worker, by iteration."""
        return executor_history(self.get_history(), executor_id)

    def get_averaged_history(self) -> np.ndarray:
        """Means of loss and metrics over the workers: float64 ``(steps, metrics)``, the loss first."""
        return averaged_history(self.get_history())

    def set_max_prefetch(self, max_mini_batches: int) -> None:
        """Warns that it has no effect: a worker reads ahead by itself, in bounded memory."""
        warn_porter(f"`set_max_prefetch` has no effect: a worker reads ahead by itself. Received: {max_mini_batches}")


for _name, _instead in _INSIDE.items():
    setattr(Histories, _name, refused(_name, _instead))


class TrainerAccessors(Histories, Trainer):
    """Of dist-keras' ``Trainer``."""

    #: The arguments of ``compile``, for another model.
    _compilation: dict[str, Any]

    @short_errors
    def train(
        self,
        df: DataFrame | None = None,
        shuffle: bool | None = None,
        *,
        dataframe: DataFrame | None = None,
        **options: Any,
    ) -> keras.Model:
        """See `Trainer.train`, which takes the ``options``.

        Args:
            df, dataframe: the data, under either name.
            shuffle: in place of the constructor's, this time.
            options: ``callbacks``, ``checkpoint``, ``resume``.
        """
        table, settings = only_table(df, dataframe), self.settings
        try:
            if shuffle is not None:
                self.settings = replace(self.settings, shuffle=shuffle)
            return super().train(table, **options)
        finally:
            self.settings = settings

    def get_training_time(self) -> float:
        """Seconds that the last `train` took; 0 before the first."""
        return self.timings.get("total", 0.0)

    def get_history(self) -> list[dict[str, Any]]:
        """See `Histories.get_history`."""
        return history_list(self._require(self._outcome.records, "get_history").history())

    def set_model(self, model: keras.Model) -> None:
        """Another model to train, compiled as the first one was to be.

        Raises:
            ConfigurationError: it cannot work.
        """
        file = archive.to_bytes(model)
        recipe = recipe_of(model, file, **self._compilation)
        recipe.build(file)  # what cannot work fails here
        self._model_file, self._recipe = file, recipe


class ParameterServer:
    """What dist-keras' scripts asked ``trainer.parameter_server``, while its server was an object of the driver."""

    def __init__(self, trainer: DistributedAccessors) -> None:
        self._trainer = trainer

    @property
    def num_updates(self) -> int:
        """Commits applied by the last job."""
        return self._trainer.num_updates()

    def get_model(self) -> keras.Model:
        """The model with the center's weights."""
        return self._trainer.model

    def stop(self) -> None:
        """Nothing is left to stop: `train` has, also where it failed or was interrupted."""


class DistributedAccessors(TrainerAccessors):
    """Of dist-keras' ``DistributedTrainer`` and ``AsynchronousDistributedTrainer``."""

    _parallelism = 1

    @short_errors
    def train(
        self,
        df: DataFrame | None = None,
        shuffle: bool | None = None,
        *,
        dataframe: DataFrame | None = None,
        **options: Any,
    ) -> keras.Model:
        """See `TrainerAccessors.train`."""
        settings, workers = self.settings, self.settings.num_workers
        try:
            if workers is not None:
                self.settings = replace(settings, num_workers=workers * self._parallelism)
            return super().train(df, shuffle, dataframe=dataframe, **options)
        finally:
            self.settings = settings

    @property
    def parameter_server(self) -> ParameterServer:
        """Its counts and its model, once the server itself is gone."""
        return ParameterServer(self)

    def num_updates(self) -> int:
        """Commits applied by the last job.

        Raises:
            LocalProtocolError: nothing has been trained.
        """
        commits = self._require(self._outcome.records, "num_updates").commits_array
        return int((commits["skipped"] == 0).sum())

    # ---- getters and setters of options, checked as by the constructor

    def get_minibatch_size(self) -> int:
        """`batch_size`."""
        return self.settings.batch_size

    def set_minibatch_size(self, size: int) -> None:
        """Sets `batch_size`."""
        self.settings = replace(self.settings, batch_size=size)

    def get_num_epoch(self) -> int:
        """`num_epoch`."""
        return self.settings.num_epoch

    def set_num_epoch(self, num_epoch: int) -> None:
        """Sets `num_epoch`."""
        self.settings = replace(self.settings, num_epoch=num_epoch)

    def get_num_workers(self) -> int | None:
        """`num_workers`, without the factor of parallelism."""
        return self.settings.num_workers

    def set_num_workers(self, num_workers: int) -> None:
        """Sets `num_workers`."""
        self.settings = replace(self.settings, num_workers=num_workers)

    def get_parallelism_factor(self) -> int:
        """The factor that `set_parallelism_factor` was given; 1 by default."""
        return self._parallelism

    def set_parallelism_factor(self, factor: int) -> None:
        """Makes ``factor`` times `num_workers` partitions, each of which is a worker here: they train in waves."""
        self._parallelism = require_integer("factor", factor)

    def get_features_column(self) -> str | list[str] | dict[str, str]:
        """`features_col`."""
        return _as_given(self.settings.features_col)

    def get_label_column(self) -> str | list[str] | dict[str, str]:
        """`label_col`."""
        return _as_given(self.settings.label_col)

    def set_master(self, master: str) -> None:
        """Sets `host`, the driver's address that executors can reach."""
        self.settings = replace(self.settings, host=master)

    def determine_new_master(self) -> None:
        """Leaves `host` to the default."""
        self.settings = replace(self.settings, host=None)

    def get_learning_rate(self) -> float:
        """The rate of the elastic move; of a rule without one, the worker optimizer's."""
        rate: float | None = getattr(self.rule, "learning_rate", None)
        return self._build_replica().learning_rate if rate is None else rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the rate of the elastic move.

        Raises:
            ConfigurationError: the rule has none; its steps are the worker optimizer's.
        """
        if not hasattr(self.rule, "learning_rate"):
            raise ConfigurationError(
                f"`set_learning_rate` is for elastic rules. Under {self.rule.name!r} give the optimizer its rate: "
                f"`worker_optimizer=keras.optimizers.SGD({learning_rate})`. Received: learning_rate={learning_rate}"
            )
        self.rule = replace(self.rule, learning_rate=learning_rate)  # type: ignore[call-arg]  # elastic rules have it
        self.worker_settings = replace(self.worker_settings, rule=self.rule)
        self.server_settings = replace(self.server_settings, rule=self.rule)


def _as_given(names: tuple[str, ...] | dict[str, str]) -> str | list[str] | dict[str, str]:
    if isinstance(names, dict):
        return names
    return names[0] if len(names) == 1 else list(names)
