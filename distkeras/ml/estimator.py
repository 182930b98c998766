"""A Keras model and an update rule as a Spark ML estimator."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from pyspark.ml import Estimator

from distkeras.data.binding import entries_of, listed, names_of
from distkeras.data.schema import require_dataframe
from distkeras.keras_callbacks import with_keras_callbacks
from distkeras.keras_model import archive
from distkeras.keras_model.optimizers import optimizer_of, with_learning_rate
from distkeras.metric_columns import in_columns
from distkeras.ml.groups import KerasGroupModel
from distkeras.ml.model import KerasModel, TrainingSummary
from distkeras.ml.params import KEYWORDS, SPARK_NAMES, TrainingParams, with_trainer_params
from distkeras.ps.checkpoint.checkpointer import Checkpoint, checkpoint_of
from distkeras.ps.checkpoint.versions import Versions
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.world.files import beside
from distkeras.settings import arguments_of, rule_of
from distkeras.shown import Shown
from distkeras.spark.failures import short_errors
from distkeras.trainer import Trainer
from distkeras.training.run import KEPT_BY_TRAINER
from distkeras.training.validation import ROWS_MAX, ValidationCurve, require_alone, split
from distkeras.transformers.files import Saveable
from distkeras.transformers.params import on_dataframe

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

    from distkeras.ml.declared import EstimatorKeywords, EstimatorMembers
    from distkeras.ps.rules import Rule
    from distkeras.training.stream import StreamTraining
else:
    EstimatorMembers = object

log = logging.getLogger(__name__)


_LOCK = threading.Lock()
#: Of this process: uid of an estimator and its checkpoint's place to the numbers of the fits that have a folder, each
#: with whether it runs.
_TAKEN: dict[tuple[str, str], dict[int, bool]] = {}


@contextmanager
def folder_of_fit(uid: str, checkpoint: Any, resume: bool) -> Iterator[Checkpoint | None]:
    """Yield where one fit is saved, for as long as it runs.

    The first fit has the estimator's place; later ones of the same estimator, and its copies, have one next to it:
    ``folder-2`` and so on. A fit that failed leaves its folder to the next one, which resumes it or fails.

    Args:
        uid: uid of the estimator.
        checkpoint, resume: see `Trainer.train`.

    Raises:
        ConfigurationError: they cannot work, or a fit is to be resumed while another one has the folder.
    """
    place = checkpoint_of(checkpoint, resume)
    if place is None:
        yield None
        return
    key = uid, place.uri
    with _LOCK:
        numbers = _TAKEN.setdefault(key, {})
        if resume and numbers.get(1):
            raise ConfigurationError(
                "`resume` must not be used for several fits at a time, as in a search. "
                f"Received: checkpoint={place.uri!r}, which another fit of this estimator uses"
            )
        number = 1 if resume else next(number for number in range(1, len(numbers) + 2) if number not in numbers)
        numbers[number] = True
    ended = False
    try:
        yield place if number == 1 else dataclasses.replace(place, uri=beside(place.uri, f"-{number}"))
        ended = True
    finally:
        with _LOCK:
            if ended:
                numbers[number] = False
            else:
                del numbers[number]


def _with_rate(keywords: Mapping[str, Any], rate: float) -> keras.optimizers.Optimizer:
    """Return a new optimizer like the workers', with the learning rate ``rate``."""
    rule = None if keywords["rule"] is None else rule_of(keywords["rule"])
    if rule is not None and rule.traits.gradient:
        raise ConfigurationError(
            f"`worker_learning_rate` must be left out: rule {rule.name!r} takes its steps at the server, with "
            f"`learning_rate`. Received: worker_learning_rate={rate}"
        )
    optimizer, model = keywords["worker_optimizer"], keywords["model"]
    if optimizer is None:
        optimizer = model.optimizer if model.compiled else "sgd"
    return with_learning_rate(optimizer_of(optimizer), rate)


