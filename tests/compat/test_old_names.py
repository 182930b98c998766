"""The public names of dist-keras 0.2.1: their modules, the order of their arguments, and their results."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml import PipelineModel
from pyspark.sql import Row, SparkSession
from support.present import present
from support.training.spark_jobs import wrong_model

from distkeras import Trainer
from distkeras.ps.errors import ConfigurationError, LocalProtocolError
from distkeras.ps.rules import all_rules
from distkeras.settings import arguments_of

SPARSE = "sparse_categorical_crossentropy"

#: Module, name, arguments in order, and the defaults that the scripts of dist-keras rely on.
MODEL = ("keras_model", "worker_optimizer", "loss", "metrics")
COLUMNS = ("features_col", "label_col")
SHARED = (*MODEL, "num_workers", "batch_size", *COLUMNS, "num_epoch")
LAST = ("master_port", "loss_weights")
DEFAULTS = {"num_workers": 2, "batch_size": 32, "features_col": "features", "label_col": "label", "num_epoch": 1}
ELASTIC = {"communication_window": 32, "rho": 5.0, "learning_rate": 0.1}
POSITIONS: list[tuple[str, str, tuple[str, ...], dict[str, Any]]] = [
    ("trainers", "SingleTrainer", (*MODEL, *COLUMNS, "num_epoch", "batch_size", "loss_weights"), {"batch_size": 32}),
    (
        "trainers",
        "AveragingTrainer",
        (*MODEL, *COLUMNS, "num_epoch", "batch_size", "num_workers", "loss_weights"),
        {"num_workers": 2},
    ),
    ("trainers", "EnsembleTrainer", (*MODEL, *COLUMNS, "batch_size", "num_ensembles", "loss_weights"), {}),
    ("trainers", "DistributedTrainer", (*SHARED, *LAST), DEFAULTS),
    ("trainers", "AsynchronousDistributedTrainer", (*SHARED, *LAST), DEFAULTS),
    ("trainers", "AEASGD", (*SHARED, "communication_window", "rho", "learning_rate", *LAST), DEFAULTS | ELASTIC),
    ("trainers", "DOWNPOUR", (*SHARED, "communication_window", *LAST), DEFAULTS),
    (
        "trainers",
        "EAMSGD",
        (*SHARED, "communication_window", "rho", "learning_rate", "momentum", *LAST),
        DEFAULTS | ELASTIC | {"momentum": 0.9},
    ),
    ("trainers", "ADAG", (*SHARED, "communication_window", *LAST), DEFAULTS),
    ("trainers", "AGN", (*SHARED, "communication_window", *LAST), DEFAULTS),
    ("trainers", "DynSGD", (*SHARED, "communication_window", *LAST), DEFAULTS),
    (
        "transformers",
        "MinMaxTransformer",
        ("o_min", "o_max", "n_min", "n_max", "input_col", "output_col", "is_vector"),
        {},
    ),
    ("transformers", "BinaryLabelTransformer", ("input_column", "output_column", "label"), {}),
    ("transformers", "StandardTransformer", ("columns", "suffix"), {}),
    ("transformers", "DenseTransformer", ("input_col", "output_col"), {}),
    ("transformers", "ReshapeTransformer", ("input_col", "output_col", "shape"), {}),
    ("transformers", "OneHotTransformer", ("output_dim", "input_col", "output_col"), {}),
    (
        "transformers",
        "LabelIndexTransformer",
        ("output_dim", "input_col", "output_col", "default_index", "activation_threshold"),
        {},
    ),
    ("predictors", "Predictor", ("keras_model",), {}),
    ("predictors", "ModelPredictor", ("keras_model", "features_col", "output_col"), {}),
    ("evaluators", "Evaluator", ("label_col", "prediction_col"), {}),
    ("evaluators", "AccuracyEvaluator", ("label_col", "prediction_col"), {}),
    ("utils", "to_one_hot_encoded_dense", ("value", "n_dim"), {"n_dim": 2}),
    ("utils", "new_dataframe_row", ("old_row", "column_name", "column_value"), {}),
    ("utils", "json_to_dataframe_row", ("string",), {}),
    ("utils", "serialize_keras_model", ("model",), {}),
    ("utils", "deserialize_keras_model", ("dictionary",), {}),
    ("utils", "history_executors_average", ("history",), {}),
    ("utils", "history_executor", ("history", "id"), {}),
    ("utils", "uniform_weights", ("model", "constraints"), {"constraints": (-0.5, 0.5)}),
    ("utils", "shuffle", ("dataset",), {}),
    ("utils", "precache", ("dataset", "num_workers"), {}),
]
#: Names without an equivalent: module, name, arguments, and the replacement that the error names.
REFUSED = [
    ("trainers", "Trainer", (None, "mse", "sgd"), r"distkeras\.Trainer"),
    ("trainers", "Experimental", (None, "sgd", "mse"), "Rule"),
    ("trainers", "DistributedTrainer", (None, "sgd", "mse"), "Rule"),
    ("trainers", "AsynchronousDistributedTrainer", (None, "sgd", "mse"), "Rule"),
    ("utils", "pickle_object", (1,), r"\.keras"),
    ("utils", "unpickle_object", (b"",), r"\.keras"),
    ("job_deployment", "Punchcard", ("secrets.json", 80), "distkeras train"),
    ("job_deployment", "PunchcardJob", ("s", "n", "p", 1, 1, None), "distkeras train"),
    ("job_deployment", "Job", ("s", "n", "p", 1, 1, None), "distkeras train"),
]


def old(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"distkeras.{module}"), name)


@pytest.mark.parametrize(("module", "name", "positions", "defaults"), POSITIONS, ids=lambda value: str(value)[:30])
def test_arguments_have_their_old_positions_and_defaults(
    module: str, name: str, positions: tuple[str, ...], defaults: dict[str, Any]
) -> None:
    parameters = inspect.signature(old(module, name)).parameters
    assert tuple(parameters)[: len(positions)] == positions
    assert {key: parameters[key].default for key in defaults} == defaults


@pytest.mark.parametrize(("module", "name", "arguments", "instead"), REFUSED, ids=lambda value: str(value)[:30])
def test_the_error_for_a_name_without_an_equivalent_names_the_replacement(
    module: str, name: str, arguments: tuple[Any, ...], instead: str
) -> None:
    with pytest.raises(ConfigurationError, match=instead) as caught:
        old(module, name)(*arguments)
    assert name in str(caught.value)


@pytest.mark.parametrize("module", ["trainers", "transformers", "predictors", "evaluators", "utils", "job_deployment"])
def test_a_star_import_includes_every_old_name_and_no_module(module: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"from distkeras.{module} import *", namespace)
    expected = {name for where, name, *_ in [*POSITIONS, *REFUSED] if where == module}
    assert expected <= set(namespace)
    strangers = {name for name, value in namespace.items() if inspect.ismodule(value)}
    assert not strangers


@pytest.mark.parametrize(
    "name", [name for name in old("trainers", "__all__") if hasattr(old("trainers", name), "rule_name")]
)
def test_the_docstring_describes_every_argument(name: str) -> None:
    kind = old("trainers", name)
    text = present(inspect.getdoc(kind))
    entries = re.findall(r"^    (\w[\w, ]*): \S", text, re.MULTILINE)
    described = [name for entry in entries for name in entry.split(", ")]
    taken = {*inspect.signature(kind).parameters, *arguments_of(Trainer)} - {"options", "model", "rule"}
    hyper_parameters = {field.name for field in dataclasses.fields(all_rules()[kind.rule_name])} - {"window"}
    assert taken | hyper_parameters <= set(described)
    assert len(described) == len(set(described))


class TestByPosition:
    """Positional arguments reach the right settings."""

    def test_a_distributed_trainer_takes_its_arguments_by_position(self) -> None:
        given = (wrong_model(), "sgd", SPARSE, ["accuracy"], 3, 16, "f", "l", 4, 7)
        for name in ("DOWNPOUR", "DynSGD", "AGN"):
            trainer = old("trainers", name)(*given, 5001, [1.0])
            settings = trainer.settings
            assert (settings.num_workers, settings.batch_size, settings.num_epoch) == (3, 16, 4)
            assert (settings.features_col, settings.label_col) == (("f",), ("l",))
            assert (trainer.rule.window, trainer.server_settings.port) == (7, 5001)

    def test_an_elastic_trainer_takes_its_arguments_by_position(self) -> None:
        given = (wrong_model(), "adagrad", SPARSE, ["accuracy"], 3, 16, "f", "l", 4, 7, 2.0, 0.25)
        trainer = old("trainers", "AEASGD")(*given, 5001, [1.0])
        assert trainer.rule.config() == {"window": 7, "rho": 2.0, "learning_rate": 0.25}
        assert trainer.server_settings.port == 5001

    @pytest.mark.slow
    def test_the_other_trainers_take_their_arguments_by_position(self) -> None:
        given = (wrong_model(), "sgd", SPARSE, ["accuracy"], "f", "l", 4, 16)
        single = old("trainers", "SingleTrainer")(*given, [1.0])
        averaging = old("trainers", "AveragingTrainer")(*given, 3, [1.0])
        for trainer, workers in ((single, 1), (averaging, 3)):
            settings = trainer.settings
            assert (settings.features_col, settings.num_epoch, settings.batch_size) == (("f",), 4, 16)
            assert settings.num_workers == workers
        ensemble = old("trainers", "EnsembleTrainer")(wrong_model(), "sgd", SPARSE, ["accuracy"], "f", "l", 16, 3)
        assert [trainer.settings.batch_size for trainer in ensemble.trainers] == [16] * 3
        assert ensemble.trainers[0].settings.features_col == ("f",)

    def test_a_scaler_takes_its_arguments_by_position(self) -> None:
        stage = old("transformers", "MinMaxTransformer")(0, 250, -1, 1, "features", "scaled", False)
        found = {param.name: stage.getOrDefault(param) for param in stage.params}
        assert found == {
            "o_min": 0, "o_max": 250, "n_min": -1, "n_max": 1, "input_col": "features", "output_col": "scaled",
            "is_vector": False,
        }  # fmt: skip

    def test_a_label_index_takes_its_arguments_by_position(self) -> None:
        stage = old("transformers", "LabelIndexTransformer")(10, "p", "i", 3, 0.6)
        assert (stage.getOrDefault("default_index"), stage.getOrDefault("activation_threshold")) == (3, 0.6)

    def test_an_evaluator_takes_its_arguments_by_position(self) -> None:
        evaluator = old("evaluators", "AccuracyEvaluator")("truth", "guess")
        assert (evaluator.getOrDefault("label_col"), evaluator.getOrDefault("prediction_col")) == ("truth", "guess")
        assert old("evaluators", "AccuracyEvaluator") is old("transformers", "AccuracyEvaluator")


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        ("transformers", "MinMaxTransformer", (0, 1, 0, 1, "a", "b")),
        ("transformers", "BinaryLabelTransformer", ("a", "b", "c")),
        ("transformers", "StandardTransformer", (["a"],)),
        ("transformers", "DenseTransformer", ("a", "b")),
        ("transformers", "ReshapeTransformer", ("a", "b", (2, 2))),
        ("transformers", "OneHotTransformer", (2, "a", "b")),
        ("transformers", "LabelIndexTransformer", (2,)),
        ("predictors", "ModelPredictor", ()),
        ("evaluators", "AccuracyEvaluator", ()),
    ],
)
def test_data_are_accepted_under_their_old_keyword(module: str, name: str, arguments: tuple[Any, ...]) -> None:
    stage = old(module, name)(*arguments)
    method = {"evaluators": "evaluate", "predictors": "predict"}.get(module, "transform")
    with pytest.raises(ConfigurationError, match=r"must be a Spark DataFrame.*of type builtins\.int"):
        getattr(stage, method)(dataframe=5)


class TestAdag:
    """ADAG, the only name whose meaning has changed."""

    def test_the_old_call_warns_and_names_the_new_class(self) -> None:
        from distkeras.compat import PortingWarning

        with pytest.warns(PortingWarning, match="`AGN`") as caught:
            trainer = old("trainers", "ADAG")(wrong_model(), "adam", SPARSE, communication_window=5)
        assert [warning.filename for warning in caught if warning.category is PortingWarning] == [__file__]
        assert trainer.rule.name == "adag"

    def test_a_call_with_new_hyperparameters_does_not_warn(self) -> None:
        # Pytest turns a warning into an error.
        trainer = old("trainers", "ADAG")(wrong_model(), "sgd", SPARSE, form="4.7")
        assert trainer.rule.name == "adag"


class TestElasticOptimizers:
    def test_aeasgd_accepts_any_optimizer(self) -> None:
        trainer = old("trainers", "AEASGD")(wrong_model(), "adagrad", SPARSE, learning_rate=0.05)
        assert trainer.rule.learning_rate == 0.05

    def test_eamsgd_uses_only_the_rate_and_warns(self) -> None:
        from distkeras.compat import PortingWarning

        with pytest.warns(PortingWarning, match=r"SGD\(0.05\).*'adagrad'") as caught:
            trainer = old("trainers", "EAMSGD")(wrong_model(), "adagrad", SPARSE, learning_rate=0.05, momentum=0.6)
        assert [warning.filename for warning in caught if warning.category is PortingWarning] == [__file__]
        assert (trainer.rule.learning_rate, trainer.rule.momentum) == (0.05, 0.6)

    def test_eamsgd_refuses_an_optimizer_other_than_sgd(self) -> None:
        with pytest.raises(ConfigurationError, match="must be SGD"):
            old("trainers", "EAMSGD")(wrong_model(), keras.optimizers.Adam(), SPARSE)


class TestAccessors:
    """Accessors of a trainer that has not trained."""

    @pytest.fixture
    def trainer(self) -> Any:
        return old("trainers", "AEASGD")(wrong_model(), "sgd", SPARSE, learning_rate=0.05)

    def test_a_getter_returns_what_its_setter_set(self, trainer: Any) -> None:
        assert (trainer.get_features_column(), trainer.get_label_column()) == ("features", "label")
        for name, value in (("minibatch_size", 8), ("num_epoch", 3), ("num_workers", 4), ("parallelism_factor", 2)):
            getattr(trainer, f"set_{name}")(value)
            assert getattr(trainer, f"get_{name}")() == value
        assert (trainer.settings.batch_size, trainer.settings.num_epoch, trainer.settings.num_workers) == (8, 3, 4)

    def test_a_list_of_columns_is_returned_unchanged(self) -> None:
        trainer = old("trainers", "DOWNPOUR")(wrong_model(), "sgd", SPARSE, features_col=["a", "b"])
        assert trainer.get_features_column() == ["a", "b"]

    @pytest.mark.parametrize(
        "name",
        [
            "minibatch_size",
            pytest.param("num_epoch", marks=pytest.mark.slow),
            pytest.param("num_workers", marks=pytest.mark.slow),
            pytest.param("parallelism_factor", marks=pytest.mark.slow),
        ],
    )
    def test_a_setter_refuses_what_the_constructor_refuses(self, trainer: Any, name: str) -> None:
        with pytest.raises(ConfigurationError, match="must be"):
            getattr(trainer, f"set_{name}")(0)

    def test_the_rate_of_an_elastic_trainer_is_that_of_its_rule(self, trainer: Any) -> None:
        assert trainer.get_learning_rate() == 0.05
        trainer.set_learning_rate(0.1)
        assert trainer.get_learning_rate() == 0.1
        rules = (trainer.rule, trainer.worker_settings.rule, trainer.server_settings.rule)
        assert [rule.learning_rate for rule in rules] == [0.1] * 3

    def test_the_rate_of_another_trainer_is_that_of_its_worker_optimizer(self) -> None:
        trainer = old("trainers", "DOWNPOUR")(wrong_model(), keras.optimizers.SGD(0.25), SPARSE)
        assert trainer.get_learning_rate() == pytest.approx(0.25)
        with pytest.raises(ConfigurationError, match="worker_optimizer"):
            trainer.set_learning_rate(0.1)

    def test_set_master_sets_the_servers_host(self, trainer: Any) -> None:
        trainer.set_master("driver.example")
        assert trainer.settings.host == "driver.example"
        trainer.determine_new_master()
        assert trainer.settings.host is None

    def test_a_setting_without_an_effect_warns(self, trainer: Any) -> None:
        from distkeras.compat import PortingWarning

        with pytest.warns(PortingWarning, match="no effect"):
            trainer.set_max_prefetch(10)

    @pytest.mark.parametrize(
        ("name", "instead"),
        [
            ("allocate_worker", "Rule"),
            pytest.param("allocate_parameter_server", "Rule", marks=pytest.mark.slow),
            ("service", "`train`"),
            pytest.param("start_service", "`train`", marks=pytest.mark.slow),
            pytest.param("stop_service", "`train`", marks=pytest.mark.slow),
            pytest.param("record_training_start", "get_training_time", marks=pytest.mark.slow),
            pytest.param("record_training_end", "get_training_time", marks=pytest.mark.slow),
            pytest.param("serialize", "distkeras train", marks=pytest.mark.slow),
        ],
    )
    def test_internal_methods_are_refused(self, trainer: Any, name: str, instead: str) -> None:
        with pytest.raises(ConfigurationError, match=instead):
            getattr(trainer, name)()
        with pytest.raises(ConfigurationError, match=f"Mine.{name}.*{instead}"):
            type("Mine", (type(trainer),), {name: lambda self: None})

    def test_the_average_of_models_is_refused(self) -> None:
        trainer = old("trainers", "AveragingTrainer")(wrong_model(), "sgd", SPARSE)
        with pytest.raises(ConfigurationError, match="average_models"):
            trainer.average_models([])

    def test_results_are_an_error_before_training(self, trainer: Any) -> None:
        assert trainer.get_training_time() == 0.0
        for ask in (trainer.num_updates, trainer.get_history, lambda: trainer.parameter_server.num_updates):
            with pytest.raises(LocalProtocolError, match="after `train`"):
                ask()

    def test_exactly_one_dataframe_is_accepted(self, trainer: Any) -> None:
        with pytest.raises(ConfigurationError, match="dataframe"):
            trainer.train()
        with pytest.raises(ConfigurationError, match="dataframe"):
            trainer.train(1, dataframe=2)

    def test_the_classes_have_their_old_hierarchy(self, trainer: Any) -> None:
        assert issubclass(old("trainers", "EnsembleTrainer"), old("trainers", "Trainer"))
        assert issubclass(old("predictors", "ModelPredictor"), old("predictors", "Predictor"))
        for name in ("Trainer", "DistributedTrainer", "AsynchronousDistributedTrainer"):
            assert isinstance(trainer, old("trainers", name))


class TestUtils:
    def test_a_label_is_encoded_as_one_hot(self) -> None:
        assert list(old("utils", "to_one_hot_encoded_dense")(2.0, n_dim=4)) == [0, 0, 1, 0]
        assert list(old("utils", "to_one_hot_encoded_dense")(1)) == [0, 1]
        with pytest.raises(ConfigurationError, match="value"):
            old("utils", "to_one_hot_encoded_dense")(-1, 4)

    def test_rows_are_extended_and_parsed(self) -> None:
        assert old("utils", "new_dataframe_row")(Row(b=1, a=2), "c", 3) == Row(b=1, a=2, c=3)
        assert old("utils", "json_to_dataframe_row")('{"b": 1, "a": [2.5]}') == Row(b=1, a=[2.5])

    def test_a_model_is_serialized_and_deserialized(self) -> None:
        model = wrong_model()
        packed = old("utils", "serialize_keras_model")(model)
        assert set(packed) == {"model", "weights"}
        again = old("utils", "deserialize_keras_model")(packed)
        x = np.ones((3, 2), np.float32)
        np.testing.assert_array_equal(again.predict_on_batch(x), model.predict_on_batch(x))

    def test_uniform_weights_are_within_their_bounds(self) -> None:
        model = wrong_model()
        old("utils", "uniform_weights")(model, constraints=[1.0, 2.0])
        values = np.concatenate([weight.ravel() for weight in model.get_weights()])
        assert values.min() >= 1.0
        assert values.max() < 2.0
        assert len(np.unique(values)) == values.size

    def test_histories_are_selected_and_averaged(self) -> None:
        history = [
            {
                "worker_id": worker,
                "iteration": iteration,
                "history": [float(worker), 10.0 * iteration],
                "timestamp": 0.0,
            }
            for worker, iteration in ((1, 2), (1, 1), (0, 1), (1, 3))
        ]
        assert [row["iteration"] for row in old("utils", "history_executor")(history, 1)] == [1, 2, 3]
        averaged = old("utils", "history_executors_average")(history)
        np.testing.assert_array_equal(averaged, [[0.5, 10.0], [1.0, 20.0], [1.0, 30.0]])
        assert old("utils", "history_executors_average")([]).shape == (0, 0)


class TestGetIndex:
    """`LabelIndexTransformer.get_index`: the first score that reaches the threshold, else the largest above 0."""

    @pytest.mark.parametrize(
        ("scores", "expected"),
        [([0.1, 0.6, 0.9], 1), ([0.1, 0.5, 0.4], 1), ([-1.0, 0.0, -2.0], 2), ([0.3, 0.3, 0.2], 0)],
    )
    def test_the_index_of_a_vector_of_scores(self, scores: list[float], expected: int) -> None:
        stage = old("transformers", "LabelIndexTransformer")(3, default_index=2, activation_threshold=0.55)
        assert stage.get_index(scores) == expected


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("StandardTransformer", (["a"],)),
        pytest.param("BinaryLabelTransformer", ("a", "b", 1.0), marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_that_an_earlier_release_saved_is_loaded(
    spark: SparkSession, tmp_path: Path, name: str, arguments: tuple[Any, ...]
) -> None:
    stage = old("transformers", name)(*arguments)
    PipelineModel([stage]).write().save(str(tmp_path / "saved"))
    (saved,) = tmp_path.glob("saved/stages/*/metadata/part-*")
    saved.write_text(saved.read_text().replace(type(stage).__module__, "distkeras.compat.stages"))
    saved.with_name(f".{saved.name}.crc").unlink()
    (loaded,) = PipelineModel.load(str(tmp_path / "saved")).stages
    assert type(loaded) is type(stage)
