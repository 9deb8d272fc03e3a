"""Snapshots that are suspected: kept beside their documents in the store, and on the node where the store refuses.

A quarantine is only advice (`quarantine_state` has the rules): a store that does not answer costs a line, a state that
cannot be read counts as none, and of two nodes that write at once one may be lost, to be told again by the next job.
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
    """What is held against the snapshots of one store."""

    def __init__(self, store: Store | None, here: Store, say: Callable[[str], None]) -> None:
        """`here` is a store on this node (`local.Local.store`), `say` gets one line for what went wrong.

        With `store` None only this node is asked: for a store that did not answer the question before either.
        """
        self._store = store
        self._here = here
        self._say = say

    def state(self, key: str) -> State:
        """What store and node know."""
        known = State(key)
        for store in (self._here, self._store):
            if store is not None:
                known = known.united(self._read(store, key))
        return known

    def why(self, document: EnvironmentDocument) -> str:
        """Why a snapshot must not be used, for people; empty when it may."""
        suspect = self.state(document.key).suspect(document.digest)
        if suspect is None:
            return ""
        jobs = "a job" if suspect.count == 1 else f"at least {suspect.count} jobs"
        return f"{jobs} died while importing with it, the last on {suspect.node}: {suspect.why}"

    def mark(self, document: EnvironmentDocument, node: str, reason: str, now_s: float) -> bool:
        """A job that got this snapshot died while it imported: whether the snapshot is suspected now."""
        state = self._change(document.key, lambda state: state.marked(document.digest, node, reason, now_s))
        return state.suspect(document.digest) is not None

    def rebuilt(self, document: EnvironmentDocument, replaced: EnvironmentDocument) -> bool:
        """A snapshot was built in place of another: whether that cleared it, being the same as a suspect."""
        before = self.state(document.key)
        after = self._change(document.key, lambda state: state.rebuilt(document.digest, replaced.digest))
        return after.suspect(document.digest) is None and before.suspect(document.digest) is not None

    def _change(self, key: str, change: Callable[[State], State]) -> State:
        """Change the state in the store, or on this node where the store refuses."""
        known = self.state(key)
        changed = change(known)
        if changed == known:
            return changed
        if self._store is not None:
            try:
                put(self._store, quarantine_name(key), changed.encode(), timeout_s=_WRITE_S)
            except BootseerError as error:
                self._say(f"the quarantine of environment {key[:12]} is known to this node alone: {error}")
            else:
                # Kept here, it would outlive what a user clears in the store.
                with contextlib.suppress(BootseerError):
                    self._here.delete(quarantine_name(key))
                return changed
        with contextlib.suppress(BootseerError):  # a full disk: the next job that fails records it again
            put(self._here, quarantine_name(key), changed.encode(), timeout_s=_WRITE_S)
        return changed

    def _read(self, store: Store, key: str) -> State:
        try:
            return State.parse(read_all(store, quarantine_name(key), MAX_BYTES, _READ_S), key)
        except NotFoundError:
            pass
        except CorruptError:
            pass  # the next change writes a good one
        except BootseerError as error:
            self._say(f"whether environment {key[:12]} is under quarantine is not known: {error}")
        return State(key)


def quarantine_name(key: str) -> str:
    """Where the quarantine of a request key is kept."""
    return f"environments/{key}/quarantine"