def _evaluate_on_executors(
    fitted: KerasModel, rows: DataFrame, points: Sequence[dict[str, Any]], clock: int | None
) -> None:
    """Replace the values of the summary's point of ``clock``, which are of a sample, by those of all rows.

    They stay where the model has weights that a callback has restored, and no point is of these. Metrics of the user's
    own classes may not add up over executors: then the sample's values stay, too.
    """
    point = next((point for point in points if point["clock"] == clock), None)
    if point is None:
        log.warning("all validations are of a sample: none is of the weights of clock %s, which were restored", clock)
        return
    try:
        values = fitted.evaluate(rows)
    except ConfigurationError as error:
        log.warning("the last validation is of %d rows, a sample: %s", point["rows"], error.message)
        return
    point.update(in_columns(values), rows=rows.count())


_VALIDATION = ("validation_data", "validation_indicator_col", "validation_split")
#: Keras makes a model from its archive under names that it counts globally: one thread at a time.
_BUILDING = threading.Lock()


@with_trainer_params
class KerasEstimator(Shown, Estimator[KerasModel], TrainingParams, Saveable, EstimatorMembers):
    """Train a Keras model on Spark, under any update rule, as a stage of a Spark ML pipeline.

    ::

        estimator = KerasEstimator(model, "agn", worker_optimizer="adam", loss="sparse_categorical_crossentropy",
                                   num_workers=4, batch_size=128, num_epoch=2)
        fitted = estimator.fit(df)                       # a KerasModel
        fitted.transform(df).select("prediction", "probability")
        fitted.summary.history.show()

    Every keyword is a parameter, with its own name (``estimator.batch_size``) or Spark's name if there is one
    (``featuresCol`` for ``features_col``, ``weightCol`` for ``sample_weight_col``). Parameters can be used in
    ``ParamGridBuilder``, in ``fit(df, {estimator.batch_size: 64})``, in ``explainParams``, and through setters and
    getters (``setFeaturesCol``). Each value is checked before any job begins. An estimator is saved and loaded like
    Spark's own, without pickle, and the model is saved with its optimizer's state. Your own classes and functions must
    be registered with ``keras.saving.register_keras_serializable()``. ``resources`` belong to the cluster, and are not
    saved.

    Args:
        model, rule, and so on: the keywords of `Trainer`, also by Keras' names: see `KerasNames`.
        prediction_col: new column of predictions, or one for each output. It has the most likely class, as a double, if
            the loss is a cross-entropy over classes; the number, as a double, if the output is a single number;
            otherwise an array. Default: "prediction"; with several outputs, their names are added, here and below.
        probability_col, raw_prediction_col: new columns of a classifier with vectors of class probabilities (1 - p and
            p for a single p) and of logits. The logits are the model's outputs or, if it ends in softmax or sigmoid,
            the logarithms of the probabilities (for a single p, log p - log(1 - p) and its negative). They are computed
            only if a query reads them (PySpark 4.1 or newer). "" adds no column. Default: "probability" and
            "rawPrediction", the default names of Spark's evaluators.
        handle_invalid: treatment of a row with a null, NaN or infinity, an array of the wrong size, a label that is not
            a class, or a value on which ``decode`` fails. "error" (the default): the job that reads it fails. "skip":
            it is left out, in training, `transform` and `evaluate`. "keep": `transform` keeps it, with null
            predictions; training and `evaluate` leave it out. `TrainingSummary.invalid_rows` has the rows that training
            left out. The check reads the training rows once more, in Python.
        invalid_col: with handle_invalid="keep", a new text column with the reason why a row has no prediction, or null.
            "" adds no column (the default).
        thresholds: for each class a number by which its probability is divided before the largest one is chosen, as in
            Spark's classifiers: at least 0, and at most one of them 0. Default: none.
        output_type: type of flat outputs of several numbers: "array" (the default), or "vector".
        output_kind: what the outputs' numbers are: "probabilities" or "logits" of classes, "numbers", or "loss" (the
            default): what the loss says. Classes have scores if it is one of Keras' categorical, sparse or binary
            cross-entropies or their focal variants, under any name, or a subclass. Give it if your own function is a
            cross-entropy; a mapping from the outputs' names if they differ.
        prediction_batch_size: largest number of rows of a call of the model for predictions. Default: 1024.
        prediction_batch_bytes: largest size of the inputs and outputs of such a call. Default: 64 MiB.
        worker_learning_rate: replaces the learning rate of ``worker_optimizer``, so that a search over numbers can tune
            it. An optimizer of the compiled model then loses its state. Rules that take their steps at the server use
            ``learning_rate`` instead.
        validation_data: a DataFrame of other rows. The summary's `validation` has the center's loss and metrics on
            them. It is not saved with the estimator.
        validation_indicator_col: boolean column that is true for rows that are left out of training and used as
            ``validation_data``.
        validation_split: share of the rows, in [0, 1), to use in the same way, chosen by their values. Default: 0.
        validation_rows: largest number of those rows to evaluate on during training; the driver holds them. Default:
            10000. If there are more, the last point of the summary's `validation` is evaluated on all of them, on
            executors, after training.
        validation_every_epochs, validation_every_seconds, validation_every_commits: interval between two points of
            `validation`, in epochs, seconds or commits. Default: one epoch.
        callbacks, checkpoint, resume: as in `Trainer.train`. Each fit uses copies of the callbacks (`copy.copy`),
            because several fits may run at once; `summary.callbacks` has the copies. Keras callbacks get the validation
            rows: see `KerasCallbacks`. Each later fit of the same estimator in this process, as in a search, has a
            checkpoint of its own next to the first one: ``folder-2`` and so on.

    Raises:
        ConfigurationError: A keyword does not exist, or a value is invalid.
    """

    left_out = ("model", "custom_objects", "validation_data")
    inner = frozenset({"archive_to_save", "extra_to_save", "left_out", "load_files", "restore", "save_files"})

    @short_errors
    def __init__(
        self, model: keras.Model | None = None, rule: Rule | str | None = None, **keywords: Unpack[EstimatorKeywords]
    ) -> None:
        super().__init__()
        for name, keyword in arguments_of(Trainer).items():
            if keyword.default is not inspect.Parameter.empty and name not in ("features_col", "label_col"):
                self._setDefault(**{SPARK_NAMES.get(name, name): keyword.default})
        self._setDefault(validation_split=0.0, validation_rows=ROWS_MAX, callbacks=[], resume=False)
        given = {**keywords, "model": model, "rule": rule}
        self.setParams(**{name: value for name, value in given.items() if value is not None})

    def _facts(self) -> Mapping[str, Any]:
        """Return the parameters that are set."""
        set_params = (param for param in self.params if self.isSet(param))
        given = {KEYWORDS.get(param.name, param.name): self.getOrDefault(param) for param in set_params}
        model = given.pop("model", None)
        return {"uid": self.uid, "model": None if model is None else model.name, **given}

    @on_dataframe
    def _fit(self, dataset: DataFrame) -> KerasModel:
        trainer = self._trainer()
        features = listed(names_of(self.value("features_col"), "features_col"))
        labels = listed(entries_of(self.value("label_col"), "label_col"))
        indicator, share = self.value("validation_indicator_col"), self.value("validation_split")
        training, held_out = split(dataset, [*features, *labels], indicator, share, self.value("seed"))
        if (given := self.value("validation_data")) is not None:
            require_alone(indicator or share)
            held_out = given
        unchecked = training
        if self.value("handle_invalid") != "error":
            training = trainer.valid_rows(training)
            held_out = None if held_out is None else trainer.valid_rows(held_out)
        every = {name: self.value(f"validation_{name}") for name in ("every_epochs", "every_seconds", "every_commits")}
        curves = [] if held_out is None else [ValidationCurve(held_out, self.value("validation_rows"), **every)]
        callbacks = [copy.copy(callback) for callback in with_keras_callbacks(self.value("callbacks"), held_out)]
        resume = self.value("resume")
        with folder_of_fit(self.uid, self.value("checkpoint"), resume) as checkpoint:
            try:
                trained = trainer.train(training, callbacks=[*callbacks, *curves], checkpoint=checkpoint, resume=resume)
            except KeyboardInterrupt as error:
                kept = "A fit keeps its weights only in a `checkpoint`"
                raise KeyboardInterrupt(str(error).replace(KEPT_BY_TRAINER, kept)) from None
        with _BUILDING:
            fitted = KerasModel(trained, custom_objects=self.value("custom_objects"))
        points = [point for curve in curves for point in curve.points]
        summary = TrainingSummary(trainer, points, callbacks, unchecked)
        fitted = self._copyValues(fitted.fitted_by(self, summary))
        if curves and curves[0].sampled and held_out is not None:
            _evaluate_on_executors(fitted, held_out, points, trainer.outcome.clock)
        return fitted

    @short_errors
    def fitGroups(
        self,
        dataset: DataFrame,
        by: str | Sequence[str],
        *,
        path: str | PathLike[str] | None = None,
        resume: bool = False,
        rows_max: int | None = None,
        side_by_side: int = 1,
    ) -> KerasGroupModel:
        """Train a model for each group of rows, such as each shop; see `Trainer.train_groups`.

        Args:
            dataset: the data.
            by, path, resume, rows_max, side_by_side: as in `Trainer.train_groups`.

        Raises:
            ConfigurationError: Validation, callbacks or a checkpoint are set, which single groups do not have.
            DistkerasError: An error of `Trainer.train_groups`.
        """
        require_dataframe("dataset", dataset)
        self._require_plain("fitGroups", *_VALIDATION, "callbacks", "checkpoint")
        trainer, ready = self._trainer(), dataset
        if self.value("handle_invalid") != "error":
            ready = trainer.valid_rows(ready)
        groups = trainer.train_groups(ready, by, path=path, resume=resume, rows_max=rows_max, side_by_side=side_by_side)
        with _BUILDING:
            fitted = KerasGroupModel(groups, custom_objects=self.value("custom_objects"))
        fitted.parent = self
        return self._copyValues(fitted)

    @short_errors
    def fitStream(
        self,
        dataset: DataFrame,
        *,
        checkpoint: str | PathLike[str] | Checkpoint,
        trigger: Mapping[str, Any] | None = None,
        query_name: str | None = None,
        publish: str | PathLike[str] | Versions | None = None,
    ) -> StreamTraining:
        """Train on a stream, each row once; see `Trainer.train_stream`. The handle's `model()` is a `KerasModel`.

        Args:
            dataset: a streaming DataFrame.
            checkpoint, trigger, query_name, publish: as in `Trainer.train_stream`.

        The callbacks are copies of the estimator's, in the handle's `callbacks`. Keras callbacks need a
        `KerasCallbacks` with ``every_commits``.

        Raises:
            ConfigurationError: Validation or a checkpoint of fits are set, which a stream does not have.
            DistkerasError: An error of `Trainer.train_stream`.
        """
        require_dataframe("dataset", dataset)
        self._require_plain("fitStream", *_VALIDATION, "checkpoint")
        trainer, ready = self._trainer(), dataset
        if self.value("handle_invalid") != "error":
            ready = trainer.valid_rows(ready)
        callbacks = [copy.copy(callback) for callback in self.value("callbacks")]
        training = trainer.train_stream(
            ready, checkpoint=checkpoint, trigger=trigger, query_name=query_name, callbacks=callbacks, publish=publish
        )
        training.convert = self._fitted_by_stream
        return training

    def _fitted_by_stream(self, trained: keras.Model) -> KerasModel:
        with _BUILDING:
            fitted = KerasModel(trained, custom_objects=self.value("custom_objects"))
        fitted.parent = self
        return self._copyValues(fitted)

    def _require_plain(self, method: str, *names: str) -> None:
        """Raise ConfigurationError if one of these parameters is set, which ``method`` does not have."""
        if present := [name for name in names if self.value(name) not in (None, 0, [])]:
            raise ConfigurationError(f"`{method}` has none of {list(names)}. Received: {present} are set")

    def _trainer(self) -> Trainer:
        """Return a trainer with the values of the parameters."""
        model = self.value("model")
        if model is None:
            raise ConfigurationError("`model` must be set before `fit`. Received: model=None")
        archive.require_inputs(model)
        keywords = {name: self.value(name) for name in arguments_of(Trainer)}
        if (rate := self.value("worker_learning_rate")) is not None:
            keywords["worker_optimizer"] = _with_rate(keywords, rate)
        with _BUILDING:
            return Trainer(**keywords)

    def archive_to_save(self) -> bytes | None:
        """Return the archive of the model, as it is now."""
        model = self.value("model")
        return None if model is None else archive.to_save(model)

    def restore(self, data: bytes | None, saved: Mapping[str, Any]) -> None:
        """Take back the model."""
        if data is not None:
            self._set(model=archive.from_bytes(data, compiled=True))
