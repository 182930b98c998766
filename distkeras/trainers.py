"""dist-keras' trainers: its classes, with its arguments in their order and with its defaults, over `Trainer`.

A script written for dist-keras runs as it is, but for `ADAG`: names of rules follow Hermans' thesis, so `AGN` is what
dist-keras called ``ADAG``, and `ADAG` is the thesis' ADAG. Whoever calls that as dist-keras' scripts did is warned.

A rule's hyper-parameters are keywords here, and so is every option of `Trainer`.
"""

from __future__ import annotations

import dataclasses
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from distkeras.compat import warn_porter
from distkeras.compat.trainers import (
    RULES,
    DistributedAccessors,
    Histories,
    RefusedClass,
    TrainerAccessors,
    documented,
    only_table,
    refusal,
)
from distkeras.data.binding import listed
from distkeras.data.columns import quoted
from distkeras.data.dataframe import field_of, require_batch
from distkeras.keras_model.archive import require_model
from distkeras.ps.rules import all_rules, make
from distkeras.ps.validate import require_integer
from distkeras.spark.actions import in_callers_scope
from distkeras.spark.failures import short_errors

if TYPE_CHECKING:
    from typing import Self

    import keras
    from pyspark.sql import DataFrame

__all__ = [
    "ADAG",
    "AEASGD",
    "AGN",
    "DOWNPOUR",
    "EAMSGD",
    "EASGD",
    "AsynchronousDistributedTrainer",
    "AveragingTrainer",
    "DistributedTrainer",
    "DynSGD",
    "EnsembleTrainer",
    "Experimental",
    "SingleTrainer",
    "Trainer",
]


