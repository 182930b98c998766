from __future__ import annotations

import inspect
import json
import pickle
from typing import Any

import jsonschema
import pytest

from distkeras import Padding
from distkeras.data.padding import padding_from_json, padding_json
from distkeras.job_server.description import (
    PREDICTOR_LEFT_OUT,
    JobDescription,
    PredictionDescription,
    PredictorOptions,
    TrainerOptions,
    json_of,
)
from distkeras.job_server.errors import DescriptionError
from distkeras.job_server.submission import LEFT_OUT
from distkeras.ps.rules import all_rules
from distkeras.ps.rules.schedules import KINDS as SCHEDULES
from distkeras.ps.rules.schedules import schedule_of
from distkeras.settings import options_of
from distkeras.trainer import Trainer
from distkeras.transformers import ModelPredictor

LEAST = {"rule": "agn", "data": "/data/train.parquet"}


def refused(**changes: Any) -> DescriptionError:
    with pytest.raises(DescriptionError) as caught:
        JobDescription.from_json(LEAST | changes)
    return caught.value


def test_the_schema_is_a_valid_json_schema() -> None:
    for kind in (JobDescription, PredictionDescription):
        jsonschema.Draft202012Validator.check_schema(kind.model_json_schema())


def test_every_keyword_of_the_trainer_is_in_the_schema_or_excluded() -> None:
    options = set(TrainerOptions.model_fields)
    assert options == set(options_of(Trainer)) - LEFT_OUT
    assert set(options_of(Trainer)) >= LEFT_OUT


@pytest.mark.parametrize("name", all_rules())
def test_every_rule_is_valid_with_its_defaults(name: str) -> None:
    kind = all_rules()[name]
    config = kind().config()
    options = {"learning_rate": 0.1} if kind().traits.gradient else {}
    made = JobDescription.from_json(LEAST | {"rule": name, "hyper_parameters": config, "options": options})
    assert made.build_rule() == kind()
    assert JobDescription.from_json({"rule": name, "data": "x"}).build_rule() == kind()


def test_balanced_classes_reach_the_trainer() -> None:
    given = JobDescription.from_json(LEAST | {"options": {"class_weight": "balanced"}})
    assert JobDescription.from_json(given.to_json()).keywords()["class_weight"] == "balanced"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"longest": 20, "multiple": "few"}, Padding(longest=20, multiple="few")),
        ({"a": {"value": 3}, "b": {}}, {"a": Padding(3), "b": Padding()}),
    ],
)
def test_a_padding_reaches_the_trainer_and_the_predictor(given: dict[str, Any], expected: Any) -> None:
    job = JobDescription.from_json(LEAST | {"options": {"padding": given}})
    assert JobDescription.from_json(job.to_json()).keywords()["padding"] == expected
    prediction = PredictionDescription.from_json({"data": "x", "output": "y", "options": {"padding": given}})
    assert PredictionDescription.from_json(prediction.to_json()).keywords() == {"padding": expected}
    assert padding_from_json(padding_json(expected)) == expected


