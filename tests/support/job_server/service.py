"""A real job server on loopback with waitress, SQLite and files; its drivers are real or stubs."""

from __future__ import annotations

import http.client
import json
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distkeras.job_server import Client
from distkeras.job_server.errors import FINAL
from distkeras.job_server.runner.files import JobFiles
from distkeras.job_server.runner.runner import JobRunner
from distkeras.job_server.server.app import FailureLimit, HttpListener, create_app
from distkeras.job_server.server.endpoints import Services
from distkeras.job_server.settings import Settings
from distkeras.job_server.store.accounts import Accounts
from distkeras.job_server.store.jobs import JobStore
from distkeras.job_server.store.tables import open_database
from support.job_server.runner_process import STUB
from support.patience import patience, until
from support.present import present


class Answer:
    """A response: status, headers, and a body that may be JSON."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = response.status, dict(response.getheaders()), response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class JobService:
    """A server with the users admin, ann and ben, as a context manager."""

    def __init__(
        self,
        folder: Path,
        *,
        failures: FailureLimit | None = None,
        upload_max: int = 1 << 20,
        trusted_proxy: str | None = None,
        database: str | None = None,
        reserve: int = 0,
    ) -> None:
        (folder / "data").mkdir(exist_ok=True)
        self.engine = open_database(database or f"sqlite:///{folder / 'jobs.sqlite'}")
        self.accounts, self.store = Accounts(self.engine), JobStore(self.engine)
        self.files = JobFiles(folder / "files")
        (folder / "output").mkdir(exist_ok=True)
        settings = Settings(
            [str(folder / "data")], [str(folder / "output")], [self.files.root], upload_max=upload_max, reserve=reserve
        )
        self.services = Services(self.accounts, self.store, self.files, settings)
        self.tokens = {}
        for name, role in (("admin", "admin"), ("ann", "user"), ("ben", "user")):
            self.accounts.add_user(name, role)
            self.tokens[name] = self.accounts.add_token(name)
        limit = failures or FailureLimit(most=10_000)
        self._http = HttpListener(
            create_app(self.services, limit),
            "127.0.0.1",
            0,
            upload_max=upload_max + (2 << 20),
            trusted_proxy=trusted_proxy,
        )
        self.port = self._http.port
        self.runner = JobRunner(self.store, self.files, Settings(slots=2, driver_command=STUB, grace=0.0))
        self._thread = threading.Thread(target=self._http.run, daemon=True)

    def __enter__(self) -> JobService:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._http.stop()
        self._thread.join(patience(20))
        self.engine.dispose()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, name: str) -> Client:
        return Client(self.url, self.tokens[name])

    def call(
        self,
        method: str,
        path: str,
        who: str | None = None,
        *,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        prefix: str = "/api/v1",
    ) -> Answer:
        """Send a request as ``who``: a user, or, if there is no such user, a token that is sent unchanged."""
        headers = dict(headers or {})
        if who is not None:
            headers["Authorization"] = f"Bearer {self.tokens.get(who, who)}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=patience(20))
        try:
            connection.request(method, prefix + path, body, headers)
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def post(self, path: str, who: str, value: Any) -> Answer:
        return self.call("POST", path, who, body=json.dumps(value).encode(), headers={"Content-Type": JSON})

    def submit(self, who: str | None, model: bytes, **description: Any) -> Answer:
        """Submit a form, as a client does."""
        given = {"rule": "downpour", "data": self.data("train.parquet"), "name": "train"} | description
        return self.send_form(who, {"job": json.dumps(given).encode()}, {"model": model})

    def predict(self, who: str | None, model: bytes | None, **description: Any) -> Answer:
        """Send the form of a predict job."""
        given = {"data": self.data("rows"), "output": self.output(who or "ann"), "name": "train"} | description
        files = {} if model is None else {"model": model}
        return self.send_form(who, {"job": json.dumps(given).encode()}, files, "/predictions")

    def send_form(
        self, who: str | None, fields: dict[str, bytes], files: dict[str, bytes], path: str = "/jobs"
    ) -> Answer:
        boundary = secrets.token_hex(8)
        parts = [f'form-data; name="{name}"\r\n\r\n'.encode() + value for name, value in fields.items()]
        parts += [f'form-data; name="{n}"; filename="../{n}"\r\n\r\n'.encode() + value for n, value in files.items()]
        mark = f"--{boundary}".encode()
        body = b"".join(mark + b"\r\nContent-Disposition: " + part + b"\r\n" for part in parts) + mark + b"--\r\n"
        kind = f"multipart/form-data; boundary={boundary}"
        return self.call("POST", path, who, body=body, headers={"Content-Type": kind})

    def data(self, name: str) -> str:
        """Return the path of an existing data file."""
        path = self.files.root.parent / "data" / name
        path.touch()
        return str(path)

    def output(self, user: str, name: str = "scored") -> str:
        return str(self.files.root.parent / "output" / user / name)

    def tick_until(self, condition: Callable[[], object]) -> None:
        def tried() -> object:
            self.runner.tick()
            return condition()

        until(tried)

    def finish(self, job_id: str) -> str:
        """Run a job to its end; return its state."""
        viewer = present(self.accounts.authenticate(self.tokens["admin"]))
        self.tick_until(lambda: self.store.get(viewer, job_id).state in FINAL)
        return self.store.get(viewer, job_id).state


JSON = "application/json"
