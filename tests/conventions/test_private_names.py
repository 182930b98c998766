"""Tests that only `distkeras.private_keras` touches private names of Keras, where ruff does not look.

Ruff refuses ``keras.src``, and another object's private attribute. It accepts private attributes of ``self``, which a
subclass of Keras' classes has inherited, and names in texts, such as those of ``getattr``.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.present import present
from support.sources import PACKAGE, ROOT, name_of, nodes_of, sources, tree_of

DOOR = ROOT / "distkeras" / "private_keras.py"


def private(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private attribute that is read, and of each text that is such a name."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            line, name = node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            line, name = node.lineno, node.value
        else:
            continue
        if re.fullmatch(r"_[a-z]\w*", name):
            yield line, name


def defined(tree: ast.AST) -> set[str]:
    """Return the names of the functions, classes, variables and attributes that a module makes."""
    names = set[str]()
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def names_of_keras() -> set[str]:
    """Return the private attributes in the sources of Keras."""
    (folder,) = present(present(importlib.util.find_spec("keras")).submodule_search_locations)
    texts = (path.read_text() for path in Path(folder).rglob("*.py") if not path.stem.endswith("_test"))
    return {name for text in texts for name in re.findall(r"\.(_[a-z]\w*)", text)}


def touched(tree: ast.AST, names: set[str]) -> list[tuple[int, str]]:
    own = defined(tree)
    return [(line, name) for line, name in private(tree) if name in names and name not in own]


def test_one_module_touches_private_names_of_keras() -> None:
    door = {name for _, name in private(tree_of(DOOR))}
    assert {"_flatten_layers", "_learning_rate", "_momentums"} <= door
    trees = {name_of(path): tree_of(path) for path in sources(*PACKAGE) if path != DOOR}
    # Where a class extends one of another module, `self` has the private attributes of that one.
    ours = set().union(*map(defined, trees.values())) | {"_asdict"}
    names = door | names_of_keras() - ours
    found = [f"{place}:{line}: {name}" for place, tree in trees.items() for line, name in touched(tree, names)]
    assert not found, "add a function to distkeras/private_keras.py for:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("model._layers()", 1),
        ("getattr(model, '_layers', None)", 1),
        ("vars(model)['_layers']", 1),
        ("class A(keras.layers.Layer):\n def call(self): return self._layers", 1),
        ("class A(keras.layers.Layer):\n def call(self): self._layers = 1; return self._layers", 0),
        ("model._mine", 0),
        ("'the list `_layers`'", 0),
    ],
)
def test_private_names_are_found(code: str, count: int) -> None:
    assert len(touched(ast.parse(code), {"_layers"})) == count
