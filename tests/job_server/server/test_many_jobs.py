"""A measurement of listing a thousand jobs; the time is recorded, not checked, as a machine may be slow."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert
from support.job_server.service import JobService
from support.present import present

from distkeras.job_server.errors import JobState
from distkeras.job_server.store.jobs import new_id
from distkeras.job_server.store.tables import JOBS, METADATA

LONG = '{"rule": "agn", "hyper_parameters": {}, "note": "%s"}' % ("x" * 2000)


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_thousand_jobs_among_ten_thousand_are_listed(
    database: str, folder: Path, request: pytest.FixtureRequest, record_property: Callable[[str, Any], None]
) -> None:
    url = None if database == "sqlite" else request.getfixturevalue("postgres_url")
    with JobService(folder, database=url) as service:
        owners = [present(service.accounts.authenticate(service.tokens[name])).id for name in ("ann", "ben")]
        values = {
            "name": "a job",
            "state": JobState.DONE,
            "kind": "train",
            "bytes": 0,
            "description": LONG,
            "attempt": 1,
        }
        rows = [values | {"id": new_id(), "user_id": owners[place % 10 > 0], "created": 1.0} for place in range(10_000)]
        with service.engine.begin() as connection:
            connection.execute(insert(JOBS), rows)
        seconds = {}
        for user in ("ann", "admin"):
            began = time.perf_counter()
            found = service.call("GET", "/jobs?limit=1000", user).json["jobs"]
            seconds[f"{database}: 1000 jobs of {user}'s list, s"] = time.perf_counter() - began
            assert len({job["id"] for job in found}) == 1000
            assert "description" not in found[0]
        began = time.perf_counter()
        assert sum(1 for _ in service.client("ann").jobs("done")) == 1000
        seconds[f"{database}: the client's pages of 100, s"] = time.perf_counter() - began
        if url is not None:
            METADATA.drop_all(service.engine)
    for name, value in seconds.items():
        record_property(name, value)
        sys.stdout.write(f"{name}: {value:.3g}\n")
