"""Tests of which modules may import which others, by reading the sources."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from support.sources import nodes_of, tree_of

ROOT = Path(__file__).parents[2]
PS, CORE, TRANSFORMERS = ROOT / "ps", ROOT / "distkeras", ROOT / "transformers"

#: Libraries that are imported inside functions, by jobs that save snapshots or encrypt.
OPTIONAL = {"files.py": {"pyarrow"}, "client.py": {"cryptography"}}
#: Modules that an executor imports before Keras' backend is chosen, or that must work where only `distkeras.ps`
#: exists.
LIGHT = [
    *(f"data/{name}" for name in ("batches", "columns", "ordering", "source")),
    *(f"keras_model/{name}" for name in ("archive", "compiled_steps", "recipe", "replica", "variables")),
    "training/task",
]
#: The transformers, predictors and evaluators of dist-keras at its own paths are made from this project's.
OF_TRANSFORMERS = {
    "distkeras.compat.stages",
    "distkeras.predictors",
    "distkeras.evaluators",
    "distkeras.job_server.description",
    "distkeras.job_server.driver",
}
#: What stands on the core: a reader of the core needs none of it, and it imports the core's public names alone.
FACES = (
    *(f"distkeras.{name}" for name in ("analysis", "commands", "compat", "dashboard", "job_server")),
    *(f"distkeras.{name}" for name in ("evaluators", "job_deployment", "predictors", "trainers", "utils")),
    "distkeras.ps.simulation",
    "distkeras.__main__",
)
#: State machines, whose caller has the sockets, the threads and the clock.
SANS_IO = [
    *(f"protocol/{name}" for name in ("framing", "messages", "driver_messages", "layout", "compression")),
    *(f"center/{name}" for name in ("arithmetic", "center", "leases", "schedulers", "commit_log")),
    "worker/loop",
    *(f"simulation/{name}" for name in ("simulate", "virtual_job")),
]


def sources(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.rglob("*.py"))
        if not (set(path.relative_to(folder).parts) & {"ps", "transformers"})
    ]


@functools.cache
def imports(path: Path, *, everywhere: bool = True) -> tuple[str, ...]:
    """Return the full names that ``path`` imports, also for types alone.

    Without ``everywhere``, only those that are imported with it.
    """

    def walk(nodes: list[ast.stmt]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                assert node.module is not None
                yield node.module
                # `from distkeras.ps import rules` imports a module, so that module is yielded.
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not everywhere:
                continue
            elif everywhere or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for name in ("body", "orelse", "finalbody"):
                    yield from walk([part for part in getattr(node, name, []) if isinstance(part, ast.stmt)])
                for handler in getattr(node, "handlers", []):
                    yield from walk(handler.body)

    tree = tree_of(path)
    return (*walk(tree.body), *(imported_by_call(tree) if everywhere else ()))


def imported_by_call(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that ``importlib.import_module`` or ``runpy.run_module`` imports by name."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "run_module")):
            yield from (str(value.value) for value in node.args if isinstance(value, ast.Constant))


def all_imports(paths: Iterable[Path], *, everywhere: bool = True) -> Iterator[tuple[str, Path, str]]:
    """Yield each import of ``paths``: its full name, the path, and a text that names both in a failure."""
    for path in paths:
        for name in imports(path, everywhere=everywhere):
            yield name, path, f"{path.relative_to(ROOT)}: {name}"


def module_of(path: Path) -> str:
    """Return the module's full name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "distkeras" else ("distkeras", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for tree in (CORE, PS, TRANSFORMERS) for path in sources(tree)}


def folder_of(module: str) -> str:
    """Return the folder of ``module``; a module at the top of its tree represents itself."""
    depth = 3 if module.startswith(("distkeras.ps.", "distkeras.transformers.")) else 2
    return ".".join(module.split(".")[:depth])


def graph(node: Callable[[str], str]) -> dict[str, set[str]]:
    """Return which node imports which others, at every depth of the code; ``node`` maps a module to its node."""
    arrows: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        # A package's own modules name the package only as part of a neighbor's name.
        targets = {name for name in imports(path) if name in MODULES and not f"{module}.".startswith(f"{name}.")}
        arrows.setdefault(node(module), set()).update(node(target) for target in targets)
    return {source: targets - {source} for source, targets in arrows.items()}


@pytest.mark.parametrize("node", [str, folder_of], ids=["modules", "folders"])
def test_imports_have_no_cycle(node: Callable[..., Any] | type[str]) -> None:
    list(TopologicalSorter(graph(node)).static_order())  # A CycleError names the cycle.


