"""A worker in a thread of the test's own process."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from distkeras.ps.worker.loop import run_worker
from support.ps.running_server import SIZE, Running
from support.ps.toy_model import toy_client


def running_worker(
    running: Running, worker: int, values: list[np.ndarray], attempt: int = 0
) -> tuple[threading.Thread, list[Any]]:
    """Start a worker in a thread of its own; return the thread, and the list that receives its error."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            client, welcome, begin = toy_client(
                running.address,
                running.rule,
                values,
                worker=worker,
                attempt=attempt,
                size=SIZE,
                deadlines=running.deadlines,
            )
            run_worker(client, welcome, begin)
            client.close()
        except Exception as error:  # noqa: BLE001 - the caller inspects it
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors
