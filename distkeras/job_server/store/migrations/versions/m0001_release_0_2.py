"""The tables of release 0.2.0, where migrations begin."""

from __future__ import annotations

revision, down_revision = "0001", None


def upgrade() -> None:
    """Change nothing: a database of that release has these tables."""
