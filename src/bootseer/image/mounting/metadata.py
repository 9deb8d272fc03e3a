"""What must be known of an image before it can be mounted: its digest, its document, the indexes of its layers.

All of it is immutable once the digest is known, and is kept on the node, so that a node that has an image needs neither
registry nor store to start it again. Only a tag has to be asked for; when the registry does not answer, the digest that
it had last is used, and that is said.

"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

from bootseer.artifact.objects import LocalObjects, read_all
from bootseer.artifact.progress import Say
from bootseer.artifact.signatures import Signatures
from bootseer.blocks.index import Index
from bootseer.errors import BootseerError, TransientError
from bootseer.image.catalog import IMAGES, images_in, read_document, read_stored
from bootseer.image.document import ImageDocument
from bootseer.image.reference import Reference
from bootseer.image.sources.manifest import Platform
from bootseer.image.sources.open import this_platform
from bootseer.io.tasks import Tasks
from bootseer.store.store import Store

_THREADS = 8
_TAG_BYTES = 256


class Metadata:
    """What this node knows of images. `folder` is made when something is kept; a full disk costs the copy alone."""

    def __init__(self, folder: Path, say: Say) -> None:
        self._kept = LocalObjects(folder, say)
        self._say = say

    def digest_of(self, reference: Reference, ask: Callable[[], str]) -> str:
        """The digest that a name in a registry stands for now: of an image, or of an index of images. `ask` asks."""
        if reference.digest:
            return reference.digest
        name = _name("tags", str(reference))
        try:
            digest = ask()
        except TransientError as error:
            known = self._known(name)
            if known is None:
                raise
            self._say(f"{error}; {reference} is taken to be {known}, as it was at its last start here")
            return known
        self._kept.keep(name, digest.encode())
        return digest

    def chosen(self, digest: str, platform: Platform | None) -> str | None:
        """Which image of an index was chosen for a platform before."""
        return self._known(_name("chosen", f"{digest} {platform or this_platform()}"))

    def choose(self, digest: str, platform: Platform | None, image: str) -> None:
        """Remember that: neither of the two digests will ever mean anything else."""
        self._kept.keep(_name("chosen", f"{digest} {platform or this_platform()}"), image.encode())

    def document(self, digest: str, store: Store, signatures: Signatures) -> ImageDocument:
        """The document of a converted image. Raises as `read_document`: it is not converted when the store has none.

        What is kept on this node is verified again at each start, for the keys that are trusted now.
        """
        with contextlib.suppress(BootseerError):
            return read_document(self._kept.store, digest, signatures)
        data = read_stored(store, digest)
        document = images_in(store, signatures=signatures).parse_stored(digest, data)
        self._kept.keep(document.name, data)
        return document

    def forget(self, digest: str) -> None:
        """Ask the store again the next time."""
        with contextlib.suppress(BootseerError):
            self._kept.store.delete(IMAGES.document_name(digest))

    def indexes(self, document: ImageDocument, store: Store) -> list[Index]:
        """The indexes of all layers, bottom first, fetched side by side where they are not here."""
        with Tasks("bootseer-index", min(_THREADS, len(document.layers))) as pool:
            return list(pool.map(lambda layer: self._kept.index(layer.file, store), document.layers))

    def _known(self, name: str) -> str | None:
        try:
            return read_all(self._kept.store, name, _TAG_BYTES).decode("ascii")
        except (BootseerError, UnicodeDecodeError):
            return None


def _name(kind: str, text: str) -> str:
    return f"{kind}/{hashlib.sha256(text.encode()).hexdigest()}"
