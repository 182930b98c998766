"""Tests of the page in a real browser: charts, live updates, keyboard, screen reader, and 200 workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.browser import DESKTOP, PHONE, colored, ink, violations
from support.job_server.service import JobService
from support.patience import patience
from support.training.recorded_job import BEGAN, RecordedJob, record_of, write_journal

from distkeras.dashboard.dashboard import Dashboard
from distkeras.dashboard.record import CurrentStatus, JobRecord
from distkeras.dashboard.watch import JobWatch, Journal
from distkeras.ps.events import Event

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
pytestmark = pytest.mark.slow

EVIL = "<img src=x onerror=alert(1)></td><script>alert(2)</script>"


class Live:
    """A page of running jobs whose messages the test sends."""

    def __init__(self, folder: Path, jobs: list[RecordedJob]) -> None:
        self.jobs = jobs
        self.watches = [JobWatch(folder / f"{number}.jsonl") for number in range(len(jobs))]
        self.journals = [Journal(watch.path) for watch in self.watches]
        self.records = [JobRecord(job.facts, job.metrics, BEGAN) for job in jobs]
        self.dashboard = Dashboard(self.watches)

    def begin(self) -> None:
        for number, record in enumerate(self.records):
            self.send(number, record.whole())

    def send(self, number: int, message: dict[str, Any] | None = None) -> None:
        more = message or self.records[number].more()
        whole = more is None or more["kind"] == "whole"
        with self.watches[number].changed:
            if whole:
                self.journals[number].begin(more or self.records[number].whole())
            else:
                assert more is not None
                self.journals[number].add(more)
            self.watches[number].changed.notify_all()

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_error: object) -> None:
        self.dashboard.close()


def require_count(page: Any, what: str, count: int) -> None:
    """Wait until the page has ``count`` such elements, without a script, which the page's own policy would refuse."""
    playwright.expect(page.locator(what)).to_have_count(count, timeout=1000 * patience(10))


@pytest.mark.parametrize("workers", [1, 4, 200])
def test_every_chart_is_drawn(visit: Callable[..., Any], saved: Callable[..., str], workers: int) -> None:
    page = visit(saved(RecordedJob(workers, seconds=40.0)))
    titles = page.locator("figure.plot h3").all_text_contents()
    assert len(titles) == 7
    # There is no stream, so this is always 1.
    absent = {"Seconds of micro-batches"} | ({"Scale of payloads"} if workers == 1 else set())
    for number, title in enumerate(titles):
        if title in absent:
            assert not page.locator("figure.plot").nth(number).is_visible()
        else:
            assert ink(page, number) > 500, title
    entries = page.locator("figure.plot").first.locator(".legend li").all_text_contents()
    assert "all workers" in entries
    assert "center, evaluated" in entries
    assert len(entries) <= 10, "200 lines are not a chart"
    assert page.locator("table.workers tbody tr").count() == workers


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("jobs", [1, 2])
def test_axe_finds_nothing(
    visit: Callable[..., Any], saved: Callable[..., str], jobs: int, scheme: str, viewport: dict[str, int]
) -> None:
    recorded = [RecordedJob(4 + 20 * number, seconds=60.0, seed=number) for number in range(jobs)]
    page = visit(saved(*recorded, state="failed", why="WorkerError: out of luck"), scheme=scheme, viewport=viewport)
    assert violations(page) == []
    for summary in page.locator("details summary").all():
        if summary.is_visible():
            summary.click()
    page.locator("table.workers tbody button").first.click()
    assert violations(page) == []
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= viewport["width"], "nothing is cut off at the side"


def test_a_page_without_a_job_states_that_and_one_without_values_has_no_chart(
    visit: Callable[..., Any], tmp_path: Path
) -> None:
    with Live(tmp_path, [RecordedJob(2, seconds=5.0)]) as live:
        page = visit(live.dashboard.url)
        page.get_by_text("No job yet").wait_for()
        assert violations(page) == []
        live.begin()
        page.locator("progress").wait_for()
        require_count(page, "figure.plot:visible", 0)  # no chart has values yet


