"""Parse the names of images that users type.

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


class SourceKind(Enum):
    """Kinds of sources of images."""

    REGISTRY = "registry"
    LAYOUT = "oci"
    ARCHIVE = "docker-archive"
    FOLDER = "dir"
    CONVERTED = "digest"


@dataclass(frozen=True, slots=True)
class Reference:
    """The name of an image. Fields that its kind of source does not use are empty."""

    kind: SourceKind
    host: str = ""
    repository: str = ""
    tag: str = ""
    """Of a registry or a layout; the name inside a docker archive."""
    digest: str = ""
    path: str = ""

    def __str__(self) -> str:
        """The text that parses to the same reference."""
        if self.kind is SourceKind.CONVERTED:
            return self.digest
        tag = f":{self.tag}" if self.tag else ""
        if self.kind is SourceKind.REGISTRY:
            return f"{self.host}/{self.repository}{tag}" + (f"@{self.digest}" if self.digest else "")
        return f"{self.kind.value}:{self.path}{tag}"

    @property
    def version(self) -> str:
        """What to request from the registry: the digest if there is one, because tags move."""
        return self.digest or self.tag


def parse_reference(text: str) -> Reference:
    """Parse a reference. Raises `UsageError` for an invalid one."""
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
    """The URI of an image's store: the given one, else the image's own repository.

    None for images that do not come from a registry: they are converted on the node, if no store is named.
    """
    if not given and reference.kind is SourceKind.REGISTRY:
        return f"oci://{reference.host}/{reference.repository}"
    return given or None


def _of_any_place(text: str) -> Reference:
    if _DIGEST.fullmatch(text):
        return Reference(SourceKind.CONVERTED, digest=text)
    if text.endswith((".sqsh", ".squashfs")):
        raise UsageError(
            f"{shown(text)!r} is a squashfs, which has no layers",
            hint="name the image that it was made of: host#repository:tag",
        )
    if text.startswith(("/", "./", "../")) or text in {".", ".."}:
        return Reference(SourceKind.FOLDER, path=text)
    kind, colon, rest = text.partition(":")
    if colon and kind == SourceKind.FOLDER.value:
        return Reference(SourceKind.FOLDER, path=_path(rest, text))
    if colon and kind == SourceKind.LAYOUT.value:
        path, tag = _split_tag(rest)
        return Reference(SourceKind.LAYOUT, path=_path(path, text), tag=tag)
    if colon and kind == SourceKind.ARCHIVE.value:
        # A name inside an archive has a tag of its own; the file's name ends at the first colon.
        path, _, name = rest.partition(":")
        return Reference(SourceKind.ARCHIVE, path=_path(path, text), tag=name)
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
    return Reference(SourceKind.REGISTRY, host, repository, tag, digest)


def _split_tag(text: str) -> tuple[str, str]:
    """A folder and the tag behind its last colon, if what stands there can be one."""
    path, colon, tag = text.rpartition(":")
    return (path, tag) if colon and path and _TAG.fullmatch(tag) else (text, "")


def _path(path: str, text: str) -> str:
    if not path:
        raise UsageError(f"{shown(text)!r} names no file or folder", hint=_FORMS)
    return path
