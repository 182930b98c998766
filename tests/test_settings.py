"""Arguments of a trainer: the constructor refuses invalid values with errors that name the argument."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.resource import ResourceProfile, ResourceProfileBuilder

from distkeras import AEASGD, Deadlines, EnsembleTrainer, Executors, Monitoring, Network, Padding, Trainer
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import all_rules, make
from distkeras.ps.rules.schedules import Constant
from distkeras.ps.settings import ServerSettings, WorkerSettings
from distkeras.settings import (
    DEFAULT_RULE,
    DEFAULT_RULE_FOR_ROWS,
    GROUPS,
    TrainSettings,
    arguments_of,
    flattened,
    grouped,
    options_of,
)

NO_COUNT: tuple[Any, ...] = (-1, 1.5, 2.0, True, "2", np.float64(2), math.nan)
NO_TABLE: Any = None
NO_SWITCH: tuple[Any, ...] = ("no", 1, 0, [], np.int64(1))
BAD: dict[str, tuple[Any, ...]] = {
    "num_workers": (0, *NO_COUNT),
    "batch_size": (0, None, *NO_COUNT),
    "num_epoch": (0, None, *NO_COUNT),
    "seed": (None, *NO_COUNT),
    "spool_bytes": (None, *NO_COUNT),
    "max_skipped": (None, *NO_COUNT),
    "staleness_bound": NO_COUNT,
    "port": (65536, None, *NO_COUNT),
    "threads": (0, *NO_COUNT),
    "stall_after": (0, -1.0, math.nan, math.inf, 10**400, "1", True),
    "log_every": (0, -1.0, math.nan, math.inf, 10**400, "1", True),
    "deadlines": (5.0, {"reply": 5.0}, 0, False, ""),
    "wire_format": ("float16", None, np.zeros(2)),
    "features_col": ((), "", (3,), 5, True),
    "label_col": ("", 5, ["a", 3], {"b": [""]}),
    "learning_rate": (0.1,),  # the rule makes no steps at the server
    "class_weight": ([1.0, 2.0], "even", {}, {"cat": 1.0}, {-1: 1.0}, {0.5: 1.0}, {0: "2"}, {0: -1.0}, {0: math.nan}),
    "padding": ("post", {"features": "post"}, {1: Padding()}, 3),
    "decode": ("gray", {}, {"features": 1}, {1: bytes}, [bytes]),
    "sample_weight_col": ("", 3, [[]], {"a": 1}),
    "host": ("", 8080),
    "server": ("spark", "", None, 1),
    "resources": (2, {"cpus": 2}, ResourceProfileBuilder(), ResourceProfile),
    "frozen_weights": ("", 3, Path("base.weights.h5")),
    "tables": ((), 3, None, [1], ""),
    "shuffle": (None, *NO_SWITCH),
    "partitioned_already": (None, *NO_SWITCH),
    "tls": (None, *NO_SWITCH),
    "measure_gap": (None, *NO_SWITCH),
    "check_model": (None, *NO_SWITCH),
    "custom_objects": (5, [1], {1: len}, {"name": 1}),
    "overlap": (None, *NO_SWITCH),
    "keep_optimizer": (None, *NO_SWITCH),
    "lends": NO_SWITCH,
    "helpers": (-1, None, True, 1.5),
    "shared_memory": (None, *NO_SWITCH),
    "relays": ("hosts", "", 0, True, 1.5),
    "shards": (0, None, True, 1.5, "2"),
    "progress": NO_SWITCH,
    "network": (1, "cluster", {"tls": True}, Monitoring()),
    "executors": (1, {"threads": 2}, Network()),
    "monitoring": (True, {"progress": True}, Network()),
}
SYNCHRONOUS = [name for name, kind in all_rules().items() if kind().traits.synchronous]
GRADIENT = [name for name, kind in all_rules().items() if kind().traits.gradient]
#: Keywords that define the model and the rule.
OF_MODEL_AND_RULE = {
    "model", "rule", "worker_optimizer", "loss", "metrics", "loss_weights", "weighted_metrics", "custom_objects",
}  # fmt: skip
#: Fields of server and workers that `train` sets, and a limit that a trainer does not change.
SETTLED_LATER = {"rule", "workers", "checkpoint", "max_body"}


@cache
def linear_model() -> keras.Model:
    """Return a model that all tests share, because a trainer does not change its model."""
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def trainer(rule: Any = "downpour", **options: Any) -> Trainer:
    return Trainer(rule=rule, **{"model": linear_model(), "loss": "mse"} | grouped(options))


@pytest.mark.parametrize("name", BAD)
def test_the_error_for_an_invalid_value_names_the_argument(name: str) -> None:
    for value in BAD[name]:
        given = {name: value} if name in GROUPS else grouped({name: value})
        with pytest.raises(ConfigurationError, match=rf"^`{name}`"):
            Trainer(linear_model(), "downpour", loss="mse", **given)


def test_each_keyword_has_invalid_values_above() -> None:
    assert {*options_of(Trainer), *GROUPS} - OF_MODEL_AND_RULE == set(BAD) - {"custom_objects"}


def test_a_trainer_has_few_keywords() -> None:
    assert len(arguments_of(Trainer)) <= 29


def test_groups_of_options_and_single_options_are_equivalent() -> None:
    options = {"tls": True, "threads": 2, "progress": False, "batch_size": 8}
    arguments = grouped(options)
    assert arguments == {
        "network": Network(tls=True),
        "executors": Executors(threads=2),
        "monitoring": Monitoring(progress=False),
        "batch_size": 8,
    }
    flat = flattened(arguments)
    assert options.items() <= flat.items()
    assert flat["server"] == "driver"
    assert not flat.keys() & GROUPS.keys()


@pytest.mark.parametrize("resume", [None, *NO_SWITCH])
def test_an_invalid_resume_is_refused(resume: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^`resume`"):
        trainer().train(NO_TABLE, checkpoint=tmp_path, resume=resume)


@pytest.mark.parametrize(
    ("rule", "options", "text"),
    [
        (7, {}, "^`rule` must be"),
        ("sgd", {}, "`rule` must be one of"),
        ("downpour", {"loss": None}, "`loss` must be given"),
        ("downpour", {"model": keras.Sequential([keras.layers.Dense(1)])}, "`model` must be built"),
        ("aeasgd", {"overlap": True}, "`overlap` must be False"),
        (
            make("easgd", early_stopping="2.9"),
            {"worker_optimizer": keras.optimizers.SGD(momentum=0.9)},
            "needs the plain step",
        ),
        *(("asgd", {"learning_rate": rate}, "^`learning_rate`") for rate in (0, -1.0, "0.1", True, math.nan)),
        *((rule, {"staleness_bound": 1}, "`staleness_bound`") for rule in SYNCHRONOUS),
        *((rule, {"worker_optimizer": "adam"}, "`worker_optimizer` must be SGD") for rule in GRADIENT),
    ],
)
def test_what_a_rule_or_a_model_does_not_allow_is_refused(rule: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        trainer(rule, **options)


@pytest.mark.parametrize("number", NO_COUNT)
def test_an_invalid_number_of_models_is_refused(number: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^`num_ensembles` must be"):
        EnsembleTrainer(linear_model(), loss="mse", num_ensembles=number)


def test_integers_of_numpy_are_integers() -> None:
    given = {"num_workers": 3, "batch_size": 8, "num_epoch": 2, "seed": 0, "spool_bytes": 10, "max_skipped": 4}
    server, worker = {"staleness_bound": 5, "port": 80}, {"threads": 2}
    made = trainer(**{name: np.int64(value) for name, value in (given | server | worker).items()})
    for settings, expected in ((made.settings, given), (made.server_settings, server), (made.worker_settings, worker)):
        for name, value in expected.items():
            kept = getattr(settings, name)
            assert kept == value
            assert type(kept) is int
    assert make("agn", window=np.uint8(7)).window == 7


def test_each_keyword_is_a_field_of_the_settings_that_act_on_it() -> None:
    kinds = (TrainSettings, ServerSettings, WorkerSettings)
    fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert set(options_of(Trainer)) - OF_MODEL_AND_RULE == fields - SETTLED_LATER


def test_defaults_are_the_same_in_the_signature_and_in_the_settings() -> None:
    made = trainer()
    assert made.settings == TrainSettings()
    assert made.server_settings == ServerSettings(made.rule, workers=1)
    assert made.worker_settings == WorkerSettings(made.rule, workers=1)


def test_each_setting_is_in_the_object_that_uses_it() -> None:
    deadlines = Deadlines(reply=5.0)
    made = trainer("asgd", num_workers=3, deadlines=deadlines, staleness_bound=2, threads=4, host="10.0.0.1")
    assert (made.server_settings.workers, made.worker_settings.workers) == (3, 3)
    assert made.server_settings.deadlines is made.worker_settings.deadlines is deadlines
    assert made.settings.host == "10.0.0.1"
    assert made.server_settings.learning_rate == Constant(float(np.float32(0.01)))  # the rate of the worker optimizer


def test_no_commit_is_skipped_by_default() -> None:
    assert trainer().server_settings.max_skipped == 0
    assert trainer(max_skipped=5).server_settings.max_skipped == 5


def test_names_of_keras_mean_the_trainers_own() -> None:
    of_keras = Trainer(linear_model(), loss="mse", epochs=3, optimizer="adam", verbose=0)
    own = Trainer(
        linear_model(), loss="mse", num_epoch=3, worker_optimizer="adam", monitoring=Monitoring(progress=False)
    )
    assert of_keras.settings == own.settings
    assert of_keras.recipe.arguments == own.recipe.arguments


def test_an_argument_with_two_names_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="`epochs` and `num_epoch` are the same argument"):
        Trainer(linear_model(), loss="mse", epochs=2, num_epoch=3)


@pytest.mark.parametrize(("wrong", "meant"), [("epoch", "num_epoch"), ("losss", "loss"), ("batchsize", "batch_size")])
def test_a_wrong_keyword_gets_one_suggestion(wrong: str, meant: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"keyword of Trainer. Did you mean `{meant}`\? Received: {wrong}=1$"):
        Trainer(linear_model(), **{wrong: 1})  # type: ignore[arg-type]  # that is the test


def test_the_default_rule_allows_what_the_model_and_the_network_need() -> None:
    by_rows = keras.Sequential([keras.Input((2,), dtype="int64"), keras.layers.Embedding(9, 3), keras.layers.Flatten()])
    assert Trainer(linear_model(), loss="mse").rule == DEFAULT_RULE
    assert Trainer(linear_model(), loss="mse", network=Network(wire_format="bfloat16")).rule == DEFAULT_RULE_FOR_ROWS
    assert Trainer(by_rows, loss="mse").rule == DEFAULT_RULE_FOR_ROWS


def test_what_a_trainer_is_asked_for_as_a_model_names_what_there_is() -> None:
    trainer = Trainer(linear_model(), loss="mse")
    with pytest.raises(AttributeError, match=r"a trainer has no `fit`: `trainer.train\(df\)` trains"):
        trainer.fit(None)  # type: ignore[attr-defined]  # that is the test
    assert {"train", "history", "epochs"} <= set(dir(trainer))
    assert not {"recipe", "outcome", "settings", "model_file"} & set(dir(trainer))
    assert repr(trainer).startswith("Trainer: model=")
    assert "rule</th>" in trainer._repr_html_()


def test_an_error_names_the_argument_of_a_dist_keras_class() -> None:
    with pytest.raises(ConfigurationError, match="`communication_window` must be"):
        AEASGD(linear_model(), "sgd", "mse", communication_window=0)
