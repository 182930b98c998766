"""How long a module and a function may be, and that a class' name is one class'."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from support.present import present

ROOT = Path(__file__).parents[2]
PACKAGE = ("distkeras", "ps", "transformers")
OTHERS = ("benchmarks", "docs/docsite", "notebooks", "scripts", "tests")
MODULE_LINES = 800
FUNCTION_LINES = 60


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    """Path from the root and text of every Python file; the links in ``distkeras/`` are not followed."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(("distkeras/ps/", "distkeras/transformers/")):
                yield name, path.read_text(encoding="utf-8")


def lines_of(node: ast.stmt) -> int:
    return present(node.end_lineno) - node.lineno + 1


def functions(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Every function in ``tree``, at any depth, with its lines; neither its docstring nor its decorators count."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = lines_of(node)
            if ast.get_docstring(node) is not None:
                lines -= lines_of(node.body[0])
            yield node, lines


def test_no_module_is_long() -> None:
    lengths = {name: text.count("\n") for name, text in sources(*PACKAGE, *OTHERS)}
    assert len(lengths) > 200
    too_long = [f"{name}: {lines} lines" for name, lines in lengths.items() if lines > MODULE_LINES]
    assert not too_long, "\n".join(too_long)


def test_no_function_is_long() -> None:
    """One whose `def` has a ``# noqa: PLR0913`` is taken without its arguments: they are many for the reason there."""
    too_long = []
    for name, text in sources(*PACKAGE, *OTHERS):
        rows = text.split("\n")
        for node, lines in functions(ast.parse(text)):
            if "noqa: PLR0913" in rows[node.lineno - 1]:
                lines -= node.body[0].lineno - node.lineno
            if lines > FUNCTION_LINES:
                too_long.append(f"{name}:{node.lineno} {node.name}: {lines} lines")
    assert not too_long, "\n".join(too_long)


def test_no_two_classes_of_the_package_have_one_name() -> None:
    """But those of ``trainers.py`` and ``compat/``: they are dist-keras' names, some of which this project has too."""
    homes = defaultdict(list)
    for name, text in sources(*PACKAGE):
        if name.startswith(("distkeras/trainers.py", "distkeras/compat/")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    shared = [f"{name}: {', '.join(found)}" for name, found in homes.items() if len(found) > 1]
    assert not shared, "\n".join(shared)


def test_a_docstring_and_decorators_do_not_count() -> None:
    text = (
        '@one\n@two\ndef f():\n    """A line.\n\n    Another.\n    """\n    def g():\n        return 1\n    return g\n'
    )
    assert {node.name: lines for node, lines in functions(ast.parse(text))} == {"f": 4, "g": 2}
