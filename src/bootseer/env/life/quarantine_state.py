"""When a snapshot is suspected, and when it is cleared: a state per request key. Decides and touches nothing.

A job that dies while it imports, right after it got a snapshot, makes that snapshot a suspect. The next start builds
anew instead of using it:

    the new snapshot is the same, to the digest     the snapshot was not at fault: cleared, for ever
    it is another one                               that one is used; it may become a suspect in its turn
    built anew `MAX_REBUILDS` times in vain         setups that never give the same twice: no more suspects here

so that a job which always dies costs a few installations and no loop. `quarantine` keeps the state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta, Struct, structs

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
_COUNTED = 8
"""From here on one more job that died changes no decision."""


class Suspect(Struct, frozen=True, array_like=True):
    """A snapshot with which jobs died."""

    digest: _Digest
    count: Annotated[int, Meta(ge=1, le=_MAX_COUNT)]
    """Jobs that died; at least so many."""
    node: str
    """The last one."""
    why: str
    at_s: Annotated[float, Meta(ge=0, lt=1e11)]
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class State:
    """All that is known for one request key."""

    key: str
    suspects: Annotated[tuple[Suspect, ...], Meta(max_length=_MAX_DIGESTS)] = ()
    cleared: Annotated[tuple[_Digest, ...], Meta(max_length=_MAX_DIGESTS)] = ()
    """Digests that will never be suspects again."""
    rebuilds: Annotated[int, Meta(ge=0, le=_MAX_COUNT)] = 0
    settled: bool = False
    """No snapshot of this key is suspected any more."""

    def suspect(self, digest: str) -> Suspect | None:
        """What is held against a snapshot; None for one that may be used."""
        if self.settled or digest in self.cleared:
            return None
        return next((each for each in self.suspects if each.digest == digest), None)

    def marked(self, digest: str, node: str, reason: str, now_s: float) -> State:
        """After a job died with this snapshot. The same state where that changes nothing."""
        if self.settled or digest in self.cleared:
            return self
        known = self.suspect(digest)
        if known is not None and known.count >= _COUNTED:
            return self
        new = Suspect(digest, (known.count if known else 0) + 1, _text(node), _text(reason), now_s)
        others = [each for each in self.suspects if each.digest != digest]
        return replace(self, suspects=(*others, new)[-_MAX_DIGESTS:])

    def rebuilt(self, digest: str, replaced: str) -> State:
        """After a snapshot was built in place of the suspect `replaced`."""
        if self.suspect(replaced) is None:
            return self
        rebuilds = self.rebuilds + 1
        state = replace(self, rebuilds=min(rebuilds, _MAX_COUNT), settled=self.settled or rebuilds >= MAX_REBUILDS)
        if self.suspect(digest) is None:
            return state
        suspects = tuple(each for each in state.suspects if each.digest != digest)
        return replace(state, suspects=suspects, cleared=(*state.cleared, digest)[-_MAX_DIGESTS:])

    def united(self, other: State) -> State:
        """With what another place knows."""
        cleared = tuple(sorted({*self.cleared, *other.cleared}))[:_MAX_DIGESTS]
        suspects: dict[str, Suspect] = {}
        for each in sorted((*self.suspects, *other.suspects), key=lambda suspect: (suspect.count, suspect.at_s)):
            if each.digest not in cleared:
                suspects[each.digest] = each
        return State(
            self.key,
            tuple(sorted(suspects.values(), key=lambda suspect: (suspect.at_s, suspect.digest)))[-_MAX_DIGESTS:],
            cleared,
            max(self.rebuilds, other.rebuilds),
            self.settled or other.settled,
        )

    def encode(self) -> bytes:
        """JSON."""
        return encode(self, SCHEMA)

    @classmethod
    def parse(cls, data: bytes, key: str) -> State:
        """Read a state. Raises `CorruptError`, also for that of another key."""
        state = decode(data, cls, "quarantine", limit=MAX_BYTES, schema=SCHEMA, other_version=CorruptError)
        if state.key != key or not is_key(key):
            raise CorruptError("the quarantine of another environment")
        suspects = (structs.replace(each, node=_text(each.node), why=_text(each.why)) for each in state.suspects)
        return replace(state, suspects=tuple(suspects))


def _text(words: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in words[:_MAX_TEXT])
