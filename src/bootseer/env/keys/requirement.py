"""One requirement, as pip and uv take it on the command line or on a line of a file: what it names, and whether that is
one certain thing.

Says nothing about versions that exist. Decides and touches nothing; called by `requirements` and `script`.
"""

from __future__ import annotations

import posixpath
import re
from typing import Literal, NamedTuple

from bootseer.store.addresses import without_credentials

Kind = Literal["name", "path", "vcs", "url"]

_VCS = re.compile(r"(git|hg|svn|bzr)\+", re.IGNORECASE)
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*@\s*(\S.*)", re.DOTALL)
_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*(.*)", re.DOTALL)
_EXACT = re.compile(r"\(?\s*={2,3}\s*(?!.*\*)[^\s,;()]+\s*\)?")
_ARCHIVE = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tbz", ".tar.xz", ".txz", ".tar")
_HASH_IN_URL = re.compile(r"[#&](?:sha256|sha384|sha512)=[0-9a-fA-F]{64,128}(?:&|$)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_SHOWN = 100


class Requirement(NamedTuple):
    """What one requirement names."""

    kind: Kind
    name: str
    """Normalised name of the distribution; empty when only the place is known."""
    target: str
    """Of a `path` as written, `file:` taken off; of `vcs` and `url` the address without credentials; of a `name` the
    specifier."""
    reference: str = ""
    """`vcs`: branch, tag or commit; empty for the default branch."""
    editable: bool = False
    hashed: bool = False
    """With `--hash`, or an address that ends in a digest."""

    @property
    def pinned(self) -> bool:
        """Whether it is one certain thing by itself; a branch is none, what a path holds is for others to look at."""
        if self.kind == "name":
            return self.hashed or bool(_EXACT.fullmatch(self.target))
        if self.kind == "vcs":
            return bool(_COMMIT.fullmatch(self.reference))
        return self.kind == "path" or self.hashed

    @property
    def words(self) -> str:
        """How to call it in one short line."""
        text = f"{self.name}{self.target}" if self.kind == "name" else (self.name or self.target)
        return " ".join(text.split())[:_MAX_SHOWN]


def normalised(name: str) -> str:
    """The name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(text: str, *, editable: bool = False, hashed: bool = False) -> Requirement | None:
    """Read one requirement, without options; None for what is none."""
    text = text.strip().strip("'\"")
    if not text:
        return None
    named = _NAMED.fullmatch(text)
    if named and not _VCS.match(text) and "://" not in text.partition("@")[0]:
        name, place = normalised(named[1]), named[2]
        return _at(place, name, editable, hashed)
    if "://" in text or text.startswith("file:") or _looks_like_path(text):
        return _at(text, "", editable, hashed)
    found = _NAME.fullmatch(_without_marker(text))
    if found is None:
        return None
    if editable:
        return Requirement("path", "", text, editable=True)
    return Requirement("name", normalised(found[1]), found[2].strip(), hashed=hashed)


def _at(place: str, name: str, editable: bool, hashed: bool) -> Requirement:
    # A marker behind an address needs a blank before it; before a blank nothing of the address can stand.
    place = re.split(r"\s;|\s", place.strip(), maxsplit=1)[0]
    if _VCS.match(place):
        address, reference = _revision(place.partition("#")[0])
        return Requirement("vcs", name or _egg(place), without_credentials(address), reference, editable, hashed)
    if place.startswith("file:"):
        path = _decoded(re.sub(r"^file:(//(localhost)?(?=/))?", "", place.partition("#")[0]))
        return Requirement("path", name, path, "", editable, hashed)
    if "://" in place:
        hashed = hashed or bool(_HASH_IN_URL.search(place))
        return Requirement("url", name or _egg(place), without_credentials(place), "", editable, hashed)
    path = re.sub(r"\[[^\]/]*\]$", "", place.partition(";")[0].partition("#")[0])
    return Requirement("path", name, path, "", editable, hashed)


def _revision(address: str) -> tuple[str, str]:
    """Address and what stands behind the last `@` of its path."""
    scheme, _, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    path, at, reference = path.rpartition("@")
    return (f"{scheme}://{host}{slash}{path}", reference) if at else (address, "")


def _decoded(path: str) -> str:
    """The path of an address, `%20` and the like as the bytes they stand for."""
    data = re.sub(
        rb"%([0-9A-Fa-f]{2})", lambda found: bytes.fromhex(found[1].decode()), path.encode("utf-8", "replace")
    )
    return data.decode("utf-8", "surrogateescape")


def _egg(address: str) -> str:
    found = re.search(r"[#&]egg=([A-Za-z0-9._-]+)", address)
    return normalised(found[1]) if found else ""


def _looks_like_path(text: str) -> bool:
    word = text.partition(";")[0].strip()
    return word.startswith((".", "/", "~")) or posixpath.sep in word.partition("[")[0] or word.endswith(_ARCHIVE)


def _without_marker(text: str) -> str:
    return text.partition(";")[0].strip()
