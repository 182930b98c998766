"""Tests of the server's metrics and of jobs that are found by name and tag or submitted again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import OperationalError
from support.job_server.service import JobService
from support.patience import patience, until

from distkeras.job_server.errors import DescriptionError, JobState, StateError, UnavailableError
from distkeras.job_server.runner.files import JobFolder
from distkeras.job_server.store.jobs import JobStore


@pytest.fixture(scope="module")
def jobs(service: JobService, model: bytes) -> Iterator[dict[str, str]]:
    """Return the ids of some jobs of ann and one of ben, by name."""
    ids = {}
    for who, name, tags in (
        ("ann", "Spring sales", ["sales", "2026"]),
        ("ann", "100% of sales_x", ["2026.1"]),
        ("ann", "churn", []),
        ("ben", "spring", ["sales"]),
    ):
        answer = service.submit(who, model, name=name, tags=tags)
        assert answer.status == 201
        assert answer.json["tags"] == tags
        ids[name] = answer.json["id"]
    yield ids
    for name, job in ids.items():
        service.call("POST", f"/jobs/{job}/cancel", "ben" if name == "spring" else "ann")


@pytest.mark.parametrize(
    ("who", "query", "found"),
    [
        ("ann", "text=SALES", {"Spring sales", "100% of sales_x"}),
        ("ann", "text=%25", {"100% of sales_x"}),
        ("ann", "text=s_x", {"100% of sales_x"}),
        ("ann", "tag=sales", {"Spring sales"}),
        ("ann", "tag=2026", {"Spring sales"}),
        ("ann", "tag=sales&text=churn", set()),
        ("ben", "text=spring", {"spring"}),
        ("admin", "text=ben", {"spring"}),
        ("admin", "tag=sales", {"Spring sales", "spring"}),
    ],
)
def test_jobs_are_found_by_name_and_tag(
    service: JobService, jobs: dict[str, str], who: str, query: str, found: set[str]
) -> None:
    listed = service.call("GET", f"/jobs?{query}", who).json["jobs"]
    assert {job["name"] for job in listed if job["id"] in jobs.values()} == found


@pytest.mark.parametrize("tags", [["two words"], [""], ["x" * 65], ["a"] * 21, "word", [1]])
def test_invalid_tags_are_refused(service: JobService, model: bytes, tags: Any) -> None:
    answer = service.submit("ann", model, tags=tags)
    assert answer.status == 422
    assert answer.json["error"]["field"].startswith("tags")


class TestResubmission:
    def test_a_job_is_submitted_again(self, service: JobService, jobs: dict[str, str]) -> None:
        first = jobs["Spring sales"]
        again = service.client("ann").job(first).resubmit()
        try:
            assert again.id != first
            assert again.state is JobState.QUEUED
            was = service.call("GET", f"/jobs/{first}", "ann").json["description"]
            assert again.record["description"] == was
            folders = [service.files.of(job).sent_model.read_bytes() for job in (first, again.id)]
            assert folders[0] == folders[1]
        finally:
            again.cancel()

    def test_a_job_is_submitted_again_with_changes(self, service: JobService, jobs: dict[str, str]) -> None:
        before = service.call("GET", f"/jobs/{jobs['Spring sales']}", "ann").json["description"]
        data = service.data("other")
        changes = {"data": data, "name": "again", "options": {"num_epoch": 3}}
        again = service.client("ann").job(jobs["Spring sales"]).resubmit(**changes)
        service.call("POST", f"/jobs/{again.id}/cancel", "ann")
        options = {**before["options"], "num_epoch": 3}
        assert again.record["description"] == before | {"data": data, "name": "again", "options": options}
        without = again.resubmit(options={"num_epoch": None})
        service.call("POST", f"/jobs/{without.id}/cancel", "ann")
        assert without.record["description"]["options"] == before["options"]

    @pytest.mark.parametrize(
        ("changes", "field"),
        [({"data": "/etc"}, "data"), ({"options": {"batch_size": 0}}, "options.batch_size"), ({"rate": 1}, "rate")],
    )
    def test_changes_are_checked(
        self, service: JobService, jobs: dict[str, str], changes: dict[str, Any], field: str
    ) -> None:
        with pytest.raises(DescriptionError) as caught:
            service.client("ann").job(jobs["Spring sales"]).resubmit(**changes)
        assert caught.value.field == field

    def test_another_users_job_is_not_found(self, service: JobService, jobs: dict[str, str]) -> None:
        assert service.call("POST", f"/jobs/{jobs['Spring sales']}/resubmit", "ben").status == 404

    def test_an_administrators_copy_belongs_to_the_administrator(
        self, service: JobService, jobs: dict[str, str]
    ) -> None:
        answer = service.call("POST", f"/jobs/{jobs['spring']}/resubmit", "admin")
        assert (answer.status, answer.json["user"]) == (201, "admin")
        service.call("POST", f"/jobs/{answer.json['id']}/cancel", "admin")

    def test_the_data_must_still_exist(self, service: JobService, model: bytes) -> None:
        data = Path(service.data("passing"))
        job = service.submit("ann", model, data=str(data)).json["id"]
        data.unlink()
        answer = service.call("POST", f"/jobs/{job}/resubmit", "ann")
        assert (answer.status, answer.json["error"]["field"]) == (422, "data")
        service.call("POST", f"/jobs/{job}/cancel", "ann")

    def test_the_model_must_still_exist(self, service: JobService, model: bytes) -> None:
        job = service.client("ann").job(service.submit("ann", model).json["id"])
        service.files.of(job.id).sent_model.unlink()
        with pytest.raises(StateError, match="its model was removed"):
            job.resubmit()
        job.cancel()


class TestMetrics:
    def test_the_health_check_needs_no_token(self, service: JobService) -> None:
        answer = service.call("GET", "/healthz", prefix="")
        assert (answer.status, answer.json) == (200, {"status": "ok", "problems": []})

    @pytest.mark.parametrize("broken", ["database", "runner"])
    def test_a_server_with_a_failure_reports_it(self, tmp_path: Path, broken: str) -> None:
        (tmp_path / "data").mkdir()
        with JobService(tmp_path) as own:
            if broken == "database":
                with own.engine.begin() as connection:
                    connection.exec_driver_sql("ALTER TABLE distkeras_jobs RENAME TO elsewhere")
            else:
                object.__setattr__(own.services, "silence", lambda: 1e6)
            answer = own.call("GET", "/healthz", prefix="")
            assert answer.status == 503
            assert answer.json["status"] == "failing"
            assert len(answer.json["problems"]) == 1

    def test_a_database_that_does_not_answer_is_not_the_servers_defect(
        self, service: JobService, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_store: JobStore, *_arguments: Any, **_options: Any) -> None:
            raise OperationalError("SELECT 1", {}, TimeoutError("no answer"))

        monkeypatch.setattr(JobStore, "page", fail)
        answer = service.call("GET", "/jobs", "ann")
        assert (answer.status, answer.json["error"]["type"]) == (503, "UnavailableError")
        with pytest.raises(UnavailableError):
            next(service.client("ann").jobs())

    def test_the_runner_reports_the_time_of_its_last_tick(self, tmp_path: Path) -> None:
        stop = threading.Event()
        with JobService(tmp_path) as own:
            runner = own.runner
        thread = threading.Thread(target=runner.run, args=(stop,))
        began = time.monotonic()
        thread.start()
        try:
            until(lambda: runner.silence() < time.monotonic() - began)
        finally:
            stop.set()
            thread.join(patience(20))

    def test_prometheus_can_parse_the_metrics(self, service: JobService, jobs: dict[str, str]) -> None:
        answer = service.call("GET", "/metrics", "admin", prefix="")
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain")
        families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
        counts = {sample.labels["state"]: sample.value for sample in families["distkeras_jobs"].samples}
        assert counts.keys() == {state.value for state in JobState}
        assert sum(counts.values()) == len(service.call("GET", "/jobs?limit=1000", "admin").json["jobs"])
        assert families["distkeras_disk_free_bytes"].samples[0].value > 0

    def test_a_token_for_metrics_reads_nothing_else(self, service: JobService, jobs: dict[str, str]) -> None:
        client = service.client("admin")
        client.add_user("prometheus", "metrics")
        token = client.new_token(user="prometheus")
        assert service.call("GET", "/metrics", token, prefix="").status == 200
        for path in ("/me", "/jobs", f"/jobs/{jobs['spring']}", "/tokens"):
            assert service.call("GET", path, token).status == 403
        assert service.post("/tokens", token, {}).status == 403

    @pytest.mark.parametrize(("who", "status"), [("ann", 403), (None, 401)])
    def test_the_metrics_require_an_administrator(self, service: JobService, who: str | None, status: int) -> None:
        assert service.call("GET", "/metrics", who, prefix="").status == status


def test_a_log_can_be_followed_to_its_end(service: JobService, model: bytes) -> None:
    job = service.client("ann").job(service.submit("ann", model).json["id"])
    folder: JobFolder = service.files.of(job.id)
    folder.log.write_text("earlier\n")
    pieces: list[str] = []
    follower = threading.Thread(target=lambda: pieces.extend(job.follow_log(last=1000)))
    follower.start()
    try:
        until(lambda: pieces == ["earlier\n"])
        with folder.log.open("a") as log:
            log.write("later\n")
        until(lambda: "".join(pieces) == "earlier\nlater\n")
        assert follower.is_alive()
    finally:
        service.call("POST", f"/jobs/{job.id}/cancel", "ann")
    follower.join(patience(20))
    assert not follower.is_alive()
    began = time.monotonic()
    assert list(job.follow_log(last=0)) == []
    assert list(job.follow_log(last=6)) == ["later\n"]
    assert time.monotonic() - began < patience(20)
