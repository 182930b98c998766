"""The same checks on every kind of cluster, with a table of known gaps."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
from support.programs import environment, output_of
from support.training import everywhere
from support.training.standalone import master, worker

PROGRAM = everywhere.__file__
#: Checks that are expected to fail, by kind of cluster, and their errors; a check that succeeds fails the test.
MISSING: dict[str, dict[str, str]] = {"local": {}, "local-cluster[2,1,1024]": {}, "standalone": {}, "connect": {}}
NAMES = [check.__name__ for check in everywhere.CHECKS]


def run(folder: Path, kind: str, url: str) -> dict[str, str | None]:
    printed = output_of(PROGRAM, folder, kind, url, seconds=500, cwd=folder, SPARK_LOCAL_IP="127.0.0.1")
    found: dict[str, str | None] = json.loads(printed.strip().splitlines()[-1])
    return found


def standalone(folder: Path) -> dict[str, str | None]:
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in environment(SPARK_LOCAL_IP="127.0.0.1").items():
            patch.setenv(name, value)  # the executors use it as well
        url = stack.enter_context(master(folder))
        for number in range(2):
            stack.enter_context(worker(folder / f"worker-{number}", url))
        return run(folder, "master", url)


#: Clusters that the test itself starts; "local" is the session that all tests share.
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
    """Return the kind of cluster, and the outcome of each check there."""
    kind, folder = request.param, tmp_path_factory.mktemp("everywhere")
    if kind not in SLOW:
        return kind, everywhere.results(request.getfixturevalue("spark"), str(folder))
    if kind == "connect":
        pytest.importorskip("grpc")
        return kind, run(folder, "connect", "local[2,4]")
    return kind, standalone(folder) if kind == "standalone" else run(folder, "master", kind)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_each_check_passes_unless_it_is_a_known_gap(found: tuple[str, dict[str, str | None]], name: str) -> None:
    kind, outcomes = found
    outcome, missing = outcomes[name], MISSING[kind].get(name)
    if missing is None:
        assert outcome is None
    else:
        assert outcome is not None, f"{name} works on {kind} now; remove it from `MISSING`"
        assert re.search(missing, outcome)


def test_the_table_of_gaps_names_existing_checks() -> None:
    assert {name for missing in MISSING.values() for name in missing} <= set(NAMES)