def test_new_data_is_shown(visit: Callable[..., Any], tmp_path: Path) -> None:
    """Curves, events and the end of a job appear, and an interrupted stream continues at the same event."""
    job = RecordedJob(4, seconds=30.0)
    with Live(tmp_path, [job]) as live:
        page = visit(live.dashboard.url)
        live.begin()
        page.locator(".link[data-state=live]").wait_for()
        pieces = list(job.pieces())
        seen = []
        for number, (at, rows, steps) in enumerate(pieces):
            live.records[0].add_commits(rows, steps)
            now = CurrentStatus("training", "", at, number / len(pieces), 4, 0, 1.0)
            live.records[0].now = replace(now, saved_clock=number, saved_seconds=65.4)
            live.send(0)
            if number % 10 == 9:
                count = live.records[0].workers.totals()[1]
                page.locator(".tiles div", has_text="Commits").locator(".value", has_text=f"{count}").wait_for()
                seen.append(ink(page))
        assert len(set(seen)) == len(seen), "the chart changes"
        latest = page.locator(".tiles div", has_text="Snapshots").locator(".note")
        assert latest.text_content() == f"of {len(pieces) - 1} commits, 1:05 ago"
        text = f"attempt 9 took partition 1 over {EVIL}"
        live.records[0].add_events([Event(BEGAN + 31.0, "server", "takeover", 1, 9, text)])
        live.send(0)
        page.locator("table.events td.text", has_text="attempt 9 took partition 1 over").wait_for()
        assert EVIL in page.locator("table.events td.text").first.text_content()
        page.locator("[role=status]", has_text="takeover: attempt 9").wait_for(state="attached")
        live.records[0].now = CurrentStatus("failed", EVIL, BEGAN + 32.0, 1.0, 4, 0, 1.0)
        live.send(0)
        page.locator(".state[data-state=failed]").wait_for()
        assert page.locator("article > .why").text_content() == EVIL
        assert page.locator("img, script:not([type]) ~ script").count() == 0
        live.dashboard.close()
        page.locator(".link[data-state=away]").wait_for()


def test_the_page_can_be_used_with_the_keyboard_alone(visit: Callable[..., Any], saved: Callable[..., str]) -> None:
    page = visit(saved(RecordedJob(4, seconds=40.0)))
    reader = page.locator("figure.plot input[type=range]").first
    reader.focus()
    before = page.locator("figure.plot .reading").first.text_content()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    after = page.locator("figure.plot .reading").first.text_content()
    assert before != after
    assert "Time 0:01" in after
    assert "all workers" in after
    assert reader.get_attribute("aria-valuetext") == after
    reached = []
    page.locator("body").press("Tab")
    for _ in range(80):
        reached.append(page.evaluate("document.activeElement.tagName + ' ' + document.activeElement.textContent"))
        page.keyboard.press("Tab")
    assert {"SUMMARY As a table", "BUTTON Loss", "BUTTON 2"} <= set(reached)
    page.locator("thead button", has_text="Samples").press("Enter")
    assert page.locator("th[aria-sort=descending]").text_content() == "Samples"
    button = page.locator("table.workers tbody button").first
    button.press("Space")
    assert button.get_attribute("aria-pressed") == "true"
    assert page.locator("label:has-text('Worker') + select").input_value() == button.text_content()


def test_tables_contain_the_numbers_of_the_charts(visit: Callable[..., Any], saved: Callable[..., str]) -> None:
    job = RecordedJob(2, seconds=30.0)
    whole = record_of(job).whole()
    page = visit(saved(job))
    figure = page.locator("figure.plot").first
    figure.locator("summary").click()
    rows = figure.locator("tbody tr")
    playwright.expect(rows).to_have_count(whole["used"])
    cells = rows.last.locator("td").all_text_contents()
    assert [float(text) for text in cells[:2]] == [line[-1] for line in whole["lines"]["loss"]]


