"""Tests of the list of jobs in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from support.browser import chromium
from support.job_server.service import JobService
from support.patience import until

from distkeras.job_server.store.tables import JOBS

pytestmark = pytest.mark.slow
RUN = "https://mlflow:5000/#/experiments/1/runs/ab"
LONG = "a name that is much longer than any column of a table should be " * 3


@pytest.fixture
def page(service: JobService, model: bytes, tmp_path: Path) -> Iterator[Any]:
    """A signed-in page of ann's jobs; they are in each state."""
    losses = {"first": 0.25, "second": 0.125, LONG: 0.5}
    for name in losses:
        job = service.submit("ann", model, name=name, tags=["x"]).json["id"]
        service.finish(job)
        summary = f'{{"last_epoch": {{"epoch": 3, "loss": {losses[name]}}}, "stopped": "loss has not improved"}}'
        with service.engine.begin() as connection:
            connection.execute(update(JOBS).where(JOBS.c.id == job).values(summary=summary, mlflow_run=RUN))
    service.finish(service.submit("ann", model, name="fail").json["id"])
    service.submit("ann", model, name="waiting")
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{service.url}/dashboard?sort=loss")
        page.get_by_label("Your token").fill(service.tokens["ann"])
        page.get_by_role("button", name="Show my jobs").click()
        page.locator(".list tbody tr").nth(4).wait_for()
        yield page
        page.screenshot(path=tmp_path / "list.png", full_page=True)
        page.set_viewport_size({"width": 390, "height": 900})
        page.screenshot(path=tmp_path / "phone.png", full_page=True)


def names(page: Any) -> list[str]:
    return [name.strip() for name in page.locator(".list tbody .name").all_inner_texts()]


def shown(page: Any) -> list[str]:
    return sorted(name.strip() for name in page.locator("article h2").all_inner_texts())


def require_only_what_is_listed(page: Any) -> None:
    """What a filter excludes is no longer shown, not even by a link; in the end, only waiting jobs are listed."""
    page.get_by_label("State").first.select_option("")
    page.get_by_role("link", name="first").click()
    page.get_by_role("checkbox", name="show second").check()
    until(lambda: shown(page) == ["first", "second"])
    page.get_by_label("Name or user").fill("SECOND")
    until(lambda: shown(page) == names(page) == ["second"])
    chosen = page.url
    page.get_by_label("Name or user").fill("")
    until(lambda: len(names(page)) == 5)
    assert shown(page) == ["second"]
    page.goto("about:blank")
    page.goto(chosen.replace("text=SECOND", "text=first"))
    until(lambda: names(page) == ["first"])
    assert shown(page) == []
    page.get_by_label("Name or user").fill("")
    page.get_by_label("State").first.select_option("queued")
    until(lambda: names(page) == ["waiting"])


def test_an_operator_reads_filters_and_repeats_jobs(service: JobService, page: Any) -> None:
    assert names(page)[:3] == ["second", "first", LONG.strip()]
    rows = page.locator(".list tbody tr")
    first = rows.filter(has_text="first").first
    assert "done" in first.inner_text()
    assert "0.2500" in first.inner_text()
    assert "loss has not improved" in first.inner_text()
    assert first.get_by_role("link", name="MLflow").get_attribute("href") == RUN
    assert "the rows must fit" in rows.filter(has=page.get_by_role("link", name="fail", exact=True)).inner_text()
    # A long name leaves the state in view.
    box = rows.filter(has_text="much longer").locator(".state").bounding_box()
    assert box["x"] + box["width"] < 1280

    # Filter and order are in the address, and a link to it shows the same.
    page.get_by_label("State").first.select_option("queued")
    until(lambda: names(page) == ["waiting"])
    assert "state=queued" in page.url
    assert "sort=loss" in page.url
    page.reload()
    until(lambda: names(page) == ["waiting"])

    require_only_what_is_listed(page)

    # Cancelling asks first.
    page.get_by_role("link", name="waiting").click()
    waiting = page.locator("article", has=page.get_by_role("heading", name="waiting"))
    page.once("dialog", lambda dialog: dialog.dismiss())
    waiting.get_by_role("button", name="Cancel").click()
    assert service.call("GET", "/jobs?state=queued", "ann").json["jobs"]
    page.once("dialog", lambda dialog: dialog.accept())
    waiting.get_by_role("button", name="Cancel").click()
    until(lambda: not service.call("GET", "/jobs?state=queued", "ann").json["jobs"])
    waiting.locator(".state[data-state=cancelled]").wait_for()
    page.locator(".list tbody .state[data-state=cancelled]").wait_for()

    # A job is submitted again with changes.
    waiting.get_by_role("button", name="Submit again").click()
    text = waiting.locator("textarea")
    text.wait_for()  # the description is read first
    text.fill(text.input_value().replace('"waiting"', '"changed"'))
    waiting.get_by_role("button", name="Submit", exact=True).click()
    until(lambda: [job["name"] for job in service.call("GET", "/jobs?state=queued", "ann").json["jobs"]] == ["changed"])
    (job,) = service.call("GET", "/jobs?state=queued", "ann").json["jobs"]
    service.call("POST", f"/jobs/{job['id']}/cancel", "ann")
