"""A job server's process that takes jobs; a module of its own, because a spawned process imports it."""

from __future__ import annotations

from typing import Any

from distkeras.job_server.errors import JobState
from distkeras.job_server.store.jobs import JobStore
from distkeras.job_server.store.tables import open_database
from support.patience import patience


def take_all(url: str, server: str, start: Any, taken: Any) -> None:
    """Take jobs, as a server's process, until none is left."""
    engine = open_database(url)
    store = JobStore(engine)
    start.wait(patience(60))
    while (job := store.claim(server)) is not None:
        store.move(job, JobState.DONE)
        taken.put((server, job.id))
    taken.put((server, None))
    engine.dispose()
