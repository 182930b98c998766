"""Tests of the client and the command line with a real server, whose drivers return the model without training it."""

from __future__ import annotations

import http.server
import json
import re
import shlex
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from support.job_server.service import JobService
from support.patience import patience, until

from distkeras.commands.main import main, parser
from distkeras.job_server import Client, RemoteJob
from distkeras.job_server.errors import (
    DescriptionError,
    ForbiddenError,
    JobFailedError,
    JobServerError,
    JobState,
    NotFoundError,
    StateError,
    UnauthorizedError,
)
from distkeras.job_server.runner.files import append
from distkeras.ps.errors import ConfigurationError, DeadlineError, ServerLostError

# Keras: a model that was compiled and saved before it was trained has an optimizer without variables.
pytestmark = pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobService]:
    with JobService(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture(scope="module")
def model() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    return model


@pytest.fixture
def working(service: JobService, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the server's runner; it and the client poll ten times as often as by default."""
    for module in ("client", "runner.runner"):
        monkeypatch.setattr(f"distkeras.job_server.{module}._POLL_SECONDS", 0.1)
    stop = threading.Event()
    thread = threading.Thread(target=service.runner.run, args=(stop,))
    thread.start()
    yield
    stop.set()
    thread.join(patience(20))


@pytest.fixture
def send(service: JobService, model: keras.Model) -> Callable[..., RemoteJob]:
    """Return a function that submits a job of ann's; the job's name says what the driver does."""

    def submit(todo: str = "train", **options: Any) -> RemoteJob:
        return service.client("ann").submit(model, "downpour", data=service.data("train.parquet"), name=todo, **options)

    return submit


def test_a_job_is_submitted_awaited_and_its_results_are_fetched(
    working: None, send: Callable[..., RemoteJob], model: keras.Model, tmp_path: Path
) -> None:
    job = send(batch_size=8, num_epoch=2).wait(patience(60), progress=False)
    assert (job.state, job.record["user"]) == (JobState.DONE, "ann")
    assert job.record["description"]["options"] == {"batch_size": 8, "num_epoch": 2}
    fetched = job.model()
    rows = np.ones((3, 2), np.float32)
    np.testing.assert_array_equal(fetched.predict(rows, verbose=0), model.predict(rows, verbose=0))
    job.save_model(tmp_path / "model.keras")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.keras"]
    with pytest.raises(StateError, match=r"history\.parquet"):
        job.history()  # This driver writes no such file.
    job.remove()
    with pytest.raises(NotFoundError):
        job.refresh()


def test_a_predict_job_is_submitted_and_awaited(
    working: None, service: JobService, send: Callable[..., RemoteJob], model: keras.Model, tmp_path: Path
) -> None:
    trained = send().wait(patience(60), progress=False)
    model.save(tmp_path / "model.keras")
    client, rows = service.client("ann"), service.data("rows")
    options: dict[str, Any] = {"features_col": ["a"], "batch_size": 9}
    jobs = [
        client.predict(source, data=rows, output=service.output("ann", name), name="train", **options)
        for source, name in ((trained, "first"), (model, "second"), (tmp_path / "model.keras", "third"))
    ]
    for job in jobs:
        assert job.wait(patience(60), progress=True).state is JobState.DONE
        assert job.record["kind"] == "predict"
        assert job.record["description"]["options"] == options
    with pytest.raises(StateError, match="to predict"):
        job.model()
    with pytest.raises(DescriptionError) as caught:
        service.client("ben").predict(trained, data=service.data("rows"), output=service.output("ben"))
    assert caught.value.field == "job"


def test_waiting_for_a_failed_job_raises_its_error(working: None, send: Callable[..., RemoteJob]) -> None:
    with pytest.raises(JobFailedError, match="failed: ShapeError: the rows must fit"):
        send("fail").wait(patience(60), progress=False)


def test_a_job_is_cancelled(working: None, send: Callable[..., RemoteJob]) -> None:
    job = send("wait")
    until(lambda: job.refresh().state is JobState.TRAINING)
    assert job.cancel().record["cancelled"]
    with pytest.raises(JobFailedError, match="cancelled"):
        job.wait(patience(60), progress=False)
    with pytest.raises(JobFailedError):
        job.wait(patience(60), progress=False)


def test_waiting_has_a_deadline(send: Callable[..., RemoteJob]) -> None:
    job = send()
    with pytest.raises(DeadlineError, match="and continues"):
        job.wait(0.0, progress=False)
    job.cancel()


def test_the_output_of_a_running_job_can_be_followed(service: JobService, send: Callable[..., RemoteJob]) -> None:
    job = send()
    path = service.files.of(job.id).progress
    for place in range(3):
        append(path, {"kind": "status", "clock": place, "loss": float("nan")})
    assert [row["clock"] for row in job.metrics()] == [0, 1, 2]
    assert job.metrics()[0]["loss"] is None
    service.files.of(job.id).log.write_text("one\ntwo\n")
    assert (job.log(), job.log(4), job.log(0)) == ("one\ntwo\n", "two\n", "")
    job.cancel()


def test_jobs_of_several_pages_are_listed(service: JobService, model: keras.Model) -> None:
    client = service.client("ben")
    sent = [client.submit(model, "agn", data=service.data("x")).id for _ in range(3)]
    listed = client.connection.call("GET", "/jobs", limit=2)
    assert [job["id"] for job in listed["jobs"]] == sent[:0:-1]
    assert [job.id for job in client.jobs()] == sent[::-1]
    assert list(client.jobs("done")) == []
    assert client.job(sent[0]).state is JobState.QUEUED
    for job in client.jobs():
        job.cancel()


def test_the_error_of_a_refusal_has_its_kind_and_field(send: Callable[..., RemoteJob], service: JobService) -> None:
    with pytest.raises(DescriptionError) as caught:
        send(batch_size=0)
    assert caught.value.field == "options.batch_size"
    with pytest.raises(UnauthorizedError, match=f"^{service.url} has refused the token"):
        list(Client(service.url, "dk_nothing").jobs())
    with pytest.raises(ForbiddenError):
        service.client("ann").add_user("eve")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"worker_optimizer": keras.optimizers.Adam()}, "options.worker_optimizer"),
        ({"loss": keras.losses.MeanSquaredError()}, "options.loss"),
        ({"batch_size": np.int64(8)}, "options.batch_size"),
        ({"hyper_parameters": {"window": float("nan")}}, "hyper_parameters.window"),
        ({"checkpoint_every": object()}, "checkpoint_every"),
    ],
    ids=range(5),
)
def test_values_that_json_cannot_represent_are_refused(
    send: Callable[..., RemoteJob], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(DescriptionError, match="JSON") as caught:
        send(**options)
    assert caught.value.field == field


# ---- addresses that a token is sent to


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "127.0.0.1:80", "http://", "https://ann:pass@x", "http://gateway:8571", "http://127.0.0.1.x"]
)
def test_a_token_is_not_sent_to_an_unsafe_url(url: str) -> None:
    with pytest.raises(ConfigurationError, match="url"):
        Client(url, "dk_x")


@pytest.mark.parametrize("token", ["", "a b", "é", "a\r\nX: y"])
def test_an_invalid_token_is_refused(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTKERAS_TOKEN", raising=False)
    with pytest.raises(ConfigurationError, match="token"):
        Client("http://127.0.0.1", token)


def test_a_token_is_read_from_the_environment_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTKERAS_TOKEN", "dk_secret")
    client = Client("https://gateway:8443/")
    assert repr(client) == "JobClient('https://gateway:8443')"
    assert "secret" not in repr(client.connection)
    assert Client("http://gateway", plain_http=True).connection.url == "http://gateway"


@pytest.mark.parametrize(
    ("status", "error"), [(302, JobServerError), (502, ServerLostError), (503, ServerLostError), (504, ServerLostError)]
)
def test_a_redirect_is_not_followed_and_a_proxy_without_its_server_is_an_absent_server(
    status: int, error: type[Exception]
) -> None:
    """A redirect would send the token to another address."""
    seen: list[str] = []

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with pytest.raises(error, match=f"status {status}"):
            Client(f"http://127.0.0.1:{server.server_port}", "dk_x").job("x")
        server.shutdown()
        thread.join(patience(20))
    assert seen == ["/api/v1/jobs/x"]


def test_an_absent_or_silent_server_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(DeadlineError, match="has not answered for"):
            Client(url, "dk_x", timeout=0.1).job("x")
    refused = rf"^{url} cannot be reached: .*refused; is the server running\?$"
    with pytest.raises(ServerLostError, match=refused):
        Client(url, "dk_x").job("x")
    with pytest.raises(ServerLostError, match=refused):  # the model's size has nothing to do with it
        Client(url, "dk_x").send("/jobs", {}, b"model")


# ---- the command line


@pytest.fixture
def run(service: JobService, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run ``distkeras jobs`` as ann."""
    (tmp_path / "token").write_text(service.tokens["ann"] + "\n")

    def call(*words: str) -> tuple[int, str, str]:
        status = main(["jobs", *words, "--url", service.url, "--token-file", str(tmp_path / "token")])
        return status, *capsys.readouterr()

    return call


def test_the_command_line_manages_a_job(
    run: Callable[..., tuple[int, str, str]], service: JobService, model: keras.Model, tmp_path: Path
) -> None:
    model.save(tmp_path / "model.keras")
    flags = "--rule agn --set window=3 --workers 2 --batch-size 16 --class-weight 0=1 1=2 --loss mse --no-shuffle"
    optimizer = "--optimizer adam --optimizer-set learning_rate=0.1"
    optimizer += f" --early-stopping data={service.data('y')} patience=3"
    what = ["--model", str(tmp_path / "model.keras"), "--data", service.data("x"), "--name", "mine"]
    what += ["--tags", "nightly", "a.1"]
    status, out, err = run("submit", *what, *flags.split(), *optimizer.split())
    assert (status, err) == (0, "")
    job = out.strip()
    status, out, _ = run("show", job)
    assert json.loads(out)["description"] == {
        "rule": "agn",
        "data": service.data("x"),
        "name": "mine",
        "tags": ["nightly", "a.1"],
        "checkpoint_every": 100,
        "time_budget": None,
        "early_stopping": {"data": service.data("y"), "patience": 3},
        "hyper_parameters": {"window": 3},
        "options": {
            "num_workers": 2,
            "batch_size": 16,
            "class_weight": {"0": 1.0, "1": 2.0},
            "loss": "mse",
            "shuffle": False,
            "worker_optimizer": {"class_name": "adam", "config": {"learning_rate": 0.1}},
        },
    }
    found = run("list", "--state", "queued", "--text", "MIN", "--tag", "a.1")[1]
    assert re.fullmatch(rf"{job}  queued .* ann +mine nightly a.1\n", found)
    assert run("fetch", job, "--out", str(tmp_path / "x"))[0] == 2
    assert not (tmp_path / "x").exists()
    assert run("cancel", job)[0] == 0
    status, out, _ = run("watch", job)
    assert (status, out) == (1, "cancelled\n")
    assert run("log", job)[:2] == run("log", "--follow", job)[:2] == (0, "")
    again = run("resubmit", job, "--set", "options.batch_size=8", f"data={service.data('y')}")[1].strip()
    record = json.loads(run("show", again)[1])
    assert record["tags"] == ["nightly", "a.1"]
    assert (record["description"]["data"], record["description"]["options"]["batch_size"]) == (service.data("y"), 8)
    assert run("cancel", again)[0] == run("remove", again)[0] == 0
    assert run("remove", job)[0] == 0
    status, _, err = run("show", job)
    assert (status, err) == (2, f"distkeras: NotFoundError: there is no job {job}, or it belongs to another user\n")


def test_a_list_has_the_numbers_of_jobs_in_an_order(
    run: Callable[..., tuple[int, str, str]], service: JobService, send: Callable[..., RemoteJob]
) -> None:
    jobs = [send(name, tags=["ordered"]) for name in ("b", "a fail")]
    for job in jobs:
        service.finish(job.id)
    lines = run("list", "--tag", "ordered", "--sort", "loss")[1].splitlines()
    assert [line.split()[0] for line in lines] == [job.id for job in jobs]
    assert re.search(r" done +\S+ \S+ +0:00:0\d +2 +0\.5  ann +b ordered$", lines[0])
    assert re.search(
        r" failed +\S+ \S+ +0:00:0\d +- +-  ann +a fail ordered \(ShapeError: the rows must fit\)$", lines[1]
    )
    lines = run("list", "--tag", "ordered", "--sort", "name")[1].splitlines()
    assert [line.split()[0] for line in lines] == [job.id for job in jobs[::-1]]


def test_the_command_line_manages_a_predict_job(
    run: Callable[..., tuple[int, str, str]], service: JobService, model: keras.Model, tmp_path: Path
) -> None:
    model.save(tmp_path / "model.keras")
    where = ["--data", service.data("rows"), "--output", service.output("ann")]
    flags = "--features a b --predictions p --batch-size 3 --batch-bytes 99 --vectors"
    status, out, err = run("predict", "--model", str(tmp_path / "model.keras"), *where, *flags.split())
    assert (status, err) == (0, "")
    job = service.client("ann").job(out.strip())
    options = {"features_col": ["a", "b"], "output_col": ["p"], "batch_size": 3, "batch_bytes": 99}
    assert job.record["description"]["options"] == options | {"output_type": "vector"}
    assert run("predict", "--job", job.id, *where)[0] == 2  # A predict job has no model.
    append(service.files.of(job.id).progress, {"kind": "tasks", "done": 3, "of": 8})
    append(service.files.of(job.id).progress, {"kind": "predicted", "rows": 40})
    job.cancel()
    lines = run("watch", job.id)[1].splitlines()
    assert (lines[1][10:], lines[2][10:]) == ("task 3 of 8", "40 rows")


def test_the_output_of_a_job_is_shown_in_lines(
    run: Callable[..., tuple[int, str, str]], service: JobService, send: Callable[..., RemoteJob]
) -> None:
    """A terminal receives no control characters."""
    job = send()
    path = service.files.of(job.id).progress
    news = {"epochs": 0.5, "samples": 320, "loss": 0.25, "joined": 3, "finished": 1}
    append(path, {"kind": "training", "attempt": 1, "metrics": ["loss"]})
    append(path, {"kind": "status"} | news)
    append(path, {"kind": "event", "event": "takeover", "text": "worker \x1b[2J 3"})
    job.cancel()
    lines = run("watch", job.id)[1].splitlines()
    assert lines[0] == "cancelled"
    assert lines[1].endswith("epoch 0.50, 320 samples, loss 0.2500, 2 workers")
    assert lines[2].endswith("takeover: worker ?[2J 3")


def test_the_command_line_manages_accounts(
    run: Callable[..., tuple[int, str, str]], service: JobService, tmp_path: Path
) -> None:
    token = run("token", "--note", "travels", "--days", "2")[1].strip()
    status, out, _ = run("tokens")
    (line,) = [line for line in out.splitlines() if line.endswith("travels")]
    assert status == 0
    assert "  until 20" in line
    for words in (["users"], ["audit"], ["user", "eve"], ["token", "--user", "ben"]):
        assert run(*words)[0] == 2  # These commands require an administrator.
    assert run("revoke", line.split()[0])[0] == 0
    assert service.call("GET", "/me", token).status == 401
    (tmp_path / "token").write_text(service.tokens["admin"])
    assert run("user", "eve")[0] == 0
    assert run("remove-user", "eve")[0] == 0
    assert re.search(r"^eve  .*  removed$", run("users")[1], re.M)
    assert run("reinstate-user", "eve")[0] == run("user", "numbers", "--role", "metrics")[0] == 0
    assert re.search(r"^eve  .*  user$", run("users")[1], re.M)
    lines = run("audit", "--count", "4")[1].splitlines()
    actions = [["add user", "numbers, metrics"], ["reinstate user", "eve"], ["remove user", "eve"]]
    assert [re.split("  +", line)[3:] for line in lines] == [*actions, ["add user", "eve, user"]]
    made = run("token", "--user", "eve")[1].strip()
    assert run("revoke", "--alone", made.split("_")[1])[0] == 0
    assert service.call("GET", "/me", made).status == 401


@pytest.mark.parametrize("flags", [["--host", "x"], ["--optimizer-set", "learning_rate=1"], ["--progress"]])
def test_flags_that_a_server_does_not_support_are_refused(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, flags: list[str]
) -> None:
    status, out, err = run("submit", "--model", "x", "--data", "x", "--rule", "agn", *flags)
    assert (status, out) == (2, "")
    assert "Received" in err


def test_every_command_has_a_help(capsys: pytest.CaptureFixture[str]) -> None:
    actions = ["submit", "predict", "list", "watch", "show", "log", "cancel", "remove", "fetch", "token", "tokens"]
    actions += ["revoke", "user", "users", "remove-user", "audit"]
    for words in (["serve"], *(["jobs", action] for action in actions)):
        with pytest.raises(SystemExit) as caught:
            parser().parse_args([*words, "--help"])
        assert caught.value.code == 0
        assert capsys.readouterr().out


# ---- the guide


GUIDE = Path(__file__).parents[2] / "docs" / "guide"


def blocks(language: str, page: str = "jobs.md") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (GUIDE / page).read_text(), re.M | re.S)


@pytest.mark.slow
def test_the_guides_program_runs(working: None, service: JobService, model: keras.Model) -> None:
    program = "\n".join(blocks("py"))
    for text, replacement in (
        ("http://127.0.0.1:8571", service.url),
        ("/data/scored/ann", service.output("ann")),
        ("/data/train.parquet", service.data("train.parquet")),
        ("/data/test.parquet", service.data("test.parquet")),
    ):
        assert text in program
        program = program.replace(text, replacement)
    names: dict[str, Any] = {"model": model, "token": service.tokens["ann"]}
    exec(program, names)
    assert names["trained"].count_params() == model.count_params()
    assert names["scored"].state is JobState.DONE


def test_the_guides_commands_exist() -> None:
    found = [*blocks("bash"), *blocks("bash", "gateway.md")]
    text = "\n".join(found).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("distkeras ")]
    assert len(lines) >= 12
    for line in lines:
        parser().parse_args(shlex.split(line.partition(" > ")[0])[1:])
