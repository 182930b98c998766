"""dist-keras' job server and client, at their old path; see `distkeras.compat`."""

from distkeras.compat.stages import Job, Punchcard, PunchcardJob

__all__ = ["Job", "Punchcard", "PunchcardJob"]