class Trainer(TrainerAccessors):
    """The base of dist-keras' trainers; it was abstract. `distkeras.Trainer` is another class, which it extends.

    Args:
        keras_model: the model.
        arguments: dist-keras', the rule's, and those of `distkeras.Trainer`.
    """

    rule_name: ClassVar[str]
    #: Where dist-keras had another window than the rule's own.
    default_window: ClassVar[int | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "rule_name" in vars(cls):
            cls.__doc__ = documented(cls.__doc__ or "", all_rules()[cls.rule_name])

    def __new__(cls, *_arguments: Any, **_options: Any) -> Self:
        """Refuses the classes that were abstract, whatever they are given."""
        if not hasattr(cls, "rule_name"):
            raise refusal(f"trainers.{cls.__name__}", f"it was abstract, and {RULES}")
        return super().__new__(cls)

    def __init__(self, keras_model: keras.Model, **arguments: Any) -> None:
        require_model(keras_model, "keras_model")
        names = (field.name for field in dataclasses.fields(all_rules()[self.rule_name]))
        chosen = {name: arguments.pop(name) for name in names if name in arguments}
        if arguments.get("communication_window") is None and self.default_window is not None:
            chosen.setdefault("window", self.default_window)
        port = arguments.pop("master_port", None)
        if port is not None:
            arguments["port"] = require_integer("master_port", port, 0, 0xFFFF)
        self._adapt(chosen, arguments)
        super().__init__(keras_model, make(self.rule_name, **chosen), **arguments)
        self._compilation = {name: arguments.get(name) for name in ("loss", "metrics", "loss_weights")} | {
            "weighted_metrics": arguments.get("weighted_metrics"),
            "optimizer": arguments.get("worker_optimizer"),
            "objects": arguments.get("custom_objects"),
        }

    def _adapt(self, hyper_parameters: dict[str, Any], arguments: dict[str, Any]) -> None:
        """Looks at the rule's hyper-parameters and the trainer's arguments, before they are used."""


def _given(local: dict[str, Any]) -> dict[str, Any]:
    """A constructor's own arguments, by name, those in ``options`` among them."""
    own: dict[str, Any] = {name: local[name] for name in local if name not in ("self", "__class__", "options")}
    own |= local["options"]
    return own


class DistributedTrainer(DistributedAccessors, Trainer):
    """The base of dist-keras' trainers with a parameter server; it was abstract."""

    @short_errors
    def __init__(  # noqa: PLR0913 - dist-keras' positional arguments
        self,
        keras_model: keras.Model,
        worker_optimizer: Any = None,
        loss: Any = None,
        metrics: Any = ("accuracy",),
        num_workers: int | None = 2,
        batch_size: int = 32,
        features_col: Any = "features",
        label_col: Any = "label",
        num_epoch: int = 1,
        master_port: int | None = None,
        loss_weights: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(**_given(locals()))


class AsynchronousDistributedTrainer(DistributedTrainer):
    """The base of dist-keras' asynchronous trainers; it was abstract."""


class _WindowTrainer(AsynchronousDistributedTrainer):
    """With dist-keras' positional arguments of a rule that has nothing but a window."""

    @short_errors
    def __init__(  # noqa: PLR0913 - dist-keras' positional arguments
        self,
        keras_model: keras.Model,
        worker_optimizer: Any = None,
        loss: Any = None,
        metrics: Any = ("accuracy",),
        num_workers: int | None = 2,
        batch_size: int = 32,
        features_col: Any = "features",
        label_col: Any = "label",
        num_epoch: int = 1,
        communication_window: int | str | None = None,
        master_port: int | None = None,
        loss_weights: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(**_given(locals()))


class DOWNPOUR(_WindowTrainer):
    """`Trainer` under `rules.downpour.Downpour`. The window is 5, as in dist-keras."""

    rule_name = "downpour"
    default_window = 5


class AGN(_WindowTrainer):
    """`Trainer` under `rules.agn.AGN`: what dist-keras called ``ADAG``, with its window of 12."""

    rule_name = "agn"
    default_window = 12


class ADAG(_WindowTrainer):
    """`Trainer` under `rules.adag.ADAG`, the adaptive rule: ``form``, ``gamma``, ``algorithm``, ``normalize``.

    Without any of these it is called as dist-keras' class of that name, which is `AGN` here, and says so.
    """

    rule_name = "adag"

    def _adapt(self, hyper_parameters: dict[str, Any], arguments: dict[str, Any]) -> None:
        if not hyper_parameters.keys() - {"window"}:
            warn_porter(
                "`ADAG` of dist-keras is `AGN` here; `ADAG` here is the adaptive rule of Hermans 2017. If you mean "
                'that one, name a hyper-parameter, such as form="4.7", or use `Trainer(model, "adag")`. '
                "Received: ADAG without form, gamma, algorithm or normalize"
            )


class DynSGD(_WindowTrainer):
    """`Trainer` under `rules.dynsgd.DynSGD`. The window is 5, as in dist-keras."""

    rule_name = "dynsgd"


class EASGD(_WindowTrainer):
    """`Trainer` under `rules.easgd.EASGD`, synchronous: ``rho``, ``learning_rate``, ``early_stopping``."""

    rule_name = "easgd"


class AEASGD(AsynchronousDistributedTrainer):
    """`Trainer` under `rules.aeasgd.AEASGD`: ``rho``, and ``learning_rate`` of the elastic move.

    The worker optimizer may be any, and has a learning rate of its own.
    """

    rule_name = "aeasgd"

    @short_errors
    def __init__(  # noqa: PLR0913 - dist-keras' positional arguments
        self,
        keras_model: keras.Model,
        worker_optimizer: Any = None,
        loss: Any = None,
        metrics: Any = ("accuracy",),
        num_workers: int | None = 2,
        batch_size: int = 32,
        features_col: Any = "features",
        label_col: Any = "label",
        num_epoch: int = 1,
        communication_window: int | str | None = 32,
        rho: float = 5.0,
        learning_rate: float | None = 0.1,
        master_port: int | None = None,
        loss_weights: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(**_given(locals()))


class EAMSGD(AsynchronousDistributedTrainer):
    """`Trainer` under `rules.eamsgd.EAMSGD`: ``rho``, ``learning_rate``, ``momentum``.

    The rule takes its local steps itself, so a worker optimizer can only be plain SGD. The name of another one, which
    dist-keras took, becomes ``SGD(learning_rate)``, with a warning.
    """

    rule_name = "eamsgd"

    @short_errors
    def __init__(  # noqa: PLR0913 - dist-keras' positional arguments
        self,
        keras_model: keras.Model,
        worker_optimizer: Any = None,
        loss: Any = None,
        metrics: Any = ("accuracy",),
        num_workers: int | None = 2,
        batch_size: int = 32,
        features_col: Any = "features",
        label_col: Any = "label",
        num_epoch: int = 1,
        communication_window: int | str | None = 32,
        rho: float = 5.0,
        learning_rate: float | None = 0.1,
        momentum: float = 0.9,
        master_port: int | None = None,
        loss_weights: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(**_given(locals()))

    def _adapt(self, hyper_parameters: dict[str, Any], arguments: dict[str, Any]) -> None:
        name, rate = arguments["worker_optimizer"], hyper_parameters["learning_rate"]
        if isinstance(name, str) and name.lower() != "sgd" and rate is not None:
            import keras

            arguments["worker_optimizer"] = keras.optimizers.SGD(rate)
            warn_porter(
                f"`worker_optimizer` must be SGD under EAMSGD, which has a momentum of its own: SGD({rate}), of "
                f"`learning_rate`, comes in its place. Received: worker_optimizer={name!r}"
            )


class AveragingTrainer(Trainer):
    """`Trainer` under `rules.averaging.ModelAveraging`: the workers' mean, after every epoch by default."""

    rule_name = "averaging"

    @short_errors
    def __init__(  # noqa: PLR0913 - dist-keras' positional arguments
        self,
        keras_model: keras.Model,
        worker_optimizer: Any = None,
        loss: Any = None,
        metrics: Any = ("accuracy",),
        features_col: Any = "features",
        label_col: Any = "label",
        num_epoch: int = 1,
        batch_size: int = 32,
        num_workers: int | None = 2,
        loss_weights: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(**_given(locals()))


class SingleTrainer(Trainer):
    """One worker on one executor: sequential training, exactly. The window only sets how often it reports."""

    rule_name = "downpour"
    default_window = 10

    @short_errors
    def __init__(  # noqa: PLR0913 - dist-keras' positional arguments
        self,
        keras_model: keras.Model,
        worker_optimizer: Any = None,
        loss: Any = None,
        metrics: Any = ("accuracy",),
        features_col: Any = "features",
        label_col: Any = "label",
        num_epoch: int = 1,
        batch_size: int = 32,
        loss_weights: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(num_workers=1, **_given(locals()))


class EnsembleTrainer(Histories):
    """Independent models, each trained alone on its own part of the rows.

    Args:
        keras_model, worker_optimizer, loss, metrics, features_col, label_col, batch_size, loss_weights: see `Trainer`.
        num_ensembles: number of models, and of parts.
        options: any other argument of `Trainer`.
    """

    @short_errors
    def __init__(  # noqa: PLR0913 - dist-keras' positional arguments
        self,
        keras_model: keras.Model,
        worker_optimizer: Any = None,
        loss: Any = None,
        metrics: Any = ("accuracy",),
        features_col: Any = "features",
        label_col: Any = "label",
        batch_size: int = 32,
        num_ensembles: int = 2,
        loss_weights: Any = None,
        **options: Any,
    ) -> None:
        arguments = _given(locals())
        count = require_integer("num_ensembles", arguments.pop("num_ensembles"))
        #: One trainer a model, each with its own history and commits.
        self.trainers = [SingleTrainer(**arguments) for _ in range(count)]

    @short_errors
    def train(
        self, df: DataFrame | None = None, shuffle: bool | None = None, *, dataframe: DataFrame | None = None
    ) -> list[keras.Model]:
        """Trains all models at once, as far as Spark has slots.

        Args:
            df, dataframe: the data, under either name.
            shuffle: in place of the constructor's, this time.

        Raises:
            DistkerasError: what ``df`` lacks, before any work; the first model's that failed, after all have ended.
        """
        from pyspark.sql import functions as F

        table, count, settings = only_table(df, dataframe), len(self.trainers), self.trainers[0].settings
        require_batch("df", table)
        names = (*listed(settings.features_col), *listed(settings.label_col))
        columns = [F.col(quoted(field_of(table.schema.fields, name).name)) for name in names]
        part = F.pmod(F.xxhash64(F.lit(settings.seed), *columns), F.lit(count))
        failures: list[tuple[int, BaseException]] = []

        def train(number: int) -> None:
            try:
                self.trainers[number].train(table.where(part == number), shuffle)
            except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
                failures.append((number, error))

        runs = [in_callers_scope(table.sparkSession, partial(train, number)) for number in range(count)]
        threads = [threading.Thread(target=run, daemon=True) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # in slices, so that Ctrl-C is heard
                thread.join(1.0)
        if failures:
            raise min(failures)[1]
        return [trainer.model for trainer in self.trainers]

    def get_training_time(self) -> float:
        """Seconds that the slowest model took in the last `train`; 0 before the first."""
        return max(trainer.get_training_time() for trainer in self.trainers)

    def get_history(self) -> list[dict[str, Any]]:
        """See `Histories.get_history`; the number of the model stands for the worker's."""
        return [
            {**entry, "worker_id": number}
            for number, trainer in enumerate(self.trainers)
            for entry in trainer.get_history()
        ]

    def set_model(self, model: keras.Model) -> None:
        """See `TrainerAccessors.set_model`."""
        for trainer in self.trainers:
            trainer.set_model(model)


Trainer.register(EnsembleTrainer)  # as it was there: it shares nothing with the others but the name


class Experimental(RefusedClass, instead=f"it was an experiment, and {RULES}"):
    """dist-keras' experiment."""
