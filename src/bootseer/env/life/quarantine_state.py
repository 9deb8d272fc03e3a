"""When a snapshot is suspected, and when it is cleared: a state per request key. Decides and touches nothing.

A job that dies while it imports, right after it got a snapshot, makes that snapshot a suspect. The next start builds
anew instead of using it:

    the new snapshot is the same, to the digest     the snapshot was not at fault: cleared, for ever
    it is another one                               that one is used; it may become a suspect in its turn
    built anew `MAX_REBUILDS` times in vain         setups that never give the same twice: no more suspects here

so that a job which always dies costs a few installations and no loop. `quarantine` keeps the state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from bootseer.env.document import is_key
from bootseer.errors import CorruptError

SCHEMA = "bootseer.environment-quarantine/1"
MAX_BYTES = 256 << 10
MAX_REBUILDS = 2
_MAX_DIGESTS = 32
_MAX_COUNT = 1000
_MAX_TEXT = 500
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_COUNTED = 8
"""From here on one more job that died changes no decision."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A snapshot with which jobs died."""

    digest: str
    count: int
    """Jobs that died; at least so many."""
    node: str
    """The last one."""
    why: str
    at_s: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class State:
    """All that is known for one request key."""

    key: str
    suspects: tuple[Suspect, ...] = ()
    cleared: tuple[str, ...] = ()
    """Digests that will never be suspects again."""
    rebuilds: int = 0
    settled: bool = False
    """No snapshot of this key is suspected any more."""

    def suspect(self, digest: str) -> Suspect | None:
        """What is held against a snapshot; None for one that may be used."""
        if self.settled or digest in self.cleared:
            return None
        return next((each for each in self.suspects if each.digest == digest), None)

    def marked(self, digest: str, node: str, why: str, now_s: float) -> State:
        """After a job died with this snapshot. The same state where that changes nothing."""
        if self.settled or digest in self.cleared:
            return self
        known = self.suspect(digest)
        if known is not None and known.count >= _COUNTED:
            return self
        new = Suspect(digest, (known.count if known else 0) + 1, _text(node), _text(why), now_s)
        others = [each for each in self.suspects if each.digest != digest]
        return replace(self, suspects=(*others, new)[-_MAX_DIGESTS:])

    def rebuilt(self, digest: str, replaced: str) -> State:
        """After a snapshot was built in place of the suspect `replaced`."""
        if self.suspect(replaced) is None:
            return self
        rebuilds = self.rebuilds + 1
        state = replace(self, rebuilds=min(rebuilds, _MAX_COUNT), settled=self.settled or rebuilds >= MAX_REBUILDS)
        return state if self.suspect(digest) is None else state._without(digest)

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
        value = {
            "schema": SCHEMA,
            "key": self.key,
            "suspects": [[each.digest, each.count, each.node, each.why, each.at_s] for each in self.suspects],
            "cleared": list(self.cleared),
            "rebuilds": self.rebuilds,
            "settled": self.settled,
        }
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, data: bytes, key: str) -> State:
        """Read a state. Raises `CorruptError`, also for that of another key."""
        try:
            value: Any = json.loads(data)
            if value["schema"] != SCHEMA or value["key"] != key or not is_key(key):
                raise ValueError("of another version or key")
            return cls(
                key,
                tuple(_suspect(row) for row in value["suspects"][:_MAX_DIGESTS]),
                tuple(_digests(value["cleared"][:_MAX_DIGESTS])),
                min(max(int(value["rebuilds"]), 0), _MAX_COUNT),
                value["settled"] is True,
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise CorruptError(f"not the quarantine of an environment: {error}") from error

    def _without(self, digest: str) -> State:
        suspects = tuple(each for each in self.suspects if each.digest != digest)
        return replace(self, suspects=suspects, cleared=(*self.cleared, digest)[-_MAX_DIGESTS:])


def _suspect(row: Any) -> Suspect:
    digest, count, node, why, at_s = row
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest) or not 0 <= at_s < 1e11:
        raise ValueError("a suspect without digest or time")
    return Suspect(digest, min(max(int(count), 1), _MAX_COUNT), _text(node), _text(why), float(at_s))


def _digests(rows: Iterable[Any]) -> Iterable[str]:
    for row in rows:
        if not isinstance(row, str) or not _DIGEST.fullmatch(row):
            raise ValueError("no digest")
        yield row


def _text(words: Any) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in str(words)[:_MAX_TEXT])
