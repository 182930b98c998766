"""Tests of the length of modules and functions, and that each class name is unique."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from support.present import present
from support.sources import OTHERS, PACKAGE, name_of, nodes_of, sources, text_of, tree_of

MODULE_LINES = 800
FUNCTION_LINES = 60


def lines_of(node: ast.stmt) -> int:
    return present(node.end_lineno) - node.lineno + 1


def functions(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Return every function in ``tree``, at any depth, with its length without docstring and decorators."""
    for node in nodes_of(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = lines_of(node)
            if ast.get_docstring(node) is not None:
                lines -= lines_of(node.body[0])
            yield node, lines


def test_every_module_is_short() -> None:
    lengths = {name_of(path): text_of(path).count("\n") for path in sources(*PACKAGE, *OTHERS)}
    assert len(lengths) > 200
    too_long = [f"{name}: {lines} lines" for name, lines in lengths.items() if lines > MODULE_LINES]
    assert not too_long, "\n".join(too_long)


def test_every_function_is_short() -> None:
    """Many arguments do not count if the `def` has a ``# noqa: PLR0913``, as the reason there explains them."""
    too_long = []
    for path in sources(*PACKAGE, *OTHERS):
        rows = text_of(path).split("\n")
        for node, lines in functions(tree_of(path)):
            if "noqa: PLR0913" in rows[node.lineno - 1]:
                lines -= node.body[0].lineno - node.lineno
            if lines > FUNCTION_LINES:
                too_long.append(f"{name_of(path)}:{node.lineno} {node.name}: {lines} lines")
    assert not too_long, "\n".join(too_long)


def test_no_two_classes_of_the_package_have_the_same_name() -> None:
    """Those of ``trainers.py`` and ``compat/`` are exempt: they have dist-keras' names, some of which this project has
    too.
    """
    homes = defaultdict(list)
    for path in sources(*PACKAGE):
        if name_of(path).startswith(("distkeras/trainers.py", "distkeras/compat/")):
            continue
        for node in nodes_of(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name_of(path))
    shared = [f"{name}: {', '.join(found)}" for name, found in homes.items() if len(found) > 1]
    assert not shared, "\n".join(shared)


def test_docstrings_and_decorators_do_not_count() -> None:
    text = (
        '@one\n@two\ndef f():\n    """A line.\n\n    Another.\n    """\n    def g():\n        return 1\n    return g\n'
    )
    assert {node.name: lines for node, lines in functions(ast.parse(text))} == {"f": 4, "g": 2}