def is_face(module: str) -> bool:
    return f"{module}.".startswith(tuple(f"{face}." for face in FACES))


def test_the_core_imports_no_face() -> None:
    tables = {"distkeras", "distkeras.ps"}  # the tables of public names
    for name, path, where in all_imports(MODULES.values()):
        assert is_face(module_of(path)) or module_of(path) in tables or not is_face(name), where


def test_faces_import_public_names_of_the_core() -> None:
    for name, path, where in all_imports(MODULES.values()):
        private = any(part.startswith("_") and not part.endswith("__") for part in name.split("."))
        assert not (private and name.startswith("distkeras") and is_face(module_of(path))), where


@pytest.mark.parametrize("package", ["distkeras", "distkeras.ps"])
def test_the_order_of_the_folders_is_the_documented_one(package: str) -> None:
    """The package's docstring lists its folders in the order of imports, with the lowest layer first."""
    arrows = graph(folder_of)
    docstring = MODULES[package].read_text().split('"""')[1]
    listed = [f"{package}.{name}" for name in re.findall(r"^    (\w+) {2,}\S", docstring, re.M)]
    mounted = {"distkeras.ps", "distkeras.transformers", "distkeras.__main__", "distkeras.ps.__main__"}
    assert set(listed) == {name for name in arrows if name.rpartition(".")[0] == package} - mounted
    for place, name in enumerate(listed):
        assert not arrows[name] & set(listed[place:]), f"{name} imports what stands above it"


def test_ps_needs_the_standard_library_numpy_and_ml_dtypes_only() -> None:
    for name, path, where in all_imports(sources(PS)):
        top = name.split(".")[0]
        own = OPTIONAL.get(path.name, set())
        assert top in own | {"distkeras", "numpy", "ml_dtypes", "__future__"} or top in sys.stdlib_module_names, where
        # The bare package is nearly empty; it is imported to find its folder.
        assert top != "distkeras" or name == "distkeras" or name.startswith("distkeras.ps"), where


def test_a_rule_imports_neither_sockets_nor_threads_nor_the_center() -> None:
    for name, _, where in all_imports(sources(PS / "rules")):
        top = name.split(".")[0]
        assert top not in {"socket", "threading", "asyncio", "subprocess"}, where
        if name.startswith("distkeras"):
            assert name.startswith(("distkeras.ps.rules", "distkeras.ps.errors", "distkeras.ps.validate")), where


def test_state_machines_open_no_socket_and_start_no_thread() -> None:
    for name, _, where in all_imports(PS / f"{module}.py" for module in SANS_IO):
        assert name.split(".")[0] not in {"socket", "threading", "asyncio", "selectors", "subprocess", "queue"}, where


def test_the_core_does_not_import_the_transformers_on_import() -> None:
    core = [path for path in sources(CORE) if path.parent.name != "ml" and module_of(path) not in OF_TRANSFORMERS]
    for name, _, where in all_imports(core, everywhere=False):
        assert not name.startswith(("distkeras.transformers", "tests", "scripts", "notebooks")), where


def test_the_transformers_do_not_import_the_trainers() -> None:
    trainers = (["distkeras", "trainer"], ["distkeras", "trainers"], ["distkeras", "training"])
    for name, _, where in all_imports(sources(TRANSFORMERS)):
        assert name.split(".")[:2] not in trainers, where


def test_no_module_imports_by_the_bare_names_or_unpickles() -> None:
    for name, _, where in all_imports(MODULES.values()):
        assert name.split(".")[0] not in {"ps", "transformers", "pickle", "marshal", "shelve"}, where


def test_modules_that_executors_import_choose_no_backend() -> None:
    for name, _, where in all_imports((CORE / f"{module}.py" for module in LIGHT), everywhere=False):
        assert name.split(".")[0] not in {"keras", "tensorflow", "jax", "torch", "pyspark"}, where


def test_imports_are_found_at_every_depth(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nimport a.b\nif TYPE_CHECKING:\n    import c\n"
        "try:\n    import d\nexcept ImportError:\n    import e\nclass F:\n    def f(self):\n        from g import h\n"
        "        importlib.import_module('i.j')\n"
    )
    assert list(imports(path)) == ["typing", "typing.TYPE_CHECKING", "a.b", "c", "d", "e", "g", "g.h", "i.j"]
    assert list(imports(path, everywhere=False)) == ["typing", "typing.TYPE_CHECKING", "a.b", "d", "e"]
