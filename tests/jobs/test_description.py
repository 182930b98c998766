from __future__ import annotations

import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from distkeras.jobs.description import JobDescription, json_of, require_allowed
from distkeras.jobs.errors import DescriptionError
from distkeras.jobs.schema import LEFT_OUT, job_schema
from distkeras.ps.rules import all_rules
from distkeras.trainer import Trainer

LEAST = {"rule": "agn", "data": "/data/train.parquet"}


def refused(**changes: Any) -> DescriptionError:
    with pytest.raises(DescriptionError) as caught:
        JobDescription.from_json(LEAST | changes)
    return caught.value


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(job_schema())
    json.dumps(job_schema())


def test_every_keyword_of_the_trainer_is_in_the_schema_or_left_out() -> None:
    options = set(job_schema()["properties"]["options"]["properties"])
    assert options == set(inspect.signature(Trainer).parameters) - LEFT_OUT
    assert set(inspect.signature(Trainer).parameters) >= LEFT_OUT


@pytest.mark.parametrize("name", all_rules())
def test_every_rule_goes_with_its_defaults(name: str) -> None:
    kind = all_rules()[name]
    config = kind().config()
    options = {"learning_rate": 0.1} if kind().traits.gradient else {}
    made = JobDescription.from_json(LEAST | {"rule": name, "hyper_parameters": config, "options": options})
    assert made.made_rule() == kind()
    assert JobDescription.from_json({"rule": name, "data": "x"}).made_rule() == kind()


def test_a_description_comes_back() -> None:
    options = {
        "batch_size": 64,
        "features_col": ["a", "b"],
        "label_col": "y",
        "class_weight": {"0": 1, "1": 2.5},
        "worker_optimizer": {"class_name": "adam", "config": {"learning_rate": 0.01}},
        "loss": "mse",
        "metrics": ["accuracy"],
        "communication_window": "auto",
    }
    given = LEAST | {"hyper_parameters": {"window": 3}, "options": options, "name": "mine", "checkpoint_every": 7}
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
        ({"hyper_parameters": {"window": "x"}}, "hyper_parameters.window"),
        ({"hyper_parameters": {"window": 0}}, "hyper_parameters.window"),
        ({"hyper_parameters": {"nothing": 1}}, "hyper_parameters"),
        ({"options": {"batch_size": 0}}, "options.batch_size"),
        ({"options": {"batch_size": True}}, "options.batch_size"),
        ({"options": {"batch_size": 2**60}}, "options.batch_size"),
        ({"options": {"num_epoch": 1.5}}, "options.num_epoch"),
        ({"options": {"num_workers": 10**6}}, "options.num_workers"),
        ({"options": {"bad_numbers": "ignore"}}, "options.bad_numbers"),
        ({"options": {"wire_format": "int4"}}, "options.wire_format"),
        ({"options": {"learning_rate": 0.1}}, "options.learning_rate"),
        ({"options": {"class_weight": {"a": 1}}}, "options.class_weight"),
        ({"options": {"loss": "keras.utils.get_file"}}, "options.loss"),
        ({"options": {"loss": {"class_name": "Lambda"}}}, "options.loss"),
        ({"options": {"metrics": [{"module": "os"}]}}, "options.metrics.0"),
        ({"options": {"worker_optimizer": {"class_name": "sgd", "module": "os"}}}, "options.worker_optimizer"),
        (
            {"options": {"worker_optimizer": {"class_name": "sgd", "config": {"x": {"class_name": "y"}}}}},
            "options.worker_optimizer.config.x",
        ),
        ({"options": {"custom_objects": {}}}, "options"),
        ({"options": {"host": "0.0.0.0"}}, "options"),
        ({"options": []}, "options"),
        ({"code": "import os"}, ""),
    ],
)
def test_what_cannot_work_is_refused_with_its_field(changes: dict[str, Any], field: str) -> None:
    error = refused(**changes)
    assert error.field == field
    assert "Received: " in error.message
    assert len(error.message) < 600
    assert pickle.loads(pickle.dumps(error)).field == field


def test_a_hyper_parameter_of_another_rule_is_refused() -> None:
    assert refused(rule="downpour", hyper_parameters={"rho": 1.0}).field == "hyper_parameters"


@pytest.mark.parametrize("value", [None, [], 3, "x", {}, {"rule": "agn"}, {"data": "x"}])
def test_what_is_no_description_is_refused(value: Any) -> None:
    with pytest.raises(DescriptionError):
        JobDescription.from_json(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        '{"rule": "agn", "rule": "easgd"}',
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": ' + "9" * 10_000 + "}",
        b"\xff\xfe",
        " " * ((1 << 20) + 1),
    ],
    ids=range(10),
)
def test_what_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(DescriptionError, match="JSON"):
        json_of(text)


# ---- where data may lie


@pytest.fixture
def roots(tmp_path: Path) -> list[str]:
    (tmp_path / "open" / "deep").mkdir(parents=True)
    (tmp_path / "closed").mkdir()
    return [str(tmp_path / "open"), "hdfs://name/data", "s3a://bucket"]


def test_data_below_a_root_is_allowed(tmp_path: Path, roots: list[str]) -> None:
    assert require_allowed(str(tmp_path / "open" / "a b.parquet"), roots) == f"file://{tmp_path}/open/a b.parquet"
    assert require_allowed(f"file://{tmp_path}/open/deep", roots) == f"file://{tmp_path}/open/deep"
    assert require_allowed("hdfs://name/data/x", roots) == "hdfs://name/data/x"
    assert require_allowed("s3a://bucket/x", roots) == "s3a://bucket/x"


@pytest.mark.parametrize(
    "place",
    [
        "{}/closed/x",
        "{}/open/../closed/x",
        "{}/openly",
        "{}",
        "/",
        "file://{}/closed/x",
        "file://elsewhere{}/open/x",
        "{}/open/{{a,b}}",
        "{}/open/*",
        "{}/open/[ab]",
        "{}/open/%2e%2e/closed",
        "{}/open/x#y",
        "{}/open/x\n",
        "hdfs://name/database/x",
        "hdfs://name:99/data/x",
        "hdfs://other/data/x",
        "hdfs:///data/x",
        "s3a://bucket2/x",
        "s3://bucket/x",
        "jdbc:postgresql://host/x",
        "http://bucket/x",
    ],
)
def test_data_elsewhere_is_refused(tmp_path: Path, roots: list[str], place: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        require_allowed(place.format(tmp_path), roots)
    assert caught.value.field == "data"


def test_a_link_does_not_lead_out(tmp_path: Path, roots: list[str]) -> None:
    (tmp_path / "open" / "link").symlink_to(tmp_path / "closed")
    with pytest.raises(DescriptionError):
        require_allowed(str(tmp_path / "open" / "link" / "x"), roots)


def test_without_a_root_nothing_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match="its operator has allowed none"):
        require_allowed(str(tmp_path), [])
