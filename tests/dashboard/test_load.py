"""Measurements with two hundred workers: what a browser, the job server and a driver need to show them."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.job_server.process import Server
from support.present import present
from support.training.recorded_job import BEGAN, RecordedJob

from distkeras.dashboard.record import CurrentStatus, JobRecord
from distkeras.dashboard.watch import JobWatch, Journal
from distkeras.job_server.errors import JobState
from distkeras.job_server.runner.files import JobFiles
from distkeras.job_server.settings import Settings
from distkeras.job_server.store.accounts import Accounts
from distkeras.job_server.store.jobs import JobStore
from distkeras.job_server.store.tables import open_database

pytestmark = pytest.mark.slow

#: Records from now on how long each frame of the browser took.
FRAMES = """() => {
    window.passed = [];
    let last = performance.now();
    const note = (now) => { window.passed.push(now - last); last = now; requestAnimationFrame(note); };
    requestAnimationFrame(note);
}"""


@pytest.fixture
def busy_server(tmp_path: Path) -> Iterator[tuple[Server, str, Path]]:
    """Yield a job server, a user's token, and the folder of that user's job, which only the test writes to."""
    server = Server(tmp_path)
    (tmp_path / "server").mkdir()
    engine = open_database(f"sqlite:///{tmp_path / 'server' / 'jobs.sqlite'}")
    accounts, store = Accounts(engine), JobStore(engine)
    accounts.add_user("ann", "admin")
    token = accounts.add_token("ann")
    job = store.add(present(accounts.authenticate(token)), "busy", {"rule": "agn"}, 0, Settings())
    store.move(present(store.claim("elsewhere/1:1.00/a")), JobState.TRAINING)
    engine.dispose()
    folder = JobFiles(tmp_path / "server" / "files").of(job.id).path
    folder.mkdir()
    server.start()
    yield server, token, folder
    server.stop()


def test_two_hundred_workers_leave_the_browser_responsive(
    visit: Callable[..., Any], busy_server: tuple[Server, str, Path], record_property: Callable[[str, Any], None]
) -> None:
    """Each of 200 workers commits once a second; the figures are recorded, not checked, as a machine may be slow."""
    server, token, folder = busy_server
    job = RecordedJob(200, seconds=60.0)
    watch = JobWatch(folder / "journal.jsonl")
    journal, record = Journal(watch.path), JobRecord(job.facts, job.metrics, BEGAN)
    journal.begin(record.whole())
    page = visit(f"{server.url}/dashboard")
    page.get_by_label("Your token").fill(token)
    page.keyboard.press("Enter")
    page.locator(".link[data-state=live]").wait_for()
    page.evaluate(FRAMES)
    began, before, spent = time.monotonic(), server.process.cpu_times(), []
    for number, (at, rows, steps) in enumerate(job.pieces()):
        time.sleep(max(0.0, began + number - time.monotonic()))  # The test measures the load.
        start = time.thread_time()
        record.add_commits(rows, steps)
        record.now = CurrentStatus("training", "", at, 0.5, 200, 0, 1.0)
        more = record.more()
        whole = more is None or more["kind"] == "whole" or journal.full
        journal.begin(record.whole()) if whole else journal.add(present(more))
        spent.append(time.thread_time() - start)
    count = f"{record.workers.totals()[1]:,}"
    page.locator(".tiles div", has_text="Commits").locator(".value", has_text=count).wait_for()
    passed, after = time.monotonic() - began, server.process.cpu_times()
    updates = page.evaluate("performance.getEntriesByName('distkeras frame').map(entry => entry.duration)")
    frames = page.evaluate("passed")
    assert len(updates) >= 20
    figures = {
        "update, median ms": statistics.median(updates),
        "update, longest ms": max(updates),
        "frame, median ms": statistics.median(frames),
        "frame, 99th percentile ms": statistics.quantiles(frames, n=100)[-1],
        "frame, longest ms": max(frames),
        "job server, share of a core": (after.user + after.system - before.user - before.system) / passed,
        "driver, share of a core": sum(spent) / passed,
    }
    record_property("load", json.dumps(figures))
    sys.stdout.write("".join(f"{name}: {value:.3g}\n" for name, value in figures.items()))
