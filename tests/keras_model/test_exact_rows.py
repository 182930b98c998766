"""Training by rows equals training with whole tables, to the bit, in a process with one compute thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import keras
import pytest
from support.patience import patience
from support.training import exact_rows

pytestmark = [
    pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="other backends add up in another order"),
    pytest.mark.timeout(600),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """Return the results of one program for all requested cases; starting it takes longer than most cases."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = [call.params["name"] for call in calls if call is not None]
    threads = dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, exact_rows.__file__, *names],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(550),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", exact_rows.cases())
def test_rows_are_trained_like_the_whole_table(results: dict[str, str | None], name: str) -> None:
    assert results[name] is None, results[name]
