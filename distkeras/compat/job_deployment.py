"""dist-keras' job server and its client, which sent pickled trainers to each other: refused."""

from __future__ import annotations

from distkeras.compat.refusals import SUBMIT, RefusedClass


class Punchcard(RefusedClass, instead=SUBMIT):
    """dist-keras' job server."""


class PunchcardJob(RefusedClass, instead=SUBMIT):
    """A job as dist-keras' job server kept it."""


class Job(RefusedClass, instead=SUBMIT):
    """A job as dist-keras' client sent it."""