def test_two_jobs_are_shown_in_the_same_charts(visit: Callable[..., Any], saved: Callable[..., str]) -> None:
    page = visit(saved(RecordedJob(2, 30.0, seed=1), RecordedJob(3, 60.0, seed=2)), viewport=DESKTOP)
    boxes = [article.bounding_box() for article in page.locator("article").all()]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert ink(page, 0) > 500, "both losses in one chart"
    assert page.locator("figure.plot").count() == 1 + 2 * 7
    for axis in ("commits", "samples"):
        page.locator(".compare label:has-text('Along') + select").select_option(axis)
        assert ink(page, 0) > 500, axis


def test_jobs_are_compared_by_any_metric_and_their_differing_options(
    visit: Callable[..., Any], saved: Callable[..., str]
) -> None:
    options = {"rule": "agn", "rule.window": 4, "batch_size": 128}
    only_loss = RecordedJob(3, 60.0, seed=2, metrics=("loss",), options=options | {"rule.window": 16})
    page = visit(saved(RecordedJob(2, 30.0, seed=1, options=options), only_loss), viewport=DESKTOP)
    show = page.locator("label:has-text('Show') + select")
    names = show.locator("option").all_text_contents()
    assert names == [
        *("loss", "accuracy", "loss of the center", "accuracy of the center"),
        *("samples per second", "staleness", "gap", "scale"),
    ]
    for name in names:
        show.select_option(name)
        assert ink(page, 0) > 500, name
        assert page.locator("figure.plot h3").first.text_content() == f"Job by job: {name}"
        without = "Without it: mnist_cnn with AGN, 2." in page.locator("figure.plot .reading").first.text_content()
        assert without == (name == "accuracy")
    assert page.locator(".settings .differs th span").all_text_contents() == ["rule.window", "differs"]
    assert page.locator(".settings .differs td").all_text_contents() == ["4", "16"]
    shown = page.locator(".settings tbody tr").count()
    page.get_by_label("Only what differs").check()
    require_count(page, ".settings tbody tr", shown - 2)
    assert violations(page) == []


def test_a_pause_interrupts_the_line(visit: Callable[..., Any], saved: Callable[..., str]) -> None:
    """A driver that died after 40 s is continued 40 s later, in the middle of the chart."""
    page = visit(saved(RecordedJob(1, 80.0, died=(40.0, 40.0))), viewport=DESKTOP)
    assert colored(page, 0.2) > 0
    assert colored(page, 0.5) == 0
    assert colored(page, 0.8) > 0
    reader = page.locator("figure.plot input[type=range]").first
    reader.focus()
    texts = []
    for _ in range(120):
        page.keyboard.press("ArrowLeft")
        texts.append(reader.get_attribute("aria-valuetext"))
    assert sum("paused for 0:4" in text for text in texts) == 1
    page.locator("figure.plot summary").first.click()
    page.locator("figure.plot tbody td", has_text="paused for 0:4").first.wait_for()
    for axis in ("commits", "samples"):
        page.locator("label:has-text('Along') + select").select_option(axis)
        assert colored(page, 0.2) > 0, axis
    assert violations(page) == []


def test_a_chart_can_be_zoomed_and_reset(visit: Callable[..., Any], tmp_path: Path) -> None:
    job = RecordedJob(2, seconds=60.0)
    with Live(tmp_path, [job]) as live:
        page = visit(live.dashboard.url)
        live.records[0].add_commits(job.commits[:60], job.steps[:240])
        live.begin()
        over = page.locator("figure.plot .u-over").first
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        reader = page.locator("figure.plot input[type=range]").first
        last = int(reader.get_attribute("max"))
        page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 40)
        page.mouse.up()
        whole = page.get_by_role("button", name="Show all: Loss and metrics")
        whole.wait_for()
        zoomed = [int(reader.get_attribute(name)) for name in ("min", "max")]
        assert 0 < zoomed[0] < zoomed[1] < last
        # The other charts are zoomed too.
        page.get_by_role("button", name="Show all: Samples per second").scroll_into_view_if_needed()
        live.records[0].add_commits(job.commits[60:90], job.steps[240:360])
        live.send(0)
        page.locator(".tiles div", has_text="Commits").locator(".value", has_text="90").wait_for()
        assert [int(reader.get_attribute(name)) for name in ("min", "max")] == zoomed, "new data does not move it"
        assert violations(page) == []
        closer = page.get_by_role("button", name="Zoom in: Loss and metrics")
        closer.press("Enter")
        assert int(reader.get_attribute("max")) - int(reader.get_attribute("min")) < zoomed[1] - zoomed[0]
        whole.press("Enter")
        playwright.expect(whole).to_be_hidden()
        assert page.evaluate("document.activeElement.textContent") == "Zoom in"
        assert reader.get_attribute("min") == "0"
        assert int(reader.get_attribute("max")) > last


