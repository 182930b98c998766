"""Tests of webhooks: the end of a job is posted only to an address that its user named and the operator allows."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import keras
import pytest
from support.job_server.service import JobService

from distkeras.job_server.errors import DescriptionError
from distkeras.job_server.states import JobState
from distkeras.job_server.store.jobs import JobStore
from distkeras.job_server.webhooks import WebhookSender, require_webhook
from distkeras.keras_model import archive


class Receiver(ThreadingHTTPServer):
    """A server that records posts and answers with the statuses that it was given."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[int] = []
        self.posts: list[tuple[str, str, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posts.append((self.path, self.headers["Idempotency-Key"], body))
        status = self.server.answers.pop(0) if self.server.answers else 200
        self.send_response(status)
        if status == 302:
            self.send_header("Location", f"{self.server.url}/elsewhere")
        self.end_headers()

    def log_message(self, *_arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield receiver
        receiver.shutdown()
        thread.join()


@pytest.fixture
def service(tmp_path: Path, receiver: Receiver) -> Iterator[JobService]:
    with JobService(tmp_path, webhooks=[f"{receiver.url}/hooks"]) as service:
        yield service


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def model() -> bytes:
    return archive.to_bytes(keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]))


def test_the_end_of_a_job_is_posted_once(service: JobService, receiver: Receiver, model: bytes) -> None:
    url = f"{receiver.url}/hooks/ann?team=a"
    job = service.client("ann")
    answer = service.submit("ann", model, name="nightly", tags=["a"], webhook=url)
    assert answer.status == 201
    quiet = service.submit("ann", model, name="quiet").json["id"]
    sender = WebhookSender(service.store)
    sender.send_due()
    assert receiver.posts == []
    for one in (answer.json["id"], quiet):
        assert service.finish(one) is JobState.DONE
    sender.send_due()
    sender.send_due()
    ((path, key, body),) = receiver.posts
    assert (path, key) == ("/hooks/ann?team=a", answer.json["id"])
    expected = {"name": "nightly", "tags": ["a"], "state": "done", "user": "ann", "error": None, "kind": "train"}
    assert {name: body[name] for name in expected} == expected
    assert body["ended"] == job.job(key).record["ended"]


def test_a_cancelled_job_is_posted_too(service: JobService, receiver: Receiver, model: bytes) -> None:
    job = service.submit("ann", model, webhook=f"{receiver.url}/hooks").json["id"]
    service.call("POST", f"/jobs/{job}/cancel", "ann")
    WebhookSender(service.store).send_due()
    assert [body["state"] for _, _, body in receiver.posts] == ["cancelled"]


def test_a_failed_post_is_tried_five_times(service: JobService, receiver: Receiver, model: bytes) -> None:
    job = service.submit("ann", model, webhook=f"{receiver.url}/hooks").json["id"]
    service.call("POST", f"/jobs/{job}/cancel", "ann")
    clock = Clock()
    sender = WebhookSender(JobStore(service.engine, clock))
    receiver.answers = [500, 404, 302, 503, 500, 500]
    for pause in (10, 60, 600, 3600, 36000):
        sender.send_due()
        count = len(receiver.posts)
        clock.now += pause - 1
        sender.send_due()
        assert len(receiver.posts) == count, "the retry is not due yet"
        clock.now += 1
    sender.send_due()
    assert len(receiver.posts) == 5
    assert {path for path, _, _ in receiver.posts} == {"/hooks"}, "redirects are not followed"


def test_an_unreachable_address_is_tried_again(service: JobService, receiver: Receiver, model: bytes) -> None:
    job = service.submit("ann", model, webhook=f"{receiver.url}/hooks").json["id"]
    service.call("POST", f"/jobs/{job}/cancel", "ann")
    with service.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE distkeras_jobs SET webhook = 'http://127.0.0.1:1/hooks'")
    clock = Clock()
    sender = WebhookSender(JobStore(service.engine, clock))
    sender.send_due()
    (waiting,) = service.store.due_webhooks()  # The store of the service uses the real clock.
    assert waiting.tries == 1
    with service.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE distkeras_jobs SET webhook = '{receiver.url}/hooks'")
    clock.now += 10
    sender.send_due()
    assert len(receiver.posts) == 1


def test_two_servers_post_an_end_once(service: JobService, receiver: Receiver, model: bytes) -> None:
    job = service.submit("ann", model, webhook=f"{receiver.url}/hooks").json["id"]
    service.call("POST", f"/jobs/{job}/cancel", "ann")
    (seen,) = service.store.due_webhooks()
    assert service.store.claim_webhook(seen, 10.0)
    assert not service.store.claim_webhook(seen, 10.0)


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example/jobs",
        "http://hooks.example/jobs/ann",
        "http://hooks.example/jobs/ann?x=1",
    ],
)
def test_allowed_addresses_are_accepted(url: str) -> None:
    require_webhook(url, ["https://other.example/", "http://hooks.example/jobs"])


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example/jobsandmore",
        "http://hooks.example/",
        "http://hooks.example/jobs/../admin",
        "http://hooks.example/jobs/%2E%2e/admin",
        "http://hooks.example/jobs/..%5cadmin",
        "https://hooks.example/jobs",
        "http://hooks.example:81/jobs",
        "http://user@hooks.example/jobs",
        "http://hooks.example.evil/jobs",
        "http://hooks.example@evil/jobs",
        "file:///etc/passwd",
        "http://[/jobs",
        "jobs",
        "",
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(DescriptionError, match="`webhook`"):
        require_webhook(url, ["http://hooks.example/jobs"])
    with pytest.raises(DescriptionError, match="allows: none"):
        require_webhook(url, [])


def test_the_server_refuses_a_job_with_such_an_address(service: JobService, model: bytes) -> None:
    answer = service.submit("ann", model, webhook="http://127.0.0.1:1/hooks")
    assert (answer.status, answer.json["error"]["field"]) == (422, "webhook")
