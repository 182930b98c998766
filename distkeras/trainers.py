"""dist-keras' classes: its names and keywords over `Trainer`.

A script written for dist-keras ports by changing its imports. Two things differ: names of rules follow Hermans'
thesis, so `AGN` is what dist-keras called ``ADAG``, and `ADAG` is the thesis' ADAG; and histories are DataFrames.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from distkeras.data.columns import quoted
from distkeras.ps.rules import all_rules, make
from distkeras.ps.validate import require_integer
from distkeras.trainer import Trainer

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame


class _RuleTrainer(Trainer):
    """dist-keras' positional arguments and defaults, and the accessors that its scripts call.

    The rule's hyper-parameters are keywords here, beside those of `Trainer`.
    """

    rule_name: ClassVar[str]
    default_window: ClassVar[int | None] = None

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
        **options: Any,
    ) -> None:
        names = (field.name for field in dataclasses.fields(all_rules()[self.rule_name]))
        chosen = {name: options.pop(name) for name in names if name in options}
        if communication_window is None and self.default_window is not None:
            chosen.setdefault("window", self.default_window)
        super().__init__(
            keras_model,
            make(self.rule_name, **chosen),
            worker_optimizer=worker_optimizer,
            loss=loss,
            metrics=metrics,
            num_workers=num_workers,
            batch_size=batch_size,
            features_col=features_col,
            label_col=label_col,
            num_epoch=num_epoch,
            communication_window=communication_window,
            **options,
        )

    def train(self, df: DataFrame, shuffle: bool | None = None, **options: Any) -> keras.Model:
        """See `Trainer.train`, which takes the ``options``. ``shuffle`` overrides the constructor's."""
        if shuffle is not None:
            self.settings = dataclasses.replace(self.settings, shuffle=shuffle)
        return super().train(df, **options)

    def get_training_time(self) -> float:
        """Seconds that the last `train` took."""
        return self.timings["total"]

    def get_history(self) -> DataFrame:
        """`history`."""
        return self.history

    def get_executor_history(self, executor_id: int) -> DataFrame:
        """The history of one worker."""
        return self.history.where(f"worker = {int(executor_id)}")

    def get_averaged_history(self) -> DataFrame:
        """Means of loss and metrics over the workers, by iteration."""
        history = self.history
        fixed = ("worker", "epoch", "iteration", "timestamp", "samples")
        names = [name for name in history.columns if name not in fixed]
        return history.groupBy("iteration").mean(*map(quoted, names)).orderBy("iteration").toDF("iteration", *names)


class DOWNPOUR(_RuleTrainer):
    """`Trainer` under `rules.downpour.Downpour`, with dist-keras' window of 5."""

    rule_name = "downpour"
    default_window = 5


class AGN(_RuleTrainer):
    """`Trainer` under `rules.agn.AGN`: what dist-keras called ``ADAG``."""

    rule_name = "agn"


class ADAG(_RuleTrainer):
    """`Trainer` under `rules.adag.ADAG`, the adaptive rule: ``form``, ``gamma``, ``algorithm``, ``normalize``."""

    rule_name = "adag"


class DynSGD(_RuleTrainer):
    """`Trainer` under `rules.dynsgd.DynSGD`."""

    rule_name = "dynsgd"


class AEASGD(_RuleTrainer):
    """`Trainer` under `rules.aeasgd.AEASGD`: ``rho``, and ``learning_rate`` of the elastic move."""

    rule_name = "aeasgd"


class EASGD(_RuleTrainer):
    """`Trainer` under `rules.easgd.EASGD`, synchronous: ``rho``, ``learning_rate``, ``early_stopping``."""

    rule_name = "easgd"


class EAMSGD(_RuleTrainer):
    """`Trainer` under `rules.eamsgd.EAMSGD`: ``rho``, ``learning_rate``, ``momentum``."""

    rule_name = "eamsgd"


class AveragingTrainer(_RuleTrainer):
    """`Trainer` under `rules.averaging.ModelAveraging`: the workers' mean, after every epoch by default."""

    rule_name = "averaging"


class SingleTrainer(_RuleTrainer):
    """One worker on one executor: sequential training, exactly. The window only sets how often it reports."""

    rule_name = "downpour"
    default_window = 10

    def __init__(
        self,
        keras_model: keras.Model,
        worker_optimizer: Any = None,
        loss: Any = None,
        metrics: Any = ("accuracy",),
        features_col: Any = "features",
        label_col: Any = "label",
        num_epoch: int = 1,
        batch_size: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(
            keras_model, worker_optimizer, loss, metrics, 1, batch_size, features_col, label_col, num_epoch, **options
        )


class EnsembleTrainer:
    """Independent models, each trained alone on its own part of the rows.

    Args:
        keras_model, worker_optimizer, loss, metrics: see `Trainer`.
        num_ensembles: number of models, and of parts.
        options: any other argument of `Trainer`.
    """

    def __init__(
        self,
        keras_model: keras.Model,
        worker_optimizer: Any = None,
        loss: Any = None,
        metrics: Any = ("accuracy",),
        num_ensembles: int = 2,
        **options: Any,
    ) -> None:
        count = require_integer("num_ensembles", num_ensembles)
        #: One trainer a model, each with its own history and commits.
        self.trainers = [SingleTrainer(keras_model, worker_optimizer, loss, metrics, **options) for _ in range(count)]

    def train(self, dataframe: DataFrame) -> list[keras.Model]:
        """Trains all models at once, as far as Spark has slots.

        Raises:
            DistkerasError: the first model's that failed, after all have ended.
        """
        from pyspark.sql import functions as F

        count, settings = len(self.trainers), self.trainers[0].settings
        columns = [F.col(quoted(name)) for name in (*settings.features_col, *settings.label_col)]
        part = F.pmod(F.xxhash64(F.lit(settings.seed), *columns), F.lit(count))
        failures: list[tuple[int, BaseException]] = []

        def train(number: int) -> None:
            try:
                self.trainers[number].train(dataframe.where(part == number))
            except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
                failures.append((number, error))

        threads = [threading.Thread(target=train, args=(number,), daemon=True) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # in slices, so that Ctrl-C is heard
                thread.join(1.0)
        if failures:
            raise min(failures)[1]
        return [trainer.model for trainer in self.trainers]
