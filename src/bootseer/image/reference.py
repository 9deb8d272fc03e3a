"""Parse image references.

| text | meaning |
|---|---|
| `[docker://]host[:port]/repository[:tag][@sha256:…]` | an image in a registry; the default tag is `latest` |
| `host#repository[:tag]` | the same, in the syntax of enroot and pyxis |
| `oci:FOLDER[:TAG]` | an OCI layout |
| `docker-archive:FILE[:NAME]` | a file that `docker save` wrote |
| `dir:FOLDER`, or a path that begins with `/`, `./`, `../` | a root file system |
| `sha256:…` | a converted image, by the digest of its manifest |

There is no default registry: a name without a host is an error. No I/O: `sources` finds out whether the image exists.
"""

from __future__ import annotations

import re
from enum import Enum

from msgspec import Struct

from bootseer.errors import UsageError
from bootseer.store.addresses import HOST, REPOSITORY, TAG, shown
from bootseer.store.store import is_content_name

_MAX = 4096
_FORMS = "use host/repository:tag, oci:FOLDER, docker-archive:FILE or dir:FOLDER"


class SourceKind(Enum):
    """The kinds of image sources."""

    REGISTRY = "registry"
    LAYOUT = "oci"
    ARCHIVE = "docker-archive"
    FOLDER = "dir"
    CONVERTED = "digest"


class Reference(Struct, frozen=True):
    """A parsed image reference. Fields that its kind does not use are empty."""

    kind: SourceKind
    host: str = ""
    repository: str = ""
    tag: str = ""
    """The tag in a registry or a layout, or the image's name in a docker archive."""
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
        """What to request from the registry: the digest if given, because tags move; else the tag."""
        return self.digest or self.tag


def parse_reference(text: str) -> Reference:
    """Parse a reference. Raises `UsageError` for an invalid one."""
    in_registry = text.startswith("docker://")  # the syntax of skopeo and podman
    text = text.removeprefix("docker://")
    is_url = re.match(r"[A-Za-z-]+://[^/]", text) is not None  # no reference, and may contain a password
    if (
        is_url
        or not text
        or len(text) > _MAX
        or "\0" in text
        or any(letter.isspace() and letter != " " for letter in text)
    ):
        scheme = re.match(r"https?://", text, re.IGNORECASE)
        hint = f"leave out {scheme[0]}; {_FORMS}" if scheme else _FORMS
        raise UsageError(f"{shown(text)[:80]!r} is not the name of an image", hint=hint)
    return _in_registry(text) if in_registry else _parse_any(text)


def store_uri(reference: Reference, given: str | None) -> str | None:
    """The URI of an image's store: the given one, else the image's own repository.

    None without a given store for an image that is not in a registry: it is converted on the node.
    """
    if not given and reference.kind is SourceKind.REGISTRY:
        return f"oci://{reference.host}/{reference.repository}"
    return given or None


def _parse_any(text: str) -> Reference:
    if is_content_name(text):
        return Reference(SourceKind.CONVERTED, digest=text)
    if text.startswith(("/", "./", "../")) or text in {".", ".."}:
        return Reference(SourceKind.FOLDER, path=text)
    kind, colon, rest = text.partition(":")
    if colon and kind == SourceKind.FOLDER.value:
        return Reference(SourceKind.FOLDER, path=_path(rest, text))
    if colon and kind == SourceKind.LAYOUT.value:
        # The text after the last colon, if it is a valid tag.
        path, _, tag = rest.rpartition(":")
        path, tag = (path, tag) if path and TAG.fullmatch(tag) else (rest, "")
        return Reference(SourceKind.LAYOUT, path=_path(path, text), tag=tag)
    if colon and kind == SourceKind.ARCHIVE.value:
        # An image's name in an archive may contain a colon, so the file's name ends at the first one.
        path, _, name = rest.partition(":")
        return Reference(SourceKind.ARCHIVE, path=_path(path, text), tag=name)
    return _in_registry(text)


def _in_registry(text: str) -> Reference:
    name, at, digest = text.replace("#", "/", 1).partition("@")
    if (at and not is_content_name(digest)) or (text.startswith("sha256:") and "/" not in text):
        where = "the text after @ is" if at else "it is"
        raise UsageError(f"{shown(text)!r}: {where} not a digest", hint="use sha256: and 64 hexadecimal digits")
    host, slash, path = name.partition("/")
    named = "." in host or ":" in host or host == "localhost"
    if not slash or not named or not HOST.fullmatch(host):
        printable = REPOSITORY.fullmatch(name.partition(":")[0]) and not at  # text before an @ may be a password
        hint = f"there is no default registry: use registry.example:5000/{name}; or " if printable else ""
        raise UsageError(f"{shown(text)!r} names no registry", hint=hint + _FORMS)
    repository, colon, tag = path.partition(":")
    if not REPOSITORY.fullmatch(repository) or len(repository) > 255:
        raise UsageError(
            f"{shown(text)!r}: {repository!r} is not a repository", hint="use lower case, digits, . _ - and /"
        )
    if colon and not TAG.fullmatch(tag):
        raise UsageError(f"{shown(text)!r}: {tag!r} is not a tag", hint="use letters, digits, . _ and -")
    if not colon and not digest:
        tag = "latest"
    if host == "docker.io" and "/" not in repository:
        repository = f"library/{repository}"
    return Reference(SourceKind.REGISTRY, host, repository, tag, digest)


def _path(path: str, text: str) -> str:
    if not path:
        raise UsageError(f"{shown(text)!r} names no file or folder", hint=_FORMS)
    return path
