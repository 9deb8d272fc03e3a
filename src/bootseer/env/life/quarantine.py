"""Quarantines of suspect snapshots, stored beside their documents, or on the node if the store refuses writes.

A quarantine is only advice (`quarantine_state` has the rules): an unreachable store causes a message, an unreadable
state counts as none, and of two concurrent writes one may be lost, until the next failing job.
"""

from __future__ import annotations

import contextlib
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

    def __init__(self, store: Store | None, here: Store, say: Callable[[str], None]) -> None:
        """`here` is a store on this node (`NodeCatalog.store`), `say` gets a line for each error.

        With `store` None only this node is asked, for a store that has not answered before.
        """
        self._store = store
        self._here = here
        self._say = say

    def state(self, key: str) -> State:
        """The state of store and node, merged."""
        known = State(key)
        for store in (self._here, self._store):
            if store is not None:
                known = known.merged(self._read(store, key))
        return known

    def reason(self, document: EnvironmentDocument) -> str:
        """Why a snapshot must not be used; empty if it may be."""
        suspect = self.state(document.key).suspect(document.digest)
        if suspect is None:
            return ""
        jobs = "a job" if suspect.count == 1 else f"at least {suspect.count} jobs"
        return f"{jobs} died while importing with it, the last on {suspect.node}: {suspect.why}"

    def mark(self, document: EnvironmentDocument, node: str, reason: str, now_s: float) -> bool:
        """Record that a job with this snapshot failed at an import; whether the snapshot is suspect now."""
        state = self._change(document.key, lambda state: state.with_failure(document.digest, node, reason, now_s))
        return state.suspect(document.digest) is not None

    def rebuilt(self, document: EnvironmentDocument, replaced: EnvironmentDocument) -> bool:
        """Record that a suspect snapshot was rebuilt; whether that has cleared it, as the new one is identical."""
        before = self.state(document.key)
        after = self._change(document.key, lambda state: state.rebuilt(document.digest, replaced.digest))
        return after.suspect(document.digest) is None and before.suspect(document.digest) is not None

    def _change(self, key: str, change: Callable[[State], State]) -> State:
        """Change the state in the store, or on this node if the store refuses."""
        known = self.state(key)
        changed = change(known)
        if changed == known:
            return changed
        if self._store is not None:
            try:
                put(self._store, quarantine_name(key), changed.encode(), timeout_s=_WRITE_S)
            except BootseerError as error:
                self._say(f"the quarantine of environment {key[:12]} is stored on this node only: {error}")
            else:
                # A copy here would persist when a user clears the quarantine in the store.
                with contextlib.suppress(BootseerError):
                    self._here.delete(quarantine_name(key))
                return changed
        with contextlib.suppress(BootseerError):  # a full disk: the next failing job records it again
            put(self._here, quarantine_name(key), changed.encode(), timeout_s=_WRITE_S)
        return changed

    def _read(self, store: Store, key: str) -> State:
        try:
            return State.parse(read_all(store, quarantine_name(key), MAX_BYTES, _READ_S), key)
        except NotFoundError:
            pass
        except CorruptError:
            pass  # overwritten by the next change
        except BootseerError as error:
            self._say(f"the quarantine of environment {key[:12]} cannot be read: {error}")
        return State(key)


def quarantine_name(key: str) -> str:
    """Name of the quarantine of a request key in a store."""
    return f"environments/{key}/quarantine"
