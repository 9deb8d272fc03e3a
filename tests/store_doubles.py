"""Stores for tests: one in this process's memory, and one with scripted faults.

All `MemoryStore`s with the same name share their objects. These are in a dictionary, protected by a lock; objects are
immutable, so that readers need the lock only for the lookup. A `FaultyStore` adds delays, errors, broken connections
and wrong bytes to another store; a list or a function determines the faults of each request, without randomness.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from bootseer.errors import AccessError, BootseerError, NotFoundError, TransientError
from bootseer.store.store import (
    PIECE_BYTES,
    Store,
    Stored,
    Upload,
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
        """`memory://` and the name."""
        return self._uri

    def read(
        self, name: str, start: int = 0, length: int | None = None, *, timeout_s: float = 60.0
    ) -> Generator[bytes, None, None]:
        """See `Store.read`. Never waits, so `timeout_s` is ignored."""
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
        """Does nothing; the objects are kept for other stores with this name."""

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


@dataclass(frozen=True, slots=True)
class Request:
    """One request that a faulty store received."""

    number: int
    """Its number among all requests of the store, from 0."""
    verb: str
    """`read`, `stat`, `list`, `delete`, `create` or `upload`."""
    name: str
    """The object, or the prefix of `list`; empty for `upload`."""
    start: int = 0
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """The faults of one request. Fields with their default values change nothing."""

    delay_s: float = 0.0
    """Delay of the response."""
    gate: threading.Event | None = None
    """Wait for this event: a hang that a test can end."""
    status: int = 0
    """Fail as if the server had answered 401, 403, 404, 429 or 5xx."""
    retry_after_s: float | None = None
    """The server's Retry-After with this status."""
    bytes_per_s: float = 0.0
    """Limit the rate of a read; 0: no limit."""
    piece_bytes: int = 0
    """Split the pieces of a read to at most this size, for a steady slow rate with `bytes_per_s`; 0: no change."""
    cut_after: int | None = None
    """Fail with a `TransientError` after this number of bytes of the response."""
    short_after: int | None = None
    """End the response after this number of bytes without an error, which a correct adapter never does."""
    corrupt_at: int | None = None
    """Flip all bits of this byte of the response."""


Plan = Callable[[Request], Fault | None] | Iterable[Fault | None]


class FaultyStore:
    """A `Store` that adds the faults of `plan` to the requests of `inner`.

    A plan is a function of the request, or a sequence with one fault (or None) for each request; after the last one
    there are no more faults. `requests` counts requests and `bytes_read` returned bytes, by name.
    """

    def __init__(self, inner: Store, plan: Plan = (), *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._inner = inner
        self._script = None if callable(plan) else iter(plan)
        self._decide = plan if callable(plan) else None
        self._sleep = sleep
        self._lock = threading.Lock()
        self._number = 0
        self.requests: Counter[str] = Counter()
        self.bytes_read: Counter[str] = Counter()

    @property
    def uri(self) -> str:
        """The URI of the inner store."""
        return self._inner.uri

    def read(
        self, name: str, start: int = 0, length: int | None = None, *, timeout_s: float = 60.0
    ) -> Generator[bytes, None, None]:
        """See `Store.read`. The delays of a fault count towards `timeout_s`."""
        until = time.monotonic() + timeout_s
        fault = self._next("read", name, start, length)
        self._begin(fault, name, timeout_s)
        pieces = self._inner.read(name, start, length, timeout_s=max(until - time.monotonic(), 0.001))
        try:
            for piece in self._damaged(pieces, fault, name):
                if time.monotonic() > until:
                    raise TransientError(f"{self.uri}: reading {name} took longer than {timeout_s:g} s")
                with self._lock:
                    self.bytes_read[name] += len(piece)
                yield piece
        finally:
            pieces.close()

    def upload(self) -> Upload:
        """See `Store.upload`. Faults occur at its begin."""
        self._begin(self._next("upload", ""), "an upload", 60.0)
        return self._inner.upload()

    def create(self, name: str, data: bytes, *, refs: Sequence[Stored] = (), timeout_s: float = 60.0) -> bool:
        """See `Store.create`. With `cut_after`, the object is written and the response is lost."""
        until = time.monotonic() + timeout_s
        fault = self._next("create", name)
        self._begin(fault, name, timeout_s)
        created = self._inner.create(name, data, refs=refs, timeout_s=max(until - time.monotonic(), 0.001))
        if fault.cut_after is not None:
            raise TransientError(f"{self.uri}: the connection broke before the answer for {name}")
        return created

    def stat(self, name: str) -> Stored:
        """See `Store.stat`."""
        self._begin(self._next("stat", name), name, 60.0)
        return self._inner.stat(name)

    def list(self, prefix: str = "") -> Iterator[Stored]:
        """See `Store.list`."""
        self._begin(self._next("list", prefix), prefix, 60.0)
        return self._inner.list(prefix)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        self._begin(self._next("delete", name), name, 60.0)
        self._inner.delete(name)

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()

    def _next(self, verb: str, name: str, start: int = 0, length: int | None = None) -> Fault:
        with self._lock:
            request = Request(self._number, verb, name, start, length)
            self._number += 1
            self.requests[name] += 1
            fault = next(self._script, None) if self._script is not None else None
        if self._decide is not None:
            fault = self._decide(request)
        return fault or Fault()

    def _begin(self, fault: Fault, name: str, timeout_s: float) -> None:
        if fault.delay_s:
            self._sleep(min(fault.delay_s, timeout_s))
            if fault.delay_s >= timeout_s:
                raise TransientError(f"{self.uri}: no answer for {name} within {timeout_s:g} s")
        if fault.gate is not None and not fault.gate.wait(timeout_s):
            raise TransientError(f"{self.uri}: no answer for {name} within {timeout_s:g} s")
        if fault.status:
            raise _answer(self.uri, name, fault.status, fault.retry_after_s)

    def _damaged(self, pieces: Iterator[bytes], fault: Fault, name: str) -> Iterator[bytes]:
        at = 0
        for piece in _cut(pieces, fault.piece_bytes):
            if fault.bytes_per_s:
                self._sleep(len(piece) / fault.bytes_per_s)
            end = at + len(piece)
            data = piece
            if fault.corrupt_at is not None and at <= fault.corrupt_at < end:
                wrong = bytearray(piece)
                wrong[fault.corrupt_at - at] ^= 0xFF
                data = bytes(wrong)
            if fault.cut_after is not None and end > fault.cut_after:
                yield data[: fault.cut_after - at]
                raise TransientError(f"{self.uri}: the connection broke after {fault.cut_after} bytes of {name}")
            if fault.short_after is not None and end > fault.short_after:
                yield data[: fault.short_after - at]
                return
            yield data
            at = end


def _cut(pieces: Iterator[bytes], size: int) -> Iterator[bytes]:
    for piece in pieces:
        for at in range(0, len(piece), size or len(piece) or 1):
            yield piece[at : at + size] if size else piece


def _answer(where: str, name: str, status: int, retry_after_s: float | None) -> BootseerError:
    what = f"{where}: {name}: status {status}"
    if status == 404:
        return NotFoundError(what)
    if status in (401, 403):
        return AccessError(what)
    return TransientError(what, retry_after_s=retry_after_s)
