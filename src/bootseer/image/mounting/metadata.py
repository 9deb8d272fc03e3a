"""The node's cache of image metadata: digests of tags, documents and the indexes of layers.

A node that has all of an image needs neither registry nor store to start it again. A tag is resolved at each start; if
the registry does not answer, the digest of the last start is used, with a message. A document is replaced when the
image is converted again, and the blocks of the old one are deleted later: as long as blocks are missing on the node, it
is compared with the store's (`is_outdated`). Everything else is immutable.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from bootseer.artifact.objects import LocalObjects, missing, read_all
from bootseer.artifact.places import metadata_folder, own_folder
from bootseer.artifact.progress import Say
from bootseer.artifact.signatures import Signatures
from bootseer.blocks.index import Index
from bootseer.errors import BootseerError, TransientError
from bootseer.image.catalog import IMAGES, images_in, read_document
from bootseer.image.document import ImageDocument
from bootseer.image.reference import Reference
from bootseer.image.sources.manifest import Platform
from bootseer.image.sources.source import this_platform
from bootseer.io.tasks import Tasks
from bootseer.store.store import Store, is_content_name

_THREADS = 8
_DIGEST_BYTES = 256
_COMPARE_S = 5.0
"""A start whose blocks are on the node, or on other nodes, waits no longer for a store that is away."""
_FRESH_S = 60.0
"""A document read within this time is not compared with the store's: often another process of the same start did."""


class Metadata:
    """The metadata in a node's cache. The folder is created on first write; on a full disk nothing is cached."""

    def __init__(self, cache: Path, say: Say) -> None:
        self._folder = own_folder(metadata_folder(cache), make=False)
        self._objects = LocalObjects(self._folder, say)
        self._say = say
        self.is_cached = False
        """Whether the last `document` was read long ago, or from another store."""

    def digest_of(self, reference: Reference, ask: Callable[[], str]) -> str:
        """The current digest of a name in a registry, of a manifest or an index. `ask` queries the registry.

        Raises its errors, unless it is temporarily unavailable and the name was resolved on this node before.
        """
        if reference.digest:
            return reference.digest
        name = _name("tags", str(reference))
        try:
            digest = ask()
        except TransientError as error:
            known = self._known(name)
            if known is None:
                raise
            self._say(f"{error}; using {known} for {reference}, the digest of its last start on this node")
            return known
        self._objects.keep(name, digest.encode())
        return digest

    def platform_image(self, digest: str, platform: Platform | None) -> str | None:
        """The digest of an index's image for a platform, if it was resolved before."""
        return self._known(_name("chosen", f"{digest} {platform or this_platform()}"))

    def remember_platform_image(self, digest: str, platform: Platform | None, image: str) -> None:
        """Cache `image` as the index's image for the platform. It never expires: both digests are immutable."""
        self._objects.keep(_name("chosen", f"{digest} {platform or this_platform()}"), image.encode())

    def document(self, digest: str, store: Store, signatures: Signatures) -> ImageDocument:
        """The document of a converted image. Raises what `read_document` raises.

        A cached document is verified again at each start, against the keys that are trusted now.
        """
        read_from = _name("read", f"{digest} {store.uri}")  # another store may not have the image
        with contextlib.suppress(BootseerError):
            document, _ = read_document(self._objects.store, digest, signatures)
            self.is_cached = True
            with contextlib.suppress(OSError):
                age_s = time.time() - (self._folder / read_from).stat().st_mtime
                self.is_cached = age_s > _FRESH_S
            return document
        self.is_cached = False
        document, data = read_document(store, digest, signatures)
        self._objects.keep(document.name, data)
        self._objects.keep(read_from, b"")
        return document

    def is_outdated(self, document: ImageDocument, store: Store, signatures: Signatures) -> bool:
        """Whether the store has replaced or removed the document and deleted objects of this one, which is dropped."""
        try:
            catalog = images_in(store, signatures=signatures)
            if catalog.find(document.digest, timeout_s=_COMPARE_S) == document:
                return False
            # A document that was replaced or removed is no reason by itself: its objects stay for the grace period, and
            # this node has blocks of it, but perhaps none of the new one.
            if not missing(store, document.objects):
                return False
        except BootseerError:
            return False  # it cannot tell
        self.forget(document.digest)
        return True

    def forget(self, digest: str) -> None:
        """Drop the cached document: the next call reads the store."""
        with contextlib.suppress(BootseerError):
            self._objects.store.delete(IMAGES.document_name(digest))

    def indexes(self, document: ImageDocument, store: Store) -> list[Index]:
        """The indexes of all layers, bottom first; those that are not cached are fetched in parallel."""
        with Tasks("bootseer-index", min(_THREADS, len(document.layers))) as pool:
            return list(pool.map(lambda layer: self._objects.index(layer.file, store), document.layers))

    def _known(self, name: str) -> str | None:
        try:
            digest = read_all(self._objects.store, name, _DIGEST_BYTES).decode("ascii")
        except (BootseerError, UnicodeDecodeError):
            return None
        return digest if is_content_name(digest) else None  # a crash of the machine may leave zeros


def _name(kind: str, text: str) -> str:
    return f"{kind}/{hashlib.sha256(text.encode()).hexdigest()}"
