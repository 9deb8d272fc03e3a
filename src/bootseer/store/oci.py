"""Objects in a repository of an OCI registry, `oci://host[:port]/repository`.

Registries store blobs (by digest) and manifests (by digest or tag). Content names are blobs. An object with a path name
is a small manifest under a tag derived from the name, with the object's bytes as its first layer; small objects are
also embedded, so that reading them costs one request. The layout is specified in docs/formats/oci-objects.md.

The only shared state is whether the registry's empty config blob is known to exist. Safe for many threads.

An object may name the manifest that it is about (`subject`), for registries that list such referrers. It is found by
its name alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

from msgspec import Struct

from bootseer.errors import CorruptError, NotFoundError, UsageError
from bootseer.io.retry import retrying
from bootseer.io.tasks import Tasks
from bootseer.store.registry import MANIFEST_TYPE, MAX_MANIFEST_BYTES, BlobUpload, Registry
from bootseer.store.store import (
    PIECE_BYTES,
    Stored,
    check_name,
    check_new,
    check_range,
    is_content_name,
    name_of_upload,
    parse_object,
    range_end,
)

ARTIFACT_TYPE = "application/vnd.bootseer.object.v1"
BLOB_TYPE = "application/vnd.bootseer.object.v1+blob"
NAME = "dev.bootseer.name"
EMBEDDED_BYTES = 16 * 1024
"""Objects up to this size are embedded in their manifest: documents and hot sets fit, and manifests stay small."""
_EMPTY = b"{}"
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
_EMPTY_DIGEST = "sha256:" + hashlib.sha256(_EMPTY).hexdigest()
_LIST_THREADS = 8
_SETTLE_S = 0.2
"""Delay of `create` before its last check: longer than the write of a process that checked before us takes."""


class _Object(Struct, frozen=True):
    """The content of an object's manifest."""

    name: str
    digest: str
    size_bytes: int
    data: bytes | None
    manifest_digest: str
    subject: str | None


