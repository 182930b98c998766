"""A commit's way through the server: a reader who follows one opens few modules."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from support.ps.running_server import Running

from distkeras.ps.protocol.loop import CommitRecord
from distkeras.ps.rules import make
from distkeras.ps.server import server

#: The folder of the server's sources.
_HOME = Path(server.__file__).parents[1]
_MODULES_MAX = 20


def test_a_commit_enters_few_modules_of_the_server() -> None:
    entered, follows = set[str](), threading.Event()

    def follow(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and follows.is_set() and path.is_relative_to(_HOME):
            entered.add(path.relative_to(_HOME).as_posix())

    threading.setprofile(follow)  # the session's thread starts after this
    try:
        with Running(make("downpour"), workers=1) as running, closing(running.client()) as client:
            client.join()
            client.pull()
            for number in range(2):
                (payload,) = client.payload(1)
                payload[:] = 1
                if number:
                    follows.set()
                client.commit(CommitRecord(0, number, number, False, True, 0.1, 1.0, (payload,)))
            follows.clear()
            np.testing.assert_array_equal(running.driver.center().center[:2], [2, 2])
    finally:
        threading.setprofile(None)
    assert {"server/dispatcher.py", "center/center.py", "rules/base.py", "center/commit_log.py"} <= entered
    assert len(entered) <= _MODULES_MAX, sorted(entered)
