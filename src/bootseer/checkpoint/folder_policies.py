"""Where stripe policies lie, and which one holds for a folder. Called by `files`."""

from __future__ import annotations

import contextlib
import threading
import time

from bootseer.checkpoint.head import STRIPES
from bootseer.checkpoint.places.open import open_place
from bootseer.checkpoint.places.place import Place, make_alike
from bootseer.checkpoint.policy import MAX_POLICY_BYTES, Policy, encode_policy, parse_policy
from bootseer.errors import AccessError, NotFoundError, PermanentError

_BELIEVED_S = 5.0
"""So long may another machine's change go unnoticed."""

Found = tuple[Policy, str | None]
"""What holds, and the address of the folder that says so; None when nobody does."""


class FolderPolicies:
    """The policies of a place, and of the folders above it. Safe to use from many threads."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._own: dict[str, tuple[float, Policy | None]] = {}
        """What each folder says itself, and when that was read."""
        self._above: tuple[float, Found] | None = None

    def find(self, folder: str) -> Found:
        """What holds for new files in a folder. Raises `PermanentError` for a policy that cannot be read."""
        while True:
            found = self._said_by(folder)
            if found is not None:
                return found, self._what(folder)
            if not folder:
                return self._find_above()
            folder = folder.rpartition("/")[0]

    def set(self, folder: str, policy: Policy | None) -> None:
        """Let a folder say this, or nothing."""
        stripes = f"{folder}/{STRIPES}" if folder else STRIPES
        if policy is None:
            with contextlib.suppress(NotFoundError):
                self._place.delete(_path(folder))
        else:
            make_alike(self._place, stripes)
            self._place.write_bytes(_path(folder), encode_policy(policy))
        with self._lock:
            self._own.clear()

    def _said_by(self, folder: str) -> Policy | None:
        now_s = time.monotonic()
        with self._lock:
            read_s, policy = self._own.get(folder, (-_BELIEVED_S, None))
            if now_s - read_s < _BELIEVED_S:
                return policy
        try:
            policy = parse_policy(self._place.read_bytes(_path(folder), MAX_POLICY_BYTES))
        except (NotFoundError, AccessError):
            policy = None
        except PermanentError as error:
            raise type(error)(
                f"{self._what(_path(folder))}: {error}; "
                f"`bootseer ckpt policy {self._what(folder)} --inherit` removes it"
            ) from error
        with self._lock:
            self._own[folder] = (now_s, policy)
        return policy

    def _find_above(self) -> Found:
        now_s = time.monotonic()
        with self._lock:
            above = self._above
        if above is not None and now_s - above[0] < _BELIEVED_S:
            return above[1]
        scheme, _, rest = self._place.uri.partition("://")
        authority, _, root = rest.partition("/")
        found: Found = (Policy(), None)
        if root:
            with contextlib.closing(open_place(f"{scheme}://{authority}/")) as top:
                found = FolderPolicies(top).find(root.rpartition("/")[0])
        with self._lock:
            self._above = (now_s, found)
        return found

    def _what(self, path: str) -> str:
        return f"{self._place.uri}/{path}" if path else self._place.uri


def _path(folder: str) -> str:
    return f"{folder}/{STRIPES}/policy.json" if folder else f"{STRIPES}/policy.json"
