"""A client of one repository of an OCI registry: manifests, tags, blobs and ranges of blobs.

Implements the OCI distribution protocol only; BootSeer's objects are in `oci`, and `image.sources` reads images through
it. Logins are in `tokens`, mirrors in `mirrors`.

Many registries redirect blobs to an object storage. The target address is cached for a minute, so that a thousand
ranges of a blob cost the registry a few requests instead of a thousand. One lock guards the table of addresses;
connection pools and tokens have their own. Safe for many threads.

The digest of an uploaded blob is known only at the end. Small blobs are sent in one request after the session is
opened, larger ones in chunks, one request each, so that memory is bounded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from functools import partial
from urllib.parse import urlsplit

from msgspec import Struct

from bootseer.errors import (
    AccessError,
    BootseerError,
    CorruptError,
    NotFoundError,
    PermanentError,
    TooShortError,
    TransientError,
    UsageError,
)
from bootseer.store.addresses import HOST, REPOSITORY, TAG
from bootseer.store.store import check_range, is_content_name, parse_object, upload_ended
from bootseer.store.tokens import Authorizer, find_credentials
from bootseer.store.transport import Answer, Origin, Transport, join, tls_hint

CHUNK_BYTES = 8 * 1024 * 1024
_MAX_CHUNK_BYTES = 64 * 1024 * 1024
_REQUEST_S = 300.0
"""Limit for one chunk and its response: a registry may forward it to a slow storage before it responds."""


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
        return self._sent + len(self._buffer)

    @property
    def digest(self) -> str:
        return "sha256:" + self._hash.hexdigest()

    def write(self, data: bytes | memoryview) -> None:
        """Append; sends full chunks. After an error only `abort` may be called."""
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
        if self._ended:
            raise upload_ended(str(self._registry))
        self._open()
        # The remainder below a chunk is sent with the last request.
        if self._sent and self._buffer:
            self._send_chunk()
        location = f"{self._location}{'&' if urlsplit(self._location).query else '?'}digest={self.digest}"
        answer = self._request("PUT", location, bytes(self._buffer))
        self._registry.expect_done(answer, f"storing blob {self.digest}", 201, 204)
        self._ended = True
        return self.digest

    def abort(self) -> None:
        """End the session; the registry drops what was sent, now or at its next cleanup."""
        if self._ended:
            return
        self._ended = True
        if self._location:
            with contextlib.suppress(BootseerError):
                self._registry.request("delete", "DELETE", self._location, timeout_s=10.0).finish()

    def _open(self) -> None:
        if self._location:
            return
        answer = self._request("POST", "blobs/uploads/", b"")
        self._registry.expect_done(answer, "beginning an upload", 202)
        self._take_location(answer)
        wanted = answer.headers.get("OCI-Chunk-Min-Length", "")
        if wanted.isdecimal() and len(wanted) < 10:
            if int(wanted) > _MAX_CHUNK_BYTES:
                raise PermanentError(f"{self._registry}: the registry requires chunks of at least {wanted} bytes")
            self._chunk_bytes = max(self._chunk_bytes, int(wanted))

    def _send_chunk(self) -> None:
        self._open()
        size = len(self._buffer)
        if size < self._chunk_bytes and not self._sent:
            return  # the registry requires larger chunks
        headers = {"Content-Range": f"{self._sent}-{self._sent + size - 1}"}
        answer = self._request("PATCH", self._location, bytes(self._buffer), headers)
        self._registry.expect_done(answer, f"sending bytes from {self._sent} on", 202, 204)
        self._take_location(answer)
        self._sent += size
        self._buffer.clear()

    def _request(self, method: str, url: str, body: bytes, headers: dict[str, str] | None = None) -> Answer:
        kind = {"Content-Type": "application/octet-stream"} if body else {}
        headers = {**kind, **(headers or {})}
        return self._registry.request("push", method, url, timeout_s=self._request_s, headers=headers, body=body)

    def _take_location(self, answer: Answer) -> None:
        location = answer.headers.get("Location", "")
        if not location:
            raise TransientError(f"{self._registry}: the registry does not say where to upload a blob")
        self._location = join(answer.url, location)


MAX_MANIFEST_BYTES = 4 * 1024 * 1024
"""The size that registries promise to accept, and so the largest that can be stored."""
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    MANIFEST_TYPE,
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_SERVERS = {"docker.io": "registry-1.docker.io"}
"""Registries whose server has another name than their images: docker.io itself redirects to a web site."""
_NEXT = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')
_ADDRESS_S = 60.0
_MAX_ADDRESSES = 1024
_MAX_PAGES = 10_000


class RangeIgnoredError(TransientError):
    """The whole blob was sent instead of a part, as by some registries, and by proxies that do not have it yet."""


class Manifest(Struct, frozen=True):
    """A manifest with its exact bytes."""

    data: bytes
    media_type: str
    digest: str


class Registry:
    """One repository of one registry. `host` is `name[:port]`; `plain_http` sends everything unencrypted. `address` is
    that of another server, with the query of each request, reached `via` this transport."""

    def __init__(
        self, host: str, repository: str, *, plain_http: bool = False, address: str = "", via: Transport | None = None
    ) -> None:
        if not HOST.fullmatch(host):
            raise UsageError(f"{host[:200]!r} is not the name of a registry", hint="use host or host:port")
        if len(repository) > 255 or not REPOSITORY.fullmatch(repository):
            raise UsageError(
                f"{repository[:255]!r} is not a repository", hint="use lower case, digits, . _ - and /, without a tag"
            )
        self.host = host
        self.repository = repository
        scheme = "http" if plain_http else "https"
        self.address, _, self._query = (address or f"{scheme}://{_SERVERS.get(host, host)}/v2").partition("?")
        self._base = f"{self.address}/{repository}/"
        self._origin = Origin.of(self._base)
        self._transport = via or Transport()
        find = partial(find_credentials, repository=repository)
        self._authorizer = Authorizer(self._transport, host, self._origin, find)
        self._lock = threading.Lock()
        self._addresses: dict[str, tuple[str, float]] = {}

    def __str__(self) -> str:
        return f"{self.host}/{self.repository}"

    def manifest(self, reference: str, *, timeout_s: float = 60.0) -> Manifest:
        """The manifest of a tag or digest; verified if a digest is known."""
        path = f"manifests/{_checked_reference(reference)}"
        answer = self.request("pull", "GET", path, timeout_s=timeout_s, headers={"Accept": ", ".join(MANIFEST_TYPES)})
        self.expect(answer, f"manifest {reference}", 200)
        data = answer.body(MAX_MANIFEST_BYTES)
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        said = reference if is_content_name(reference) else answer.headers.get("Docker-Content-Digest", digest)
        if is_content_name(said) and said != digest:
            raise CorruptError(f"{self}: the bytes of manifest {reference} are not those of {said}")
        if not data.lstrip().startswith(b"{"):
            raise CorruptError(f"{self}: a web page or other text was sent as manifest {reference}")
        return Manifest(data, answer.headers.get("Content-Type", "").partition(";")[0].strip(), digest)

    def manifest_digest(self, reference: str, *, timeout_s: float = 60.0) -> str:
        """The current digest of a tag, without reading the manifest if the registry sends the digest."""
        path = f"manifests/{_checked_reference(reference)}"
        answer = self.request("pull", "HEAD", path, timeout_s=timeout_s, headers={"Accept": ", ".join(MANIFEST_TYPES)})
        self.expect_done(answer, f"manifest {reference}", 200, 405, 501)  # some proxies know GET only
        digest = answer.headers.get("Docker-Content-Digest", "")
        return digest if is_content_name(digest) else self.manifest(reference, timeout_s=timeout_s).digest

    def put_manifest(self, reference: str, data: bytes, media_type: str, *, timeout_s: float = 60.0) -> None:
        """Store a manifest under a tag or its own digest, atomically."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise PermanentError(f"{self}: a manifest of {len(data)} bytes is too large; {MAX_MANIFEST_BYTES} may be")
        path = f"manifests/{_checked_reference(reference)}"
        answer = self.request("push", "PUT", path, timeout_s=timeout_s, headers={"Content-Type": media_type}, body=data)
        self.expect_done(answer, f"storing manifest {reference}", 201, 202)

    def delete_manifest(self, digest: str) -> None:
        """Delete a manifest and its tags. Nothing happens if it does not exist."""
        self._delete(f"manifests/{_checked_digest(digest)}", f"removing manifest {digest}")

    def delete_blob(self, digest: str) -> None:
        """Delete a blob. Nothing happens if it does not exist."""
        self._delete(f"blobs/{_checked_digest(digest)}", f"removing blob {digest}")
        with self._lock:
            self._addresses.pop(digest, None)

    def blob_size(self, digest: str, *, timeout_s: float = 60.0) -> int:
        answer = self.request("pull", "HEAD", f"blobs/{_checked_digest(digest)}", timeout_s=timeout_s)
        self.expect_done(answer, f"blob {digest}", 200)
        if answer.length is None:
            raise TransientError(f"{self}: the registry does not report the size of blob {digest}")
        return answer.length

    def blob(
        self, digest: str, start: int = 0, length: int | None = None, *, timeout_s: float = 60.0
    ) -> Generator[bytes, None, None]:
        """Bytes of a blob as they arrive, under the rules of `Store.read`. The digest is not verified."""
        check_range(start, length)
        _checked_digest(digest)
        if length == 0:
            return
        until = time.monotonic() + timeout_s
        # Also for a whole blob: the answer then states its size, in most cases also if it comes in chunks.
        headers = {"Range": f"bytes={start}-" if length is None else f"bytes={start}-{start + length - 1}"}
        answer = self._blob_answer(digest, headers, until)
        try:
            expected = self._checked_length(answer, digest, start, length)
            if expected == 0:
                answer.finish()
                return
            with closing(answer.pieces()) as pieces:
                for piece in pieces:
                    expected -= len(piece)
                    if expected < 0:
                        raise TransientError(f"{self}: more bytes of blob {digest} arrived than were asked for")
                    yield piece
            if 0 < expected < math.inf:
                raise TransientError(f"{self}: {expected} bytes of blob {digest} are missing from the answer")
        finally:
            answer.close()

    def tags(self, *, timeout_s: float = 60.0) -> Iterator[str]:
        """All tags; none if the repository does not exist."""
        until = time.monotonic() + timeout_s
        path = "tags/list?n=1000"
        for page in range(_MAX_PAGES):
            answer = self.request("pull", "GET", path, timeout_s=until - time.monotonic())
            if answer.status == 404 and not page:
                answer.finish()
                return
            self.expect(answer, "the list of tags", 200)
            # A registry without paging sends everything at once: 100,000 tags of 50 bytes fit.
            data = answer.body(2 * MAX_MANIFEST_BYTES)
            document = parse_object(data, f"{self}: the list of tags", len(data))
            tags = document.get("tags")  # null when there are none
            yield from (
                tag for tag in (tags if isinstance(tags, list) else ()) if isinstance(tag, str) and TAG.fullmatch(tag)
            )
            following = _NEXT.search(answer.headers.get("Link", ""))
            if following is None:
                return
            path = join(answer.url, following[1])

    def request(
        self,
        action: str,
        method: str,
        path: str,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Answer:
        """Send a request for `path` (of this repository, or a whole URL from the registry), with authorization.

        `action` is `pull`, `push` or `delete`. The response may have any status; `expect` maps it to an error.
        """
        until = time.monotonic() + timeout_s
        url = join(self._base, path)
        if self._query:
            url += f"{'&' if '?' in url else '?'}{self._query}"
        mine = Origin.of(url) == self._origin
        if self._origin.scheme == "https" and Origin.of(url).scheme != "https":
            raise PermanentError(f"{self}: the registry names an http address, which is not encrypted")
        authorization = self._authorizer.header(action, until) if mine else None
        answer = self._transport.send(method, url, until=until, headers=headers, body=body, authorization=authorization)
        if not mine or answer.origin != self._origin:
            return answer
        if answer.status == 401:
            answer.finish()
            challenges = answer.headers.getlist("WWW-Authenticate")
            authorization = self._authorizer.renewed(action, challenges, authorization, until)
        elif answer.status == 403 and (fresh := self._authorizer.changed(authorization, until)) is not None:
            answer.finish()
            authorization = fresh
        else:
            return answer
        return self._transport.send(method, url, until=until, headers=headers, body=body, authorization=authorization)

    def expect(self, answer: Answer, operation: str, *statuses: int) -> None:
        """Raise the error for a response with any other status."""
        if answer.status not in statuses:
            raise self._refusal(answer, operation)

    def expect_done(self, answer: Answer, operation: str, *statuses: int) -> None:
        """As `expect`, for a response whose body does not matter."""
        self.expect(answer, operation, *statuses)
        answer.finish()

    def close(self) -> None:
        self._transport.close()

    def _delete(self, path: str, operation: str) -> None:
        answer = self.request("delete", "DELETE", path, timeout_s=60.0)
        if answer.status == 405:
            answer.finish()
            raise PermanentError(f"{self}: {operation}: this registry does not allow deletion")
        self.expect_done(answer, operation, 200, 202, 204, 404)

    def _blob_answer(self, digest: str, headers: dict[str, str], until: float) -> Answer:
        with self._lock:
            address, good_until = self._addresses.get(digest, ("", 0.0))
        if good_until > time.monotonic():
            try:
                answer = self._transport.send("GET", address, until=until, headers=headers)
            except TransientError:  # the registry may redirect the next attempt to another host
                with self._lock:
                    self._addresses.pop(digest, None)
                raise
            if answer.status in (200, 206, 416):
                return answer
            answer.finish()  # its signature may have expired: ask the registry for a new address
        answer = self.request("pull", "GET", f"blobs/{digest}", timeout_s=until - time.monotonic(), headers=headers)
        with self._lock:
            self._addresses.pop(digest, None)
            if answer.origin != self._origin and answer.status in (200, 206):
                while len(self._addresses) >= _MAX_ADDRESSES:
                    del self._addresses[next(iter(self._addresses))]
                self._addresses[digest] = (answer.url, time.monotonic() + _ADDRESS_S)
        return answer

    def _checked_length(self, answer: Answer, digest: str, start: int, length: int | None) -> float:
        """The number of bytes that will arrive; infinite for a whole blob whose size the answer does not state. Raises
        unless exactly the requested range is sent."""
        if answer.status == 416:
            total = (answer.content_range or (0, 0, None))[2]
            answer.finish()
            if total == start and length is None:
                return 0
            size = f"has {total} bytes" if total is not None else "is shorter"
            raise TooShortError(f"{self}: blob {digest} {size}; bytes from {start} on were asked for")
        self.expect(answer, f"blob {digest}", 200, 206)
        if answer.status == 200:
            if start > 0 or length not in (None, answer.length):
                raise RangeIgnoredError(f"{self}: blob {digest}: the registry, or a proxy before it, ignores the range")
            return math.inf if answer.length is None else answer.length
        span = answer.content_range
        if span is None or span[0] != start:
            raise TransientError(f"{self}: asked for a part of blob {digest}, the registry sends another part")
        first, end, total = span
        if length is not None and total is not None and start + length > total:
            raise TooShortError(
                f"{self}: blob {digest} has {total} bytes; bytes {start} to {start + length} were asked for"
            )
        if end != (total if length is None else start + length) or answer.length not in (None, end - first):
            raise TransientError(f"{self}: asked for a part of blob {digest}, the registry sends another part")
        return end - first

    def _refusal(self, answer: Answer, operation: str) -> BootseerError:
        retry_after_s = answer.retry_after_s
        words = _error_words(answer.finish(8192))
        digest = f"{self}: {operation}: status {answer.status}{words}"
        if answer.origin != self._origin:
            digest += f" from {answer.origin}, to which the registry redirects"
        if answer.status == 404:
            return NotFoundError(digest)
        if answer.status == 400 and "DIGEST_INVALID" in words:
            return TransientError(f"{digest}; the bytes were damaged in transit, send them again")
        if answer.status == 400 and not words:  # as most servers of TLS answer plain HTTP
            return PermanentError(f"{digest}{tls_hint(answer.origin)}")
        if answer.status in (401, 403):
            return self._authorizer.denied(digest) if answer.origin == self._origin else AccessError(digest)
        if answer.status in (408, 425, 429) or answer.status >= 500:
            return TransientError(digest, retry_after_s=retry_after_s)
        return PermanentError(digest)


def _checked_reference(reference: str) -> str:
    if not (is_content_name(reference) or TAG.fullmatch(reference)):
        raise UsageError(f"{reference[:200]!r} is neither a tag nor a digest", hint="use sha256: or a tag")
    return reference


def _checked_digest(digest: str) -> str:
    if not is_content_name(digest):
        raise UsageError(f"{digest[:200]!r} is not a digest", hint="use sha256: and 64 hexadecimal digits")
    return digest


def _error_words(body: bytes) -> str:
    """The registry's error message as one short printable line."""
    try:
        first = json.loads(body)["errors"][0]
        words = f"{first.get('code', '')} {first.get('message', '')}"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return ""
    return " (" + "".join(letter if letter.isprintable() else " " for letter in words)[:200].strip() + ")"
