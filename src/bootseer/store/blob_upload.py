"""A blob on its way into a registry, whose digest is known only at the end.

Small blobs go in one request after the session was opened; larger ones in chunks. Each chunk is sent with one request,
so that memory stays bounded whatever the size. Called by `oci`.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from urllib.parse import urlsplit

from bootseer.errors import BootseerError, PermanentError, TransientError
from bootseer.store.registry import Registry
from bootseer.store.store import upload_ended
from bootseer.store.transport import Answer, join

CHUNK_BYTES = 8 * 1024 * 1024
_MAX_CHUNK_BYTES = 64 * 1024 * 1024
_REQUEST_S = 300.0
"""For one chunk and its answer: a registry may pass it on to a slow storage before it answers."""


class BlobUpload:
    """One upload session. Belongs to one thread at a time."""

    def __init__(self, registry: Registry, *, request_s: float = _REQUEST_S) -> None:
        self._registry = registry
        self._request_s = request_s
        self._hash = hashlib.sha256()
        self._buffer = bytearray()
        self._chunk_bytes = CHUNK_BYTES
        self._location = ""
        self._ended = False
        self._sent = 0

    @property
    def size_bytes(self) -> int:
        """Bytes written so far."""
        return self._sent + len(self._buffer)

    @property
    def digest(self) -> str:
        """The digest of what was written so far."""
        return "sha256:" + self._hash.hexdigest()

    def write(self, data: bytes | memoryview) -> None:
        """Append; sends full chunks. After an error only `abort` makes sense."""
        if self._ended:
            raise upload_ended(str(self._registry))
        self._hash.update(data)
        rest = memoryview(data).cast("B")
        while rest:
            room = self._chunk_bytes - len(self._buffer)
            self._buffer += rest[:room]
            rest = rest[room:]
            if len(self._buffer) >= self._chunk_bytes:
                self._send_chunk()

    def commit(self) -> str:
        """Make the blob visible under its digest, which is returned."""
        if self._ended:
            raise upload_ended(str(self._registry))
        self._open()
        # What never became a chunk goes with the last request.
        if self._sent and self._buffer:
            self._send_chunk()
        location = f"{self._location}{'&' if urlsplit(self._location).query else '?'}digest={self.digest}"
        answer = self._request("PUT", location, bytes(self._buffer))
        self._registry.expect(answer, f"storing blob {self.digest}", 201, 204)
        answer.finish()
        self._ended = True
        return self.digest

    def abort(self) -> None:
        """End the session; what was sent is dropped by the registry, now or when it cleans up."""
        if self._ended:
            return
        self._ended = True
        if self._location:
            with contextlib.suppress(BootseerError):
                self._registry.request("delete", "DELETE", self._location, until=time.monotonic() + 10.0).finish()

    def _open(self) -> None:
        if self._location:
            return
        answer = self._request("POST", "blobs/uploads/", b"")
        self._registry.expect(answer, "beginning an upload", 202)
        answer.finish()
        self._take_location(answer)
        wanted = answer.headers.get("OCI-Chunk-Min-Length", "")
        if wanted.isdecimal() and len(wanted) < 10:
            if int(wanted) > _MAX_CHUNK_BYTES:
                raise PermanentError(f"{self._registry}: the registry wants chunks of at least {wanted} bytes")
            self._chunk_bytes = max(self._chunk_bytes, int(wanted))

    def _send_chunk(self) -> None:
        self._open()
        size = len(self._buffer)
        if size < self._chunk_bytes and not self._sent:
            return  # the registry wants larger chunks than we thought
        headers = {"Content-Range": f"{self._sent}-{self._sent + size - 1}"}
        answer = self._request("PATCH", self._location, bytes(self._buffer), headers)
        self._registry.expect(answer, f"sending bytes from {self._sent} on", 202, 204)
        answer.finish()
        self._take_location(answer)
        self._sent += size
        self._buffer.clear()

    def _request(self, method: str, url: str, body: bytes, headers: dict[str, str] | None = None) -> Answer:
        kind = {"Content-Type": "application/octet-stream"} if body else {}
        until = time.monotonic() + self._request_s
        return self._registry.request("push", method, url, until=until, headers={**kind, **(headers or {})}, body=body)

    def _take_location(self, answer: Answer) -> None:
        location = answer.headers.get("Location", "")
        if not location:
            raise TransientError(f"{self._registry}: the registry does not say where to send a blob to")
        self._location = join(answer.url, location)
