"""Tests that no object is half built: a constructor assigns every attribute that the object will have."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

import pytest
from support.sources import PACKAGE, name_of, nodes_of, sources, tree_of

#: Methods that run before any other code has the object.
BUILDING = ("__init__", "__new__", "__post_init__")


def assigned(method: ast.AST) -> dict[str, int]:
    """Yield each attribute of ``self`` that is assigned in a method, with its line."""
    return {
        node.attr: node.lineno
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


@functools.cache
def built(kind: ast.ClassDef) -> set[str]:
    """Return the attributes that the class and its constructor define."""
    found: set[str] = set()
    for node in kind.body:
        if isinstance(node, ast.FunctionDef):
            found |= assigned(node).keys() if node.name in BUILDING else {node.name}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@functools.cache
def bases_of(kind: ast.ClassDef) -> frozenset[str]:
    """Return the names of the base classes, without modules and parameters."""
    return frozenset(ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in kind.bases)


def late(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield the attributes that another method is the first to assign; base classes are found by their names."""
    kinds = [(path, node) for path, tree in trees.items() for node in nodes_of(tree) if isinstance(node, ast.ClassDef)]
    by_name: dict[str, list[ast.ClassDef]] = {}
    for _, kind in kinds:
        by_name.setdefault(kind.name, []).append(kind)

    def known(kind: ast.ClassDef, seen: frozenset[str] = frozenset()) -> set[str]:
        bases = bases_of(kind) - seen
        inherited = [known(base, seen | bases) for name in bases for base in by_name.get(name, ())]
        return built(kind).union(*inherited)

    for path, kind in kinds:
        there = known(kind)
        for method in kind.body:
            if isinstance(method, ast.FunctionDef) and method.name not in BUILDING:
                for name, line in assigned(method).items():
                    if name not in there:
                        yield f"{path}:{line} {kind.name}.{name}"


def test_every_attribute_is_assigned_by_the_constructor() -> None:
    trees = {name_of(path): tree_of(path) for path in sources(*PACKAGE, "benchmarks", "scripts")}
    found = list(late(trees))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("class A:\n    def f(self):\n        self.x = 1\n", ["A.x"]),
        ("class A:\n    def f(self):\n        self.x, self.y = 1, 2\n", ["A.x", "A.y"]),
        ("class A:\n    def __init__(self):\n        self.x = 0\n    def f(self):\n        self.x = 1\n", []),
        ("class A:\n    x: int\n    def f(self):\n        self.x = 1\n", []),
        ("class A:\n    x = 0\nclass B(m.A[int]):\n    def f(self):\n        self.x = 1\n", []),
        ("class A:\n    def f(self):\n        other.x = 1\n", []),
    ],
)
def test_late_attributes_are_found(text: str, names: list[str]) -> None:
    assert [found.split()[1] for found in late({"a.py": ast.parse(text)})] == names
