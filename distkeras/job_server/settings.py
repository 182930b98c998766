"""The settings of a job server, which its operator gives to ``distkeras serve``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distkeras.ps.validate import check_fields, count, not_negative, positive


@dataclass(frozen=True)
class Settings:
    """What the operator allows and limits.

    Args:
        data: paths and URIs of folders that jobs may read.
        output: paths and URIs of folders that predict jobs may write to, each user in a subfolder of their name.
        private: folders of the server's own files, which no job may read or write, even if they are in ``data``.
        master: of Spark, such as "local[4,4]" or "yarn".
        config: Spark's settings.
        slots: the most jobs that run at once.
        attempts_max: the most drivers of one job, one after the other.
        upload_max: the most bytes of a model.
        bytes_max: the most bytes of the files of all jobs of a user.
        queued_max: the most waiting jobs of a user.
        reserve: the least free bytes on the disk of the jobs' files for a job to be accepted or to begin.
        run_max: seconds that a driver may run; None: forever.
        memory_max: the most bytes of private memory of a job's processes on this machine; None: no limit.
        log_max: the most bytes of a job's log; of more, the latest are kept.
        retention: seconds that an ended job is kept; None: forever.
        grace: seconds for a driver to end after SIGTERM, before it is killed.
        lease: seconds without a renewal or heartbeat after which another server, or a driver that is not visible from
            here, counts as dead.
        driver_command: the command of a driver; its folder and attempt are appended.
    """

    data: Sequence[str] = ()
    output: Sequence[str] = ()
    private: Sequence[Path] = ()
    master: str = "local[*,4]"
    config: Mapping[str, str] = field(default_factory=dict)
    slots: int = count(1, 0)
    attempts_max: int = count(3)
    upload_max: int = count(512 << 20)
    bytes_max: int = count(20 << 30)
    queued_max: int = count(1000, 0)
    reserve: int = count(0, 0)
    run_max: float | None = positive(None)
    memory_max: int | None = positive(None)
    log_max: int = count(64 << 20, 10_000)
    retention: float | None = positive(None)
    grace: float = not_negative(60.0)
    lease: float = positive(30.0)
    driver_command: Sequence[str] = (sys.executable, "-m", "distkeras.job_server.driver")

    def __post_init__(self) -> None:
        check_fields(self)
