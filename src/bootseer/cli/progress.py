"""One line on standard error that tells how far something long has come; nothing where that is no terminal.

At most ten times a second, and gone at the end. Called by the verbs that pull, convert and verify.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from bootseer.units import format_bytes

_EVERY_S = 0.1
_WIDTH = 24


class Progress:
    """A context manager; `show` may be called from any thread, as often as anybody likes."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._next_s = 0.0
        self._on = sys.stderr is not None and sys.stderr.isatty()
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def show(self, done: int, total: int, note: str = "") -> None:
        """So much of so much is done, in any unit."""
        self._show(done, total, f"{done:,} of {total:,}", note)

    def show_bytes(self, done: int, total: int, note: str = "") -> None:
        """So many bytes of so many are done; a total of 0 is not known."""
        of = f" of {format_bytes(total)}" if total else ""
        self._show(done, total, f"{format_bytes(done)}{of}", note)

    def _show(self, done: int, total: int, amount: str, note: str) -> None:
        now_s = time.monotonic()
        if not self._on or (now_s < self._next_s and done != total):
            return
        self._next_s = now_s + _EVERY_S
        self._shown = True
        filled = round(_WIDTH * min(done / total, 1)) if total else 0
        bar = f"[{'#' * filled}{'-' * (_WIDTH - filled)}] " if total else ""
        behind = f", {note}" if note else ""
        sys.stderr.write(f"\r\x1b[K{self._what} {bar}{amount}{behind}")
        sys.stderr.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
