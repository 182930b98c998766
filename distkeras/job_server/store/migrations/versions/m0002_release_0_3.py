"""From the tables of release 0.2.0 to those of 0.3.0: tags, leases of servers, webhooks, and the drivers of a job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", None


def upgrade() -> None:
    """Add tags, renewals, webhooks and attempts."""
    for column in (
        sa.Column("tags", sa.Text, nullable=False, server_default=""),
        sa.Column("renewal", sa.Integer, nullable=False, server_default="0"),
        sa.Column("webhook", sa.Text),
        sa.Column("tries", sa.Integer, nullable=False, server_default="0"),
        sa.Column("notify", sa.Double),
    ):
        op.add_column("distkeras_jobs", column)
    op.create_table(
        "distkeras_attempts",
        sa.Column("job", sa.Integer, sa.ForeignKey("distkeras_jobs.number", ondelete="CASCADE"), primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("started", sa.Double, nullable=False),
        sa.Column("ended", sa.Double),
        sa.Column("outcome", sa.Text),
    )
