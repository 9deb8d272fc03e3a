"""Quarantines of suspect snapshots, stored beside their documents: one state for each request key.

A job that fails at an import, soon after a restore, makes its snapshot suspect. The next start rebuilds it, once for
each key: afterwards the snapshot or its rebuild is used whatever fails, as either the job is at fault or the setup
cannot be reproduced. So a job that always fails costs one installation.

A quarantine is only advice: a store that refuses or does not answer causes a message, an unreadable state counts as
none, and of two concurrent writes one may be lost, until the next failing job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from bootseer.artifact.document import decode, encode, printable, readable
from bootseer.artifact.objects import put, read_all
from bootseer.env.document import EnvironmentDocument, is_key
from bootseer.errors import BootseerError, CorruptError, NotFoundError
from bootseer.store.store import Store

SCHEMA = "bootseer.environment-quarantine/1"
MAX_BYTES = 256 << 10
_MAX_DIGESTS = 32
_MAX_COUNT = 1000
_MAX_TEXT = 500
_READ_S = 5.0
_WRITE_S = 10.0
_Digest = Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]


class Suspect(Struct, frozen=True, array_like=True):
    """A snapshot with which jobs failed."""

    digest: _Digest
    count: Annotated[int, Meta(ge=1, le=_MAX_COUNT)]
    """Always 1: further failures change no decision. Earlier versions counted some of them."""
    node: Annotated[str, Meta(max_length=_MAX_TEXT)]
    why: Annotated[str, Meta(max_length=_MAX_TEXT)]
    at_s: Annotated[float, Meta(ge=0, lt=1e11)]
    """Seconds since 1970."""


@readable
class State(Struct, frozen=True):
    """The state of one request key."""

    key: str
    suspects: Annotated[tuple[Suspect, ...], Meta(max_length=_MAX_DIGESTS)] = ()
    settled: bool = False
    """Whether a suspect snapshot was rebuilt: no snapshot of this key is suspect any more."""

    def suspect(self, digest: str) -> Suspect | None:
        """The failure of a snapshot; None for one that may be used."""
        return None if self.settled else next((each for each in self.suspects if each.digest == digest), None)

    def with_failure(self, digest: str, node: str, reason: str, now_s: float) -> State:
        """The state after a job failed with this snapshot; unchanged if the failure does not count."""
        if self.settled or self.suspect(digest) is not None:
            return self
        return replace(self, suspects=(Suspect(digest, 1, node[:_MAX_TEXT], reason[:_MAX_TEXT], now_s),))

    def rebuilt(self, replaced: str) -> State:
        """The state after the snapshot `replaced` was rebuilt; unchanged if it was not suspect."""
        return self if self.suspect(replaced) is None else replace(self, suspects=(), settled=True)

    def encode(self) -> bytes:
        return encode(self, SCHEMA)

    @classmethod
    def parse(cls, data: bytes, key: str) -> State:
        """Read a state. Raises `CorruptError`, also for the state of another key."""
        state = decode(data, cls, "quarantine", limit=MAX_BYTES, schema=SCHEMA, other_version=CorruptError)
        if state.key != key or not is_key(key):
            raise CorruptError("the quarantine of another environment")
        return state


class Quarantine:
    """The quarantines of one store."""

    def __init__(self, store: Store, say: Callable[[str], None]) -> None:
        """`say` gets a line for each quarantine that cannot be read."""
        self._store = store
        self._say = say

    def reason(self, document: EnvironmentDocument) -> str:
        """Why a snapshot must not be used; empty if it may be."""
        try:
            suspect = self._read(document.key).suspect(document.digest)
        except BootseerError as error:
            self._say(f"the quarantine of environment {document.key[:12]} cannot be read: {error}")
            return ""
        if suspect is None:
            return ""
        return f"a job died while importing with it, on {printable(suspect.node)}: {printable(suspect.why)}"

    def mark(self, document: EnvironmentDocument, node: str, reason: str, now_s: float) -> bool:
        """Record that a job with this snapshot failed at an import; whether the snapshot is suspect now. Raises the
        store's errors."""
        state = self._change(document.key, lambda state: state.with_failure(document.digest, node, reason, now_s))
        return state.suspect(document.digest) is not None

    def rebuilt(self, replaced: EnvironmentDocument) -> None:
        """Record that a snapshot was rebuilt. Raises the store's errors."""
        self._change(replaced.key, lambda state: state.rebuilt(replaced.digest))

    def _read(self, key: str) -> State:
        try:
            return State.parse(read_all(self._store, quarantine_name(key), MAX_BYTES, _READ_S), key)
        except (NotFoundError, CorruptError):  # a damaged one is overwritten by the next change
            return State(key)

    def _change(self, key: str, change: Callable[[State], State]) -> State:
        known = self._read(key)  # one that cannot be read now must not be overwritten by an empty one
        changed = change(known)
        if changed != known:
            put(self._store, quarantine_name(key), changed.encode(), timeout_s=_WRITE_S)
        return changed


def quarantine_name(key: str) -> str:
    """Name of the quarantine of a request key in a store."""
    return f"environments/{key}/quarantine"
