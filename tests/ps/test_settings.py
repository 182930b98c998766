"""Settings: they are checked when they are built, survive JSON, have flags, and may exclude each other."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.patience import patience

from distkeras.ps.__main__ import parser, request_from
from distkeras.ps.checkpoint.checkpointer import Checkpoint, StartMode
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.protocol.tables import TableShape
from distkeras.ps.rules import make
from distkeras.ps.rules.schedules import Constant, Cosine
from distkeras.ps.server.process import StartRequest
from distkeras.ps.server.start_report import (
    Loading,
    NotStarted,
    ResumePoint,
    ServedToTheEnd,
    Started,
    StartReport,
    report_from_json,
    report_to_json,
)
from distkeras.ps.settings import ServerSettings, WorkerSettings
from distkeras.ps.transport.client import Certificate
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.ps.validate import EXCLUSIONS, Exclusion, reason_against, refuse
from distkeras.settings import TrainSettings

KEY = bytes(range(48, 80))


def server(rule: str = "downpour", **options: Any) -> ServerSettings:
    return ServerSettings(make(rule), **{"workers": 2} | options)


def worker(rule: str = "agn", **options: Any) -> WorkerSettings:
    return WorkerSettings(make(rule), **{"workers": 2} | options)


@pytest.mark.parametrize(
    ("rule", "options", "text"),
    [
        ("downpour", {"workers": 0}, "`workers` must be a positive integer. Received: workers=0"),
        ("downpour", {"workers": True}, "`workers` must be a positive integer"),
        ("downpour", {"workers": 2.0}, "`workers` must be a positive integer"),
        ("downpour", {"staleness_bound": -1}, "`staleness_bound` must be .* Received: staleness_bound=-1"),
        ("downpour", {"staleness_bound": 0.5}, "`staleness_bound` must be"),
        ("ssgd", {"learning_rate": 0.1, "staleness_bound": 1}, "`staleness_bound` is for rules without rounds"),
        ("aeasgd", {"staleness_bound": 1}, "`staleness_bound` hold back the center"),
        ("asgd", {}, "`learning_rate` must be given"),
        ("asgd", {"learning_rate": 0}, "`learning_rate` must be"),
        ("downpour", {"learning_rate": 0.1}, "`learning_rate` must be None"),
        ("downpour", {"max_skipped": -1}, "`max_skipped` must be"),
        ("downpour", {"port": 65536}, "`port` must be an integer from 0 to 65535"),
        ("downpour", {"max_body": 0}, "`max_body` must be"),
    ],
)
def test_an_invalid_server_setting_is_refused_by_name(rule: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        server(rule, **options)


@pytest.mark.parametrize(
    ("rule", "options", "text"),
    [
        ("downpour", {"workers": 0}, "`workers` must be a positive integer"),
        ("downpour", {"wire_format": "float16"}, "`wire_format` must be one of"),
        ("easgd", {"wire_format": "bfloat16"}, "`wire_format` must be 'float32'"),
        ("easgd", {"overlap": True}, "`overlap` must be False"),
        ("downpour", {"threads": 0}, "`threads` must be a positive integer"),
    ],
)
def test_an_invalid_worker_setting_is_refused_by_name(rule: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        worker(rule, **options)


def test_the_name_of_a_rule_is_refused_in_place_of_the_rule() -> None:
    for kind in (ServerSettings, WorkerSettings):
        with pytest.raises(ConfigurationError, match="`rule` must be a `Rule`"):
            kind("downpour", workers=1)  # type: ignore[arg-type]  # the mistake under test


def test_numbers_of_numpy_become_numbers_of_python() -> None:
    settings = server(workers=np.int32(3), staleness_bound=np.int64(1), port=np.uint16(7))
    for number in (settings.workers, settings.staleness_bound, settings.port):
        assert type(number) is int
    assert worker(threads=np.int8(2)).threads == 2
    assert server("asgd", learning_rate=np.float64(0.1)).learning_rate == Constant(0.1)


@pytest.mark.parametrize(
    "settings",
    [
        server(),
        server(
            "adag",
            staleness_bound=3,
            measure_gap=True,
            max_skipped=4,
            host="::1",
            port=4321,
            deadlines=Deadlines(lease=1.5),
            checkpoint=Checkpoint("somewhere", every=7),
            max_body=1 << 20,
        ),
        server("agn"),
        server("asgd", learning_rate=Cosine(0.5, length=10)),
    ],
    ids=lambda settings: settings.rule.name,
)
def test_server_settings_survive_json(settings: ServerSettings) -> None:
    assert ServerSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


def test_worker_settings_can_be_pickled() -> None:
    settings = worker(overlap=True, wire_format="bfloat16")
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_a_request_survives_json_and_its_repr_has_no_secrets() -> None:
    request = StartRequest(
        server(),
        KEY,
        Certificate("public", "-----PRIVATE-----"),
        StartMode(after=2, same_attempts=False, epochs=3),
        {"seed": 1},
    )
    assert StartRequest.from_json(request.to_json()) == request
    assert "\n" not in request.to_json()
    for secret in (KEY.decode(), KEY.hex(), "PRIVATE"):
        assert secret not in repr(request)


@pytest.mark.parametrize(
    "report",
    [
        Started("127.0.0.1", 7),
        Started("127.0.0.1", 7, ResumePoint(5, 2, False, 1), incarnation=3, epoch=4),
        Loading(),
        ServedToTheEnd(),
        NotStarted("no", 1, port_taken=True),
    ],
)
def test_a_report_survives_json(report: StartReport) -> None:
    line = report_to_json(report)
    assert "\n" not in line
    assert report_from_json(line) == report


def test_the_command_line_has_a_flag_for_each_field(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY.hex() + "\n")
    words = ["serve", "--rule", "adag", "--set", "window=3", "--workers", "4", "--key-file", str(tmp_path / "key")]
    assert request_from(parser().parse_args(words)) == StartRequest(ServerSettings(make("adag", window=3), 4), KEY)
    words += ["--staleness-bound", "2", "--measure-gap", "--max-skipped", "5", "--host", "::1", "--port", "99"]
    words += ["--max-body", "1000", "--checkpoint", "there", "--checkpoint-every", "8"]
    settings = request_from(parser().parse_args(words)).settings
    expected = ServerSettings(
        make("adag", window=3),
        workers=4,
        staleness_bound=2,
        measure_gap=True,
        max_skipped=5,
        host="::1",
        port=99,
        checkpoint=Checkpoint("there", 8),
        max_body=1000,
    )
    assert settings == expected
    # All other flags are set above. `relays`, `lends` and `shards`, which exclude these, and `learning_rate`
    # are tested below.
    defaults = ServerSettings(make("adag", window=3), workers=4)
    same = {
        option.name
        for option in dataclasses.fields(settings)
        if getattr(settings, option.name) == getattr(defaults, option.name)
    }
    assert same == {"rule", "workers", "learning_rate", "deadlines", "tables", "relays", "lends", "shards"}


def test_the_command_line_lets_workers_lend_and_divides_the_center(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY.hex())
    words = ["serve", "--rule", "adag", "--workers", "2", "--key-file", str(tmp_path / "key"), "--lends"]
    settings = request_from(parser().parse_args([*words, "--shards", "3"])).settings
    assert (settings.lends, settings.shards) == (True, 3)


@pytest.mark.parametrize("relays", ["host", 2])
def test_the_command_line_accepts_relays_as_a_word_or_as_a_number(tmp_path: Path, relays: str | int) -> None:
    (tmp_path / "key").write_text(KEY.hex())
    words = ["serve", "--rule", "agn", "--workers", "4", "--relays", str(relays)]
    request = request_from(parser().parse_args([*words, "--key-file", str(tmp_path / "key")]))
    assert request.settings == ServerSettings(make("agn"), workers=4, relays=relays)
    assert ServerSettings.from_json(request.settings.to_json()) == request.settings


@pytest.mark.slow
def test_the_command_line_works_without_docstrings() -> None:
    """The help is made from docstrings: `python -OO` removes them, and Python 3.13 removes their indentation."""
    command = [sys.executable, "-OO", "-m", "distkeras.ps", "serve", "--help"]
    for words, text in ((command, "--staleness-bound"), (command[:1] + command[2:], "number of workers of the job")):
        completed = subprocess.run(words, capture_output=True, text=True, timeout=patience(60), check=False)
        assert completed.returncode == 0, completed.stderr
        assert text in completed.stdout


def test_the_command_line_accepts_a_learning_rate_as_a_number(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY.hex())
    words = ["serve", "--rule", "asgd", "--workers", "1", "--learning-rate", "0.5"]
    request = request_from(parser().parse_args([*words, "--key-file", str(tmp_path / "key")]))
    assert request.settings.learning_rate == Constant(0.5)


CASES = [(capability, exclusion) for capability, listed in EXCLUSIONS.items() for exclusion in listed]
SETTINGS = [ServerSettings(make("agn"), 2), WorkerSettings(make("agn"), 2), TrainSettings()]


@pytest.mark.parametrize(("capability", "exclusion"), CASES, ids=lambda part: getattr(part, "option", part))
def test_the_error_names_the_option_its_value_and_the_reason(capability: str, exclusion: Exclusion) -> None:
    option, allowed, why = exclusion
    other: Any = "other" if isinstance(allowed[0], str) else 7
    with pytest.raises(ConfigurationError) as caught:
        refuse(capability, **{option: other})
    expected, received = f"`{option}` must be {allowed[0]!r}", f"{option}={other!r}"
    if option == "stream":
        expected, received = "`df` must not be a stream", "a stream"
    assert str(caught.value).startswith(expected)
    assert str(caught.value).endswith(f"{why}. Received: {received}")
    for value in allowed:
        assert reason_against(capability, **{option: value}) is None


@pytest.mark.parametrize("capability", EXCLUSIONS)
def test_options_are_fields_of_the_settings_whose_defaults_exclude_nothing(capability: str) -> None:
    fields = {field.name for one in SETTINGS for field in dataclasses.fields(one)}  # type: ignore[arg-type]  # dataclasses
    assert {exclusion.option for exclusion in EXCLUSIONS[capability]} <= fields | {"stream"}
    assert reason_against(capability, *SETTINGS, stream=False) is None


def test_settings_of_a_server_and_of_workers_refuse_what_relays_and_tables_exclude() -> None:
    with pytest.raises(ConfigurationError, match="`measure_gap` must be False with tables by rows"):
        ServerSettings(make("downpour"), 2, tables=(TableShape("users", 3, 2, 2),), measure_gap=True)
    with pytest.raises(ConfigurationError, match="`staleness_bound` must be None with relays"):
        ServerSettings(make("downpour"), 2, relays=1, staleness_bound=3)
    with pytest.raises(ConfigurationError, match="`overlap` must be False with relays"):
        WorkerSettings(make("downpour"), 2, relays=1, overlap=True)
