"""Tests that the code and commands in README and guide work: Python is run, and the names in commands exist."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.patience import patience

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide"
START = GUIDE / "start.md"
README = ROOT / "README.md"
#: Pages whose code is a complete program.
FIRST, TABULAR, IMAGES, TEXT = PROGRAMS = [
    GUIDE / f"{name}.md" for name in ("first-pipeline", "tabular", "images", "text")
]
#: Pages that continue the code of "Getting started".
FURTHER = sorted(
    path for path in GUIDE.glob("*.md") if path not in (START, *PROGRAMS) and "```python" in path.read_text()
)
#: Letters that fit the column of code at 1280 px.
COLUMN = 92
ROWS = {"train": 256, "test": 64}
PIXELS = 784


def blocks(path: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def run(path: Path, namespace: dict[str, Any]) -> None:
    """Execute a page's Python code, one block after the other; an error names the page and the block.

    The data lies in the current folder, but Spark resolves relative paths in the folder in which its JVM was
    started.
    """
    for place, block in enumerate(blocks(path, "python")):
        path_of = r'''(\b(?:parquet|save|load|start)\(|"checkpointLocation", )"'''
        absolute = re.sub(path_of, rf'\1"{Path.cwd()}/', block)
        exec(compile(absolute, f"{path.name}, block {place}", "exec"), namespace)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder in which the snippets run, with a small part of the data that they read."""
    place = tmp_path_factory.mktemp("snippets")
    numbers = np.random.default_rng(0)
    for name, rows in ROWS.items():
        features = numbers.random((rows, PIXELS), np.float32)
        table = pa.table({"features": list(features), "label": numbers.integers(0, 10, rows)})
        pq.write_table(table, place / f"{name}.parquet")
    before = Path.cwd()
    os.chdir(place)
    yield place
    os.chdir(before)


@pytest.fixture(scope="module")
def started(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Return the variables that "Getting started" has defined at its end."""
    namespace: dict[str, Any] = {"__name__": "snippets"}
    run(START, namespace)
    return namespace


@pytest.mark.parametrize("path", sorted(GUIDE.glob("*.md")), ids=lambda path: path.stem)
def test_code_and_output_fit_their_column(path: Path) -> None:
    lines = "".join(block for block in blocks(path, r"\w+")).splitlines()
    assert [line for line in lines if len(line) > COLUMN] == []


def test_every_guide_is_linked_from_the_readme_and_the_first_page() -> None:
    for page, folder in ((ROOT / "README.md", "docs/guide/"), (ROOT / "docs" / "index.md", "guide/")):
        linked = set(re.findall(rf"\]\({folder}([\w-]+)\.md", page.read_text()))
        assert linked == {path.stem for path in GUIDE.glob("*.md")}, page.name


@pytest.mark.slow
@pytest.mark.parametrize("path", FURTHER, ids=lambda path: path.stem)
def test_the_guide_runs(path: Path, started: dict[str, Any]) -> None:
    run(path, dict(started))


def test_the_readmes_program_runs(spark: SparkSession) -> None:
    """With fewer rows than the page has, in the session of all tests."""
    program = blocks(README, "python")[0]
    for old, new in (("20_000", "256"), ("spark.stop()\n", "")):
        assert old in program
        program = program.replace(old, new)
    exec(compile(program, README.name, "exec"), {"__name__": "snippets"})


def output_of(page: Path, folder: Path) -> list[str]:
    """Return the lines that a page's program prints in ``folder``, without empty ones."""
    (program,) = blocks(page, "python")
    script = folder / f"{page.stem.replace('-', '_')}.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, script.name], cwd=folder, capture_output=True, text=True, timeout=patience(300)
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.strip()]


def expected_output(page: Path) -> list[str]:
    """Return the lines that the page claims its program prints."""
    (expected,) = blocks(page, "text")
    return [line for line in expected.splitlines() if line.strip()]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_first_pipeline_prints_what_the_page_says(tmp_path: Path) -> None:
    printed = dict(line.split(" ", 1) for line in output_of(FIRST, tmp_path) if line.startswith("accurac"))
    assert float(printed["accuracy"]) > 0.9
    assert printed["accuracies"].startswith("{32: 0.9")
    assert (tmp_path / "best.saved" / "metadata").is_dir()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_table_with_nulls_and_words_prints_what_the_page_says(tmp_path: Path) -> None:
    for one, other in zip(output_of(TABULAR, tmp_path), expected_output(TABULAR), strict=True):
        if "under ROC" not in other:
            kept = -2 if other.startswith("|") else None  # All columns except the prediction are compared.
            assert one.split("|")[:kept] == other.split("|")[:kept]
            continue
        # Workers commit in any order, so the areas differ in their second digit.
        label, area = other.rpartition(" ")[::2]
        assert one.rpartition(" ")[0] == label
        assert float(one.rpartition(" ")[2]) == pytest.approx(float(area), abs=0.1 if "0.0003" in label else 0.03)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("page", "tolerance"),
    [
        pytest.param(README, 0.05, id="readme", marks=pytest.mark.slow),
        pytest.param(IMAGES, 0.1, id="images", marks=pytest.mark.slow),
        pytest.param(TEXT, 0.05, id="text", marks=pytest.mark.slow),
    ],
)
def test_a_tutorial_prints_what_its_page_says(page: Path, tolerance: float, tmp_path: Path) -> None:
    """Workers commit in any order, so accuracies differ a little; predicted classes are 0.0 and 1.0."""
    number = re.compile(r"\d+\.\d+")
    for one, other in zip(output_of(page, tmp_path), expected_output(page), strict=True):
        assert number.sub("#", one) == number.sub("#", other)
        values = [float(value) for value in number.findall(one)]
        assert values == pytest.approx([float(value) for value in number.findall(other)], abs=tolerance), one


def commands() -> Iterator[tuple[str, str]]:
    """Return file name and command of each logical line in the shell blocks of README, CONTRIBUTING and guide."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(GUIDE.glob("*.md"))):
        for block in blocks(path, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                if shlex.split(line, comments=True):
                    yield path.name, line


@pytest.mark.parametrize(("name", "command"), list(commands()))
def test_the_names_in_a_command_exist(name: str, command: str) -> None:
    words = shlex.split(command, comments=True)
    for place, word in enumerate(words):
        if re.match(r"(scripts|tests|notebooks|docs)/", word):
            assert (ROOT / word.partition("::")[0]).exists(), word
        if re.fullmatch(r"scripts/\w+(\.py|\.sh)?", word):
            text_of_help = help_of(word)
            options = [part.partition("=")[0] for part in words[place + 1 :] if part.startswith("--")]
            missing = [option for option in options if option not in text_of_help]
            assert not missing or word.endswith("test.sh")  # The script passes these arguments to pytest.
    if words[:2] == ["python", "-m"] and words[2].startswith("distkeras"):
        done = subprocess.run([sys.executable, *words[1:], "--help"], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()


@functools.cache
def help_of(script: str) -> str:
    """Return a script's help on its options; a shell script passes the option to the Python script of its name."""
    stem = ROOT / Path(script).with_suffix("")
    program = next((path for path in (stem, stem.with_suffix(".py")) if path.exists()), None)
    if program is None:
        return (ROOT / script).read_text()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, program, "--help"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
