"""The tables of release 0.4.0: summaries, runs of MLflow, the tokens that made others, and no webhooks."""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0003", "0002"


def upgrade() -> None:
    """Add summaries, runs of MLflow, parents of tokens and the database's name; drop webhooks."""
    for name in ("summary", "mlflow_run"):
        op.add_column("distkeras_jobs", sa.Column(name, sa.Text))
    for name in ("webhook", "tries", "notify"):
        op.drop_column("distkeras_jobs", name)
    op.add_column("distkeras_tokens", sa.Column("parent", sa.String(16)))
    op.add_column("distkeras_meta", sa.Column("id", sa.String(32), nullable=False, server_default=""))
    op.execute(f"UPDATE distkeras_meta SET version = 6, id = '{uuid.uuid4().hex}'")
