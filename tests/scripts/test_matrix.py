"""Tests of the matrix of environments: it covers what the metadata names, and its counts are right."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from matrix import command, suite
from matrix.environments import ENVIRONMENTS, ROOT, Environment, Unavailable, lowest, make, metadata
from matrix.suite import CORE, Row
from support.present import present

from distkeras.keras_model.archive import BACKENDS

MATRIX = ROOT / "docs" / "matrix.json"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHER = "2.7"


class TestEnvironments:
    def test_every_python_of_the_metadata_is_covered(self) -> None:
        named = [line.rpartition(" ")[2] for line in metadata()["classifiers"] if ":: Python :: 3." in line]
        assert {one.python for one in ENVIRONMENTS} == set(named)
        assert metadata()["requires-python"] == f">={named[0]}"

    def test_every_backend_is_covered(self) -> None:
        assert {one.backend for one in ENVIRONMENTS} == set(BACKENDS)
        assert set(BACKENDS) == {"tensorflow"} | {"jax", "torch"} & set(metadata()["optional-dependencies"])

    def test_the_oldest_and_the_newest_spark_are_covered(self) -> None:
        (spark,) = lowest(line for line in metadata()["dependencies"] if line.startswith("pyspark"))
        assert spark.startswith("pyspark==4.0.")
        old = {one.oldest or "pyspark==4.0.*" in one.pins for one in ENVIRONMENTS}
        assert old == {True, False}

    def test_names_are_unique(self) -> None:
        assert len({one.name for one in ENVIRONMENTS}) == len(ENVIRONMENTS)

    def test_each_environment_has_been_run(self) -> None:
        rows = command.load(MATRIX)
        assert [row.environment for row in rows] == [one.name for one in ENVIRONMENTS]
        assert all(row.good for row in rows)

    def test_the_oldest_environment_has_the_lowest_versions(self) -> None:
        lowest_of = dict(pin.split("==") for pin in lowest(metadata()["dependencies"]))
        (row,) = (row for row, one in zip(command.load(MATRIX), ENVIRONMENTS, strict=True) if one.oldest)
        for name, version in present(row.versions).items():
            assert f"{version}.".startswith(f"{lowest_of[name]}."), name

    def test_the_paths_of_the_core_exist(self) -> None:
        assert not [path for path in CORE if not (ROOT / path).exists()]


def test_the_lowest_version_of_each_requirement_is_pinned() -> None:
    assert lowest(["numpy>=1.26", "ml-dtypes>=0.4,<1"]) == ["numpy==1.26", "ml-dtypes==0.4"]
    with pytest.raises(ValueError, match="must have a lowest version"):
        lowest(["numpy"])


def test_a_missing_interpreter_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # Without a path, uv is not found.
    with pytest.raises(Unavailable, match=f"Python {OTHER} must be on the path, or uv"):
        make(Environment(OTHER, "jax"), tmp_path / "environment")


@pytest.fixture
def core(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that writes a file of tests to use instead of the core."""

    def write(text: str) -> str:
        (tmp_path / "test_few.py").write_text(text)
        return str(tmp_path / "test_few.py")

    return write


@pytest.mark.slow
def test_the_results_of_a_run_are_counted(core: Callable[[str], str]) -> None:
    text = """
        import os, pytest, warnings
        def test_backend(): assert os.environ["KERAS_BACKEND"] == "jax"
        def test_warning(): warnings.warn("old", DeprecationWarning)
        def test_failure(): assert False
        @pytest.fixture
        def broken(): raise ValueError
        def test_error(broken): pass
        @pytest.mark.skip(reason="meant")
        def test_skipped(): pass
    """
    path = core("\n".join(line[8:] for line in text.splitlines()))
    row = suite.tested(Environment(HERE, "jax"), Path(sys.executable), [path])
    assert (row.passed, row.failed, row.skipped, row.trouble, row.good) == (2, 2, 1, "", False)
    assert row.python.startswith(HERE)
    assert set(present(row.versions)) >= {"pyspark", "keras", "tensorflow", "numpy"}


@pytest.mark.slow
def test_a_run_without_tests_is_a_failure(core: Callable[[str], str]) -> None:
    row = suite.tested(Environment(HERE, "tensorflow"), Path(sys.executable), [core("import no_such_module")])
    assert not row.good


def test_the_table_is_printed_and_the_status_returned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(environment: Environment, folder: Path) -> Row:
        if environment.backend == "torch":
            return Row(environment.name, "torch", trouble="no such interpreter")
        versions = {"pyspark": "4.0.0", "keras": "3.11.3", environment.backend: "1.2"}
        return Row(environment.name, environment.backend, "3.12.1", versions, 3, 0, 1, 7)

    monkeypatch.setattr(command, "row", row)
    path = tmp_path / "matrix.json"
    assert command.main(["--only", "jax", "--json", str(path)]) == 0
    captured = capsys.readouterr()
    cells = [cell.strip() for cell in captured.out.splitlines()[2].strip("|").split("|")]
    assert cells == ["3.12.1", "jax 1.2", "4.0.0", "3.11.3", "– – –", "3", "0", "1", "7"]

    assert command.main(["--json", str(path)]) == 1
    assert "torch-newest: no such interpreter" in capsys.readouterr().err
    assert [one.environment for one in command.load(path)] == [one.name for one in ENVIRONMENTS]


def test_an_unknown_environment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "cobol"])
    assert "Received: cobol" in capsys.readouterr().err
