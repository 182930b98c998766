"""Tracebacks as text: which frames belong to a library, and what the text of an error shows."""

from __future__ import annotations

from pathlib import Path

import pytest

import distkeras
from distkeras.ps.errors import VARIABLE, BadValueError, DistkerasError, WorkerError, headline, is_library, user_frames

REMOTE = """Traceback (most recent call last):
  File "/opt/venv/lib/python3.12/site-packages/distkeras/training/task.py", line 143, in run
    rows, batches = self._train()
                    ^^^^^^^^^^^^^
  File "/home/me/distkeras/examples/job.py", line 12, in picky
    raise KeyError("not here")
  File "<ipython-input-3>", line 1, in loss
KeyError: 'not here'
"""


@pytest.mark.parametrize(
    ("path", "library"),
    [
        ("/opt/venv/lib/python3.12/site-packages/keras/src/layers/layer.py", True),
        ("/usr/lib/python3/dist-packages/numpy/core.py", True),
        ("/usr/lib/python3.12/threading.py", True),
        ("/opt/spark/python/lib/pyspark.zip/pyspark/worker.py", True),
        ("/src/checkout/distkeras/training/task.py", True),
        ("/src/checkout/distkeras/trainer.py", True),
        ("C:\\venv\\Lib\\site-packages\\keras\\x.py", True),
        ("<frozen importlib._bootstrap>", True),
        ("/home/me/distkeras/examples/job.py", False),
        ("/home/me/job.py", False),
        ("<ipython-input-3>", False),
        ("/tmp/ipykernel_7/123.py", False),
    ],
)
def test_a_file_is_a_library_file_or_the_users_file(path: str, library: bool) -> None:
    assert is_library(path) is library


def test_every_file_of_the_package_counts_as_a_library() -> None:
    package = Path(distkeras.__file__).parent
    paths = [path.relative_to(package).as_posix() for path in package.rglob("*.py")]
    assert len(paths) > 100
    assert [path for path in paths if not is_library(f"/src/checkout/distkeras/{path}")] == []


def test_only_the_frames_of_the_users_code_are_returned() -> None:
    assert user_frames(REMOTE) == (
        '  File "/home/me/distkeras/examples/job.py", line 12, in picky\n    raise KeyError("not here")\n'
        '  File "<ipython-input-3>", line 1, in loss'
    )
    assert user_frames("") == user_frames(REMOTE.replace("/home/me", "/lib/python3.12").replace("<ip", "<frozen")) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("KeyError: 'a'", "KeyError: 'a'"),
        ("", ""),
        ("ValueError: this\nand that", "ValueError: this"),
        (
            "InvalidArgumentError: Graph execution error:\n\nDetected at node embedding defined at (most recent call "
            'last):\n  File "a.py", line 1, in b\n\nindices[0,0] = 12 is not in [0, 10)\n\t [[{{node embedding}}]]',
            "InvalidArgumentError: indices[0,0] = 12 is not in [0, 10)",
        ),
        (
            "ValueError: Exception encountered when calling Dense.call().\n\n\x1b[1mshapes (2, 3)\x1b[0m\n\nArguments "
            "received by Dense.call():\n  • inputs=1",
            "shapes (2, 3)",
        ),
        (
            "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
            '  File "a.py", line 1, in b\n    c\nKeyError: 7',
            "KeyError: 7",
        ),
    ],
)
def test_the_headline_is_the_line_that_states_the_error(text: str, expected: str) -> None:
    assert headline(text) == expected


@pytest.mark.parametrize("kind", [WorkerError, BadValueError])
def test_an_error_shows_the_users_frames_or_all_frames_if_the_variable_says_so(
    kind: type[DistkerasError], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = kind("what is wrong", worker=1, remote_traceback=REMOTE)
    lines = str(error).splitlines()
    assert lines[0] == "what is wrong [worker/partition 1]"
    assert "picky" in lines[1]
    assert len(lines) == 5
    assert f"{VARIABLE}=full" in lines[-1]
    monkeypatch.setenv(VARIABLE, "full")
    assert str(error).endswith(REMOTE)


def test_an_error_without_frames_of_the_user_is_one_line() -> None:
    assert str(BadValueError("a null", remote_traceback="Traceback\n")) == "a null"
