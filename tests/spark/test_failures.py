"""Errors of Spark as typed errors, and the lines of a traceback that are shown."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import pytest
from support.present import present

from distkeras.ps.errors import VARIABLE, BadValueError, ConfigurationError, DistkerasError, ShapeError, WorkerError
from distkeras.spark.failures import short_errors, typed_error

TASK = (
    "Job aborted due to stage failure: Task 1 in stage 2.0 failed 1 times, most recent failure: Lost task 1.0 in stage "
    "2.0 (TID 3) (host executor driver): org.apache.spark.api.python.PythonException: Traceback (most recent call "
    'last):\n  File "/lib/python3.12/b.py", line 1, in c\n{}\n\n\tat org.apache.spark.scheduler.Task.run(Task.scala)\n'
)


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (
            TASK.format("distkeras.ps.errors.BadValueError: no null. Received: null [worker/partition 1, column 'x']"),
            BadValueError,
            "no null. Received: null [worker/partition 1, column 'x']",
        ),
        (
            TASK.format("distkeras.ps.errors.ShapeError: odd. Received: 3 SQLSTATE: P0001"),
            ShapeError,
            "odd. Received: 3",
        ),
        (
            TASK.format("ModuleNotFoundError: No module named 'distkeras'"),
            ConfigurationError,
            "Received: ModuleNotFoundError: No module named 'distkeras', with 'python7'",
        ),
        ("Error from python worker:\n  /bin/python3: No module named pyspark\n", ConfigurationError, "pyspark, with"),
        ('java.io.IOException: Cannot run program "pythn3": error=2', ConfigurationError, 'program "pythn3", with'),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has 3.9", ConfigurationError, "worker has 3.9, with"),
        (
            "[DIVIDE_BY_ZERO] Division by zero.\n\tat org.apache",
            WorkerError,
            "Spark ended the job's tasks: [DIVIDE_BY_ZERO] Division by zero.",
        ),
    ],
)
def test_an_error_of_spark_becomes_a_typed_error(raised: str, kind: type[DistkerasError], text: str) -> None:
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(pythonExec="python7"))
    error = typed_error(RuntimeError(raised), session)
    assert type(error) is kind
    assert text in str(error)
    assert "\n" not in str(error)
    assert error.remote_traceback == raised


def shown(function: Callable[[], object]) -> list[str]:
    with pytest.raises(DistkerasError) as caught:
        short_errors(function)()
    return "".join(traceback.format_exception(caught.value)).splitlines()


def by_library(own: Callable[[], object]) -> object:
    """Raise an error that is caused by an error deep within Keras."""
    try:
        return keras.tree.map_structure(lambda _: keras.tree.map_structure(lambda _: own(), [1]), [1])
    except Exception as error:
        raise ConfigurationError(f"must be good. Received: {error}") from error


def test_only_the_users_own_frames_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def own() -> None:
        raise ValueError("bad")

    monkeypatch.setattr("distkeras.spark.failures.is_library", lambda path: "test_failures" not in path)
    lines = shown(lambda: by_library(own))
    assert len(lines) < 25
    assert any("in own" in line for line in lines)
    assert not any("site-packages/keras" in line for line in lines)
    assert lines[-1].endswith("ConfigurationError: must be good. Received: bad")


def test_a_cause_without_the_users_code_is_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distkeras.spark.failures.is_library", lambda path: True)
    lines = shown(lambda: by_library(lambda: [][0]))
    assert not any("IndexError" in line for line in lines)
    assert len(lines) < 10


def test_the_full_traceback_is_kept_and_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError) as caught:
        short_errors(lambda: by_library(lambda: [][0]))()
    assert "IndexError" in present(caught.value.full_traceback)
    assert "site-packages" in present(caught.value.full_traceback)
    monkeypatch.setenv(VARIABLE, "full")
    assert any("IndexError" in line for line in shown(lambda: by_library(lambda: [][0])))