@pytest.mark.parametrize("axis", ["commits", "samples"])
def test_the_horizontal_axis_can_be_chosen(visit: Callable[..., Any], saved: Callable[..., str], axis: str) -> None:
    page = visit(saved(RecordedJob(12, 30.0)))
    page.locator("label:has-text('Along') + select").select_option(axis)
    page.locator("label:has-text('Metric') + select").select_option("accuracy")
    page.locator("label:has-text('Worker') + select").select_option("7")
    page.locator("label:has-text('Scale') + select").select_option("log")
    assert ink(page, 0) > 500
    assert "worker 7" in page.locator("figure.plot").first.locator(".legend li").all_text_contents()
    assert page.locator("figure.plot h3").first.text_content() == "Loss and metrics: accuracy"


@pytest.fixture(scope="module")
def model() -> bytes:
    import keras

    from distkeras.keras_model import archive

    return archive.to_bytes(keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]))


def test_the_job_server_s_page_requires_a_token(visit: Callable[..., Any], model: bytes, tmp_path: Path) -> None:
    with JobService(tmp_path) as service:
        for number, name in enumerate(("first", EVIL)):
            job = service.submit("ann", model, name=name).json["id"]
            service.finish(job)
            write_journal(service.files.of(job).journal, RecordedJob(2 + number, 20.0), state="done")
        page = visit(f"{service.url}/dashboard")
        assert violations(page) == []
        page.get_by_label("Your token").fill("nonsense")
        page.keyboard.press("Enter")
        page.get_by_role("alert").get_by_text("not valid").wait_for()
        page.get_by_label("Your token").fill(service.tokens["ben"])
        page.keyboard.press("Enter")
        page.get_by_text("No jobs yet").wait_for()
        page.get_by_role("button", name="Sign out").click()
        page.get_by_label("Your token").fill(service.tokens["ann"])
        page.get_by_role("button", name="Show my jobs").click()
        page.locator("article").wait_for()
        assert page.locator("article h2").text_content() == EVIL, "the latest job"
        assert page.locator("table.attempts tbody td").last.text_content() == "done"
        page.get_by_role("checkbox", name="show first").check()
        require_count(page, "article progress", 2)
        page.locator("article .state[data-state=done]").last.wait_for()
        assert violations(page) == []
        with page.expect_download() as download:
            page.get_by_role("button", name="Save as a file").first.click()
        assert '"mode":"saved"' in Path(download.value.path()).read_text()
        page.reload()
        require_count(page, "article progress", 2)
        page.get_by_role("checkbox", name="show first").uncheck()
        require_count(page, "article", 1)


def test_the_job_server_s_page_updates_its_list(visit: Callable[..., Any], model: bytes, tmp_path: Path) -> None:
    """Jobs start and end while the page is open; the first job is shown."""
    with JobService(tmp_path) as service:
        page = visit(f"{service.url}/dashboard", fails="404")
        page.get_by_label("Your token").fill(service.tokens["ann"])
        page.keyboard.press("Enter")
        page.get_by_text("No jobs yet").wait_for()
        first = service.submit("ann", model, name="first").json["id"]
        page.locator("article h2", has_text="first").wait_for()
        row = page.locator(".list tbody tr")
        row.locator("td", has_text="queued").wait_for()
        box = page.get_by_role("checkbox", name="show first")
        box.focus()
        service.finish(first)
        row.locator("td", has_text="done").wait_for()
        service.submit("ann", model, name="second")
        require_count(page, ".list tbody tr", 2)
        assert row.first.locator("th").text_content() == "second"
        assert box.is_checked()
        assert box.evaluate("box => document.activeElement === box"), "the focus stays in the list"
        require_count(page, "article", 1)
        assert violations(page) == []
        service.client("ann").job(first).remove()
        page.locator("article .state[data-state=removed]").wait_for()
        page.get_by_role("checkbox", name="show second").check()
        box.uncheck()
        require_count(page, ".list tbody tr", 1)
        service.accounts.remove_user("ann")
        page.get_by_role("alert").get_by_text("not valid").wait_for()
        require_count(page, "article", 0)


