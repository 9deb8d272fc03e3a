"""The service's database: SQLite beside the raw lines, or PostgreSQL for several processes. Both by SQLAlchemy Core.

What lies in it is derived, so that a crash may cost the last transactions (SQLite's `synchronous=NORMAL`): they are
derived again from raw lines. Only tokens and alerts are not, and they are written rarely.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Table, create_engine, event, insert, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError

from bootseer.errors import PermanentError, TransientError, UsageError

_BUSY_S: Final = 20
_ROWS: Final = 10_000
_POOL: Final = 8


class Database:
    """One database. Safe to use from many threads; not across a fork."""

    def __init__(self, url: str) -> None:
        """`url`: `sqlite:///PATH` or `postgresql://[USER[:PASSWORD]@][HOST]/NAME`, whose password may also come from
        PGPASSWORD or a .pgpass file.

        Raises `UsageError` for any other.
        """
        self._url = _parsed(url)
        self.is_postgres = self._url.get_backend_name() == "postgresql"
        options: dict[str, Any] = {"connect_args": {"timeout": _BUSY_S}}
        if self.is_postgres:
            options = {"pool_size": _POOL, "pool_pre_ping": True, "connect_args": {"connect_timeout": _BUSY_S}}
        self._engine = create_engine(self._url, **options)
        if not self.is_postgres:
            event.listen(self._engine, "connect", _set_up_sqlite)
            event.listen(self._engine, "begin", _begin_sqlite)

    @classmethod
    def open(cls, url: str) -> Database:
        """The database with today's tables: made, or brought there by migrations.

        Raises `PermanentError` when it was made by a newer version, `TransientError` when it cannot be reached.
        """
        database = cls(url)
        try:
            with database.write() as connection:
                if database.is_postgres:  # of several processes that start at once, one does it
                    connection.execute(text("SELECT pg_advisory_xact_lock(7012619)"))
                _migrate(connection)
        except BaseException:
            database.close()
            raise
        return database

    def __str__(self) -> str:
        return self._url.render_as_string(hide_password=True)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that may write, committed at the end of the block. Of SQLite there is one at a time.

        Raises `TransientError` when the database cannot be reached, or is busy for 20 s.
        """
        writing = self._engine.execution_options(bootseer_writes=True)
        with self._with_database_errors(), writing.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database. Raises `TransientError` like `write`."""
        with self._with_database_errors(), self._engine.connect() as connection, connection.begin():
            yield connection

    def insert_all(self, connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert many rows, which have the same columns: by COPY, or as many statements at once."""
        if not rows:
            return
        if not self.is_postgres:
            for first in range(0, len(rows), _ROWS):
                connection.execute(insert(table), rows[first : first + _ROWS])
            return
        names = list(rows[0])
        quoted = ", ".join(f'"{name}"' for name in names)
        driver: Any = connection.connection.driver_connection
        with driver.cursor() as cursor, cursor.copy(f'COPY "{table.name}" ({quoted}) FROM STDIN') as copy:
            for row in rows:
                copy.write_row([row[name] for name in names])

    def ids(self, connection: Connection, table: Table, names: Iterable[str]) -> dict[str, int]:
        """The numbers of these stages or nodes, given now to those that have none."""
        wanted, found = sorted(set(names)), {}
        for first in range(0, len(wanted), _ROWS):
            some = wanted[first : first + _ROWS]
            connection.execute(
                text(f'INSERT INTO "{table.name}" (name) VALUES (:name) ON CONFLICT (name) DO NOTHING'),  # noqa: S608
                [{"name": name} for name in some],
            )
            rows = connection.execute(table.select().with_only_columns(table.c.name, table.c.id).where(
                table.c.name.in_(some)))  # fmt: skip
            found.update({row.name: row.id for row in rows})
        return found

    def return_pages(self, most: int) -> None:
        """Give so many pages of what was deleted back to the disk, on SQLite."""
        with self._with_database_errors(), self._engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            driver.execute(f"PRAGMA incremental_vacuum({most:d})").fetchall()
            driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def _with_database_errors(self) -> Iterator[None]:
        """Errors of connections as ours: they pass. Others are the caller's mistake and stay as they are."""
        try:
            yield
        except OperationalError as error:
            raise TransientError(f"{self}: {str(error.orig).strip() or type(error.orig).__name__}") from error
        except DBAPIError as error:
            if error.connection_invalidated:
                raise TransientError(f"{self}: the connection broke off") from error
            raise


def default_url(data: Path) -> str:
    """The SQLite database of a data folder."""
    return f"sqlite:///{data.absolute() / 'derived.sqlite'}"


def _parsed(text_: str) -> URL:
    try:
        url = make_url(text_)
    except ArgumentError:
        url = None
    known = url is not None and url.get_backend_name() in ("sqlite", "postgresql")
    if url is None or not known or (url.get_backend_name() == "sqlite" and not url.database):
        shown = text_.rpartition("@")[2]  # what stands in front may be a password
        raise UsageError(f"{shown!r} is no database", hint="sqlite:///PATH or postgresql://USER@HOST/NAME")
    return url.set(drivername="postgresql+psycopg") if url.get_backend_name() == "postgresql" else url


def _set_up_sqlite(connection: Any, record: object) -> None:
    connection.isolation_level = None  # transactions begin where SQLAlchemy says so, not at the first statement
    path = connection.execute("PRAGMA database_list").fetchone()[2]
    if path:
        os.chmod(path, 0o600)  # noqa: PTH101 - hashes of tokens lie in it
    for setting in (
        "auto_vacuum = INCREMENTAL",  # before the first table: later it takes a VACUUM
        "journal_mode = WAL",
        "synchronous = NORMAL",
        "foreign_keys = ON",
        "cache_size = -65536",
        "temp_store = MEMORY",
    ):
        connection.execute(f"PRAGMA {setting}")


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and writes then would fail when another has written in between.
    writes = connection.get_execution_options().get("bootseer_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _migrate(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", "bootseer.service:migrations")
    config.attributes["connection"] = connection
    known = {revision.revision for revision in ScriptDirectory.from_config(config).walk_revisions()}
    if inspect(connection).has_table("alembic_version"):
        there = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
        if there not in known:
            raise PermanentError(
                f"the database has version {there} of its tables, which this BootSeer does not know: it was made by a "
                "newer one; upgrade, or give --data or --database another place and run `bootseer serve reindex`"
            )
    command.upgrade(config, "head")
