"""Rules for when a snapshot is suspect and when it is cleared: one state for each request key. Decides and touches
nothing.

A job that fails at an import, soon after a restore, makes its snapshot suspect. The next start rebuilds it:

    the digest is the same               the snapshot was not at fault: cleared permanently
    the digest differs                   the new snapshot is used; it may become suspect, too
    `MAX_REBUILDS` different rebuilds    the setup is not reproducible: no snapshot of this key is suspect any more

So a job that always fails causes a few installations and no endless loop. `quarantine` stores the state.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, structs
from msgspec.structs import replace

from bootseer.artifact.document import decode, encode
from bootseer.env.document import is_key
from bootseer.errors import CorruptError

SCHEMA = "bootseer.environment-quarantine/1"
MAX_BYTES = 256 << 10
MAX_REBUILDS = 2
_MAX_DIGESTS = 32
_MAX_COUNT = 1000
_MAX_TEXT = 500
_Digest = Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
_MAX_COUNTED = 8
"""Further failures are not counted: they change no decision."""


class Suspect(Struct, frozen=True, array_like=True):
    """A snapshot with which jobs failed."""

    digest: _Digest
    count: Annotated[int, Meta(ge=1, le=_MAX_COUNT)]
    """Lower bound of the number of failed jobs."""
    node: str
    """Of the last failure."""
    why: str
    at_s: Annotated[float, Meta(ge=0, lt=1e11)]
    """Seconds since 1970."""


class State(Struct, frozen=True):
    """The state of one request key."""

    key: str
    suspects: Annotated[tuple[Suspect, ...], Meta(max_length=_MAX_DIGESTS)] = ()
    cleared: Annotated[tuple[_Digest, ...], Meta(max_length=_MAX_DIGESTS)] = ()
    """Digests that are never suspect again."""
    rebuilds: Annotated[int, Meta(ge=0, le=_MAX_COUNT)] = 0
    settled: bool = False
    """Whether no snapshot of this key is suspect any more."""

    def suspect(self, digest: str) -> Suspect | None:
        """The failures of a snapshot; None for one that may be used."""
        if self.settled or digest in self.cleared:
            return None
        return next((each for each in self.suspects if each.digest == digest), None)

    def with_failure(self, digest: str, node: str, reason: str, now_s: float) -> State:
        """The state after a job failed with this snapshot; unchanged if the failure does not count."""
        if self.settled or digest in self.cleared:
            return self
        known = self.suspect(digest)
        if known is not None and known.count >= _MAX_COUNTED:
            return self
        new = Suspect(digest, (known.count if known else 0) + 1, _text(node), _text(reason), now_s)
        others = [each for each in self.suspects if each.digest != digest]
        return replace(self, suspects=(*others, new)[-_MAX_DIGESTS:])

    def rebuilt(self, digest: str, replaced: str) -> State:
        """The state after the suspect `replaced` was rebuilt as `digest`."""
        if self.suspect(replaced) is None:
            return self
        rebuilds = self.rebuilds + 1
        state = replace(self, rebuilds=min(rebuilds, _MAX_COUNT), settled=self.settled or rebuilds >= MAX_REBUILDS)
        if self.suspect(digest) is None:
            return state
        suspects = tuple(each for each in state.suspects if each.digest != digest)
        return replace(state, suspects=suspects, cleared=(*state.cleared, digest)[-_MAX_DIGESTS:])

    def encode(self) -> bytes:
        return encode(self, SCHEMA)

    @classmethod
    def parse(cls, data: bytes, key: str) -> State:
        """Read a state. Raises `CorruptError`, also for the state of another key."""
        state = decode(data, cls, "quarantine", limit=MAX_BYTES, schema=SCHEMA, other_version=CorruptError)
        if state.key != key or not is_key(key):
            raise CorruptError("the quarantine of another environment")
        suspects = (structs.replace(each, node=_text(each.node), why=_text(each.why)) for each in state.suspects)
        return replace(state, suspects=tuple(suspects))


def _text(words: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in words[:_MAX_TEXT])
