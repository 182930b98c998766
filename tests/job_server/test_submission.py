"""Tests that compare the trainer that a client submits with the trainer that the driver builds from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
from support.job_server.service import JobService

from distkeras import DOWNPOUR, Deadlines, Padding, Trainer, rules, schedules
from distkeras.job_server import Client
from distkeras.job_server.description import JobDescription, TrainerOptions
from distkeras.job_server.driver import trainer_of
from distkeras.job_server.errors import DescriptionError
from distkeras.job_server.model_file import require_weights
from distkeras.job_server.submission import description_of, model_of
from distkeras.keras_model import archive
from distkeras.keras_model.keras_config import applied
from distkeras.settings import grouped

# Keras: a model that was compiled and saved before it was trained has an optimizer without variables.
pytestmark = pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")

layers = keras.layers
#: A port where no server listens: every request to it ends with a ServerLostError.
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobService]:
    with JobService(tmp_path_factory.mktemp("service")) as service:
        yield service


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), layers.Dense(3, activation="softmax")])


def make_trainer(**options: Any) -> Trainer:
    return Trainer(
        dense(), options.pop("rule", "asgd"), **grouped({"loss": "sparse_categorical_crossentropy"} | options)
    )


def submit_and_rebuild(service: JobService, trainer: Trainer, **more: Any) -> tuple[JobDescription, Trainer, bytes]:
    """Return the trainer that the driver builds from what the client's trainer has sent."""
    job = service.client("ann").submit(trainer, data=Path(service.data("train")), **more)
    job.cancel()
    description = JobDescription.from_json(job.record["description"])
    data = service.files.of(job.id).sent_model.read_bytes()
    return description, trainer_of(data, description), data


def same_settings(sent: Trainer, found: Trainer) -> None:
    assert found.rule == sent.rule
    assert found.worker_settings == sent.worker_settings
    assert found.server_settings == sent.server_settings
    # This option concerns only the driver's own terminal.
    assert found.settings == dataclasses.replace(sent.settings, progress=False, log_every=found.settings.log_every)


#: A value of each option that is not the default.
OPTIONS: dict[str, Any] = {
    "worker_optimizer": "adam",
    "loss": "mse",
    "metrics": ["accuracy"],
    "loss_weights": [0.5],
    "weighted_metrics": ["accuracy"],
    "features_col": ["a"],
    "label_col": "y",
    "sample_weight_col": "w",
    "class_weight": {0: 1.5, 2: 3.0},
    "padding": {"a": Padding(longest=20, side="pre")},
    "num_workers": 3,
    "batch_size": np.int64(7),
    "num_epoch": 2,
    "learning_rate": schedules.Cosine(0.5, length=100),
    "staleness_bound": 2,
    "seed": 5,
    "shuffle": False,
    "partitioned_already": True,
    "spool_bytes": 1 << 20,
    "max_skipped": 3,
    "measure_gap": True,
    "wire_format": "int8",
    "overlap": True,
    "tls": True,
    "threads": 1,
    "keep_optimizer": False,
    "lends": True,
    "helpers": 2,
    "shared_memory": False,
    "relays": "host",
    "shards": 2,
    "stall_after": None,
    "tables": "dense",
}
#: These options need a rule that applies gradients at the server, and no `overlap`.
APART = {"learning_rate", "relays", "shards"}
#: These options are part of the model's compilation, which a test below covers.
COMPILED = {"worker_optimizer", "loss", "metrics", "loss_weights", "weighted_metrics"}


def test_every_option_is_tested() -> None:
    assert OPTIONS.keys() == TrainerOptions.model_fields.keys()


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ("downpour", OPTIONS.keys() - APART),
        pytest.param("asgd", {"learning_rate"}, marks=pytest.mark.slow),
        pytest.param("downpour", {"relays"}, marks=pytest.mark.slow),
        pytest.param("downpour", {"shards"}, marks=pytest.mark.slow),
    ],
)
def test_every_option_arrives(service: JobService, rule: str, names: set[str]) -> None:
    trainer = make_trainer(rule=rule, **{name: OPTIONS[name] for name in names})
    description, found, _ = submit_and_rebuild(service, trainer)
    same_settings(trainer, found)
    assert description.options.model_fields_set == names - COMPILED


