"""The table of snapshots: an SQLite file that survives a power failure, and the filters of containerd's lists.

A key names a snapshot; committed ones can be parents of others. The number of a row is the name of its folder.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bootseer.errors import NotFoundError, PermanentError, UsageError

VIEW, ACTIVE, COMMITTED = 1, 2, 3
"""Kinds, with the numbers of the protocol."""
_KINDS: Final = {VIEW: "View", ACTIVE: "Active", COMMITTED: "Committed"}
_SCHEMA = """
CREATE TABLE IF NOT EXISTS snapshots (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    parent TEXT NOT NULL,
    kind INTEGER NOT NULL,
    created_s REAL NOT NULL,
    updated_s REAL NOT NULL,
    labels TEXT NOT NULL,
    size_bytes INTEGER NOT NULL DEFAULT 0,
    inodes INTEGER NOT NULL DEFAULT 0,
    image TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS by_parent ON snapshots (parent);
CREATE INDEX IF NOT EXISTS by_image ON snapshots (image);
"""
_COLUMNS = "id, key, parent, kind, created_s, updated_s, labels, size_bytes, inodes, image"
_FIELD = re.compile(r"\s*(\w+)((?:\.(?:[\w\-/]+|\"(?:[^\"\\]|\\.)*\"))*)\s*", re.ASCII)
_VALUE = re.compile(r"(==|!=|~=)\s*(\"(?:[^\"\\]|\\.)*\"|[^,]*)")


class ExistsError(PermanentError):
    """A snapshot of this name exists."""


class RefusedError(PermanentError):
    """The snapshot has children, or is of the wrong kind."""


@dataclass(frozen=True, slots=True)
class Record:
    """One snapshot."""

    id: int
    key: str
    parent: str
    kind: int
    created_s: float
    updated_s: float
    labels: Mapping[str, str]
    size_bytes: int = 0
    """Disk usage of its own files once it is committed; `inodes` likewise."""
    inodes: int = 0
    image: str = ""
    """The converted image that provides its files (`LazyImages.layer`); empty: they are in its own folder."""


class Records:
    """The table. Safe for any thread."""

    def __init__(self, path: Path) -> None:
        """Open or create it. Raises `PermanentError` for an invalid file."""
        self._lock = threading.RLock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; {_SCHEMA}")
        except sqlite3.Error as error:
            full = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
            reason = "free space on its disk" if full else "not a snapshotter's database, or a disk error"
            raise PermanentError(f"{path}: {error}; {reason}") from error

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """A transaction; other threads wait."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
            except BaseException as error:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise PermanentError(f"the table of snapshots cannot be written: {error}") from error
                raise

    def find(self, key: str) -> Record | None:
        found = self._select("WHERE key = ?", key)
        return found[0] if found else None

    def get(self, key: str) -> Record:
        """The snapshot of this name. Raises `NotFoundError`."""
        found = self.find(key)
        if found is None:
            raise NotFoundError(f"snapshot {key}: not found")
        return found

    def all(self) -> list[Record]:
        """All snapshots in the order of creation."""
        return self._select("ORDER BY id")

    def images(self) -> list[str]:
        """The layers of converted images that snapshots use, each once, the earliest used first."""
        with self._lock:
            rows = self._db.execute("SELECT image FROM snapshots WHERE image != '' GROUP BY image ORDER BY min(id)")
            return [image for (image,) in rows]

    def ancestors(self, key: str) -> list[Record]:
        """A snapshot, its parent and so on, down to the lowest; empty for an empty key."""
        chain = []
        while key:
            chain.append(self.get(key))
            key = chain[-1].parent
        return chain

    def add(self, key: str, parent: str, kind: int, labels: Mapping[str, str], image: str = "") -> Record:
        """Create a snapshot. Raises `ExistsError`, `NotFoundError` for the parent, `RefusedError` if that is not
        committed."""
        with self.change():
            if not key:
                raise UsageError("a snapshot needs a key")
            if self.find(key) is not None:
                raise ExistsError(f"snapshot {key}: already exists")
            if parent and self.get(parent).kind != COMMITTED:
                raise RefusedError(f"parent {parent} is not committed")
            now = time.time()
            self._db.execute(
                "INSERT INTO snapshots (key, parent, kind, created_s, updated_s, labels, image) VALUES (?,?,?,?,?,?,?)",
                (key, parent, kind, now, now, json.dumps(dict(labels)), image),
            )
            return self.get(key)

    def commit(self, key: str, name: str, labels: Mapping[str, str], size_bytes: int, inodes: int) -> None:
        """Turn an active snapshot into a committed one with another name. Raises as `add`."""
        with self.change():
            found = self.get(key)
            if found.kind != ACTIVE:
                raise RefusedError(f"snapshot {key} is not active")
            if self.find(name) is not None:
                raise ExistsError(f"snapshot {name}: already exists")
            now = time.time()
            self._db.execute(
                "UPDATE snapshots SET key=?, kind=?, created_s=?, updated_s=?, labels=?, size_bytes=?, inodes=? "
                "WHERE id=?",
                (name, COMMITTED, now, now, json.dumps(dict(labels)), size_bytes, inodes, found.id),
            )

    def relabel(self, key: str, labels: Mapping[str, str], paths: Sequence[str]) -> Record:
        """Change the labels named by paths `labels.KEY`, or all. Raises `UsageError` for any other path."""
        with self.change():
            found = self.get(key)
            changed = dict(found.labels) if paths and "labels" not in paths else dict(labels)
            for path in paths:
                name = path.removeprefix("labels.")
                if path == "labels":
                    continue
                if name == path:
                    raise UsageError(f"{path} of snapshot {key} cannot be changed")
                changed[name] = labels.get(name, "")
            kept = {name: value for name, value in changed.items() if value}
            self._db.execute(
                "UPDATE snapshots SET labels=?, updated_s=? WHERE id=?", (json.dumps(kept), time.time(), found.id)
            )
            return self.get(key)

    def remove(self, key: str) -> Record:
        """Remove a snapshot. Raises `NotFoundError`, and `RefusedError` if it has children."""
        with self.change():
            found = self.get(key)
            if self._select("WHERE parent = ? LIMIT 1", key):
                raise RefusedError(f"cannot remove snapshot {key}: it has children")
            self._db.execute("DELETE FROM snapshots WHERE id=?", (found.id,))
            return found

    def _select(self, where: str, *values: str) -> list[Record]:
        with self._lock:
            rows = self._db.execute(f"SELECT {_COLUMNS} FROM snapshots {where}", values).fetchall()  # noqa: S608
        return [Record(*(*row[:6], json.loads(row[6]), *row[7:])) for row in rows]  # 6: the labels


def matching(filters: Sequence[str]) -> Callable[[Record], bool]:
    """A predicate for containerd's filters, such as `kind==active,labels."a.b"~=^x`; without filters all match.

    Raises `UsageError` for a malformed filter.
    """
    parsed = [_rules(text) for text in filters]
    return lambda record: not parsed or any(all(rule(record) for rule in rules) for rules in parsed)


def _rules(text: str) -> list[Callable[[Record], bool]]:
    rules, at = [], 0
    while at < len(text):
        field = _FIELD.match(text, at)
        if field is None:
            raise UsageError(f"filter {text!r}: a field was expected at {at}")
        at = field.end()
        value = _VALUE.match(text, at)
        at = value.end() if value is not None else at
        if at < len(text) and text[at] != ",":
            raise UsageError(f"filter {text!r}: an operator (==, !=, ~=) was expected at {at}")
        at += 1
        path = [_unquoted(part) for part in re.findall(r"\.(\"(?:[^\"\\]|\\.)*\"|[\w\-/]+)", field[2])]
        rules.append(_rule(field[1], ".".join(path), value[1] if value else "", _unquoted(value[2]) if value else ""))
    return rules


def _rule(field: str, label: str, operator: str, wanted: str) -> Callable[[Record], bool]:
    try:
        pattern = re.compile(wanted if operator == "~=" else "")
    except re.error as error:
        raise UsageError(f"filter: {wanted!r} is not a regular expression: {error}") from error

    def meets(record: Record) -> bool:
        values = {"kind": _KINDS[record.kind], "name": record.key, "parent": record.parent}
        found = record.labels.get(label) if field == "labels" else values.get(field)
        if operator == "==":
            # Kinds are written in upper or lower case.
            return found == wanted or (field == "kind" and str(found).lower() == wanted.lower())
        if operator == "!=":
            return found != wanted
        return found is not None and (not operator or pattern.search(found) is not None)

    return meets


def _unquoted(text: str) -> str:
    text = text.strip()
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if len(text) > 1 and text[0] == text[-1] == '"' else text
