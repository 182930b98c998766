"""dist-keras' functions."""

from __future__ import annotations

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

import distkeras.trainer
from distkeras.compat import warn_porter
from distkeras.keras_model import archive
from distkeras.keras_model.recipe import recipe_of
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import Rule
from distkeras.ps.validate import require_integer
from distkeras.spark.failures import short_errors
from distkeras.trainer import Trainer

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame


#: Where a rule comes in place of dist-keras' worker and server classes.
RULES = "an algorithm is one `Rule`, both halves: `distkeras.Trainer(model, rule)`, `python -m distkeras.ps rules`"
#: What comes in place of a trainer that travels.
SUBMIT = "there is `distkeras.job_server.Client`, and `distkeras train` with a file of its arguments"


def refusal(name: str, instead: str) -> ConfigurationError:
    """The error for ``name``."""
    return ConfigurationError(f"`{name}` is dist-keras' and has no equivalent here; {instead}. Received: a use of it")


def refused(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a function or method ``name`` that raises its refusal, with any arguments."""

    def raise_it(*_arguments: Any, **_keywords: Any) -> NoReturn:
        raise refusal(name, instead)

    raise_it.__name__ = raise_it.__qualname__ = name
    raise_it.__doc__ = f"Of dist-keras, without an equivalent: {instead}."
    return raise_it


class RefusedClass:
    """A class that raises its refusal where it is instantiated."""

    instead: ClassVar[str]

    def __init_subclass__(cls, *, instead: str) -> None:
        cls.instead = instead

    def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
        raise refusal(type(self).__name__, self.instead)


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


#: What an entry of ``Args:`` begins with: one name, or several.
_ENTRY = re.compile(r"^    (?=\w[\w, ]*: )", re.MULTILINE)
_SECTION = re.compile(r"^Args:\n((?:    .*\n?|\n)+)", re.MULTILINE)

_DEFAULTS = "Where the signature has a default, that is the one."
_OWN = "keras_model: a built `keras.Model`. It is not changed.\n"
_PORT = "master_port: the port of `network`.\n"
_WINDOW = 'communication_window: the `window` of the rule; "auto": each worker measures and chooses.\n'


def documented(words: str, rule: type[Rule]) -> str:
    """A docstring for a trainer under ``rule`` that says ``words`` of itself."""
    own = [entry for entry in _arguments(rule) if not entry.startswith("window:")]
    options = [entry for entry in _arguments(distkeras.trainer.Trainer) if not entry.startswith(("model:", "rule:"))]
    taken = {entry.partition(":")[0] for entry in own}
    rest = [entry for entry in options if entry.partition(":")[0] not in taken]
    entries = "".join(f"    {entry.rstrip()}\n" for entry in (_OWN, _WINDOW, *own, *rest, _PORT))
    head = f"{inspect.cleandoc(words)}\n\n{_DEFAULTS}"
    return f"{head}\n\nArgs:\n{entries}\nRaises:\n    ConfigurationError: an argument cannot work.\n"


def _arguments(kind: type) -> list[str]:
    """The entries of a class' ``Args:``, each as it stands but for its first indentation."""
    section = _SECTION.search(inspect.cleandoc(kind.__doc__ or "") + "\n")
    return _ENTRY.split(section[1])[1:] if section else []


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
    table = df if dataframe is None else dataframe
    if table is None or (df is not None and dataframe is not None):
        raise ConfigurationError(f"`dataframe` must be given, once. Received: df={df!r}, dataframe={dataframe!r}")
    return table


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
        return history_list(self._require(self.outcome.records, "get_history").history())

    def set_model(self, model: keras.Model) -> None:
        """Another model to train, compiled as the first one was to be.

        Raises:
            ConfigurationError: it cannot work.
        """
        file = archive.to_bytes(model)
        recipe = recipe_of(model, file, **self._compilation)
        recipe.build(file)  # what cannot work fails here
        self.model_file, self.recipe = file, recipe


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
        commits = self._require(self.outcome.records, "num_updates").commits_array
        return int((commits["skipped"] == 0).sum())

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


_PICKLE = 'what is unpickled runs as code: keep a model with `model.save("name.keras")`'

pickle_object = refused("pickle_object", _PICKLE)
unpickle_object = refused("unpickle_object", _PICKLE)


def to_one_hot_encoded_dense(value: float, n_dim: int = 2) -> np.ndarray:
    """float64 ``(n_dim,)``: 1 at the place ``value``, else 0.

    Raises:
        ConfigurationError: ``value`` is no place in it.
    """
    if not 0 <= value < n_dim:
        raise ConfigurationError(f"`value` must be in [0, {n_dim}). Received: value={value}")
    vector = np.zeros(n_dim)
    vector[int(value)] = 1.0
    return vector


def new_dataframe_row(old_row: Row, column_name: str, column_value: Any) -> Row:
    """``old_row`` with a column more, or another value in one that it has."""
    return Row(**{**old_row.asDict(), column_name: column_value})


def json_to_dataframe_row(string: str) -> Row:
    """A row from a JSON object."""
    return Row(**json.loads(string))


def serialize_keras_model(model: keras.Model) -> dict[str, Any]:
    """``model``: its architecture as JSON; ``weights``: a list of arrays. Neither optimizer nor loss."""
    return {"model": model.to_json(), "weights": model.get_weights()}


def deserialize_keras_model(dictionary: Mapping[str, Any]) -> keras.Model:
    """The model that `serialize_keras_model` took, not compiled."""
    import keras

    model = keras.models.model_from_json(dictionary["model"])
    model.set_weights(dictionary["weights"])
    return model


def uniform_weights(model: keras.Model, constraints: Sequence[float] = (-0.5, 0.5)) -> None:
    """Sets all weights of ``model`` to random numbers in ``constraints``, from numpy's global generator."""
    low, high = constraints
    model.set_weights([np.random.uniform(low, high, weight.shape) for weight in model.get_weights()])


def history_executors_average(history: Iterable[dict[str, Any]]) -> np.ndarray:
    """Means of loss and metrics over the workers: float64 ``(steps, metrics)``, the loss first."""
    return averaged_history(history)


def history_executor(history: Iterable[dict[str, Any]], id: int) -> list[dict[str, Any]]:
    """The entries of one worker, by iteration."""
    return executor_history(history, id)


def shuffle(dataset: DataFrame) -> DataFrame:
    """The rows in a random order, cached. Training needs none: it shuffles by itself."""
    return dataset.orderBy(F.rand()).cache()


def precache(dataset: DataFrame, num_workers: int) -> DataFrame:
    """The rows in ``num_workers`` partitions, cached by a job that counts them."""
    cached = dataset.repartition(num_workers).cache()
    cached.count()
    return cached
