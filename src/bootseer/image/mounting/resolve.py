"""Resolve an image reference: the image's document, the indexes of its layers and the store that has its blocks.

An image that is not converted yet is pulled and converted on this node, into a store in the node's cache. If signatures
are required, this is done only for an image that is named by its digest, because the digest then verifies all that is
pulled.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path

from bootseer.artifact.cache_space import CacheSpace
from bootseer.artifact.catalog import Catalog
from bootseer.artifact.materialize import Subject
from bootseer.artifact.owned_folder import one_at_a_time
from bootseer.artifact.places import blocks_folder, converted_folder, own_folder
from bootseer.artifact.progress import Say, Show, Stage, no_progress, shown_while
from bootseer.blocks.index import Index
from bootseer.cache.cache import Cache
from bootseer.errors import BootseerError, NotFoundError, SignatureError, TransientError, UsageError
from bootseer.image.catalog import CONVERTING, delete_idle, read_document
from bootseer.image.document import ImageDocument
from bootseer.image.mounting.metadata import Metadata
from bootseer.image.mounting.request import Request
from bootseer.image.reference import SourceKind
from bootseer.image.sources.source import ImageSource, open_source
from bootseer.io.locks import flocked
from bootseer.io.retry import retrying
from bootseer.store.file import FileStore
from bootseer.store.open import open_registry, open_store
from bootseer.store.store import Store

_ASK_S = 20.0
"""How long a registry may take to resolve a tag before the digest of the last start is used."""
_DELETION_S = 60.0


class ResolvedImage(Subject, frozen=True, kw_only=True):
    """A converted image, ready to be mounted."""

    document: ImageDocument
    indexes: Sequence[Index]
    """Indexes of its layers, bottom first, each once."""
    is_cached: bool
    """Whether the document was on this node; see `LazyMount.is_outdated`."""


def resolve_image(
    request: Request,
    *,
    stage: Stage = lambda name: nullcontext({}),
    say: Say,
    show: Show = no_progress,
    missing: str = "",
    in_child: bool = False,
) -> ResolvedImage:
    """Find the converted image, or convert it on this node. Raises `UsageError` if it is missing or `fallback` forbids
    a conversion, `SignatureError` if a required signature is missing, and the errors of the source and the store.
    `missing`, `in_child`: see `LazyMount`."""
    metadata = Metadata(request.cache, say)
    local_uri = str(own_folder(converted_folder(request.cache), make=False))
    reason = missing
    with stage("resolve"), shown_while(show, f"waiting for {request.store or request.reference}"):
        asked = None if missing else request.store
        store = None if asked is None else open_store(asked, plain_http=request.plain_http, mirrored=True)
        try:
            document, uri = _document(request, metadata, local_uri, store)
        except SignatureError as error:
            document, uri, reason = None, "", str(error)
        except BaseException:
            if store is not None:
                store.close()
            raise
    if store is not None and uri != request.store:
        store.close()
        store = None
    if document is None:
        _check_may_pull(request, reason or f"{request.reference} is not converted, so it has no signature")
        reason = reason or f"{request.reference} is not converted"
        if in_child:
            raise NotFoundError(reason)
        if request.fallback != "convert":
            how = f"{request.reference} {request.store or 'DST'}{' --plain-http' if request.plain_http else ''}"
            named = (
                ", then name it by the digest that this prints" if request.reference.kind is SourceKind.FOLDER else ""
            )
            raise UsageError(reason, hint=f"bootseer image convert {how}{named}")
        with stage("fallback") as facts:
            facts["reason"] = reason
            say(f"{reason}; it is pulled and converted on this node")
            document, uri = _convert_here(request, local_uri, say, show), local_uri
    if store is None:
        store = open_store(uri, plain_http=request.plain_http, mirrored=True)
    with stage("index"), shown_while(show, f"waiting for the indexes of {request.reference}"):
        indexes = {index.identity: index for index in metadata.indexes(document, store)}
    # A layer that occurs twice in the stack is mounted once, at its upper position.
    order = list(dict.fromkeys(reversed([layer.file.identity for layer in document.layers])))
    is_shared = uri != local_uri
    return ResolvedImage(
        name=str(request.reference),
        digest=document.digest,
        store=store,
        store_uri=uri,
        is_shared=is_shared,
        fallback=reason,
        document=document,
        indexes=[indexes[identity] for identity in reversed(order)],
        is_cached=metadata.is_cached or not is_shared,
    )


def converted_digest(catalog: Catalog[ImageDocument], request: Request, say: Say) -> str:
    """The digest of an image that is converted in `catalog` or on this node. Raises `UsageError` if it is not."""
    digest = request.reference.digest
    if digest and catalog.look(digest).kind != "none":
        return digest
    metadata = Metadata(request.cache, say)
    local_uri = str(own_folder(converted_folder(request.cache), make=False))
    document, _ = _document(request, metadata, local_uri, catalog.store)
    if document is None:
        raise UsageError(f"{request.reference} is not converted", hint="name it by its digest: sha256:...", exit_code=1)
    return document.digest


def _document(
    request: Request, metadata: Metadata, local_uri: str, store: Store | None
) -> tuple[ImageDocument | None, str]:
    """The document and the URI of its store; None and an empty URI if the image is not converted. `store` is
    `request.store`, opened."""
    reference = request.reference
    if reference.kind is SourceKind.FOLDER:  # its digest is known only after it is converted
        return None, ""
    if reference.kind is not SourceKind.REGISTRY:
        found = _find_converted(request, metadata, local_uri, reference.digest or _source_digest(request), store)
    else:
        named = metadata.digest_of(reference, lambda: _ask_registry(request, store))
        digest = metadata.platform_image(named, request.platform) or named
        found = _find_converted(request, metadata, local_uri, digest, store)
        if found is None and digest == named:
            # The digest may be an index's, and this platform's image has another one.
            digest = _source_digest(request)
            if digest != named:
                metadata.remember_platform_image(named, request.platform, digest)
                found = _find_converted(request, metadata, local_uri, digest, store)
    if found is None and reference.kind is SourceKind.CONVERTED:
        raise UsageError(f"{reference}: not found", hint="name the source image, or the store with --store")
    return found or (None, "")


def _check_may_pull(request: Request, reason: str) -> None:
    """Raise `SignatureError` if signatures are required and no digest verifies the source's data."""
    reference = request.reference
    if request.signatures.trusted and not (reference.kind is SourceKind.REGISTRY and reference.digest):
        raise SignatureError(
            f"{reason}; signatures are required: sign it with bootseer image convert --sign KEY, or name it by its "
            "digest in a registry (NAME@sha256:...), to pull and convert it here"
        )


