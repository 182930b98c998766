"""Who may import whom, read from the sources."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PS, CORE, TRANSFORMERS = ROOT / "ps", ROOT / "distkeras", ROOT / "transformers"

#: Rooms of ps from the ground up; a module may import from rooms below its own. Every module has a room.
ROOMS: list[set[str]] = [
    {"errors", "events"},
    {"layout", "messages", "rules", "buffers"},
    {"wire", "faults", "gate", "tls", "records", "schedulers", "schedules", "timing", "store", "codecs", "window"},
    {"center", "worker", "channel", "daso"},
    {"snapshot", "checks"},
    {"saver"},
    {"desk"},
    {"calls", "server", "simulate"},
    {"client", "driver"},
    {"process"},
    {"__main__"},
]
#: Inside a room nobody imports a neighbor, but for these.
NEIGHBORS = {("layout", "messages"), ("messages", "layout")}
#: Imported inside functions, by jobs that have snapshots or encrypt.
OPTIONAL = {"store.py": {"pyarrow"}, "tls.py": {"cryptography"}}
#: What an executor imports before Keras' backend is chosen, or `distkeras.ps` alone may be there for.
LIGHT = {"batches", "columns", "models", "plan", "prefetch", "recipe", "replica", "spool", "task", "tensors"}


def sources(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.rglob("*.py"))
        if not (set(path.relative_to(folder).parts) & {"ps", "transformers"})
    ]


def imports(path: Path, *, everywhere: bool = True) -> Iterator[str]:
    """Full names that ``path`` imports; without ``everywhere``, only those that importing it executes."""

    def walk(nodes: list[ast.stmt]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                assert node.module is not None
                yield node.module
                # `from distkeras.ps import rules` imports a module, and that is the one that counts.
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                continue
            elif everywhere or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for name in ("body", "orelse", "finalbody"):
                    yield from walk([part for part in getattr(node, name, []) if isinstance(part, ast.stmt)])
                for handler in getattr(node, "handlers", []):
                    yield from walk(handler.body)

    yield from walk(ast.parse(path.read_text()).body)


def room(module: str) -> int:
    found = [number for number, names in enumerate(ROOMS) if module in names]
    assert len(found) == 1, f"ps/{module}.py needs a place in ROOMS"
    return found[0]


def ps_module(path: Path) -> str:
    first = path.relative_to(PS).parts[0]
    return first.removesuffix(".py")


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sources(PS), ids=ids)
def test_ps_needs_the_standard_library_numpy_and_ml_dtypes_only(path):
    for name in imports(path):
        top = name.split(".")[0]
        own = OPTIONAL.get(path.name, set())
        assert top in own | {"distkeras", "numpy", "ml_dtypes", "__future__"} or top in sys.stdlib_module_names, name
        # The bare package is nearly empty; it is there to ask where it lives.
        assert top != "distkeras" or name == "distkeras" or name.startswith("distkeras.ps"), name


@pytest.mark.parametrize("path", [path for path in sources(PS) if path != PS / "__init__.py"], ids=ids)
def test_ps_imports_downward(path):
    own = ps_module(path)
    for name in imports(path):
        if not name.startswith("distkeras.ps."):
            continue
        other = name.split(".")[2]
        assert other == own or room(other) < room(own) or (own, other) in NEIGHBORS, f"{own} imports {other}"


@pytest.mark.parametrize("path", sources(PS / "rules"), ids=ids)
def test_a_rule_knows_neither_sockets_nor_threads_nor_the_center(path):
    for name in imports(path):
        top = name.split(".")[0]
        assert top not in {"socket", "threading", "asyncio", "subprocess"}, name
        if name.startswith("distkeras"):
            assert name.startswith(("distkeras.ps.rules", "distkeras.ps.errors")), name


SANS_IO = [
    name
    for name in ("wire", "center", "worker", "schedulers", "messages", "simulate", "daso")
    if (PS / f"{name}.py").exists()
]


@pytest.mark.parametrize("module", SANS_IO)
def test_state_machines_open_no_socket_and_start_no_thread(module):
    tops = {name.split(".")[0] for name in imports(PS / f"{module}.py")}
    assert not tops & {"socket", "threading", "asyncio", "selectors", "subprocess", "queue"}


@pytest.mark.parametrize("path", sources(CORE), ids=ids)
def test_the_core_does_not_import_the_transformers_on_import(path):
    for name in imports(path, everywhere=False):
        assert not name.startswith(("distkeras.transformers", "tests", "scripts", "notebooks")), name


@pytest.mark.parametrize("path", sources(TRANSFORMERS), ids=ids)
def test_the_transformers_do_not_import_the_trainers(path):
    for name in imports(path):
        assert name.split(".")[:2] not in (["distkeras", "trainer"], ["distkeras", "trainers"], ["distkeras", "job"]), (
            name
        )


@pytest.mark.parametrize("path", [*sources(CORE), *sources(PS), *sources(TRANSFORMERS)], ids=ids)
def test_nobody_imports_by_the_bare_names_or_unpickles(path):
    for name in imports(path):
        assert name.split(".")[0] not in {"ps", "transformers", "pickle", "marshal", "shelve"}, name


@pytest.mark.parametrize("module", sorted(LIGHT))
def test_what_executors_import_chooses_no_backend(module):
    tops = {name.split(".")[0] for name in imports(CORE / f"{module}.py", everywhere=False)}
    assert not tops & {"keras", "tensorflow", "jax", "torch", "pyspark"}


def test_the_reader_sees_imports_at_every_depth(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nimport a.b\nif TYPE_CHECKING:\n    import c\n"
        "try:\n    import d\nexcept ImportError:\n    import e\nclass F:\n    def f(self):\n        from g import h\n"
    )
    assert list(imports(path)) == ["typing", "typing.TYPE_CHECKING", "a.b", "d", "e", "g", "g.h"]
    assert list(imports(path, everywhere=False)) == ["typing", "typing.TYPE_CHECKING", "a.b", "d", "e"]