def require_filters(page: Any) -> None:
    """Filter a list of 60 jobs; in the end, the second one is shown alone."""
    page.get_by_label("Tag").fill("even")
    require_count(page, ".list tbody tr", 30)
    page.get_by_label("Name or user").fill("JOB 0")
    require_count(page, ".list tbody tr", 5)
    page.get_by_label("State").select_option("cancelled")
    require_count(page, ".list tbody tr", 1)
    assert page.locator(".list tbody tr").first.locator("th").text_content() == "job 00"
    page.get_by_label("Name or user").fill("nothing")
    page.get_by_text("No such jobs").wait_for()
    require_count(page, "article", 0)  # which the filter excludes
    page.get_by_label("State").select_option("")
    page.get_by_label("Tag").fill("")
    page.get_by_label("Name or user").fill("job 01")
    page.get_by_role("link", name="job 01").click()


def test_the_job_server_s_page_finds_and_manages_jobs(visit: Callable[..., Any], model: bytes, tmp_path: Path) -> None:
    """The page has filters, older jobs and a link to an old job, and cancels, resubmits, and shows a job's log and
    model.
    """
    with JobService(tmp_path) as service:
        ids = [
            service.submit("ann", model, name=f"job {number:02}", tags=["even"] if number % 2 == 0 else []).json["id"]
            for number in range(60)
        ]
        service.call("POST", f"/jobs/{ids[0]}/cancel", "ann")
        page = visit(f"{service.url}/dashboard#{ids[1]}", fails="409")
        page.get_by_label("Your token").fill(service.tokens["ann"])
        page.keyboard.press("Enter")
        page.locator("article h2", has_text="job 01").wait_for()
        require_count(page, ".list tbody tr", 50)
        page.get_by_role("button", name="Show older jobs").click()
        require_count(page, ".list tbody tr", 60)
        assert page.get_by_role("checkbox", name="show job 01").is_checked()
        assert violations(page) == []
        require_filters(page)
        service.files.of(ids[1]).log.write_text("a line of the driver\n")
        page.get_by_role("button", name="Log").click()
        page.locator("pre", has_text="a line of the driver").wait_for()
        with service.files.of(ids[1]).log.open("a") as log:
            log.write("and another")
        page.locator("pre", has_text="and another").wait_for()
        assert violations(page) == []
        page.get_by_role("button", name="Cancel").click()
        page.locator("article .state[data-state=cancelled]").wait_for()
        require_count(page, "article button:text('Cancel'):visible", 0)
        page.get_by_role("button", name="Submit again").click()
        assert violations(page) == []
        page.get_by_role("button", name="Submit", exact=True).click()
        require_count(page, "article", 2)
        service.files.of(ids[1]).sent_model.unlink()
        page.get_by_role("button", name="Submit again").first.click()
        page.get_by_role("button", name="Submit", exact=True).click()
        page.get_by_role("alert").get_by_text("its model was removed").wait_for()
        new = next(one.id for one in service.client("ann").jobs(text="job 01") if one.id != ids[1])
        service.finish(new)
        with page.expect_download() as download:
            page.get_by_role("button", name="Model").click()
        assert download.value.suggested_filename == f"{new[:8]}-model.keras"


def test_without_scripts_the_page_states_what_is_missing(visit: Callable[..., Any], saved: Callable[..., str]) -> None:
    page = visit(saved(RecordedJob(1, 10.0)), java_script_enabled=False)
    assert "does not run" in page.locator("noscript").text_content()