def _ask_registry(request: Request, store: Store | None) -> str:
    """The name's current digest in the registry."""
    from bootseer.store.oci import OciStore  # not all starts need a registry

    reference = request.reference
    with contextlib.ExitStack() as opened:
        if isinstance(store, OciStore) and str(store.registry) == f"{reference.host}/{reference.repository}":
            registry = store.registry  # with one connection, and one login
        else:
            other = open_registry(reference.host, reference.repository, plain_http=request.plain_http, mirrored=True)
            registry = opened.enter_context(closing(other))
        try:
            return retrying(
                lambda left_s: registry.manifest_digest(reference.version, timeout_s=left_s), deadline_s=_ASK_S
            )
        except NotFoundError as error:
            raise NotFoundError(f"no such tag or repository: {reference}") from error


def _find_converted(
    request: Request, metadata: Metadata, local_uri: str, digest: str, store: Store | None
) -> tuple[ImageDocument, str] | None:
    """The document and its store's URI: from this node's own conversions, else from the image's store."""
    with contextlib.suppress(BootseerError):  # an unreadable conversion is repeated
        # Documents converted here are unsigned. They are trusted for a digest that the user named, because the
        # conversion verified it; for a tag only if no signature is required.
        if Path(local_uri).is_dir() and (request.reference.digest or not request.signatures.trusted):
            document, _ = read_document(FileStore(Path(local_uri)), digest)
            with contextlib.suppress(OSError):
                os.utime(Path(local_uri, document.name))  # its last use: see `delete_idle`
            return document, local_uri
    if store is None or request.store is None:
        return None
    with contextlib.suppress(NotFoundError):
        return metadata.document(digest, store, request.signatures), request.store
    return None


def _convert_here(request: Request, local_uri: str, say: Say, show: Show) -> ImageDocument:
    from bootseer.image.conversion.convert import convert  # few starts need it
    from bootseer.image.conversion.layer import ConvertOptions, LayerLimits

    folder = own_folder(local_uri)
    lock = folder / f".{zlib.crc32(str(request.reference).encode()):08x}.lock"
    with contextlib.ExitStack() as opened:
        if request.reference.kind is not SourceKind.FOLDER:
            with contextlib.suppress(OSError, TransientError):  # of starts at once one converts, for the others to find
                opened.enter_context(one_at_a_time(lock, f"been converting {request.reference}", say))
        with contextlib.suppress(OSError, BootseerError):
            space = CacheSpace(Cache(blocks_folder(request.cache)), say)
            delete_idle(request.cache, space.cache, idle_s=space.idle_s)
        with contextlib.suppress(OSError, TransientError):
            opened.enter_context(flocked(folder / CONVERTING, deadline_s=_DELETION_S, shared=True))
        on_progress = opened.enter_context(show(f"converting {request.reference}", "bytes"))
        source = opened.enter_context(closing(_open_source(request)))
        store = opened.enter_context(closing(open_store(local_uri)))
        options = ConvertOptions(limits=LayerLimits(**request.layer_limits))
        return convert(source, store, progress=on_progress, options=options)


def _source_digest(request: Request) -> str:
    """The digest of the image, where the reference names an index that of the platform's image. Costs requests."""
    with closing(_open_source(request)) as source:
        return source.digest


def _open_source(request: Request) -> ImageSource:
    return open_source(request.reference, platform=request.platform, plain_http=request.plain_http)
