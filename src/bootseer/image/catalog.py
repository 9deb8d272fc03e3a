"""The catalog of a store's converted images, by the digests of their manifests.

    images/sha256-<hex>                         the document (`image.document`)
    image-trash/sha256-<hex>-<16 hex>           a removed image whose objects still exist (`artifact.prune`)
    layers/<hex>                                results of conversions by layer (`conversion.layer_document`)

Images share layers. A conversion reuses layers that it finds in the store, and checks when it publishes that they still
exist.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from bootseer.artifact.catalog import Catalog
from bootseer.artifact.kind import Kind
from bootseer.artifact.objects import read_all
from bootseer.artifact.places import converted_folder, own_folder
from bootseer.artifact.progress import Say
from bootseer.artifact.prune import GRACE_S, Pruned
from bootseer.artifact.prune import prune as prune_artifacts
from bootseer.artifact.signatures import UNSIGNED, Signatures, stored_limit
from bootseer.artifact.unpacked import OTHERS_S
from bootseer.cache.cache import Cache
from bootseer.errors import BootseerError, PermanentError, TransientError, UsageError, os_errors_as
from bootseer.image.conversion import layer_document
from bootseer.image.document import MAX_DOCUMENT_BYTES, ImageDocument, document_name
from bootseer.image.sources.manifest import check_document
from bootseer.io.files import may_be_shared
from bootseer.io.locks import flocked
from bootseer.store.file import FileStore
from bootseer.store.store import Store, is_content_name

_FOLDER, _TRASH, _LAYERS = "images/", "image-trash/", "layers/"
CONVERTING = ".converting.lock"
"""In the node's own store: locked by conversions, which may reuse layers, and by `delete_idle`."""
_READ_S = 60.0
_STARTING_S = 600.0
"""A start that has found an image has opened its block files by then."""


def _check_digest(digest: str) -> None:
    if not is_content_name(digest):
        raise UsageError(f"{digest[:80]!r} is not a digest", hint="use sha256: and 64 hexadecimal digits")


def _digest_in(name: str) -> str:
    digest = name.removeprefix(_FOLDER).replace("-", ":", 1)
    return digest if is_content_name(digest) else ""


def _parse(data: bytes) -> ImageDocument:
    document = ImageDocument.parse(data)
    check_document(document)
    return document


def _identity(document: ImageDocument) -> str:
    return hashlib.sha256(" ".join(layer.file.identity for layer in document.layers).encode()).hexdigest()


IMAGES = Kind(
    noun="image",
    folder=_FOLDER,
    trash=_TRASH,
    tombstone_schema="bootseer.image-tombstone/1",
    max_bytes=MAX_DOCUMENT_BYTES,
    check_key=_check_digest,
    document_name=document_name,
    key_in=_digest_in,
    parse=_parse,
    key=lambda document: document.digest,
    identity=_identity,
)


def images_in(store: Store, say: Say = lambda line: None, signatures: Signatures = UNSIGNED) -> Catalog[ImageDocument]:
    return Catalog(IMAGES, store, say, signatures)


def read_document(store: Store, digest: str, signatures: Signatures = UNSIGNED) -> tuple[ImageDocument, bytes]:
    """The document of an image in a store, verified against the digest by `check_document`, and its stored bytes.
    Raises as `Catalog.read`."""
    return images_in(store, signatures=signatures).read(digest, _READ_S)


def remove(
    catalog: Catalog[ImageDocument], digest: str, now_s: float, *, mounted: Mapping[str, str], dry_run: bool = False
) -> str:
    """Remove an image from the catalog; `prune` deletes its objects later. Returns why it was not removed, if so.
    `mounted` maps digests of images that are mounted here to mount points."""
    if digest in mounted:
        return f"it is mounted at {mounted[digest]}"
    if catalog.look(digest).kind == "none":
        return f"{catalog.store.uri} does not have it"
    if not dry_run:
        catalog.remove(digest, now_s)
    return ""


def prune(
    catalog: Catalog[ImageDocument],
    now_s: float,
    *,
    grace_s: float = GRACE_S,
    mounted: Collection[str] = (),
    also_used: Callable[[], Iterable[str]] = tuple,
) -> Pruned:
    """Run `artifact.prune.prune`, then delete layer documents whose objects are gone. `mounted` are image digests.

    A converted image that is attached to its source image in a registry expires when the source image is deleted.
    """
    from bootseer.store.oci import OciStore  # mounts import this module, and not all need a registry

    store = catalog.store
    is_gone = store.has_lost_subject if isinstance(store, OciStore) else lambda name: False
    done = prune_artifacts(
        catalog,
        now_s,
        grace_s=grace_s,
        in_use=mounted,
        also_used=also_used,
        expired=lambda document: is_gone(document.name),
    )
    for stored in list(store.list(_LAYERS)) if done.deleted else ():
        if _is_gone(store, stored.name, done.deleted):
            done.try_step(stored.name, partial(store.delete, stored.name))
    return done


def _is_gone(store: Store, name: str, deleted: Collection[str]) -> bool:
    """Whether a layer document refers to an object that was deleted."""
    try:
        data = UNSIGNED.open(name, read_all(store, name, stored_limit(layer_document.MAX_BYTES)), store.uri)
        layer = layer_document.parse(data)
    except BootseerError:
        return False  # unreadable, or questions of an earlier version
    return any(stored.name in deleted for stored in layer.file.objects)


def delete_idle(cache_root: Path, cache: Cache, *, idle_s: float) -> None:
    """Delete what was converted on this node, except images that a start has used within `idle_s` seconds, or whose
    blocks a process has open in `cache`, and what interrupted conversions have stored since then. Nothing is deleted
    during a conversion. An image whose blocks are all in `cache` keeps its document, and can be started. Raises
    `PermanentError` if a document cannot be read; then no object is deleted.
    """
    folder = own_folder(converted_folder(cache_root), make=False)
    if not folder.is_dir():
        return
    with (
        suppress(TransientError),
        os_errors_as(PermanentError, folder),
        flocked(folder / CONVERTING, deadline_s=0.0) as lock,
        suppress(FileNotFoundError),  # another process deletes, too: the next time
    ):
        # Other machines' processes may not be seen.
        oldest_s = time.time() - max(idle_s, OTHERS_S if may_be_shared(lock) else _STARTING_S)
        entries = cache.entries()
        opened = {entry.identity for entry in entries if entry.in_use}
        complete = {entry.identity for entry in entries if entry.trusted}
        catalog, needed, deleted = images_in(FileStore(folder)), set[str](), set[str]()
        for digest in catalog.published_keys():
            found, path = catalog.look(digest), folder / document_name(digest)
            if found.kind == "unreachable":  # a failure of the disk: what the image needs is unknown
                raise PermanentError(found.why)
            layers = [layer.file for layer in found.document.layers] if found.document is not None else []
            identities = {layer.identity for layer in layers}
            if path.stat().st_mtime >= oldest_s or identities & opened:
                needed.update(stored.name for layer in layers for stored in layer.objects)
            elif layers and identities <= complete:
                needed.update(layer.index_name for layer in layers)
            else:  # also one that is invalid or of another version
                path.unlink()
        for path in (*folder.glob("sha256/*/*"), *folder.glob(".uploads/*")):
            if f"sha256:{path.name}" not in needed and path.stat().st_mtime < oldest_s:
                path.unlink()
                deleted.add(f"sha256:{path.name}")
        for stored in list(catalog.store.list(_LAYERS)) if deleted else ():
            if _is_gone(catalog.store, stored.name, deleted):
                catalog.store.delete(stored.name)
