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

from bootseer.errors import NotFoundError, PermanentError, UsageError

VIEW, ACTIVE, COMMITTED = 1, 2, 3
"""Kinds, with the numbers of the protocol."""
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
_EQUALITY = re.compile(r'(name|parent|labels\.("(?:[^"\\]|\\.)*"|[\w/-]+))==("(?:[^"\\]|\\.)*"|[^,"]*)(?:,|$)')


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
            # The log is reused after eight pages. If it grew with each change, nothing could be removed on a full disk.
            pragmas = "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA wal_autocheckpoint=8;"
            self._db.executescript(f"{pragmas} {_SCHEMA}")
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

    def hand_over(self, digest: str, same_layer: Callable[[str, str], str]) -> None:
        """Let other converted images provide the layers that they have in common with this one, which can then be
        unmounted. `same_layer` finds a layer by its chain id in the image of the layer above it."""
        with self.change():
            for record in reversed(self.all()):
                if record.image.startswith(digest):
                    above = self._select("WHERE parent = ?", record.key)
                    if not above or not all(other.image for other in above):
                        return
                    layer = same_layer(above[0].image, record.key)
                    self._db.execute("UPDATE snapshots SET image=? WHERE id=?", (layer, record.id))

    def _select(self, where: str, *values: str) -> list[Record]:
        with self._lock:
            rows = self._db.execute(f"SELECT {_COLUMNS} FROM snapshots {where}", values).fetchall()  # noqa: S608
        return [Record(*(*row[:6], json.loads(row[6]), *row[7:])) for row in rows]  # 6: the labels


def matching(filters: Sequence[str]) -> Callable[[Record], bool]:
    """A predicate for containerd's filters; without filters all match. It uses equalities only, to find the snapshot
    of a layer: `labels."containerd.io/snapshot.ref"==sha256:...,parent=="..."`. Raises `UsageError` for others."""
    wanted = [list(_equalities(text)) for text in filters]

    def meets(record: Record) -> bool:
        values = {"name": record.key, "parent": record.parent}
        values |= {f"labels.{name}": value for name, value in record.labels.items()}
        return not wanted or any(all(values.get(name) == value for name, value in rules) for rules in wanted)

    return meets


def _equalities(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        found = _EQUALITY.match(text, at)
        if found is None:
            raise UsageError(f"filter {text!r}: name, parent or labels.LABEL with == was expected at {at}")
        at = found.end()
        name, label, value = found.groups()
        yield (f"labels.{_unquoted(label)}" if label else name), _unquoted(value)


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text.startswith('"') else text
