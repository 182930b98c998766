"""Tests that names in the docs exist: arguments of the trainer, tests that show a promise, modules in the pictures."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import keras
import pyspark.ml.classification
import pyspark.ml.feature
import pyspark.ml.tuning
import pytest
from docsite.pictures import PICTURES
from support.sources import nodes_of, sources, tree_of

import distkeras
from distkeras.ml.model import TrainingSummary
from distkeras.ps.validate import EXCLUSIONS
from distkeras.settings import GROUPS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/guide").glob("*.md")]
)


def spans(path: Path) -> Iterator[str]:
    """Return the inline code outside of fenced blocks."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", text)


def resolves(name: str) -> bool:
    """Return whether a dotted name is a module or an object in one."""
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return bool(module) and hasattr(importlib.import_module(module), attribute)
    return True


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_arguments_and_attributes_of_the_trainer_exist(path: Path) -> None:
    trainer = distkeras.Trainer
    arguments = set(inspect.signature(trainer).parameters) | set(inspect.signature(trainer.train).parameters)
    source = "".join(inspect.getsource(kind) for kind in trainer.__mro__[:-1])
    for span in spans(path):
        for name in re.findall(r"Trainer\((\w+)=", span):
            assert name in arguments, span
        for name in re.findall(r"^trainer\.(\w+)", span):
            assert hasattr(trainer, name) or f"self.{name}" in source, span


@pytest.mark.parametrize("page", ["docs/promises.md", "docs/guide/large-models.md"])
def test_tests_that_show_a_promise_exist(page: str) -> None:
    shown = {span for span in spans(ROOT / page) if re.fullmatch(r"[\w/]+/test_\w+", span)}
    assert shown
    for name in shown:
        assert (ROOT / "tests" / f"{name}.py").exists(), name


def test_the_table_of_what_works_with_shards_is_complete() -> None:
    """Each row names a test, and each option that shards exclude, or whose values they are tried with, has a row."""
    text = (ROOT / "docs/guide/large-models.md").read_text().partition("## What works with shards")[2]
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")][2:]
    assert all(re.search(r"`[\w/]+/test_\w+`", row[-1]) for row in rows)
    named = " ".join(row[0] for row in rows)
    excluded = {exclusion.option for exclusion in EXCLUSIONS["shards"]}
    network = {field.name for field in dataclasses.fields(distkeras.Network)} - {"host", "port", "shards"}
    for option in sorted(excluded | network | {"daso", "resume", "lends", "stream", "tables"}):
        assert option in named or option.replace("_", " ") in named, option


def classes() -> set[str]:
    """Return every class of the project, by its name."""
    return {
        node.name
        for folder in ("distkeras", "ps", "transformers")
        for path in sources(folder)
        for node in nodes_of(tree_of(path))
        if isinstance(node, ast.ClassDef)
    }


def test_classes_exist() -> None:
    known = classes()
    names = {span for path in DOCUMENTS for span in spans(path) if re.fullmatch(r"([A-Z][a-z]+){2,}", span)}
    drawn = {name for name in re.findall(r">([A-Z]\w+)<", PICTURES["commit.svg"]().svg()) if name != "Worker"}
    assert names
    others = (
        builtins,
        pyspark.ml,
        pyspark.ml.classification,
        pyspark.ml.feature,
        pyspark.ml.tuning,
        keras.callbacks,
        keras.layers,
    )
    theirs = {name for name in names if any(hasattr(module, name) for module in others)}
    assert (names | drawn) - {"Session"} - theirs <= known


def test_modules_in_the_pictures_exist() -> None:
    names = re.findall(r">([a-z_]+(?:\.[a-z_]+)+)<", PICTURES["dataframe.svg"]().svg())
    assert names
    for name in names:
        assert resolves(f"distkeras.{name}"), name


def test_the_names_in_the_tables_of_conventions_exist() -> None:
    """The last column of each table names parameters, attributes, or classes of Keras and of this package."""
    homes = (distkeras.KerasEstimator, distkeras.KerasModel, TrainingSummary, distkeras, keras.layers, keras.utils)
    rows = re.findall(r"^\| .* \| ([^|]*) \|$", (ROOT / "docs/guide/conventions.md").read_text(), re.MULTILINE)
    spans = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
    words = {word for span in spans for word in re.findall(r"[A-Za-z]\w+(?=[=(]|$)", span)}
    assert {"class_weight", "handle_invalid", "KerasEstimator", "EarlyStopping"} <= words
    called = (distkeras.KerasEstimator, distkeras.EarlyStopping, keras.layers.Dense, *GROUPS.values())
    keywords = {name for function in called for name in inspect.signature(function).parameters}
    unknown = {word for word in words if not any(hasattr(home, word) for home in homes)}
    set_there = set(re.findall(r"self\.(\w+)", inspect.getsource(TrainingSummary)))
    assert unknown <= keywords | set_there, unknown - keywords - set_there