@pytest.mark.parametrize(
    "columns",
    [
        {"label_col": {"a": ["b", "c"], "d": None}, "sample_weight_col": {"a": "w", "d": None}},
        pytest.param({"label_col": ["b", None], "sample_weight_col": [None, "w"]}, marks=pytest.mark.slow),
        pytest.param({"label_col": None, "loss": None}, marks=pytest.mark.slow),
    ],
)
def test_labels_and_weights_of_outputs_arrive(service: JobService, columns: dict[str, Any]) -> None:
    trainer = make_trainer(rule="downpour", **columns)
    _, found, _ = submit_and_rebuild(service, trainer)
    same_settings(trainer, found)


def test_default_values_are_not_sent(service: JobService) -> None:
    trainer = make_trainer(rule="downpour", worker_optimizer="sgd")
    description, found, _ = submit_and_rebuild(service, trainer)
    assert not description.options.model_fields_set
    assert found.rule == trainer.rule


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rules.make("agn", window=7), marks=pytest.mark.slow),
        rules.make("aeasgd", rho=0.3),
        pytest.param(rules.make("adag", form="4.7"), marks=pytest.mark.slow),
    ],
)
def test_a_rule_arrives_with_its_hyper_parameters(service: JobService, rule: rules.Rule) -> None:
    trainer = make_trainer(rule=rule)
    _, found, _ = submit_and_rebuild(service, trainer)
    assert found.rule == trainer.rule == rule


def test_a_compilation_of_objects_arrives(service: JobService) -> None:
    """The trainer sends what `train` would compile the model with for its workers, not the model's own compilation."""
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 100), momentum=0.9, clipnorm=1.0)
    given = {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": [keras.metrics.SparseTopKCategoricalAccuracy(k=2)],
        "weighted_metrics": ["accuracy"],
        "loss_weights": [0.25],
    }
    model = dense()
    model.compile("adam", "mse")
    trainer = Trainer(model, "downpour", worker_optimizer=optimizer, **given)
    _, _, data = submit_and_rebuild(service, trainer)
    found = archive.from_bytes(data, compiled=True)
    np.testing.assert_array_equal(found.get_weights()[0], model.get_weights()[0])
    model.compile(optimizer, **given)
    assert found.get_compile_config() == model.get_compile_config()
    assert found.optimizer.get_config() == optimizer.get_config()


