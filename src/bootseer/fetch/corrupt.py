"""Blocks that their origin has only with wrong bytes: known for a while, so that not every read asks for them again.

A program that reads a damaged file again and again would have each read wait for several requests, and load the store
with them. After the while it is asked once more: somebody may have repaired it. Called by `engine`, with its lock held.
Decides and touches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from bootseer.errors import BootseerError, CorruptError
from bootseer.fetch.queues import Key

_KNOWN_S = 30.0
_MAX_KNOWN = 65_536
"""A store that is damaged as a whole must not fill the memory."""


class CorruptBlocks:
    """Which blocks were corrupt at every attempt, and until when that is believed."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[CorruptError, float]] = {}
        self.first = ""
        """What was found first, for the user."""

    def add(self, key: Key, error: BootseerError, now: float) -> None:
        """A block was given up because of `error`; only corrupt ones are kept in mind."""
        if not isinstance(error, CorruptError):
            return
        self.first = self.first or str(error)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[key] = (error, now + _KNOWN_S)

    def error(self, file: int, blocks: Iterable[int], now: float) -> CorruptError | None:
        """Why a read of these blocks fails at once; None when it is worth an attempt."""
        if not self._known:
            return None
        for block in blocks:
            known = self._known.get((file, block))
            if known is not None:
                if now < known[1]:
                    return known[0]
                del self._known[file, block]
        return None

    def forget(self, key: Key) -> None:
        """A sound block came."""
        self._known.pop(key, None)
