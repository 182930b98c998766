"""Malformed and hostile uploads: forms, archives, headers and types of content, made up by Hypothesis.

The answer to each is a refusal, or that it was taken; it is never the server's own failure. A refusal leaves nothing
on the disk.
"""

from __future__ import annotations

import contextlib
import io
import json
import socket
import zipfile
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.job_server.service import Answer, JobService
from support.patience import patience

from distkeras.job_server.server.views import PREFIX

#: Statuses of the answers that refuse what a client has sent.
REFUSALS = {400, 401, 404, 405, 409, 413, 415, 422, 431, 501}
#: The server is there for all examples of a test.
FUZZ = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
UPLOADS = ["/jobs", "/predictions"]


def require_harmless(service: JobService, answer: Answer) -> None:
    assert answer.status in REFUSALS | {201}, answer.body
    if answer.status == 201:
        job = answer.json["id"]
        assert service.call("POST", f"/jobs/{job}/cancel", "ann").status == 200
        assert service.call("DELETE", f"/jobs/{job}", "ann").status == 204
    else:
        assert answer.json["error"]["type"]
    assert list(service.files.temporary().iterdir()) == []
    assert list((service.files.root / "jobs").iterdir()) == []


def job_of(service: JobService, path: str) -> bytes:
    """A good description."""
    given = {"data": service.data("x")}
    given |= {"rule": "agn"} if path == "/jobs" else {"output": service.output("ann")}
    return json.dumps(given).encode()


NAMES = st.one_of(
    st.sampled_from(["config.json", "metadata.json", "model.weights.h5", "assets/x", "../x", "/x", "assets/../../x"]),
    st.text(min_size=1, max_size=30).filter(
        lambda name: name.isprintable() and name.encode("utf-8", "ignore").decode() == name
    ),
)
BOMBS = st.integers(0, 1 << 22).map(bytes)
CONFIGS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=20)
    | st.sampled_from(["keras.layers", "Lambda", "os"]),
    lambda parts: (
        st.lists(parts, max_size=4)
        | st.dictionaries(st.sampled_from(["class_name", "module", "config", "vocabulary", "x"]), parts, max_size=4)
    ),
    max_leaves=20,
).map(lambda value: json.dumps(value).encode())


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    """Files of zip with any members, as they are or damaged."""
    out = io.BytesIO()
    method = draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2]))
    # One that is stored as it is is no bomb, and Hypothesis would write out megabytes of it.
    large = st.nothing() if method == zipfile.ZIP_STORED else BOMBS
    with zipfile.ZipFile(out, "w", method) as file:
        members = draw(st.dictionaries(NAMES, st.binary(max_size=50) | large | CONFIGS, max_size=5))
        if draw(st.booleans()):
            members |= {"config.json": draw(CONFIGS), "metadata.json": b"{}", "model.weights.h5": b""}
        for name, data in members.items():
            file.writestr(name, data)
    return draw(damaged(out.getvalue()))


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """As it is, cut off, or with a few other bytes."""
    found = bytearray(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)
    for place, value in draw(st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), max_size=5)):
        if found:
            found[place % len(found)] = value
    return bytes(found)


@pytest.mark.parametrize("path", UPLOADS)
@FUZZ
@given(data=st.one_of(archives(), st.binary(max_size=200)))
def test_an_archive_that_is_none(service: JobService, path: str, data: bytes) -> None:
    require_harmless(service, service.send_form("ann", {"job": job_of(service, path)}, {"model": data}, path))


@pytest.mark.parametrize("path", UPLOADS)
@FUZZ
@given(draw=st.data())
def test_a_model_that_was_damaged_on_its_way(service: JobService, model: bytes, path: str, draw: st.DataObject) -> None:
    data = draw.draw(damaged(model))
    require_harmless(service, service.send_form("ann", {"job": job_of(service, path)}, {"model": data}, path))


@pytest.mark.parametrize("path", UPLOADS)
@FUZZ
@given(
    text=st.one_of(
        CONFIGS, st.binary(max_size=200), st.text(max_size=50).map(lambda text: text.encode("utf-8", "replace"))
    )
)
def test_a_description_that_is_none(service: JobService, model: bytes, path: str, text: bytes) -> None:
    require_harmless(service, service.send_form("ann", {"job": text}, {"model": model}, path))


@pytest.mark.parametrize("path", UPLOADS)
@FUZZ
@given(
    kind=st.sampled_from(
        [
            "multipart/form-data; boundary=x",
            "multipart/form-data",
            'multipart/form-data; boundary="',
            f"multipart/form-data; boundary={'x' * 500}",
            "multipart/mixed; boundary=x",
            "application/json",
            "application/x-www-form-urlencoded",
            "text/plain; charset=utf-7",
            "é",
            "",
        ]
    ),
    parts=st.lists(
        st.sampled_from(
            [
                b"--x\r\n",
                b"--x--\r\n",
                b'Content-Disposition: form-data; name="job"\r\n\r\n{}\r\n',
                b'Content-Disposition: form-data; name="model"; filename="../../x"\r\n\r\nx\r\n',
                b"Content-Disposition: form-data; name=\"model\"; filename*=utf-8''%00%ff\r\n\r\nx\r\n",
                b"Content-Disposition: form-data\r\n\r\n",
                b"Content-Type: text/plain; charset=nothing\r\n",
                b"Content-Transfer-Encoding: base64\r\n",
                b"Content-Length: -1\r\n",
                b"\r\n" * 40,
                b"\xff\xfe\x00",
                b"job=%7b%7d&model=x",
                b"x" * 20_000,
            ]
        ),
        max_size=8,
    ).map(b"".join),
)
def test_a_form_that_is_none(service: JobService, path: str, kind: str, parts: bytes) -> None:
    require_harmless(service, service.call("POST", path, "ann", body=parts, headers={"Content-Type": kind}))


@FUZZ
@given(
    lines=st.lists(
        st.one_of(
            st.binary(max_size=50),
            st.sampled_from(
                [
                    b"Content-Length: 1e3",
                    b"Content-Length: -1",
                    b"Content-Length: 99999999999999999999",
                    b"Content-Length: 0",
                    b"Transfer-Encoding: chunked",
                    b"Transfer-Encoding: gzip, chunked",
                    b"Content-Type: multipart/form-data; boundary=x",
                    b"Expect: 100-continue",
                    b"X: " + b"x" * 20_000,
                    b" folded",
                    b"Host: x\x00y",
                    b"Authorization: Bearer x",
                ]
            ),
        ),
        max_size=6,
    ),
    tail=st.binary(max_size=50),
)
def test_malformed_headers(service: JobService, lines: list[bytes], tail: bytes) -> None:
    """The answer is a refusal in HTTP, or the connection's end; the next request is answered as ever."""
    head = [f"POST {PREFIX}/jobs HTTP/1.1".encode(), b"Connection: close", *lines]
    with socket.create_connection(("127.0.0.1", service.port), patience(20)) as sock:
        with contextlib.suppress(OSError):  # it has hung up already
            sock.sendall(b"\r\n".join(head) + b"\r\n\r\n" + tail)
            sock.shutdown(socket.SHUT_WR)
        status = first_status(sock)
    assert status is None or status in REFUSALS | {100, 429}, status
    assert service.call("GET", "/me", "ann").status == 200


def first_status(sock: Any) -> int | None:
    answer = b""
    while b"\r\n" not in answer:
        try:
            piece = sock.recv(4096)
        except ConnectionResetError:
            return None
        if not piece:
            return None
        answer += piece
    return int(answer.split()[1])
