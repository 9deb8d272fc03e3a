"""What tells kinds of artifacts apart (environments, images), what a look found, and what is left of a removed one.

A removed artifact leaves a tombstone until its objects are deleted, with their names and a time. The document goes at
once, so that no start finds the artifact any more; a start that found it before may read its objects for some time yet.
Decides and touches nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Generic, Literal, Protocol, TypeVar

from msgspec import Meta

from bootseer.artifact.document import decode, encode
from bootseer.errors import CorruptError
from bootseer.store.store import Stored, is_content_name

MAX_OBJECTS = 100_000


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A removed artifact."""

    key: str
    digest: str
    """Of its content: its hot sets are filed under it."""
    identity: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    """Tells the contents of one key apart; of an environment that of its block file, which nodes mount."""
    removed_s: Annotated[float, Meta(ge=0, le=1e11)]
    """Seconds since 1970, by the clock of the node that removed it."""
    objects: Annotated[tuple[Stored, ...], Meta(max_length=MAX_OBJECTS)]

    def __post_init__(self) -> None:
        # A path name would let a forged tombstone delete documents.
        if not all(is_content_name(stored.name) and stored.size_bytes >= 0 for stored in self.objects):
            raise ValueError("an object is not named by its content")

    @property
    def name(self) -> str:
        """Its name in the trash: one for one content, so that removing twice leaves one."""
        return f"{self.key.replace(':', '-')}-{self.identity[:16]}"

    def encode(self, schema: str) -> bytes:
        """JSON."""
        return encode(self, schema)

    @classmethod
    def parse(cls, data: bytes, schema: str, limit: int) -> Tombstone:
        """Read a tombstone. Raises `CorruptError`: what is written in it will be deleted."""
        return decode(data, cls, "tombstone", limit=limit, schema=schema, other_version=CorruptError)


class Document(Protocol):
    """What a catalog needs of a document."""

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def objects(self) -> tuple[Stored, ...]: ...
    def encode(self) -> bytes: ...


D = TypeVar("D", bound=Document)


@dataclass(frozen=True)
class Kind(Generic[D]):
    """What tells environments and images apart."""

    noun: str
    """For people: `environment`."""
    folder: str
    """Where a store keeps the documents: `environments/`."""
    trash: str
    """Where it keeps tombstones."""
    tombstone_schema: str
    max_bytes: int
    """Of a document."""
    check_key: Callable[[str], None]
    """Raises `UsageError` for what is not a key."""
    document_name: Callable[[str], str]
    """Where a store keeps the document of a key."""
    key_in: Callable[[str], str]
    """The key of a document's name; empty for every other name."""
    parse: Callable[[bytes], D]
    key: Callable[[D], str]
    identity: Callable[[D], str]
    """See `Tombstone.identity`."""

    def tombstone(self, document: D, now_s: float) -> Tombstone:
        """The tombstone of a document that is removed now."""
        return Tombstone(self.key(document), document.digest, self.identity(document), now_s, document.objects)

    def short(self, key: str) -> str:
        """A key for people."""
        return key.removeprefix("sha256:")[:12]


@dataclass(frozen=True)
class Lookup(Generic[D]):
    """What a look for an artifact found."""

    kind: Literal["found", "none", "unsigned", "broken", "other-version", "unreachable"]
    document: D | None = None
    """What was found; for `unreachable`, what this node knows, if anything."""
    why: str = ""
    """The error, for people."""
    data: bytes = field(default=b"", repr=False, compare=False)
    """The document as it is stored, with its signatures."""
