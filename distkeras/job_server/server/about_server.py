"""Endpoints about the server itself: whether it works, and numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from flask import Blueprint, Response, g, jsonify
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

import distkeras
from distkeras.job_server.server.services import Services, services

server_pages = Blueprint("server", __name__)

#: Seconds after which a runner that has not looked at the jobs counts as stuck.
SILENCE_MAX = 120.0


@server_pages.get("/healthz")
def show_health() -> tuple[Response, int]:
    """Answer 200 if the database answers and the jobs are looked after, else 503; without a token."""
    problems = []
    try:
        services().jobs.counts()
    except SQLAlchemyError:
        problems.append("the database does not answer")
    if services().silence() > SILENCE_MAX:
        problems.append("the jobs are not looked after")
    return jsonify({"status": "failing" if problems else "ok", "problems": problems}), 503 if problems else 200


@server_pages.get("/metrics")
def show_metrics() -> Response:
    """Answer with the server's numbers in the text format of Prometheus; for administrators."""
    g.account.require_admin()
    registry = CollectorRegistry()
    registry.register(_ServerNumbers(services()))
    return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)


class _ServerNumbers(Collector):
    def __init__(self, of: Services) -> None:
        self._of = of

    def collect(self) -> Iterator[GaugeMetricFamily]:
        jobs = GaugeMetricFamily("distkeras_jobs", "Jobs in each state.", labels=["state"])
        for state, count in self._of.jobs.counts().items():
            jobs.add_metric([state.value], count)
        yield jobs
        yield GaugeMetricFamily("distkeras_disk_free_bytes", "Free bytes of the jobs' disk.", self._of.files.free())
        yield GaugeMetricFamily(
            "distkeras_runner_silence_seconds", "Seconds since the jobs were last looked after.", self._of.silence()
        )
        version = GaugeMetricFamily("distkeras_build_info", "The version of distkeras.", labels=["version"])
        version.add_metric([distkeras.__version__], 1)
        yield version
