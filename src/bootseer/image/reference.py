"""What a user types to name an image, taken apart.

| text | meaning |
|---|---|
| `[docker://]host[:port]/repository[:tag][@sha256:…]` | in a registry; the tag is `latest` when nothing is said |
| `host#repository[:tag]` | the same, as enroot and pyxis write it |
| `oci:FOLDER[:TAG]` | an OCI layout |
| `docker-archive:FILE[:NAME]` | what `docker save` writes |
| `dir:FOLDER`, or a path that begins with `/`, `./`, `../` | a root file system |
| `sha256:…` | an image that is already converted, by the digest of its manifest |

There is no default registry: a name without a host is an error, not a guess. Decides and touches nothing: whether any
of it exists is for `source` to find out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from bootseer.errors import UsageError
from bootseer.store.addresses import shown

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?)(:\d{1,5})?")
_REPOSITORY = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_MAX = 4096
_FORMS = "use host/repository:tag, oci:FOLDER, docker-archive:FILE or dir:FOLDER"


class Place(Enum):
    """Kinds of places where an image can lie."""

    REGISTRY = "registry"
    LAYOUT = "oci"
    ARCHIVE = "docker-archive"
    FOLDER = "dir"
    CONVERTED = "digest"


@dataclass(frozen=True, slots=True)
class Reference:
    """A name of an image. Fields that its place does not use are empty."""

    place: Place
    host: str = ""
    repository: str = ""
    tag: str = ""
    """Of a registry or a layout; the name inside a docker archive."""
    digest: str = ""
    path: str = ""

    def __str__(self) -> str:
        """The text that means the same."""
        if self.place is Place.CONVERTED:
            return self.digest
        tag = f":{self.tag}" if self.tag else ""
        if self.place is Place.REGISTRY:
            return f"{self.host}/{self.repository}{tag}" + (f"@{self.digest}" if self.digest else "")
        return f"{self.place.value}:{self.path}{tag}"

    @property
    def version(self) -> str:
        """What a registry is asked for: the digest where there is one, as tags move."""
        return self.digest or self.tag


def parse_reference(text: str) -> Reference:
    """Take a reference apart. Raises `UsageError` for anything that is not one."""
    in_registry = text.startswith("docker://")  # as skopeo and podman call it
    text = text.removeprefix("docker://")
    is_url = re.match(r"[A-Za-z-]+://[^/]", text) is not None  # may hold a login, and is not a path
    if (
        is_url
        or not text
        or len(text) > _MAX
        or "\0" in text
        or any(letter.isspace() and letter != " " for letter in text)
    ):
        scheme = re.match(r"https?://", text, re.IGNORECASE)
        hint = f"leave out {scheme[0]}; {_FORMS}" if scheme else _FORMS
        if text.startswith(("dockerd://", "podman://")):  # as enroot calls what such a program has on this machine
            hint = "push it into a registry, or write it into a file (docker save) for docker-archive:FILE"
        raise UsageError(f"{shown(text)[:80]!r} is not the name of an image", hint=hint)
    return _in_registry(text) if in_registry else _of_any_place(text)


def store_uri(reference: Reference, given: str | None) -> str | None:
    """The store of an image: what the user says, else the image's own repository.

    None for images that do not come from a registry: they are converted on the node, if no store is named.
    """
    if not given and reference.place is Place.REGISTRY:
        return f"oci://{reference.host}/{reference.repository}"
    return given or None


def _of_any_place(text: str) -> Reference:
    if _DIGEST.fullmatch(text):
        return Reference(Place.CONVERTED, digest=text)
    if text.endswith((".sqsh", ".squashfs")):
        raise UsageError(
            f"{shown(text)!r} is a squashfs, which has no layers",
            hint="name the image that it was made of: host#repository:tag",
        )
    if text.startswith(("/", "./", "../")) or text in {".", ".."}:
        return Reference(Place.FOLDER, path=text)
    kind, colon, rest = text.partition(":")
    if colon and kind == Place.FOLDER.value:
        return Reference(Place.FOLDER, path=_path(rest, text))
    if colon and kind == Place.LAYOUT.value:
        path, tag = _split_tag(rest)
        return Reference(Place.LAYOUT, path=_path(path, text), tag=tag)
    if colon and kind == Place.ARCHIVE.value:
        # A name inside an archive has a tag of its own; the file's name ends at the first colon.
        path, _, name = rest.partition(":")
        return Reference(Place.ARCHIVE, path=_path(path, text), tag=name)
    return _in_registry(text)


def _in_registry(text: str) -> Reference:
    name, at, digest = text.replace("#", "/", 1).partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise UsageError(
            f"{shown(text)!r}: the text after @ is not a digest", hint="use sha256: and 64 hexadecimal digits"
        )
    host, slash, path = name.partition("/")
    named = "." in host or ":" in host or host == "localhost"
    if not slash or not named or not _HOST.fullmatch(host):
        known = _REPOSITORY.match(name) and not at  # what stands in front of an @ may be a password
        hint = f"there is no default one: registry.example:5000/{name}; or " if known else ""
        raise UsageError(f"{shown(text)!r} names no registry", hint=hint + _FORMS)
    repository, colon, tag = path.partition(":")
    if not _REPOSITORY.fullmatch(repository) or len(repository) > 255:
        raise UsageError(
            f"{shown(text)!r}: {repository!r} is not a repository", hint="use lower case, digits, . _ - and /"
        )
    if colon and not _TAG.fullmatch(tag):
        raise UsageError(f"{shown(text)!r}: {tag!r} is not a tag", hint="use letters, digits, . _ and -")
    if not colon and not digest:
        tag = "latest"
    return Reference(Place.REGISTRY, host, repository, tag, digest)


def _split_tag(text: str) -> tuple[str, str]:
    """A folder and the tag behind its last colon, if what stands there can be one."""
    path, colon, tag = text.rpartition(":")
    return (path, tag) if colon and path and _TAG.fullmatch(tag) else (text, "")


def _path(path: str, text: str) -> str:
    if not path:
        raise UsageError(f"{shown(text)!r} names no file or folder", hint=_FORMS)
    return path
