"""Tests of what a reader sees first: the headline, the monitored metric, the start, a failure, words, and paper."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.browser import DESKTOP, PHONE, colored, violations
from support.training.recorded_job import BEGAN, RecordedJob, record_of

from distkeras.dashboard.page import saved_page
from distkeras.dashboard.record import CurrentStatus, JobRecord
from distkeras.dashboard.watch import Journal, read_since
from distkeras.ps.events import Event
from distkeras.ps.rules import make
from distkeras.results import MicroBatchProgress

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
pytestmark = pytest.mark.slow

#: Seconds before the first commit at which the jobs of these tests begin.
START = 43.0
JOB = RecordedJob(4, seconds=60.0)
FIRST_TILE = ".tiles > div:first-child"


@pytest.fixture
def show(visit: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Return a function that opens the saved page of a record."""

    def show(record: JobRecord, **options: Any) -> Any:
        Journal(tmp_path / "journal.jsonl").begin(record.whole())
        (tmp_path / "job.html").write_text(saved_page([read_since(tmp_path / "journal.jsonl")]))
        return visit((tmp_path / "job.html").as_uri(), **options)

    return show


def begun(commits: int = 0, job: RecordedJob = JOB, **status: Any) -> JobRecord:
    """Return the record of a job with some commits."""
    record = JobRecord(job.facts, job.metrics, float(job.commits["timestamp"][0]) - START)
    record.add_commits(job.commits[:commits], job.steps[: 4 * commits])
    record.now = replace(record.now, **status)
    return record


def facts_of(page: Any) -> list[str]:
    return list(page.locator("article > .facts").all_text_contents())


def test_the_headline_names_the_model_the_rule_and_the_data(show: Callable[..., Any]) -> None:
    page = show(record_of(JOB, state="done"))
    assert page.locator("h2").text_content() == "mnist_cnn with AGN"
    assert facts_of(page) == [
        "421,642 parameters · 61,440 rows · 2 columns: image, label",
        "rule AGN, window 4 · 4 workers · 2 epochs · mini-batches of 128",
    ]
    assert "None" not in page.locator("article").inner_text()
    assert page.title() == "done · Validation loss 0.351 · mnist_cnn with AGN"


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("diloco", "rule DiLoCo, window 50, server rate 0.7, momentum 0.9, nesterov"),
        ("fedopt", "rule FedOpt, form adam, server rate 0.01, beta 1 0.9, beta 2 0.99, epsilon 0.001"),
        ("ringmaster", "rule Ringmaster, window 1, patience 1"),
    ],
)
def test_a_rule_is_in_plain_words(show: Callable[..., Any], rule: str, words: str) -> None:
    record = begun()
    record.facts = replace(JOB.facts, rule=repr(make(rule)), columns=[f"c{number}" for number in range(39)])
    page = show(record)
    assert facts_of(page)[1].split(" · ")[0] == words
    assert facts_of(page)[0] == "421,642 parameters · 39 columns: c0, c1, c2, c3, …"


def test_the_first_tile_is_the_monitored_metric(show: Callable[..., Any]) -> None:
    page = show(record_of(RecordedJob(4, seconds=60.0, monitor="accuracy")))
    assert page.locator(f"{FIRST_TILE} dt").text_content() == "Validation accuracy"
    assert page.locator(f"{FIRST_TILE} .note").text_content() == "monitored by EarlyStopping"
    assert page.locator("figure.plot h3").first.text_content() == "Loss and metrics: accuracy"
    large, small = (
        page.locator(f".tiles > div:nth-child({place}) .value").evaluate(
            "one => parseFloat(getComputedStyle(one).fontSize)"
        )
        for place in (1, 2)
    )
    assert large > small
    assert page.locator(".tiles dt").all_text_contents().count("Training loss") == 1


@pytest.mark.parametrize(("evaluated", "label"), [(True, "Validation loss"), (False, "Training loss")])
def test_without_a_monitored_metric_the_first_tile_is_the_loss(
    show: Callable[..., Any], evaluated: bool, label: str
) -> None:
    page = show(record_of(JOB) if evaluated else begun(40, state="training", why=""))
    assert page.locator(".tiles dt").first.text_content() == label


def test_the_start_is_a_phase_and_no_part_of_the_axes(show: Callable[..., Any]) -> None:
    first = float(JOB.commits["timestamp"][0])
    starting = show(begun(why="spreading the data", timestamp=first - 23.0))
    assert starting.locator(".state").text_content() == "starting: spreading the data"
    assert starting.locator(".passed").text_content() == "0:20 since the job began"
    assert not starting.locator(".why").is_visible()
    assert not starting.locator(".tiles").is_visible()
    page = show(begun(len(JOB.commits), state="training", why="", timestamp=BEGAN + 60.0, epochs=1.5))
    assert "after a start of 0:43" in page.locator(".passed").text_content()
    reader = page.locator("figure.plot input[type=range]").first
    reader.focus()
    page.keyboard.press("Home")
    assert reader.get_attribute("aria-valuetext").startswith("Time 0:00: worker 0")
    assert colored(page, 0.02) > 0, "the lines begin at the left"


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_job_that_failed_at_once_states_it_once(show: Callable[..., Any], viewport: dict[str, int]) -> None:
    error = "WorkerError: column 'image' has a NaN"
    end = float(JOB.commits["timestamp"][0]) + 3.0
    record = begun(1, state="failed", why=error, timestamp=end)
    record.add_events([Event(end, "server", "failed", 2, None, f"job ends: {error}")])
    page = show(record, viewport=viewport)
    text = page.locator("body").inner_text()
    assert text.count("failed") == text.count(error) == 1
    assert page.title().startswith("failed")
    assert set(page.locator("table.workers tbody td:nth-child(2)").all_text_contents()) == {"ended"}
    assert violations(page) == []


