"""A commit whose arithmetic fails half-way is applied in part: it must not be sent again to such a center."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.patience import patience
from support.running_server import Running
from support.worker_thread import running_worker

from distkeras.ps.errors import LocalProtocolError, NodeError
from distkeras.ps.rules import make


def failing_once(error: Exception, whole: Any) -> Any:
    """``whole``, which raises ``error`` at its first call."""
    errors = [error]

    def call(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return whole(*arguments)

    return call


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError("no room for a row"), NodeError),
        (OSError(12, "no room"), NodeError),
        (KeyError(1), LocalProtocolError),
    ],
    ids=["memory", "an errno", "a mistake"],
)
def test_without_a_checkpoint_the_job_ends(error: Exception, told: type[Exception]) -> None:
    with Running(make("downpour", window=1), workers=1) as running:
        center = running.server.center
        assert center is not None
        center.log.add = failing_once(error, center.log.add)
        thread, errors = running_worker(running, 0, [np.ones(1, np.float32)])
        thread.join(patience(30))
        assert [type(found) for found in errors] == [told]
        with pytest.raises(told, match=r"no room|KeyError"):
            running.driver.observe(10, 0.0)
        assert center.corrupt
        assert len(center.log) == center.clock == 0
