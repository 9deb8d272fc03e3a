"""What distinguishes the kinds of artifacts (environments, images), the result of a lookup, and tombstones.

Removing an artifact deletes its document at once, so that no start finds it any more, and leaves a tombstone with the
names of its objects and a time: starts that found it before may read its objects for a while. Decides and touches
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Generic, Literal, Protocol, TypeVar

from msgspec import Meta

from bootseer.artifact.document import readable
from bootseer.store.store import Stored, is_content_name

MAX_OBJECTS = 100_000


@readable
@dataclass(frozen=True, slots=True)
class Tombstone:
    """The record of a removed artifact."""

    key: str
    digest: str
    """Of its content; its hot sets are stored under it."""
    identity: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    """Distinguishes contents of the same key; for an environment the identity of its block file, which nodes mount."""
    removed_s: Annotated[float, Meta(ge=0, le=1e11)]
    """Seconds since 1970, by the clock of the removing node."""
    objects: Annotated[tuple[Stored, ...], Meta(max_length=MAX_OBJECTS)]

    def __post_init__(self) -> None:
        # A path name would let a forged tombstone delete documents.
        if not all(is_content_name(stored.name) and stored.size_bytes >= 0 for stored in self.objects):
            raise ValueError("an object is not named by its content")

    @property
    def name(self) -> str:
        """Its name in the trash, derived from the content: removing twice leaves one."""
        return f"{self.key.replace(':', '-')}-{self.identity[:16]}"


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
    """How a kind of artifact is named, stored and parsed."""

    noun: str
    """In messages: `environment`."""
    folder: str
    """The prefix of its documents in a store: `environments/`."""
    trash: str
    """The prefix of its tombstones."""
    tombstone_schema: str
    max_bytes: int
    """Of a document."""
    check_key: Callable[[str], None]
    """Raises `UsageError` for an invalid key."""
    document_name: Callable[[str], str]
    """The name of a key's document in a store."""
    key_in: Callable[[str], str]
    """The key of a document's name; "" for other names."""
    parse: Callable[[bytes], D]
    key: Callable[[D], str]
    identity: Callable[[D], str]
    """See `Tombstone.identity`."""

    def tombstone(self, document: D, now_s: float) -> Tombstone:
        """The tombstone of a document removed now."""
        return Tombstone(self.key(document), document.digest, self.identity(document), now_s, document.objects)

    def short(self, key: str) -> str:
        """An abbreviated key for messages."""
        return key.removeprefix("sha256:")[:12]


@dataclass(frozen=True)
class Lookup(Generic[D]):
    """The result of a lookup."""

    kind: Literal["found", "none", "unsigned", "broken", "other-version", "unreachable"]
    document: D | None = None
    """The document found; for `unreachable` the one that this node knows, if any."""
    why: str = ""
    """The error message."""
    data: bytes = field(default=b"", repr=False, compare=False)
    """The stored bytes of the document, with signatures."""
