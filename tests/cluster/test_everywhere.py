"""The same checks on every kind of cluster, and what is known to be missing where."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
from support import everywhere
from support.patience import patience

PROGRAM = everywhere.__file__
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
#: What is expected to be missing where, and what its error says; a row that is no longer true fails.
MISSING: dict[str, dict[str, str]] = {"local": {}, "local-cluster[2,1,1024]": {}, "standalone": {}, "connect": {}}
NAMES = [check.__name__ for check in everywhere.CHECKS]


def environment() -> dict[str, str]:
    tests = str(Path(__file__).parents[1])
    found = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    found["PYTHONPATH"] = os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), tests])
    return found


def run(folder: Path, kind: str, url: str) -> dict[str, str | None]:
    command = [sys.executable, PROGRAM, str(folder), kind, url]
    limit = patience(500)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=limit, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str | None] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@contextlib.contextmanager
def daemon(folder: Path, started: str, *arguments: str) -> Iterator[str]:
    """A process of a standalone cluster; gives what its log says it has started as."""
    log = folder / f"{arguments[0].rpartition('.')[2]}-{len(list(folder.iterdir()))}.log"
    with log.open("w") as out:
        process = subprocess.Popen([SPARK_CLASS, *arguments], env=environment(), stdout=out, stderr=out, cwd=folder)
        try:
            for _ in range(int(patience(60) / 0.1)):
                if (found := re.search(started, log.read_text())) is not None:
                    break
                assert process.poll() is None, log.read_text()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            assert found is not None, log.read_text()
            yield found[1]
        finally:
            process.terminate()
            process.wait(patience(30))


def standalone(folder: Path) -> dict[str, str | None]:
    deploy = "org.apache.spark.deploy"
    where = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(daemon(folder, r"Starting Spark master at (\S+)", f"{deploy}.master.Master", *where))
        for number in range(2):
            told = ("--cores", "1", "--memory", "1g", "--work-dir", str(folder / f"worker-{number}"), *where, url)
            started = r"Successfully registered with master (\S+)"
            stack.enter_context(daemon(folder, started, f"{deploy}.worker.Worker", *told))
        return run(folder, "master", url)


#: Started by the test itself; the first one is the session that all tests share.
SLOW = ("local-cluster[2,1,1024]", "standalone", "connect")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("local", marks=pytest.mark.slow),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW),
    ],
)
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, str | None]]:
    """The kind of cluster, and what became of each check there."""
    kind, folder = request.param, tmp_path_factory.mktemp("everywhere")
    if kind not in SLOW:
        return kind, everywhere.results(request.getfixturevalue("spark"), str(folder))
    if kind == "connect":
        pytest.importorskip("grpc")
        return kind, run(folder, "connect", "local[2,4]")
    return kind, standalone(folder) if kind == "standalone" else run(folder, "master", kind)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_all_of_it_works_but_for_what_is_known_to_be_missing(
    found: tuple[str, dict[str, str | None]], name: str
) -> None:
    kind, outcomes = found
    outcome, missing = outcomes[name], MISSING[kind].get(name)
    if missing is None:
        assert outcome is None
    else:
        assert outcome is not None, f"{name} works on {kind} now: take it out of the table"
        assert re.search(missing, outcome)


def test_the_table_names_checks() -> None:
    assert {name for missing in MISSING.values() for name in missing} <= set(NAMES)
