"""The service's database: SQLite next to the raw lines, or PostgreSQL for several processes; both with SQLAlchemy Core.

Its content is derived from raw lines, so losing the last transactions in a crash is acceptable (SQLite's
`synchronous=NORMAL`): they are derived again. Only tokens and alerts are not derived, and they are written rarely.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Table, create_engine, event, insert, inspect, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from bootseer.errors import PermanentError, TransientError, UsageError
from bootseer.store.addresses import shown, without_credentials

_BUSY_S: Final = 20
_ROWS: Final = 10_000
_POOL: Final = 8
_MAY_PASS: Final = ("25006", "42501")
"""Codes of errors: a standby is read-only until it takes over, and missing rights are granted."""


class Database:
    """One database. Thread-safe, but not usable across a fork."""

    def __init__(self, url: str) -> None:
        """`url`: `sqlite:///PATH` or `postgresql://[USER[:PASSWORD]@][HOST]/NAME`; the password may also come from
        PGPASSWORD or a .pgpass file.

        Raises `UsageError` for any other URL.
        """
        self._url = _parsed(url)
        self.is_postgres = self._url.get_backend_name() == "postgresql"
        self.insert = postgresql.insert if self.is_postgres else sqlite.insert
        """The dialect's INSERT, which has ON CONFLICT."""
        options: dict[str, Any] = {"connect_args": {"timeout": _BUSY_S}}
        if self.is_postgres:
            # Without the last three, a server that vanishes without a word holds up its queries for up to two hours.
            connect = dict.fromkeys(("connect_timeout", "keepalives_idle", "keepalives_interval"), _BUSY_S)
            connect["tcp_user_timeout"] = 3000 * _BUSY_S  # ms
            options = {"pool_size": _POOL, "pool_pre_ping": True, "connect_args": connect}
        self._engine = create_engine(self._url, **options)
        if not self.is_postgres:
            event.listen(self._engine, "connect", _set_up_sqlite)
            event.listen(self._engine, "begin", _begin_sqlite)
        reads: dict[str, Any] = {"isolation_level": "REPEATABLE READ"} if self.is_postgres else {}  # SQLite always does
        self._reading = self._engine.execution_options(**reads)
        self._writing = self._engine.execution_options(bootseer_writes=True)

    @classmethod
    def open(cls, url: str) -> Database:
        """The database with the current tables, created or migrated.

        Raises `PermanentError` if it was created by another version or is damaged, `TransientError` if it cannot be
        reached or refuses this user.
        """
        database = cls(url)
        try:
            with database.write() as connection:
                if database.is_postgres:  # only one of several processes that start at once migrates
                    connection.execute(text("SELECT pg_advisory_xact_lock(7012619)"))
                _migrate(connection)
        except BaseException as error:
            database.close()
            if isinstance(error, DBAPIError):
                raise PermanentError(f"{database}: {str(error.orig).partition(chr(10))[0]}") from error
            raise
        return database

    def __str__(self) -> str:
        return without_credentials(self._url.set(drivername=self._url.get_backend_name()).render_as_string())

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that may write, committed at the end of the block. SQLite has one at a time.

        Raises `TransientError` if the database cannot be reached, or is busy for 20 s.
        """
        with self._with_database_errors(), self._writing.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that reads: all its statements see the same rows. Raises `TransientError` like `write`."""
        with self._with_database_errors(), self._reading.connect() as connection, connection.begin():
            yield connection

    def insert_all(self, connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert many rows with the same columns, on PostgreSQL by COPY."""
        if not rows:
            return
        if not self.is_postgres:
            connection.execute(insert(table), rows)
            return
        names = list(rows[0])
        quoted = ", ".join(f'"{name}"' for name in names)
        driver: Any = connection.connection.driver_connection
        with driver.cursor() as cursor, cursor.copy(f'COPY "{table.name}" ({quoted}) FROM STDIN') as copy:
            for row in rows:
                copy.write_row([row[name] for name in names])

    def ids(self, connection: Connection, table: Table, names: Iterable[str]) -> dict[str, int]:
        """The ids of these stages or nodes; missing ones are created."""
        wanted, found = sorted(set(names)), {}
        for first in range(0, len(wanted), _ROWS):
            some = wanted[first : first + _ROWS]
            made = self.insert(table).on_conflict_do_nothing()
            connection.execute(made, [{"name": name} for name in some])
            rows = connection.execute(select(table.c.name, table.c.id).where(table.c.name.in_(some)))
            found.update({row.name: row.id for row in rows})
        return found

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _with_database_errors(self) -> Iterator[None]:
        """Map errors that may pass, as of connections, disks and rights, to `TransientError`. Other errors are the
        caller's mistake and are not mapped."""
        driver = self._engine.dialect.loaded_dbapi
        try:
            yield
        except PoolTimeoutError as error:
            raise TransientError(f"{self}: all connections are in use") from error
        except (DBAPIError, driver.Error) as error:
            cause = getattr(error, "orig", error)  # COPY's are the driver's own
            may_pass = isinstance(cause, driver.OperationalError) or getattr(cause, "sqlstate", "") in _MAY_PASS
            if not may_pass and not getattr(error, "connection_invalidated", False):
                raise
            why = " ".join(str(cause).partition("\nLINE ")[0].split())  # one line, without the statement
            raise TransientError(f"{self}: {why or type(cause).__name__}") from error


def default_url(data: Path) -> str:
    """The SQLite database of a data folder."""
    return f"sqlite:///{data.absolute() / 'derived.sqlite'}"


def _parsed(text_: str) -> URL:
    try:
        url = make_url(text_.strip())  # a secret made of a file ends with its newline
    except ArgumentError:
        url = None
    known = url is not None and url.get_backend_name() in ("sqlite", "postgresql")
    if url is None or not known or (url.get_backend_name() == "sqlite" and not url.database):
        raise UsageError(
            f"{shown(text_)!r} is not a database URL", hint="sqlite:///PATH or postgresql://USER@HOST/NAME"
        )
    return url.set(drivername="postgresql+psycopg") if url.get_backend_name() == "postgresql" else url


def _set_up_sqlite(connection: Any, record: object) -> None:
    connection.isolation_level = None  # transactions begin where SQLAlchemy says so, not at the first statement
    try:
        path = connection.execute("PRAGMA database_list").fetchone()[2]
        if path:
            os.chmod(path, 0o600)  # noqa: PTH101 - it contains hashes of tokens
        for setting in (
            "journal_mode = WAL",
            "synchronous = NORMAL",
            "foreign_keys = ON",
            "cache_size = -65536",
            "temp_store = MEMORY",
        ):
            connection.execute(f"PRAGMA {setting}")
    except BaseException:
        connection.close()  # SQLAlchemy does not
        raise


def _begin_sqlite(connection: Connection) -> None:
    # A deferred transaction that reads first and then writes fails if another one has written in between.
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
                f"the database has table version {there}, unknown to this BootSeer, because another one created it; "
                "upgrade, or use another --data or --database and run `bootseer serve reindex`"
            )
    command.upgrade(config, "head")
