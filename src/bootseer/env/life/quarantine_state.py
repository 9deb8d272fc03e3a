"""Rules for when a snapshot is suspect: one state for each request key. Decides and touches nothing.

A job that fails at an import, soon after a restore, makes its snapshot suspect. The next start rebuilds it, once for
each key: afterwards the snapshot or its rebuild is used whatever fails, as either the job is at fault or the setup
cannot be reproduced. So a job that always fails costs one installation. `quarantine` stores the state.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, structs
from msgspec.structs import replace

from bootseer.artifact.document import decode, encode, readable
from bootseer.env.document import is_key
from bootseer.errors import CorruptError

SCHEMA = "bootseer.environment-quarantine/1"
MAX_BYTES = 256 << 10
_MAX_DIGESTS = 32
_MAX_COUNT = 1000
_MAX_TEXT = 500
_Digest = Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]


class Suspect(Struct, frozen=True, array_like=True):
    """A snapshot with which jobs failed."""

    digest: _Digest
    count: Annotated[int, Meta(ge=1, le=_MAX_COUNT)]
    """Always 1: further failures change no decision. Earlier versions counted some of them."""
    node: str
    why: str
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
        return replace(self, suspects=(Suspect(digest, 1, _text(node), _text(reason), now_s),))

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
        suspects = (structs.replace(each, node=_text(each.node), why=_text(each.why)) for each in state.suspects)
        return replace(state, suspects=tuple(suspects))


def _text(words: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in words[:_MAX_TEXT])
