"""Open the image that a reference names, of whatever kind its source is."""

from __future__ import annotations

import platform as machine

from bootseer.errors import UsageError
from bootseer.image.reference import Reference, SourceKind
from bootseer.image.sources.manifest import Platform
from bootseer.image.sources.source import ImageSource

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


def this_platform() -> Platform:
    """What this machine runs."""
    name = machine.machine()
    return Platform("linux", _MACHINES.get(name, name))


def open_source(reference: Reference, *, platform: Platform | None = None, plain_http: bool = False) -> ImageSource:
    """Look at an image. `platform` chooses from images for several ones, this machine's by default.

    Raises `UsageError` when there is nothing of that name, `PermanentError` for what cannot be converted,
    `CorruptError` for documents that are not what their digests say, and what a store raises.
    """
    wanted = platform or this_platform()
    if reference.kind is SourceKind.REGISTRY:
        from bootseer.image.sources.registry import open_registry_image

        return open_registry_image(reference, wanted, plain_http=plain_http)
    if reference.kind is SourceKind.LAYOUT:
        from bootseer.image.sources.local import open_layout

        return open_layout(reference, wanted)
    if reference.kind is SourceKind.ARCHIVE:
        from bootseer.image.sources.local import open_archive

        return open_archive(reference)
    if reference.kind is SourceKind.FOLDER:
        from bootseer.image.sources.folder import open_folder

        return open_folder(reference, wanted)
    raise UsageError(f"{reference} is an image that is converted already", hint="name its source")
