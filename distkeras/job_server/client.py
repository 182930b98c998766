"""The job server's client, for notebooks and programs. It needs neither Spark nor the server's libraries."""

from __future__ import annotations

import io
import ipaddress
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, TypeGuard
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request

from tqdm.auto import tqdm

from distkeras.job_server.errors import (
    BY_STATUS,
    FINAL,
    DescriptionError,
    JobFailedError,
    JobServerError,
    JobState,
    UnauthorizedError,
    UnavailableError,
    refused,
)
from distkeras.keras_model import archive
from distkeras.ps.errors import ConfigurationError, DeadlineError, ServerLostError
from distkeras.ps.validate import require_number

if TYPE_CHECKING:
    import keras
    import pandas as pd

    from distkeras.trainer import Trainer

#: Seconds from one poll of a job to the next.
_POLL_SECONDS = 1.0
#: Seconds that a server may be unreachable, as during a restart, while a client waits for a job.
_UNREACHABLE_SECONDS = 120.0
#: An offset behind the end of any log.
_END = 2**53
_WEEK = 7 * 86400.0
_BAR = "{{desc}}: {{percentage:3.0f}}%|{{bar}}| {} [{{elapsed}}{{postfix}}]"
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class JobClient:
    """The connection of one user to a job server.

    ::

        client = Client("https://gateway:8571", token)
        job = client.submit(model, "agn", data="hdfs:///data/train", num_workers=8, loss="mse")
        trained = job.wait().model()

    Args:
        url: the server's URL.
        token: your token; None: the variable ``DISTKERAS_TOKEN`` of the environment.
        timeout: seconds to wait for the next bytes of an answer.
        plain_http: allow sending the token over unencrypted HTTP to another machine, where others may read it.

    Raises:
        ConfigurationError: The URL or the token is invalid, or the URL leads to another machine without TLS.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 60.0, plain_http: bool = False) -> None:
        self.connection = ServerConnection(url, token, timeout, plain_http=plain_http)

    def submit(  # noqa: PLR0913 - one keyword a field of the description
        self,
        model: keras.Model | str | PathLike[str] | Trainer,
        rule: str | None = None,
        *,
        data: str | PathLike[str],
        hyper_parameters: Mapping[str, Any] = _NO_OPTIONS,
        name: str = "",
        tags: Sequence[str] = (),
        checkpoint_every: int = 100,
        time_budget: float | None = None,
        early_stopping: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> RemoteJob:
        """Send a job, and return at once.

        Args:
            model: a built `keras.Model`, or the path of a saved one. Or a `distkeras.Trainer`: the server then runs the
                same training as `Trainer.train`, and ``rule``, ``hyper_parameters`` and ``options`` must be left out.
                Before anything is sent, code of your own, `deadlines` and addresses of this machine are refused.
            rule: name of the update rule.
            data: Parquet to train on; a path or URI on the server.
            hyper_parameters: hyper-parameters of the rule.
            name: name of the job.
            tags: tags of the job, without spaces.
            checkpoint_every: commits from one snapshot to the next, from which a job continues if its driver has died.
            time_budget: seconds after which training ends early and successfully.
            early_stopping: a dictionary with ``data``, Parquet on the server to evaluate the center on, and keywords of
                `distkeras.EarlyStopping`; without ``patience`` and ``target`` the job is only evaluated.
            options: keywords of `distkeras.Trainer`, with values of JSON's types: ``worker_optimizer`` is a name, or a
                dictionary with ``class_name`` and ``config``; losses and metrics are names.

        Raises:
            DescriptionError: The job cannot be sent, or the server has refused it; ``field`` says which part.
            QuotaError: You have too many jobs or bytes on the server.
        """
        if not isinstance(data, str | PathLike):
            kind = f"{type(data).__module__}.{type(data).__qualname__}"
            raise refused("data", f"be the path or URI of Parquet that the server reads. Received: a {kind}")
        description = _given(
            data=str(data),
            name=name,
            tags=list(tags) or None,
            checkpoint_every=checkpoint_every,
            time_budget=time_budget,
            early_stopping=None if early_stopping is None else dict(early_stopping),
        )
        if _is_trainer(model):
            others = [rule, *hyper_parameters, *options]
            if others != [None]:
                raise DescriptionError(f"`rule` and options must be the trainer's own. Received: {others}", "rule")
            from distkeras.job_server.submission import description_of, model_of

            return self.send("/jobs", description | description_of(model), model_of(model))
        description |= {"rule": rule, "hyper_parameters": dict(hyper_parameters), "options": options}
        return self.send("/jobs", description, _bytes_of(model))

    def predict(
        self,
        model: keras.Model | str | PathLike[str] | RemoteJob,
        *,
        data: str,
        output: str,
        name: str = "",
        tags: Sequence[str] = (),
        **options: Any,
    ) -> RemoteJob:
        """Send a predict job, which writes the rows of ``data`` with the model's predictions, and return at once.

        Args:
            model: a built `keras.Model`, the path of one that Keras saved, or a job that has trained one.
            data: Parquet to predict for; a path or URI on the server.
            output: new folder on the server to write to, below your own folder in a place that the server allows. It is
                complete when the job is done.
            name, tags: as in `submit`, which has the errors, too.
            options: keywords of `distkeras.transformers.ModelPredictor`: ``features_col``, ``output_col`` and others.
        """
        description = _given(data=data, output=output, name=name, tags=list(tags) or None, options=options)
        if isinstance(model, RemoteJob):
            return self.send("/predictions", description | {"job": model.id}, None)
        return self.send("/predictions", description, _bytes_of(model))

    def send(self, path: str, description: Mapping[str, Any], model: bytes | None) -> RemoteJob:
        """Send a description and, if there is one, the model; DescriptionError as in `submit`."""
        _require_json(description)
        return RemoteJob(self.connection, self.connection.upload(path, "job", description, "model", model))

    def job(self, job_id: str) -> RemoteJob:
        """Return one of your jobs; NotFoundError if you have no such job."""
        return RemoteJob(self.connection, self.connection.call("GET", f"/jobs/{job_id}"))

    def jobs(self, state: str | None = None, *, text: str | None = None, tag: str | None = None) -> Iterator[RemoteJob]:
        """Yield your jobs, the latest first: in this state, with this tag, with this text in the name or user's name.

        They are read in pages.
        """
        for record in self._pages("/jobs", "jobs", state=state, text=text, tag=tag):
            yield RemoteJob(self.connection, record)

    def new_token(self, note: str = "", *, days: float | None = None, user: str | None = None) -> str:
        """Return a new token, which the server shows only once.

        Args:
            note: purpose of the token.
            days: days for which it is valid; None: as long as your own token.
            user: its user; only an administrator can create tokens for others.
        """
        return str(self.connection.call("POST", "/tokens", _given(note=note, days=days, user=user))["token"])

    def tokens(self) -> list[dict[str, Any]]:
        """Return your tokens, or all for an administrator: id, user, note, and when created, expires, revoked."""
        return list(self.connection.call("GET", "/tokens")["tokens"])

    def revoke_token(self, token_id: str, *, alone: bool = False) -> None:
        """Revoke a token by its id, which `tokens` returns, and the tokens that it has made, unless ``alone``.

        StateError if no administrator would have a valid token any more, NotFoundError if you have no such token.
        """
        self.connection.call("DELETE", f"/tokens/{token_id}", alone=alone or None)

    def add_user(self, name: str, role: str = "user") -> None:
        """Add a user, if you are an administrator; `new_token` creates their token.

        ``role`` is "user", "admin", or "metrics", which may read the server's numbers and nothing else.
        """
        self.connection.call("POST", "/users", {"name": name, "role": role})

    def users(self) -> list[dict[str, Any]]:
        """Return all users, if you are an administrator: name, role, active, created."""
        return list(self.connection.call("GET", "/users")["users"])

    def remove_user(self, name: str) -> None:
        """Revoke all tokens of a user, if you are an administrator. Their jobs stay."""
        self.connection.call("DELETE", f"/users/{name}")

    def reinstate_user(self, name: str) -> None:
        """Let a removed user have tokens again, if you are an administrator; the old ones stay revoked."""
        self.connection.call("POST", f"/users/{name}/reinstate")

    def audit(self) -> Iterator[dict[str, Any]]:
        """Yield the audit log, the latest entries first, if you are an administrator. It is read in pages."""
        return self._pages("/audit", "entries")

    def _pages(self, path: str, part: str, **query: Any) -> Iterator[dict[str, Any]]:
        before = None
        while True:
            page = self.connection.call("GET", path, before=before, **query)
            yield from page[part]
            before = page["next"]
            if before is None:
                return

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.connection.url!r})"


@dataclass
class RemoteJob:
    """A job on the server. Its model, history and commits are available when it is done; before, they raise StateError.

    Args:
        record: the job as the server described it last: state, times, error and others.
    """

    connection: ServerConnection
    record: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The server's id of the job."""
        return str(self.record["id"])

    @property
    def state(self) -> JobState:
        """Return the state at the last `refresh`."""
        return JobState(self.record["state"])

    def refresh(self) -> RemoteJob:
        """Read the job from the server again."""
        self.record = self.connection.call("GET", self._path())
        return self

    def wait(self, timeout: float = _WEEK, *, progress: bool | None = None) -> RemoteJob:
        """Wait until the job has ended successfully, and show its progress.

        Args:
            timeout: seconds.
            progress: show a bar. Default: on a terminal and in a notebook.

        Raises:
            JobFailedError: The job has failed, was cancelled or was lost; the text says which.
            DeadlineError: The job has not ended in time; it continues.
            ServerLostError: The server has been unreachable for longer than a restart takes.
        """
        deadline = _deadline(timeout)
        description = self.record.get("description", {})
        epochs = None if "output" in description else description.get("options", {}).get("num_epoch", 1)
        bar_format = _BAR.format("task {n} of {total}" if epochs is None else "epoch {n:.2f} of {total}")
        hidden = None if progress is None else not progress
        with tqdm(total=epochs or 1, desc=self.state.value, disable=hidden, bar_format=bar_format) as bar:
            for status in self.watch(deadline):
                if status.get("kind") == "tasks":
                    bar.n, bar.total = status["done"], status["of"]
                bar.n = min(bar.total, round(status.get("epochs", bar.n), 2))
                bar.set_description_str(self.state.value, refresh=False)
                if status.get("loss") is not None:
                    bar.set_postfix_str(f"loss {status['loss']:.4f}", refresh=False)
                bar.refresh()
        self.require_done()
        return self

    def require_done(self) -> None:
        """Raise JobFailedError, which says how the job ended, unless it was done at the last `refresh`."""
        if self.state is not JobState.DONE:
            text = f": {self.record['error']}" if self.record.get("error") else ""
            raise JobFailedError(f"job {self.id} ended as {self.state}{text}")

    def watch(self, deadline: float) -> Iterator[dict[str, Any]]:
        """Yield the job's records as they come, until the job has ended; an empty record if a poll returns none.

        ``deadline`` is by `time.monotonic`; the errors are those of `wait`.
        """
        for answer in self._answers("metrics", 0, "rows", deadline):
            yield from answer["rows"] or [{}]

    def _answers(self, part: str, offset: int, key: str, deadline: float) -> Iterator[dict[str, Any]]:
        """Yield the answers about a growing part of the job, until the job has ended and ``key`` is empty."""
        away = time.monotonic() + _UNREACHABLE_SECONDS
        while True:
            try:
                ended = self.refresh().state in FINAL  # read first: then the last answer is complete
                answer = self.connection.call("GET", self._path(part), offset=offset)
            except (ServerLostError, DeadlineError, UnavailableError):
                if time.monotonic() > min(away, deadline):
                    raise
                time.sleep(_POLL_SECONDS)
                continue
            away = time.monotonic() + _UNREACHABLE_SECONDS
            offset = answer["next"]
            yield answer
            if answer[key]:
                continue
            if ended:
                return
            if time.monotonic() > deadline:
                raise DeadlineError(f"job {self.id} has not ended in time; it is {self.state}, and continues")
            time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the job's records so far: one per second of training, and one for each event."""
        rows: list[dict[str, Any]] = []
        offset, following = -1, 0
        while following != offset:
            offset = following
            answer = self.connection.call("GET", self._path("metrics"), offset=offset)
            rows, following = rows + answer["rows"], answer["next"]
        return rows

    def follow_log(self, last: int = 20_000, timeout: float = _WEEK) -> Iterator[str]:
        """Yield what the driver and Spark print, as it comes, until the job has ended; errors as in `wait`.

        Args:
            last: largest number of bytes of the existing log to begin with.
            timeout: seconds.
        """
        for answer in self._answers("log", -last if last else _END, "text", _deadline(timeout)):
            if answer["text"]:
                yield answer["text"]

    def resubmit(self, **changes: Any) -> RemoteJob:
        """Submit the job again, as your own, with the same model, and return the new job.

        Args:
            changes: fields of the description with new values, such as ``data``, ``output``, ``name``, or
                ``options={"learning_rate": 0.01}``: of a dictionary, the entries that are given are replaced, and one
                with None is left out.

        The errors are those of `submit`, and StateError if the job's model no longer exists.
        """
        return RemoteJob(self.connection, self.connection.call("POST", self._path("resubmit"), changes or None))

    def log(self, last: int = 20_000) -> str:
        """Return the last bytes of what the driver and Spark have printed."""
        return str(self.connection.call("GET", self._path("log"), offset=-last)["text"]) if last else ""

    def cancel(self) -> RemoteJob:
        """Ask the server to end the job, and return at once; StateError if the job has already ended."""
        self.record = self.connection.call("POST", self._path("cancel"))
        return self

    def remove(self) -> None:
        """Remove the job, which must have ended, and its files."""
        self.connection.call("DELETE", self._path())

    def save_model(self, path: str | PathLike[str]) -> None:
        """Write the trained model to a file (.keras)."""
        self.connection.fetch(self._path("model"), Path(path))

    def model(self, custom_objects: Mapping[str, Any] | None = None) -> keras.Model:
        """Return the trained model, compiled as it was trained. Lambdas in it are refused.

        Args:
            custom_objects: registered name to class or function, in addition to what this process has registered.
        """
        return archive.from_bytes(self.connection.read(self._path("model")), custom_objects, compiled=True)

    def history(self) -> pd.DataFrame:
        """Return one row for each mini-batch, as `distkeras.Trainer.history` has it."""
        return self._table("history")

    def commits(self) -> pd.DataFrame:
        """Return one row for each commit, as `distkeras.Trainer.commits` has it."""
        return self._table("commits")

    def _table(self, name: str) -> pd.DataFrame:
        import pandas as pd

        return pd.read_parquet(io.BytesIO(self.connection.read(self._path(name))))

    def _path(self, part: str = "") -> str:
        return f"/jobs/{self.id}" + (f"/{part}" if part else "")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({json.dumps(self.record.get('name') or self.id)}, {self.state})"


