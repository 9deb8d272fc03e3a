"""The request key: its components, its digest, and its explanation.

A key is the digest of named components, each a fact that the result of a setup may depend on. The components are stored
with the snapshot, so that a later miss can name the changed ones.

Does no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

SCHEMA = "bootseer.request-key/2"
"""First part of every digest, so that new rules give new keys. Version 1 hashed requirement files as bytes."""
_SHOWN = 72
_MAX_NAMED = 5


class RequestKey(Struct, frozen=True):
    """What a setup requests. Equal digests may share a snapshot."""

    digest: str
    """64 hex digits."""
    components: Mapping[str, str]
    """Name to value or digest, in a fixed order. Never contains secrets."""
    details: Mapping[str, tuple[str, ...]]
    """Readable lines on the content of a component. Never contains secrets; not part of the key."""
    accounted: tuple[str, ...]
    """Files and folders whose content is part of the key, absolute and sorted."""
    unpinned: tuple[str, ...]
    """Inputs without a fixed version, for which snapshots have an age limit."""
    problems: tuple[str, ...]
    """Reasons why no snapshot may be used for this setup, each with a remedy. Mostly empty."""
    platform: Mapping[str, Any]
    """Facts about this node; `gate.check` compares format and driver."""


class Row(NamedTuple):
    """A component as `env key` prints it."""

    name: str
    value: str
    lines: tuple[str, ...]


class Difference(NamedTuple):
    """A changed component. `old` or `new` is empty if it did not exist."""

    name: str
    old: str
    new: str
    words: str


def framed(parts: Iterable[str | bytes]) -> bytes:
    """The parts as unambiguous bytes: each is preceded by its length."""
    encoded = (part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part for part in parts)
    return b"".join([len(data).to_bytes(8, "big") + data for data in encoded])


def digest_of(parts: Iterable[str | bytes]) -> str:
    """SHA-256 of the framed parts as hex digits."""
    return hashlib.sha256(framed(parts)).hexdigest()


def key_digest(components: Mapping[str, str]) -> str:
    """The key's digest, independent of the order of the components."""
    return digest_of([SCHEMA, *(part for name in sorted(components) for part in (name, components[name]))])


def explain(key: RequestKey) -> list[Row]:
    """All components, in order, with their details."""
    return [Row(name, _short(value), tuple(key.details.get(name, ()))) for name, value in key.components.items()]


def difference(
    old: Mapping[str, str], key: RequestKey, old_details: Mapping[str, Sequence[str]] | None = None
) -> list[Difference]:
    """Components that differ from those of an old key, sorted by name.

    With the old key's details, changed entries of a component are named as well.
    """
    found = []
    for name in dict.fromkeys((*key.components, *old)):
        before, now = old.get(name, ""), key.components.get(name, "")
        if name in old and name in key.components and before == now:
            continue
        if name not in old:
            words = "was not in the key"
        elif name not in key.components:
            words = "is not in the key any more"
        else:
            words = _inside((old_details or {}).get(name, ()), key.details.get(name, ())) or _changed(before, now)
        found.append(Difference(name, _short(before), _short(now), words))
    return found


def _inside(old: Sequence[str], new: Sequence[str]) -> str:
    """Added, removed and changed lines. The first word of a line identifies its entry."""
    if not old or not new:
        return ""
    before, now = ({line.partition(" ")[0]: line for line in lines} for lines in (old, new))
    groups = {
        "added": [name for name in now if name not in before],
        "removed": [name for name in before if name not in now],
        "changed": [name for name in now if name in before and now[name] != before[name]],
    }
    return "; ".join(f"{word} {_named(names)}" for word, names in groups.items() if names)


def _named(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _changed(old: str, new: str) -> str:
    if old.endswith(" bytes") and new.endswith(" lines"):
        return "its lines count since this version, before it was its bytes"
    if old.startswith("sha256:") or new.startswith("sha256:"):
        return "its content changed"
    return f"{_short(old)} -> {_short(new)}"


def _short(value: str) -> str:
    if value.startswith("sha256:"):
        digest, _, rest = value.partition(" ")
        return f"{digest[:19]} {rest}".rstrip()
    return value if len(value) <= _SHOWN else f"{value[: _SHOWN - 3]}..."
