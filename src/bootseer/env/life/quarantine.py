"""Quarantines of suspect snapshots, stored beside their documents.

A quarantine is only advice (`quarantine_state` has the rules): a store that refuses or does not answer causes a
message, an unreadable state counts as none, and of two concurrent writes one may be lost, until the next failing job.
"""

from __future__ import annotations

from collections.abc import Callable

from bootseer.artifact.objects import put, read_all
from bootseer.env.document import EnvironmentDocument
from bootseer.env.life.quarantine_state import MAX_BYTES, State
from bootseer.errors import BootseerError, CorruptError, NotFoundError
from bootseer.store.store import Store

_READ_S = 5.0
_WRITE_S = 10.0


class Quarantine:
    """The quarantines of one store."""

    def __init__(self, store: Store, say: Callable[[str], None]) -> None:
        """`say` gets a line for each quarantine that cannot be read."""
        self._store = store
        self._say = say

    def state(self, key: str) -> State:
        try:
            return self._read(key)
        except BootseerError as error:
            self._say(f"the quarantine of environment {key[:12]} cannot be read: {error}")
        return State(key)

    def reason(self, document: EnvironmentDocument) -> str:
        """Why a snapshot must not be used; empty if it may be."""
        suspect = self.state(document.key).suspect(document.digest)
        if suspect is None:
            return ""
        return f"a job died while importing with it, on {suspect.node}: {suspect.why}"

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
