"""Marks of setups that are not snapshot-safe, in the store beside where their documents would be.

A start that finds one runs the setup at once. Otherwise, in each start, all nodes would wait for one that builds and
then publishes nothing. Only what the setup itself does is marked, for a week, and no failure, which may be over at the
next start. A mark is advice: one that cannot be written or read counts as none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from bootseer.artifact.document import decode, encode, printable, readable
from bootseer.artifact.objects import put, read_all
from bootseer.env.document import CLOCK_SKEW_S
from bootseer.errors import BootseerError, CorruptError, PermanentError
from bootseer.store.store import Store

if TYPE_CHECKING:
    from bootseer.env.snapshot.secret_check import SecretCheck

SCHEMA = "bootseer.environment-unsafe/1"
MAX_AGE_S = 7 * 86_400.0
_MAX_BYTES = 16 << 10
_MAX_TEXT, _MAX_WRITTEN = 2000, 1000
_READ_S = 5.0
_WRITE_S = 10.0


class UnsafeError(PermanentError):
    """A snapshot is refused for what the setup does each time."""

    def __init__(self, message: str, *, conflicts: bool = False) -> None:
        super().__init__(message)
        self.conflicts = conflicts


@readable
class Mark(Struct, frozen=True):
    """The content of a mark."""

    key: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    reason: Annotated[str, Meta(max_length=_MAX_TEXT)]
    node: Annotated[str, Meta(max_length=_MAX_TEXT)]
    at_s: Annotated[float, Meta(ge=0, lt=1e11)]
    """Seconds since 1970."""
    conflicts: bool = False
    """Whether the reason is only a conflict of versions, which other starts may accept."""


def mark_name(key: str) -> str:
    """Name of the mark of a request key in a store."""
    return f"environments/{key}/unsafe"


def write_mark(store: Store, mark: Mark, check: SecretCheck) -> None:
    """A reason that contains a secret is not written. Raises the store's errors."""
    text = mark.reason[:_MAX_WRITTEN]
    if check.check_text("its mark", text.encode("utf-8", "replace")):
        text = "see what that start printed"
    mark = replace(mark, reason=text, node=mark.node[:_MAX_WRITTEN])
    put(store, mark_name(mark.key), encode(mark, SCHEMA), timeout_s=_WRITE_S)


def reason(store: Store, key: str, now_s: float, *, accepts_conflicts: bool = False) -> str:
    """Why the setup of this key is not snapshot-safe; empty if it is not marked."""
    try:
        data = read_all(store, mark_name(key), _MAX_BYTES, _READ_S)
        found = decode(data, Mark, "mark", limit=_MAX_BYTES, schema=SCHEMA, other_version=CorruptError)
    except BootseerError:
        return ""
    if found.key != key or (found.conflicts and accepts_conflicts):
        return ""
    if not -CLOCK_SKEW_S <= now_s - found.at_s <= MAX_AGE_S:
        return ""
    node = printable(found.node)
    return f"this setup is not snapshot-safe, as {node} found: {printable(found.reason)} (--env refresh tries again)"
