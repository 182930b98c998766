"""Alembic's environment: it runs the migrations in the transaction that `open_database` has begun."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"], version_table="distkeras_revision")
with context.begin_transaction():
    context.run_migrations()
