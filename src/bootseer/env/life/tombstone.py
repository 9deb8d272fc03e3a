"""What is left of a removed snapshot until its objects are deleted: a tombstone with their names and a time.

The document goes at once, so that nobody finds the snapshot any more; whoever found it before may read its objects for
some time yet. Kept as `environments/trash/<key>-<16 hex>`. Decides and touches nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from bootseer.env.document import MAX_BYTES, EnvironmentDocument, is_key
from bootseer.errors import CorruptError
from bootseer.store.store import Stored, is_content_name

SCHEMA = "bootseer.environment-tombstone/1"
TRASH = "environments/trash/"
_IDENTITY = re.compile(r"[0-9a-f]{64}")
_MAX_OBJECTS = 10_000
_MAX_SECONDS = 1e11


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A removed snapshot."""

    key: str
    digest: str
    """Of the snapshot's content: its hot sets are filed under it."""
    identity: str
    """Of its block file: what a node mounts."""
    removed_s: float
    """Seconds since 1970, by the clock of who removed it."""
    objects: tuple[Stored, ...]

    @classmethod
    def of(cls, document: EnvironmentDocument, now_s: float) -> Tombstone:
        """The tombstone of a document that is removed now."""
        return cls(document.key, document.digest, document.file.identity, now_s, document.objects)

    @property
    def name(self) -> str:
        """What it is called in a store: one name for one content, so that removing twice leaves one."""
        return f"{TRASH}{self.key}-{self.identity[:16]}"

    def encode(self) -> bytes:
        """JSON."""
        value = {
            "schema": SCHEMA,
            "key": self.key,
            "digest": self.digest,
            "identity": self.identity,
            "removed_s": self.removed_s,
            "objects": [[stored.name, stored.size_bytes] for stored in self.objects],
        }
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, data: bytes) -> Tombstone:
        """Read a tombstone. Raises `CorruptError`: what is written in it will be deleted."""
        try:
            value: Any = json.loads(data) if len(data) <= MAX_BYTES else None
            if value["schema"] != SCHEMA or not is_key(value["key"]) or not _IDENTITY.fullmatch(value["identity"]):
                raise ValueError("its names are not those of a snapshot")
            if len(value["objects"]) > _MAX_OBJECTS:
                raise ValueError("too many objects")
            if not 0 <= value["removed_s"] <= _MAX_SECONDS:
                raise ValueError("removed at no time")
            return cls(
                key=value["key"],
                digest=str(value["digest"]),
                identity=value["identity"],
                removed_s=float(value["removed_s"]),
                objects=tuple(_object(name, size) for name, size in value["objects"]),
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorruptError(f"not the tombstone of an environment: {error}") from error


def _object(name: Any, size: Any) -> Stored:
    # A path name would let a forged tombstone delete documents.
    if not isinstance(name, str) or not is_content_name(name) or type(size) is not int or size < 0:
        raise ValueError("an object is not named by its content")
    return Stored(name, size)
