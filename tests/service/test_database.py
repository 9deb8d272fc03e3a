"""The database on both engines: it is created once, keeps its data, and reports errors."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import make_url, select, text

from bootseer.errors import BootseerError, PermanentError, TransientError, UsageError
from bootseer.service import schema
from bootseer.service.database import Database


def test_migrations_end_with_the_tables_of_the_schema(database_url: str) -> None:
    database = Database.open(database_url)
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"target_metadata": schema.metadata})
        assert compare_metadata(context, schema.metadata) == []
    database.close()


def test_several_that_open_it_at_once_make_it_once(database_url: str) -> None:
    opened: list[Database] = []
    threads = [threading.Thread(target=lambda: opened.append(Database.open(database_url))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 4
    for database in opened:
        database.close()


def test_names_have_one_number(database_url: str) -> None:
    database = Database.open(database_url)
    with database.write() as connection:
        first = database.ids(connection, schema.stage, ["install", 'it\'s\n"odd"; --', "install"])
    with database.write() as connection:
        assert database.ids(connection, schema.stage, ["install"]) == {"install": first["install"]}
    database.close()


def test_all_statements_of_a_reader_see_the_same_rows(database_url: str) -> None:
    """A stage that is new in the second statement would have no name from the first."""
    database = Database.open(database_url)
    with database.read() as reader:
        assert reader.execute(select(schema.stage)).all() == []
        with database.write() as connection:
            database.ids(connection, schema.stage, ["install"])
        assert reader.execute(select(schema.stage)).all() == []
    with database.read() as reader:
        assert len(reader.execute(select(schema.stage)).all()) == 1
    database.close()


def test_a_block_that_fails_leaves_nothing(database_url: str) -> None:
    database = Database.open(database_url)
    with pytest.raises(ZeroDivisionError), database.write() as connection:
        database.ids(connection, schema.stage, ["install"])
        raise ZeroDivisionError
    with database.read() as connection:
        assert connection.execute(select(schema.stage)).all() == []
    database.close()


def test_no_free_connection_is_a_reason_to_try_again(database_url: str) -> None:
    database = Database.open(database_url)
    database._engine.pool._timeout = 0.01  # type: ignore[attr-defined]
    with contextlib.ExitStack() as held, pytest.raises(TransientError):
        for _ in range(100):
            held.enter_context(database.read())
    database.close()


def test_one_of_a_newer_version_is_left_as_it_is(database_url: str) -> None:
    database = Database.open(database_url)
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    database.close()
    with pytest.raises(PermanentError, match=r"version 9999, .* another one"):
        Database.open(database_url)


def test_one_with_a_table_of_another_program_is_refused(database_url: str) -> None:
    database = Database(database_url)
    with database.write() as connection:
        connection.execute(text("CREATE TABLE token (id INTEGER)"))
    database.close()
    with pytest.raises(BootseerError, match=r"token\W* already exists$"):
        Database.open(database_url)


@pytest.mark.parametrize("url", ["", "mysql://a:secret@b/c", "mysql://b/c?password=secret", "sqlite://", "no url"])
def test_other_addresses_are_refused_without_their_password(url: str) -> None:
    with pytest.raises(UsageError) as error:
        Database(url)
    assert "secret" not in str(error.value)


def test_a_newline_after_an_address_is_no_part_of_the_name(tmp_path: Path) -> None:
    """For example in a variable that Kubernetes sets from a secret created from a file."""
    Database.open(f"sqlite:///{tmp_path / 'db'}\n").close()
    assert (tmp_path / "db").exists()


def skip_without_server(database_url: str, reason: str) -> None:
    """Before anything is connected: Python 3.13 warns of connections that are not closed, in a later test."""
    if not Database(database_url).is_postgres:
        pytest.skip(reason)


def test_a_server_that_vanishes_is_noticed_within_two_minutes(database_url: str) -> None:
    skip_without_server(database_url, "SQLite has no server")
    database = Database.open(database_url)
    with database.read() as connection:
        driver: Any = connection.connection.driver_connection
        assert driver.info.get_parameters()["tcp_user_timeout"] == "60000"
    database.close()


def test_a_copy_that_the_server_cannot_make_now_is_a_reason_to_try_again(database_url: str) -> None:
    """As on a full disk. After three errors of other kinds, the service would give up the start whose rows they are."""
    skip_without_server(database_url, "SQLite has no COPY")
    database = Database.open(database_url)
    with database.write() as other:
        other.execute(text("LOCK TABLE stage"))
        with pytest.raises(TransientError, match="lock timeout"), database.write() as connection:
            connection.execute(text("SET LOCAL lock_timeout = 1"))
            database.insert_all(connection, schema.stage, [{"name": "install"}])
    database.close()


def test_a_standby_that_is_still_read_only_is_a_reason_to_try_again(database_url: str) -> None:
    skip_without_server(database_url, "SQLite has no standby")
    database = Database.open(database_url)
    for write in (database.ids, lambda *to: database.insert_all(*to[:2], [{"name": "install"}])):
        with pytest.raises(TransientError, match=r"read-only transaction$"), database.write() as connection:
            connection.execute(text("SET TRANSACTION READ ONLY"))
            write(connection, schema.stage, ["install"])
    database.close()


def test_a_file_that_is_no_database_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "derived.sqlite").write_bytes(b"\0" * 50 + b"no database" * 100)
    with pytest.raises(PermanentError, match=r"derived\.sqlite: file is not a database$"):
        Database.open(f"sqlite:///{tmp_path / 'derived.sqlite'}")


def test_a_user_without_the_right_to_create_tables_gets_a_clear_error(database_url: str) -> None:
    skip_without_server(database_url, "SQLite has no users")
    database = Database(database_url)
    with database.write() as connection:
        connection.execute(text("CREATE ROLE poor LOGIN"))
    database.close()
    with pytest.raises(TransientError, match=r"permission denied for schema public$"):
        Database.open(make_url(database_url).set(username="poor").render_as_string(hide_password=False))


def test_one_that_cannot_be_reached_says_so_without_its_password(tmp_path: Path) -> None:
    for login, more in (("me:secret@", ""), ("", "?user=me&password=secret&sslpassword=secret")):
        with pytest.raises(TransientError) as error:
            Database.open(f"postgresql://{login}127.0.0.1:9/db{more}")
        said = str(error.value)
        assert said.startswith("postgresql://127.0.0.1:9/db")  # as it was given, in one line
        assert "\n" not in said
        assert "secret" not in said
    with pytest.raises(TransientError, match="unable to open"):
        Database.open(f"sqlite:///{tmp_path / 'no such folder' / 'db'}")
