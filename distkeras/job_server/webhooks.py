"""Webhooks: the outcome of a job is posted as JSON to an address that its user names and the operator allows."""

from __future__ import annotations

import http.client
import json
import logging
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from sqlalchemy.exc import SQLAlchemyError

from distkeras.job_server.connection import NoRedirect
from distkeras.job_server.errors import DescriptionError
from distkeras.job_server.store.jobs import JobStore, StoredJob

log = logging.getLogger(__name__)

#: Seconds from one check for ended jobs to the next, for an address to answer, and from each attempt to the next one.
_POLL_SECONDS, _TIMEOUT, _PAUSES = 2.0, 10.0, (10.0, 60.0, 600.0, 3600.0)


def require_webhook(url: str, allowed: Sequence[str]) -> None:
    """Check that the server may post to ``url``.

    Args:
        allowed: the operator's prefixes of URLs: scheme, host and port must be the same, and the path must be below.

    Raises:
        DescriptionError: the server must not post there.
    """
    try:
        parts = urlsplit(url)
        fits = any(_within(parts, urlsplit(prefix)) for prefix in allowed)
    except ValueError:
        fits = False
    if not fits:
        places = ", ".join(allowed) or "none"
        raise DescriptionError(
            f"`webhook` must begin with an address that the server allows: {places}. Received: {url[:200]}", "webhook"
        )


def _within(url: Any, prefix: Any) -> bool:
    same = (url.scheme, url.hostname, url.port) == (prefix.scheme, prefix.hostname, prefix.port)
    below = prefix.path.rstrip("/") + "/"
    path = url.path or "/"
    parts = re.split(r"[/\\]", unquote(path))
    plain = url.scheme in ("http", "https") and url.username is None and ".." not in parts
    return same and plain and (path == prefix.path or path.startswith(below))


class WebhookSender:
    """Posts ended jobs, until each address has acknowledged, at most five times.

    Two servers with one database do not post the same job at a time. An address may receive a job twice if a server
    dies between the acknowledgment and its record; the id identifies the job.
    """

    def __init__(self, jobs: JobStore) -> None:
        self._jobs = jobs
        # No proxies: they could reach addresses to which the server must not post.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect)

    def run(self, stop: threading.Event) -> None:
        """Post ended jobs, until ``stop``."""
        while not stop.wait(_POLL_SECONDS):
            try:
                self.send_due()
            except SQLAlchemyError as error:
                log.warning("webhooks could not be sent, and will be tried again: %s", str(error).partition("\n")[0])

    def send_due(self) -> None:
        """Post each job that is due, once."""
        for job in self._jobs.due_webhooks():
            pause = _PAUSES[job.tries] if job.tries < len(_PAUSES) else None
            if not self._jobs.claim_webhook(job, pause):
                continue
            if self._post(job):
                self._jobs.end_webhook(job)
            elif pause is None:
                log.warning("the webhook of job %s was tried %d times without success", job.id, job.tries + 1)

    def _post(self, job: StoredJob) -> bool:
        """Post a job, and return whether the address has acknowledged it."""
        fields = {"id", "kind", "user", "name", "tags", "state", "created", "started", "ended", "attempt", "error"}
        body = job.model_dump(include=fields)
        headers = {"Content-Type": "application/json", "Idempotency-Key": job.id}
        request = urllib.request.Request(job.webhook or "", json.dumps(body).encode(), headers, method="POST")
        try:
            with self._opener.open(request, timeout=_TIMEOUT) as answer:
                return 200 <= int(answer.status) < 300
        except (OSError, ValueError, http.client.HTTPException) as error:  # URLError and time-outs are OSErrors
            log.info("the webhook of job %s could not be delivered: %s", job.id, error)
            return False
