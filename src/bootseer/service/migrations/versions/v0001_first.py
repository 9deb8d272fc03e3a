"""The first tables.

They are those of `schema` as long as this is the only version; the next one puts a copy of them here.
"""

from alembic import op

from bootseer.service.schema import metadata

revision = "0001b"  # databases of "0001", before the release, have columns that nothing fills
down_revision = None


def upgrade() -> None:
    """Make all tables."""
    metadata.create_all(op.get_bind(), checkfirst=False)  # tables of these names are another program's
