"""Run by Alembic, with the connection that `database` gives it."""

from alembic import context

from bootseer.service.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
context.run_migrations()
