"""What drivers and workers print without being asked: nothing that is not about the user's program."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import patience

from distkeras import chatter

IMPORTS = """
import sys
import distkeras
import keras
keras.ops.zeros(1)
print("of the program", file=sys.stderr)
"""

JOB = (
    IMPORTS
    + """
import numpy as np
import pandas as pd
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2,4]").getOrCreate()
rows = pd.DataFrame({"features": np.random.random((20000, 40)).tolist(), "label": 1.0})  # tasks of a megabyte
model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(1)])
distkeras.Trainer(model, loss="mse", num_workers=2, num_epoch=2).train(spark.createDataFrame(rows))
spark.stop()
"""
)


def lines_of(program: str, **variables: str) -> list[str]:
    """Return what a plain Python program prints."""
    ours = {chatter.LEVEL, chatter.VARIABLE, "SPARK_SUBMIT_OPTS", "SPARK_CONF_DIR", "JDK_JAVA_OPTIONS"}
    env = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=env | {"PYSPARK_PYTHON": sys.executable} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience(240),
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_backend_is_imported_quietly() -> None:
    assert lines_of(IMPORTS) == ["of the program"]


@pytest.mark.slow
def test_a_plain_program_prints_at_most_one_line_of_spark() -> None:
    assert lines_of(JOB) in (
        ["of the program"],
        ["of the program", "WARNING: Using incubator modules: jdk.incubator.vector"],
    )


@pytest.mark.slow  # The test below shows that nothing is set.
def test_a_variable_brings_every_line_back() -> None:
    printed = lines_of(JOB, DISTKERAS_VERBOSE="1")
    assert any("cannot" in line or "WARN" in line for line in printed), printed
    assert len(printed) > 8


def begun(monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, str]:
    """Return what `begin` sets in an environment with ``variables``."""
    for name in (chatter.LEVEL, chatter.VARIABLE, "SPARK_SUBMIT_OPTS", "SPARK_CONF_DIR", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "modules", {name: one for name, one in sys.modules.items() if name != "tensorflow"})
    before = dict(os.environ)
    chatter.begin()
    added = {name: value for name, value in os.environ.items() if before.get(name) != value}
    assert all(not chatter.is_users(name) for name in added)
    chatter.end()
    assert dict(os.environ) == before
    return added


def test_only_what_the_user_has_not_set_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    level, options = chatter.LEVEL, "SPARK_SUBMIT_OPTS"
    assert begun(monkeypatch).keys() == {level, options}
    assert begun(monkeypatch, **{level: "1", options: "-Xss4m"}) == {}
    assert begun(monkeypatch, DISTKERAS_VERBOSE="1") == {}
    assert begun(monkeypatch, PYSPARK_GATEWAY_PORT="1").keys() == {level}
    (tmp_path / "log4j2.properties").write_text("rootLogger.level = info\n")
    assert begun(monkeypatch, SPARK_CONF_DIR=str(tmp_path)).keys() == {level}


def test_other_lines_of_an_import_are_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with chatter.without_lines():
        os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called\nmine\nI0000 oneDNN is on\n")
        os.write(2, b"E0000 another error\nno end")
    assert capfd.readouterr().err == "mine\nE0000 another error\nno end"


@pytest.mark.slow
def test_another_finder_may_ask_all_finders_too() -> None:
    program = """
import sys
from importlib.abc import MetaPathFinder
import distkeras
class Asking(MetaPathFinder):  # as the finder of a coverage tool
    def find_spec(self, fullname, path, target=None):
        others = (finder for finder in sys.meta_path if finder is not self)
        return next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
sys.meta_path.insert(0, Asking())
import tensorflow
print(tensorflow.__name__)
"""
    assert lines_of(program) == ["tensorflow"]


def test_calls_of_several_models_are_no_warning() -> None:
    log = logging.getLogger("tensorflow")
    text = "5 out of the last 5 calls to <function %s> triggered tf.function retracing"
    assert not log.filter(
        log.makeRecord("", 30, "", 0, text, ("TensorFlowTrainer.make_predict_function at 0x1",), None)
    )
    assert log.filter(log.makeRecord("", 30, "", 0, text, ("users at 0x1",), None))