def _deadline(timeout: float) -> float:
    return time.monotonic() + require_number("timeout", timeout, inclusive=True)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _is_trainer(value: Any) -> TypeGuard[Trainer]:
    """Return whether ``value`` is a `Trainer`, without importing its module."""
    module = sys.modules.get("distkeras.trainer")
    return module is not None and isinstance(value, module.Trainer)


def _bytes_of(model: keras.Model | str | PathLike[str]) -> bytes:
    return Path(model).read_bytes() if isinstance(model, str | PathLike) else archive.to_bytes(model)


def _require_json(description: Mapping[str, Any]) -> None:
    """Check that a description can be sent as JSON: it must not have objects of Keras, such as optimizers."""
    for group, values in description.items():
        for name, value in (values if isinstance(values, dict) else {"": values}).items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                where = f"{group}.{name}".rstrip(".")
                raise refused(where, f"be what JSON has. Received: {value!r}") from error


_PREFIX = "/api/v1"
#: The most bytes of a JSON answer.
_LONGEST = 64 << 20
TOKEN = "DISTKERAS_TOKEN"
#: The statuses of a proxy whose server is unreachable, as during a restart.
_FROM_PROXIES = (502, 503, 504)


class ServerConnection:
    """Sends requests to a server in the name of a user; arguments and their errors are those of `JobClient`."""

    def __init__(self, url: str, token: str | None, timeout: float, *, plain_http: bool = False) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ConfigurationError(f"`url` must be like https://host:port. Received: url={url!r}")
        local = is_loopback(parts.hostname)
        if parts.scheme == "http" and not (local or plain_http):
            raise ConfigurationError(
                "`url` must begin with https://, because each request carries the token; or set `plain_http`. "
                f"Received: url={url!r}"
            )
        token = token or os.environ.get(TOKEN, "")
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigurationError(
                f"`token` must be a token of the server, or the variable {TOKEN} must be set. Received: "
                + ("a text with spaces or characters that no token has" if token else "none")
            )
        self.url, self._timeout = url.rstrip("/"), require_number("timeout", timeout)
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "*/*"}
        self._opener = urllib.request.build_opener(_NoRedirect, *([ProxyHandler({})] if local else []))

    def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """Return the JSON answer of an endpoint; None if it is empty."""
        given = {name: value for name, value in query.items() if value is not None}
        path += f"?{urllib.parse.urlencode(given)}" if given else ""
        return self._json(method, path, None if body is None else json.dumps(body).encode(), "application/json")

    def upload(self, path: str, name: str, value: Any, file_name: str, file: bytes | None) -> Any:
        """Post a form with a JSON part and, if there is one, a file; return the answer."""
        mark = f"--{secrets.token_hex(16)}"
        head = f'{mark}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{json.dumps(value)}\r\n'
        disposition = f'form-data; name="{file_name}"; filename="{file_name}"'
        kind = "application/octet-stream"
        part = f"{mark}\r\nContent-Disposition: {disposition}\r\nContent-Type: {kind}\r\n\r\n".encode()
        parts = [head.encode(), *([] if file is None else [part, file, b"\r\n"]), f"{mark}--\r\n".encode()]
        body = b"".join(parts)
        try:
            return self._json("POST", path, body, f"multipart/form-data; boundary={mark[2:]}")
        except ServerLostError as error:
            reason = getattr(error.__cause__, "reason", error.__cause__)
            if isinstance(reason, ConnectionRefusedError):  # no server has seen the request
                raise
            raise ServerLostError(
                f"{error.message}. The request had {len(body)} bytes, perhaps more than the server accepts"
            ) from error

    def fetch(self, path: str, target: Path) -> None:
        """Write an endpoint's file to ``target``, completely or not at all."""
        with tempfile.NamedTemporaryFile(dir=target.absolute().parent, prefix=".distkeras-", delete=False) as partial:
            try:
                with self._open("GET", path) as answer:
                    shutil.copyfileobj(answer, partial)
                Path(partial.name).replace(target)
            except BaseException:
                Path(partial.name).unlink(missing_ok=True)
                raise

    def read(self, path: str) -> bytes:
        """Return an endpoint's file."""
        with self._open("GET", path) as answer:
            return answer.read()

    def _open(self, method: str, path: str, data: bytes | None = None, kind: str = "") -> IO[bytes]:
        headers = self._headers | ({} if data is None else {"Content-Type": kind})
        request = Request(f"{self.url}{_PREFIX}{path}", data=data, headers=headers, method=method)
        try:
            answer: IO[bytes] = self._opener.open(request, timeout=self._timeout)
            return answer
        except urllib.error.HTTPError as error:
            with error:
                typed = _error_of(error.code, error.read(_LONGEST))
            if isinstance(typed, UnauthorizedError):  # the server does not say whether a token came
                typed = UnauthorizedError(f"{self.url} has refused the token: it is not valid there, or was revoked")
            raise typed from None
        except OSError as error:  # or URLError, which may contain one
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise DeadlineError(f"{self.url} has not answered for {self._timeout:g} s") from error
            hint = "; is the server running?" if isinstance(reason, ConnectionRefusedError) else ""
            raise ServerLostError(f"{self.url} cannot be reached: {reason}{hint}") from error

    def _json(self, method: str, path: str, data: bytes | None, kind: str) -> Any:
        with self._open(method, path, data, kind) as answer:
            text = answer.read(_LONGEST)
        try:
            return json.loads(text) if text else None
        except ValueError:
            raise JobServerError(f"{self.url} must answer with JSON. Received: {text[:100]!r}") from None


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address or "localhost"."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirect, which could send a token to another host: the answer is an error."""

    def redirect_request(self, *_arguments: Any, **_keywords: Any) -> None:
        """Return no new request."""


def _error_of(status: int, body: bytes) -> JobServerError | ServerLostError:
    """Return the error that the server describes, or ServerLostError if a proxy cannot reach the server."""
    kind = BY_STATUS.get(status, JobServerError)
    try:
        error = json.loads(body)["error"]
        message, field = str(error["message"]), str(error.get("field", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        if status in _FROM_PROXIES:
            return ServerLostError(f"a proxy cannot reach the job server: status {status}")
        return kind(f"the server must answer the request. Received: status {status}")
    return kind(message, field) if kind is DescriptionError else kind(message)