class OciStore:
    """A `Store` in a registry. Closes `registry`."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._has_empty = False

    @property
    def uri(self) -> str:
        """`oci://host/repository`."""
        return f"oci://{self.registry}"

    def read(
        self, name: str, start: int = 0, length: int | None = None, *, timeout_s: float = 60.0
    ) -> Generator[bytes, None, None]:
        check_range(start, length)
        digest = check_name(name)
        until = time.monotonic() + timeout_s
        if not is_content_name(name):
            found = self._find(name, timeout_s)
            end = range_end(f"{self.uri}: {name}", found.size_bytes, start, length)
            if found.data is not None:
                for at in range(start, end, PIECE_BYTES):
                    yield found.data[at : min(at + PIECE_BYTES, end)]
                return
            digest = found.digest
        with closing(self.registry.blob(digest, start, length, timeout_s=until - time.monotonic())) as pieces:
            yield from pieces

    def upload(self) -> OciUpload:
        return OciUpload(self)

    def create(self, name: str, data: bytes, *, refs: Sequence[Stored] = (), timeout_s: float = 60.0) -> bool:
        """See `Store.create`. Registries have no atomic request for it: of concurrent writers, the last gets True."""
        check_new(name, data)
        until = time.monotonic() + timeout_s
        if self._is_taken(name, timeout_s):
            return False
        blob = BlobUpload(self.registry, request_s=timeout_s)
        try:
            blob.write(data)
            stored = Stored(blob.commit(), len(data))
        finally:
            blob.abort()
        self._ensure_empty()
        # As late as possible: what another process writes between this check and our write is lost.
        if self._is_taken(name, until - time.monotonic()):
            return False
        embedded = data if len(data) <= EMBEDDED_BYTES else None
        self.put_object(name, stored, embedded, refs, None, timeout_s=until - time.monotonic())
        time.sleep(max(min(_SETTLE_S, until - time.monotonic()), 0.0))
        look = lambda left_s: self._find(name, left_s)  # noqa: E731
        return retrying(look, deadline_s=max(until - time.monotonic(), 1.0)).digest == stored.name

    def stat(self, name: str) -> Stored:
        if is_content_name(check_name(name)):
            return Stored(name, self.registry.blob_size(name))
        return Stored(name, self._find(name).size_bytes)

    def list(self, prefix: str = "") -> Iterator[Stored]:
        """See `Store.list`. Costs one request per object of the repository: registries cannot search."""
        tags = [tag for tag in self.registry.tags() if tag.startswith("bootseer-")]
        with Tasks("bootseer-registry", min(_LIST_THREADS, len(tags) or 1)) as pool:
            for found in pool.map(self._listed, tags):
                if found is not None and found.name.startswith(prefix):
                    yield Stored(found.name, found.size_bytes)

    def delete(self, name: str) -> None:
        """See `Store.delete`. Many registries refuse it by default."""
        if is_content_name(check_name(name)):
            self.registry.delete_blob(name)
            return
        try:
            found = self._find(name)
        except NotFoundError:
            return
        self.registry.delete_manifest(found.manifest_digest)

    def has_lost_subject(self, name: str) -> bool:
        """Whether an object refers to a manifest of this repository that was deleted."""
        try:
            subject = retrying(lambda left_s: self._find(name, left_s)).subject
        except NotFoundError:
            return False
        try:
            if subject is not None:
                retrying(lambda left_s: self.registry.manifest_digest(subject, timeout_s=left_s))
        except NotFoundError:
            return True
        return False

    def close(self) -> None:
        self.registry.close()

    def put_object(
        self,
        name: str,
        blob: Stored,
        data: bytes | None,
        refs: Sequence[Stored],
        subject: str | None,
        *,
        timeout_s: float = 60.0,
    ) -> None:
        """Publish an existing blob under a path name; `data`: its bytes if they are to be embedded."""
        for other in refs:
            if not is_content_name(check_name(other.name)):
                raise UsageError(f"{name} can only keep objects with content names, not {other.name}")
        self._ensure_empty()
        first: dict[str, Any] = {"mediaType": BLOB_TYPE, "digest": blob.name, "size": blob.size_bytes}
        if data is not None:
            first["data"] = base64.b64encode(data).decode()
        rest = [{"mediaType": BLOB_TYPE, "digest": other.name, "size": other.size_bytes} for other in refs]
        manifest: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": {"mediaType": _EMPTY_TYPE, "digest": _EMPTY_DIGEST, "size": len(_EMPTY)},
            "layers": [first, *rest],
            "annotations": {NAME: name},
        }
        if subject is not None:
            about = self.registry.manifest(subject)
            manifest["subject"] = {"mediaType": about.media_type, "digest": about.digest, "size": len(about.data)}
        self.registry.put_manifest(tag_of(name), json.dumps(manifest).encode(), MANIFEST_TYPE, timeout_s=timeout_s)

    def _is_taken(self, name: str, timeout_s: float) -> bool:
        try:
            self._find(name, timeout_s)
        except NotFoundError:
            return False
        return True

    def _ensure_empty(self) -> None:
        if self._has_empty:
            return
        try:
            self.registry.blob_size(_EMPTY_DIGEST)
        except NotFoundError:
            upload = BlobUpload(self.registry)
            upload.write(_EMPTY)
            upload.commit()
        self._has_empty = True

    def _listed(self, tag: str) -> _Object | None:
        try:
            return self._parsed(tag)
        except (NotFoundError, CorruptError):
            return None  # removed meanwhile, or a tag of another program

    def _find(self, name: str, timeout_s: float = 60.0) -> _Object:
        try:
            found = self._parsed(tag_of(name), timeout_s)
        except NotFoundError as error:
            raise NotFoundError(f"{self.uri} has no object {name}") from error
        if found.name != name:
            raise CorruptError(f"{self.uri}: the tag of {name} shows {found.name[:200]!r}")
        return found

    def _parsed(self, tag: str, timeout_s: float = 60.0) -> _Object:
        manifest = self.registry.manifest(tag, timeout_s=timeout_s)
        document: Any = parse_object(manifest.data, f"{self.uri}: manifest {tag}", MAX_MANIFEST_BYTES)
        try:
            first = document["layers"][0]
            digest, size_bytes = first["digest"], first["size"]
            name = document["annotations"][NAME]
            check_name(name)
            if not is_content_name(digest) or not isinstance(size_bytes, int) or size_bytes < 0:
                raise ValueError("its first layer has no digest or size")
            data = None
            if "data" in first:
                data = base64.b64decode(first["data"], validate=True)
                if len(data) != size_bytes or "sha256:" + hashlib.sha256(data).hexdigest() != digest:
                    raise ValueError("the embedded bytes do not have their digest")
            subject = (document.get("subject") or {}).get("digest")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, binascii.Error, UsageError) as error:
            raise CorruptError(f"{self.uri}: manifest {tag} holds no object: {error}") from error
        return _Object(name, digest, size_bytes, data, manifest.digest, subject)


class OciUpload:
    """An `Upload` into a registry. Belongs to one thread at a time."""

    def __init__(self, store: OciStore) -> None:
        self._store = store
        self._blob = BlobUpload(store.registry)
        self._committed = ""
        """The digest of the blob, while it has no name."""
        self._head: bytearray | None = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        self._blob.write(data)
        if self._head is not None:
            self._head = self._head + data if len(self._head) + len(data) <= EMBEDDED_BYTES else None

    def commit(self, name: str | None = None, *, refs: Sequence[Stored] = (), subject: str | None = None) -> Stored:
        name = name_of_upload(self._store.uri, name, self._blob.digest.removeprefix("sha256:"))
        if is_content_name(name):
            if refs or subject is not None:
                raise UsageError(
                    f"{self._store.uri}: {name} is a blob, which cannot keep or be about others",
                    hint="give refs and subject with an object that has a path name",
                )
            return Stored(self._blob.commit(), self._blob.size_bytes)
        size_bytes = self._blob.size_bytes
        self._committed = self._committed or self._blob.commit()
        blob = Stored(self._committed, size_bytes)
        head = bytes(self._head) if self._head is not None else None
        self._store.put_object(name, blob, head, refs, subject)
        self._committed = ""
        return Stored(name, size_bytes)

    def abort(self) -> None:
        self._blob.abort()


def tag_of(name: str) -> str:
    """The tag of the manifest of the object with this path name."""
    return "bootseer-" + hashlib.sha256(name.encode()).hexdigest()[:40]
