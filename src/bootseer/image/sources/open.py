"""Open an image by its reference: from a registry, an OCI layout, a docker archive or a folder."""

from __future__ import annotations

import platform as machine

from bootseer.errors import UsageError
from bootseer.image.reference import Reference, SourceKind
from bootseer.image.sources.manifest import Platform
from bootseer.image.sources.source import ImageSource

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


def this_platform() -> Platform:
    """The platform of this machine."""
    name = machine.machine()
    return Platform("linux", _MACHINES.get(name, name))


def open_source(
    reference: Reference, *, platform: Platform | None = None, plain_http: bool = False, mirrored: bool = True
) -> ImageSource:
    """Read an image's manifest and configuration. `platform` selects from a multi-platform image; default: this
    machine's.

    Raises `UsageError` for an image that does not exist, `PermanentError` for one that cannot be converted,
    `CorruptError` for a document that does not match its digest, and the store's errors.
    """
    wanted = platform or this_platform()
    if reference.kind is SourceKind.REGISTRY:
        from bootseer.image.sources.registry import open_registry_image

        return open_registry_image(reference, wanted, plain_http=plain_http, mirrored=mirrored)
    if reference.kind is SourceKind.LAYOUT:
        from bootseer.image.sources.local import open_layout

        return open_layout(reference, wanted)
    if reference.kind is SourceKind.ARCHIVE:
        from bootseer.image.sources.local import open_archive

        return open_archive(reference)
    if reference.kind is SourceKind.FOLDER:
        from bootseer.image.sources.folder import open_folder

        return open_folder(reference, wanted)
    raise UsageError(f"{reference} is already converted", hint="name its source image")