@pytest.mark.slow
def test_the_state_of_an_optimizer_arrives(service: JobService) -> None:
    model = dense()
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(np.ones((8, 2)), np.zeros(8), verbose=0)
    _, _, data = submit_and_rebuild(service, Trainer(model, "downpour"))
    found = archive.from_bytes(data, compiled=True)
    assert int(found.optimizer.iterations) == 1
    for one, other in zip(found.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_trainer_of_dist_keras_sends_the_values_of_its_setters(service: JobService) -> None:
    trainer = DOWNPOUR(dense(), "adam", "mse", features_col="a", label_col="b", batch_size=9, num_workers=2)
    trainer.set_num_epoch(4)
    description, found, _ = submit_and_rebuild(service, trainer)
    assert description.options.num_epoch == found.settings.num_epoch == 4
    same_settings(trainer, found)


def test_name_checkpoints_and_a_time_budget_arrive(service: JobService) -> None:
    description, _, _ = submit_and_rebuild(service, make_trainer(), name="mine", checkpoint_every=7, time_budget=30.0)
    assert (description.name, description.checkpoint_every, description.time_budget) == ("mine", 7, 30.0)


# ---- what cannot be sent


class Own(keras.layers.Layer):
    """A layer of the user's own, which a server cannot load."""

    def call(self, inputs: Any) -> Any:
        return inputs


@keras.saving.register_keras_serializable("test_submission")
class Registered(keras.losses.MeanSquaredError):
    """A loss of the user's own, which is registered here but not at a server."""


def own_loss(truth: Any, predicted: Any) -> Any:
    return keras.ops.mean(truth - predicted)


def with_layer() -> Trainer:
    model = keras.Sequential([keras.Input((2,)), Own(), layers.Dense(1)])
    return Trainer(model, "asgd", loss="mse", custom_objects={"Own": Own})


def with_rule() -> Trainer:
    trainer = make_trainer(rule="agn")
    trainer.rule = dataclasses.make_dataclass("OwnRule", [], bases=(type(trainer.rule),), frozen=True)()
    return trainer


@pytest.mark.parametrize(
    ("build", "field", "named"),
    [
        (with_layer, "custom_objects", "Own"),
        (with_rule, "rule", "OwnRule"),
        (lambda: make_trainer(loss=own_loss), "loss", "own_loss"),
        (lambda: make_trainer(metrics=["mse", own_loss]), "metrics", "own_loss"),
        (lambda: make_trainer(loss=Registered()), "custom_objects", "Registered"),
        (lambda: make_trainer(decode=np.asarray), "decode", "decode"),
        (lambda: make_trainer(host="10.0.0.1"), "host", "10.0.0.1"),
        (lambda: make_trainer(port=4321), "port", "4321"),
        (lambda: make_trainer(deadlines=Deadlines(lease=99.0)), "deadlines", "99"),
    ],
    ids=range(9),
)
def test_values_that_cannot_be_sent_are_refused_before_submission(
    build: Callable[[], Trainer], field: str, named: str
) -> None:
    with pytest.raises(DescriptionError) as caught:
        Client(NOWHERE, "dk_x").submit(build(), data="/data/train")
    assert caught.value.field == field
    assert named in caught.value.message


@pytest.mark.parametrize("data", [pd.DataFrame({"label": [1]}), [1, 2], None])
def test_rows_in_memory_are_refused(data: Any) -> None:
    with pytest.raises(DescriptionError, match="path or URI") as caught:
        Client(NOWHERE, "dk_x").submit(make_trainer(), data=data)
    assert caught.value.field == "data"


def test_functions_of_keras_are_sent(service: JobService) -> None:
    trainer = make_trainer(loss=keras.losses.mean_squared_error, metrics=[keras.metrics.mean_absolute_error])
    _, _, data = submit_and_rebuild(service, trainer)
    assert archive.from_bytes(data, compiled=True).loss is keras.losses.mean_squared_error


@pytest.mark.slow
def test_the_factors_of_lora_are_sent(service: JobService) -> None:
    model = dense()
    model.layers[0].enable_lora(1)
    model.layers[0].lora_kernel_b.assign([[1.0, 2.0, 3.0]])
    trainer = Trainer(model, "asgd", loss="sparse_categorical_crossentropy")
    _, _, data = submit_and_rebuild(service, trainer)
    require_weights(data)
    for given, sent in zip(model.get_weights(), archive.from_bytes(data).get_weights(), strict=True):
        np.testing.assert_array_equal(given, sent)


def test_the_settings_of_keras_are_sent() -> None:
    with applied({"dtype_policy": "mixed_float16", "epsilon": 1e-3}):
        trainer = make_trainer()
    sent = trainer_of(model_of(trainer), JobDescription.from_json({**description_of(trainer), "data": "/data/train"}))
    assert sent.recipe.settings == trainer.recipe.settings
    assert sent.recipe.settings["epsilon"] == 1e-3


@pytest.mark.parametrize(
    ("variables", "named"),
    [({"var_names": ["kernel"]}, "_exclude_from_weight_decay_pattern"), ({"var_list": None}, "excludes 1 variables")],
)
def test_exclusions_from_weight_decay_are_refused(variables: dict[str, Any], named: str) -> None:
    model, optimizer = dense(), keras.optimizers.AdamW(0.1, weight_decay=0.5)
    if "var_list" in variables:
        variables = {"var_list": [model.layers[0].kernel]}
    optimizer.exclude_from_weight_decay(**variables)
    model.compile(optimizer, "sparse_categorical_crossentropy")
    with pytest.raises(DescriptionError, match=named) as caught:
        model_of(Trainer(model, "downpour"))
    assert caught.value.field == "optimizer"


@pytest.mark.parametrize("more", [{"rule": "agn"}, {"hyper_parameters": {"window": 2}}, {"batch_size": 4}])
def test_a_rule_or_options_next_to_a_trainer_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(DescriptionError, match="the trainer's own"):
        Client(NOWHERE, "dk_x").submit(make_trainer(), data="/data", **more)