def test_a_description_survives_a_round_trip() -> None:
    options = {
        "batch_size": 64,
        "features_col": ["a", "b"],
        "label_col": "y",
        "class_weight": {"0": 1, "1": 2.5},
        "worker_optimizer": {"class_name": "adam", "config": {"learning_rate": 0.01}},
        "loss": "mse",
        "metrics": ["accuracy"],
        "wire_format": "bfloat16",
    }
    given = LEAST | {"hyper_parameters": {"window": 3}, "options": options, "name": "mine", "checkpoint_every": 7}
    given |= {
        "time_budget": 0.5,
        "early_stopping": {"data": "/data/test.parquet", "monitor": "accuracy", "patience": 3},
        "tags": ["a", "b.1"],
    }
    made = JobDescription.from_json(given)
    assert made.to_json() == given
    assert JobDescription.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert made.keywords()["class_weight"] == {0: 1, 1: 2.5}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rule": "nothing"}, "rule"),
        ({"rule": ["agn"]}, "rule"),
        ({"data": ""}, "data"),
        ({"data": 3}, "data"),
        ({"name": "x" * 201}, "name"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"time_budget": 0}, "time_budget"),
        ({"early_stopping": {"patience": 3}}, "early_stopping.data"),
        ({"early_stopping": {"data": "x", "df": 3}}, "early_stopping.df"),
        ({"early_stopping": {"data": "x", "patience": 0}}, "early_stopping.patience"),
        ({"early_stopping": {"data": "x", "mode": "most"}}, "early_stopping.mode"),
        ({"early_stopping": {"data": "x", "max_rows": 10**9}}, "early_stopping.max_rows"),
        ({"hyper_parameters": {"window": "x"}}, "hyper_parameters.window"),
        ({"hyper_parameters": {"window": 0}}, "hyper_parameters.window"),
        ({"hyper_parameters": {"nothing": 1}}, "hyper_parameters.nothing"),
        ({"rule": "downpour", "hyper_parameters": {"rho": 1.0}}, "hyper_parameters.rho"),
        ({"options": {"batch_size": 0}}, "options.batch_size"),
        ({"options": {"batch_size": True}}, "options.batch_size"),
        ({"options": {"batch_size": 2**60}}, "options.batch_size"),
        ({"options": {"num_epoch": 1.5}}, "options.num_epoch"),
        ({"options": {"num_workers": 10**6}}, "options.num_workers"),
        ({"options": {"max_skipped": -1}}, "options.max_skipped"),
        ({"options": {"wire_format": "int4"}}, "options.wire_format"),
        ({"options": {"learning_rate": 0.1}}, "options.learning_rate"),
        ({"options": {"class_weight": {"a": 1}}}, "options.class_weight.a"),
        ({"options": {"padding": {"longest": 0}}}, "options.padding"),
        ({"options": {"loss": "keras.utils.get_file"}}, "options.loss"),
        ({"options": {"loss": {"class_name": "Lambda"}}}, "options.loss"),
        ({"options": {"metrics": [{"module": "os"}]}}, "options.metrics.0"),
        ({"options": {"worker_optimizer": {"class_name": "sgd", "module": "os"}}}, "options.worker_optimizer.module"),
        (
            {"options": {"worker_optimizer": {"class_name": "sgd", "config": {"x": {"class_name": "y"}}}}},
            "options.worker_optimizer.config.x",
        ),
        (
            {"options": {"worker_optimizer": {"class_name": "sgd", "config": dict.fromkeys(map(str, range(101)), 1)}}},
            "options.worker_optimizer.config",
        ),
        ({"options": {"loss": "mean_squared_eror"}}, "options.loss"),
        ({"options": {"metrics": ["accuracy", "acuracy"]}}, "options.metrics"),
        ({"options": {"worker_optimizer": "adamm"}}, "options.worker_optimizer"),
        ({"options": {"worker_optimizer": {"class_name": "adamm"}}}, "options.worker_optimizer"),
        ({"options": {"custom_objects": {}}}, "options.custom_objects"),
        ({"options": {"host": "0.0.0.0"}}, "options.host"),
        ({"options": []}, "options"),
        ({"code": "import os"}, "code"),
    ],
)
def test_the_refusal_of_an_invalid_value_names_its_field(changes: dict[str, Any], field: str) -> None:
    error = refused(**changes)
    assert error.field == field
    assert "Received: " in error.message
    assert len(error.message) < 600
    assert pickle.loads(pickle.dumps(error)).field == field


@pytest.mark.parametrize("value", [None, [], 3, "x", {}, {"rule": "agn"}, {"data": "x"}])
def test_a_malformed_description_is_refused(value: Any) -> None:
    with pytest.raises(DescriptionError):
        JobDescription.from_json(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": ' + "9" * 10_000 + "}",
        b"\xff\xfe",
        " " * ((1 << 20) + 1),
    ],
    ids=range(8),
)
def test_malformed_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(DescriptionError, match="JSON"):
        json_of(text)


# ---- schedules and predict jobs


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_a_learning_rate(name: str) -> None:
    schedule = SCHEDULES[name](0.5)
    given = LEAST | {"rule": "asgd", "options": {"learning_rate": json.loads(json.dumps(schedule.config()))}}
    assert schedule_of(JobDescription.from_json(given).keywords()["learning_rate"]) == schedule


@pytest.mark.parametrize(
    ("rate", "field", "text"),
    [
        ({"schedule": "cosine", "rate": "x"}, "learning_rate.rate", "a valid number"),
        ({"schedule": "x", "rate": 1}, "learning_rate", "'constant'"),
        ({"rate": 1}, "learning_rate", "'schedule'"),
        (
            {"schedule": "constant", "rate": 1.0} | {f"k{number}": 1 for number in range(30_000)},
            "learning_rate.k0",
            "not permitted",
        ),
    ],
    ids=range(4),
)
def test_an_invalid_schedule_is_refused(rate: dict[str, Any], field: str, text: str) -> None:
    """The error is that of the schedule that was named, not of every schedule that it might have been."""
    error = refused(rule="asgd", options={"learning_rate": rate})
    assert error.field == f"options.{field}"
    assert text in error.message


def test_every_keyword_of_the_predictor_is_in_the_schema_or_excluded() -> None:
    options = set(PredictorOptions.model_fields)
    assert options == set(inspect.signature(ModelPredictor).parameters) - PREDICTOR_LEFT_OUT


def test_a_predict_job_survives_a_round_trip() -> None:
    options = {"features_col": ["a", "b"], "output_col": "p", "batch_size": 7, "output_type": "vector"}
    given: dict[str, Any] = {"data": "/a", "output": "/b", "job": "a" * 32, "options": options, "name": "mine"}
    given |= {"tags": ["a"]}
    made = PredictionDescription.from_json(given)
    assert made.to_json() == given
    assert PredictionDescription.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"output": ""}, "output"),
        ({"job": "../x"}, "job"),
        ({"options": {"batch_size": 0}}, "options.batch_size"),
        ({"options": {"batch_bytes": -1}}, "options.batch_bytes"),
        ({"options": {"output_type": "text"}}, "options.output_type"),
        ({"options": {"custom_objects": {}}}, "options.custom_objects"),
        ({"rule": "agn"}, "rule"),
    ],
)
def test_an_invalid_predict_job_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        PredictionDescription.from_json({"data": "/a", "output": "/b"} | changes)
    assert caught.value.field == field