def test_a_single_point_is_a_visible_dot(show: Callable[..., Any]) -> None:
    page = show(begun(1, state="failed", why="out of luck", timestamp=float(JOB.commits["timestamp"][0])))
    assert 5 <= colored(page, 0.5) < 30
    assert colored(page, 0.2) == colored(page, 0.8) == 0


def test_a_job_that_stopped_early_is_no_failure(show: Callable[..., Any]) -> None:
    page = show(record_of(JOB, state="stopped", why="accuracy 0.9 has reached 0.9"))
    assert page.locator(".state").text_content() == "stopped early"
    color = "one => getComputedStyle(one).color"
    assert page.locator("article > .why").evaluate(color) == page.locator(".passed").evaluate(color)


#: The pixels of each chart that are drawn, and those that have the color of texts on white.
DRAWN = """() => [...document.querySelectorAll('figure.plot:not([hidden])')].map((figure) => {
    const canvas = figure.querySelector('canvas');
    if (!canvas) return null;
    const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    let [ink, dark] = [0, 0];
    for (let place = 3; place < data.length; place += 4) {
        ink += data[place] > 0;
        dark += data[place] === 255 && data[place - 3] === 0x16 && data[place - 2] === 0x19 && data[place - 1] === 0x1d;
    }
    return { ink, dark, width: canvas.getBoundingClientRect().width, room: figure.clientWidth };
})"""


def drawn_when(page: Any, condition: str) -> list[dict[str, Any]]:
    """Return what `DRAWN` says of each chart, once all are drawn and ``condition`` is true of ``drawn``."""
    all_drawn = "drawn.length && drawn.every(Boolean)"
    page.wait_for_function(f"() => {{ const drawn = ({DRAWN})(); return {all_drawn} && {condition}; }}")
    drawn: list[dict[str, Any]] = page.evaluate(DRAWN)
    return drawn


def test_charts_are_drawn_without_scrolling(show: Callable[..., Any]) -> None:
    page = show(record_of(JOB, state="done"), viewport=PHONE)
    playwright.expect(page.locator("figure.plot:not([hidden]) canvas")).to_have_count(6)
    assert page.evaluate("scrollY") == 0
    drawn = page.evaluate(DRAWN)
    assert len(drawn) == 6
    assert all(figure["ink"] > 500 for figure in drawn)


def test_a_printed_page_has_all_charts_in_light_colors(show: Callable[..., Any], tmp_path: Path) -> None:
    page = show(record_of(RecordedJob(30, seconds=60.0), state="done"), scheme="dark")
    drawn_when(page, "drawn[0].dark === 0")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    drawn = drawn_when(page, "drawn[0].dark > 100")  # dark lines on white paper
    assert all(figure["width"] <= figure["room"] <= 720 for figure in drawn)
    scroll = page.locator(".scroll:has(table.workers)")
    assert scroll.evaluate("one => one.scrollHeight <= one.clientHeight"), "no row is cut off"
    assert not page.locator("figure.plot .reader").first.is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    drawn_when(page, "drawn[0].dark === 0")
    pages = page.pdf(path=tmp_path / "job.pdf")
    assert len(re.findall(rb"/Type\s*/Page\b", pages)) in range(2, 7)


def test_tiles_have_the_rows_of_tables(show: Callable[..., Any]) -> None:
    page = show(begun(12, tables={"users": [1200, 2000, 700, 100], "items": [3, 3, 0, 0]}))
    tiles = page.locator(".tiles > div").all_inner_texts()
    assert "Rows of users\n1,200\n2,000 admitted, 700 expired, 100 removed" in tiles
    assert "Rows of items\n3\n3 admitted, 0 expired, 0 removed" in tiles


def test_the_words_of_the_page_have_tooltips(show: Callable[..., Any]) -> None:
    job = RecordedJob(3, seconds=30.0)
    job.facts = replace(job.facts, stream=True)
    record = record_of(job)
    record.now = CurrentStatus("training", "", BEGAN + 30.0, 1.0, 3, 0, 1.0, saved_clock=3, saved_seconds=1.0)
    record.set_micro_batch(MicroBatchProgress(3, 100, 10, 2.0, 4.0, 0.5, 60, backlog={"files": 7.0}))
    page = show(record)
    for word in (
        *("attempt", "backlog", "center", "commit", "computing", "epoch", "fenced", "gap", "lag", "micro-batch"),
        *("retry", "rule", "sample", "scale", "skipped", "snapshot", "staleness", "takeover", "wait", "window", "wire"),
        *("mini-batch", "validation", "worker"),
    ):
        assert page.locator(f"article [title*='{word}: ']").count(), word
    words = page.locator("details.words")
    words.locator("summary").click()
    listed = words.locator("dt").all_text_contents()
    assert {"clock", "partition", "refusal", "staleness"} <= set(listed) == set(sorted(listed))
    assert listed == sorted(listed)
    assert violations(page) == []
