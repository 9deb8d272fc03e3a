"""Which manifests are about another one: "there is a lazy form of this image, and this is it".

Registries of the distribution protocol 1.1 keep that list themselves. Older ones do not: there, clients keep it as an
image index under a tag made of the digest, which is part of the same protocol. Called by `oci` and `image`.

Such a registry has no "replace if unchanged", so that two writers at the same time may lose one's entry. Each reads
again what it wrote and repeats when its entry is gone; an entry that is lost all the same costs the later reader only
the discovery: objects are found by their names.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from bootseer.errors import NotFoundError, PermanentError, TransientError
from bootseer.store.registry import INDEX_TYPE, MAX_MANIFEST_BYTES, Registry, parse_object
from bootseer.store.retry import retrying
from bootseer.store.store import is_content_name

Descriptor = dict[str, Any]

_ATTEMPTS = 8
_DEADLINE_S = 60.0


def referrers(registry: Registry, digest: str, artifact_type: str = "", *, timeout_s: float = 60.0) -> list[Descriptor]:
    """Descriptors of the manifests about `digest`, of one artifact type or of all; each has a valid `digest`."""
    answer = registry.request("pull", "GET", f"referrers/{digest}", until=time.monotonic() + timeout_s)
    if answer.status == 404:
        answer.finish()
        found = _tagged(registry, digest, timeout_s)
    else:
        registry.expect(answer, f"referrers of {digest}", 200)
        found = _entries(answer.body(MAX_MANIFEST_BYTES), f"{registry}: referrers of {digest}")
    return [entry for entry in found if not artifact_type or entry.get("artifactType") == artifact_type]


def add_tagged(registry: Registry, subject: str, entry: Descriptor, replaces: Callable[[Descriptor], bool]) -> None:
    """Put an entry into the tagged list of `subject`, instead of those that it replaces."""

    def changed(entries: list[Descriptor]) -> list[Descriptor]:
        kept = [other for other in entries if other["digest"] == entry["digest"] or not replaces(other)]
        # An entry that is there stays where it is: writers that moved theirs to the end would never agree.
        return kept if any(other["digest"] == entry["digest"] for other in kept) else [*kept, entry]

    _change(registry, subject, changed)


def remove_tagged(registry: Registry, subject: str, digest: str) -> None:
    """Take the manifest `digest` out of the tagged list of `subject`."""
    _change(registry, subject, lambda entries: [entry for entry in entries if entry["digest"] != digest])


def _change(registry: Registry, subject: str, changed: Callable[[list[Descriptor]], list[Descriptor]]) -> None:
    def settle(left_s: float) -> None:
        before = _tagged(registry, subject, left_s)
        after = changed(before)
        if after == before:
            return
        try:
            _put(registry, subject, after, left_s)
        except PermanentError:
            # The registry refuses lists that name what it has removed since.
            _put(registry, subject, [entry for entry in after if _exists(registry, entry["digest"], left_s)], left_s)
        # Looked at again after a random pause, in which a slower writer may have put back what it had read before.
        raise TransientError(f"{registry}: others keep changing the referrers of {subject}; try again")

    retrying(settle, attempts=_ATTEMPTS, deadline_s=_DEADLINE_S)


def _tagged(registry: Registry, subject: str, timeout_s: float) -> list[Descriptor]:
    try:
        manifest = registry.manifest(subject.replace(":", "-"), timeout_s=timeout_s)
    except NotFoundError:
        return []
    return _entries(manifest.data, f"{registry}: referrers of {subject}")


def _put(registry: Registry, subject: str, entries: list[Descriptor], timeout_s: float) -> None:
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries}
    registry.put_manifest(subject.replace(":", "-"), json.dumps(index).encode(), INDEX_TYPE, timeout_s=timeout_s)


def _entries(data: bytes, what: str) -> list[Descriptor]:
    entries = parse_object(data, what).get("manifests")
    return [
        entry
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and is_content_name(str(entry.get("digest", "")))
    ]


def _exists(registry: Registry, digest: str, timeout_s: float) -> bool:
    try:
        registry.manifest_digest(digest, timeout_s=timeout_s)
    except NotFoundError:
        return False
    return True
