"""The settings of a job server, which its operator gives to ``distkeras serve``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distkeras.ps.validate import check_fields, count, not_negative, positive


@dataclass(frozen=True)
class Settings:
    """What the operator allows and limits, in bytes and seconds. None is no limit."""

    data: Sequence[str] = ()  # paths and URIs of folders that jobs may read
    output: Sequence[str] = ()  # those that predict jobs may write to, each user in a subfolder of their name
    private: Sequence[Path] = ()  # folders of the server's own files, which no job may read or write
    master: str = "local[*,4]"  # of Spark
    config: Mapping[str, str] = field(default_factory=dict)  # Spark's settings
    mlflow: str | None = None  # the tracking URI of MLflow, to which training jobs log
    slots: int = count(1, 0)  # the most jobs that run at once
    attempts_max: int = count(3)  # the most drivers of one job, one after the other
    upload_max: int = count(512 << 20)  # of a model
    bytes_max: int = count(20 << 30)  # of the files of all jobs of a user
    queued_max: int = count(1000, 0)  # the most waiting jobs of a user
    reserve: int = count(0, 0)  # that the disk of the jobs' files must have free for a job to be accepted or to begin
    run_max: float | None = positive(None)  # that a driver may run
    memory_max: int | None = positive(None)  # of private memory of a job's processes on this machine
    log_max: int = count(64 << 20, 10_000)  # of a job's log; of more, the latest are kept
    retention: float | None = positive(None)  # that an ended job is kept
    grace: float = not_negative(60.0)  # for a driver to end after SIGTERM, before it is killed
    #: Without a renewal or heartbeat after which another server, or a driver that is not visible from here, is dead.
    lease: float = positive(30.0)
    #: The command of a driver; its folder and attempt are appended.
    driver_command: Sequence[str] = (sys.executable, "-m", "distkeras.job_server.driver")

    def __post_init__(self) -> None:
        check_fields(self)
