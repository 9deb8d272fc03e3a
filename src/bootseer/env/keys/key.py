"""The request key: its components, its digest, its explanation, and the gate for snapshots that lie under it.

A key is the digest of named components, each a fact that the result of a setup may depend on. The components are stored
with the snapshot, so that a later miss can name the changed ones.

Does no I/O.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from bootseer.units import listed

SCHEMA = "bootseer.request-key/3"
"""First part of every digest, so that new rules give new keys. ADR 13 names what each version changed."""
FORMAT = 1
"""Version of the platform facts and of the snapshot format; a later one may use the same names with other meanings."""
_SHOWN = 72


class RequestKey(Struct, frozen=True):
    """What a setup requests. Equal digests may share a snapshot."""

    digest: str
    """64 hex digits."""
    components: Mapping[str, str]
    """Name to value or digest, in a fixed order. Never contains secrets."""
    details: Mapping[str, tuple[str, ...]]
    """Readable lines on the content of a component. Never contains secrets; not part of the key."""
    accounted: Mapping[str, str]
    """Files and folders whose content is part of the key, absolute and sorted, with the names of their components. A
    component of several files, and a repository, has no name here."""
    unpinned: tuple[str, ...]
    """Inputs without a fixed version, for which snapshots have an age limit."""
    problems: tuple[str, ...]
    """Reasons why no snapshot may be used for this setup, each with a remedy. Mostly empty."""
    platform: Mapping[str, Any]
    """Facts about this node; `gate` compares format and driver."""


class Difference(NamedTuple):
    """A changed component. `old` or `new` is empty if it did not exist."""

    name: str
    old: str
    new: str
    words: str


def digest_of(parts: Iterable[str | bytes]) -> str:
    """SHA-256 of the parts, each preceded by its length, as hex digits."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "big") + data)
    return found.hexdigest()


def key_digest(components: Mapping[str, str]) -> str:
    """The key's digest, independent of the order of the components."""
    return digest_of([SCHEMA, *(part for name in sorted(components) for part in (name, components[name]))])


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
        found.append(Difference(name, shortened(before), shortened(now), words))
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
    return "; ".join(f"{word} {listed(names, 5)}" for word, names in groups.items() if names)


def _changed(old: str, new: str) -> str:
    if old.startswith("sha256:") or new.startswith("sha256:"):
        return "its content changed"
    return f"{shortened(old)} -> {shortened(new)}"


def shortened(value: str) -> str:
    """A component's value for a message."""
    if value.startswith("sha256:"):
        digest, _, rest = value.partition(" ")
        return f"{digest[:19]} {rest}".rstrip()
    return value if len(value) <= _SHOWN else f"{value[: _SHOWN - 3]}..."


class Refusal(NamedTuple):
    """A refusal by the gate: its code, which is stable for reports, tests and alerts, and a message."""

    code: str
    """`format`, `driver`, or the first word of the component that differs: `architecture`, `libc`, `file`, ..."""
    message: str


def gate(components: Mapping[str, str], platform: Mapping[str, Any], key: RequestKey) -> Refusal | None:
    """The first reason why a snapshot with these components, built on `platform`, cannot be used for `key` here.

    Both come from a store: values of the platform may have any type. The components of an honest document are those of
    its key, as the key is their digest: they are compared in case the document was edited, or lies under another key.
    Of NVIDIA's driver only the branch is a component, as the last numbers differ between equal nodes; here the whole
    version counts.
    """
    found, own = platform.get("format"), key.platform.get("format", FORMAT)
    if found != own:
        return Refusal("format", f"the snapshot has format {_text_of(found)}, this BootSeer reads {own}")
    for changed in difference(components, key):
        name = _text_of(changed.name)
        return Refusal(name.partition(" ")[0], f"the snapshot has another key, {name}: {_text_of(changed.words)}")
    driver, own_driver = platform.get("driver"), key.platform.get("driver")
    if driver and not _numbers(own_driver) >= (_numbers(driver) or (9999,)):
        return Refusal("driver", f"built with NVIDIA's driver {_text_of(driver)}, here is {_text_of(own_driver)}")
    return None


def _numbers(version: Any) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d{1,9}", str(version))[:4])


def _text_of(value: Any) -> str:
    """A document's value for a message: short, on one line."""
    text = "none" if value in (None, "") else str(value)
    return "".join(letter if letter.isprintable() else "?" for letter in text[:160])
