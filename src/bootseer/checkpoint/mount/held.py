"""One version of a file that is read by many: whoever begins a read must not find it closed a moment before.

A file that is opened again is read by a new reader from then on, and so it is after a rename; reads that were about to
begin go on with the old one. Called by `content`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bootseer.checkpoint.mount.content import Reader


class Held:
    """A reader that is closed when nobody holds it any more. Safe for many threads."""

    def __init__(self, reader: Reader, path: str) -> None:
        self.reader = reader
        self.path = path
        """Where it was opened; it may open parts there later."""
        self._lock = threading.Lock()
        self._holders = 1

    def hold(self) -> Held:
        """Somebody else holds it too. Called by one who does."""
        with self._lock:
            self._holders += 1
        return self

    def let_go(self) -> None:
        """One of its holders does not need it any more."""
        with self._lock:
            self._holders -= 1
            is_over = not self._holders
        if is_over:
            self.reader.close()
