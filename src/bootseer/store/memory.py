"""Objects in this process's memory, `memory://name`: for tests and for trying things out.

All stores of one name are the same place, as they would be anywhere else. Made by `open.open_store`.

Each place is a dictionary that only this module changes, under one lock; objects are immutable, so that readers need it
for the look-up alone.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Generator, Iterator, Sequence

from bootseer.errors import NotFoundError
from bootseer.store.store import (
    PIECE_BYTES,
    Stored,
    check_name,
    check_new,
    check_range,
    is_content_name,
    name_of_upload,
    range_end,
    upload_ended,
)

_lock = threading.Lock()
_places: dict[str, dict[str, bytes]] = {}


class MemoryStore:
    """A `Store` in memory."""

    def __init__(self, name: str) -> None:
        with _lock:
            self._objects = _places.setdefault(name, {})
        self._uri = f"memory://{name}"

    @property
    def uri(self) -> str:
        """`memory://` and the name of the place."""
        return self._uri

    def read(
        self, name: str, start: int = 0, length: int | None = None, *, timeout_s: float = 60.0
    ) -> Generator[bytes, None, None]:
        """See `Store.read`. Never waits, so that `timeout_s` does not matter."""
        check_range(start, length)
        data = memoryview(self._get(name))
        end = range_end(f"{self._uri}: {name}", len(data), start, length)
        for at in range(start, end, PIECE_BYTES):
            yield bytes(data[at : min(at + PIECE_BYTES, end)])

    def upload(self) -> MemoryUpload:
        """See `Store.upload`."""
        return MemoryUpload(self._objects, self._uri)

    def create(self, name: str, data: bytes, *, refs: Sequence[Stored] = (), timeout_s: float = 60.0) -> bool:
        """See `Store.create`."""
        check_new(name, data)
        with _lock:
            if name in self._objects:
                return False
            self._objects[name] = bytes(data)
            return True

    def stat(self, name: str) -> Stored:
        """See `Store.stat`."""
        return Stored(name, len(self._get(name)))

    def list(self, prefix: str = "") -> Iterator[Stored]:
        """See `Store.list`."""
        with _lock:
            found = [
                Stored(name, len(data))
                for name, data in self._objects.items()
                if name.startswith(prefix) and not is_content_name(name)
            ]
        return iter(found)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        with _lock:
            self._objects.pop(check_name(name), None)

    def close(self) -> None:
        """Nothing to give back; the objects stay for the other stores of this name."""

    def _get(self, name: str) -> bytes:
        with _lock:
            data = self._objects.get(check_name(name))
        if data is None:
            raise NotFoundError(f"{self._uri} has no object {name}")
        return data


class MemoryUpload:
    """An `Upload` into memory."""

    def __init__(self, objects: dict[str, bytes], uri: str) -> None:
        self._objects = objects
        self._uri = uri
        self._data: bytearray | None = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        """See `Upload.write`."""
        if self._data is None:
            raise upload_ended(self._uri)
        self._data += data

    def commit(self, name: str | None = None, *, refs: Sequence[Stored] = (), subject: str | None = None) -> Stored:
        """See `Upload.commit`."""
        if self._data is None:
            raise upload_ended(self._uri)
        data = bytes(self._data)
        name = name_of_upload(self._uri, name, hashlib.sha256(data).hexdigest())
        self._data = None
        with _lock:
            self._objects[name] = data
        return Stored(name, len(data))

    def abort(self) -> None:
        """See `Upload.abort`."""
        self._data = None
