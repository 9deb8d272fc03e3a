"""One line on standard error that tells how far something long has come, or that it is waited for.

On a terminal at most ten times a second, and gone at the end. In front of a job whose output goes elsewhere: one line
once it takes long, since whoever reads a log wants to know why nothing happens. Called by the verbs that pull, convert,
copy and verify, and handed to `launch` as a `Show`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING

from bootseer.units import format_bytes

if TYPE_CHECKING:
    from bootseer.artifact.progress import ProgressCallback, Unit

_EVERY_S = 0.1
_LONG_S = 2.5
"""From here on somebody wonders. Longer than an unmount waits for those that let go of their files in a moment."""
_WIDTH = 24
_COLUMNS = 80


class Progress:
    """A context manager; what shows may be called from any thread, as often as anybody likes.

    `line`: without a terminal one line is written once it takes long, otherwise nothing is.
    """

    def __init__(self, what: str, *, line: bool = False) -> None:
        self._what = what
        self._began_s = time.monotonic()
        self._next_s = 0.0
        self._on = sys.stderr is not None and sys.stderr.isatty()
        self._line = line and sys.stderr is not None and not self._on
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

    def wait(self) -> None:
        """It goes on, nobody knows how long: shown once it takes long."""
        waited_s = time.monotonic() - self._began_s
        if waited_s >= _LONG_S:
            self._show(0, 0, f"for {waited_s:.0f} s", "")

    def _show(self, done: int, total: int, amount: str, note: str) -> None:
        now_s = time.monotonic()
        if self._line and now_s - self._began_s >= _LONG_S:
            self._line = False
            _write(f"bootseer: still {self._what} {amount}{f' {note}' if note else ''}\n")
        if not self._on or (now_s < self._next_s and done != total):
            return
        self._next_s = now_s + _EVERY_S
        self._shown = True
        filled = round(_WIDTH * min(done / total, 1)) if total else 0
        bar = f"[{'#' * filled}{'-' * (_WIDTH - filled)}] " if total else ""
        behind = f", {note}" if note else ""
        # A line that wraps could not be taken back.
        _write("\r\x1b[K" + f"{self._what} {bar}{amount}{behind}"[: _columns() - 1])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            _write("\r\x1b[K")


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody can read it: what is shown goes on
        sys.stderr.write(text)
        sys.stderr.flush()


def _columns() -> int:
    with suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
    return _COLUMNS


@contextmanager
def shown(what: str, unit: Unit) -> Iterator[ProgressCallback]:
    """Progress of a job's start: a `artifact.progress.Show`."""
    with Progress(what, line=True) as progress:

        def heard(done: int, total: int) -> None:
            if unit == "bytes":
                progress.show_bytes(done, total)
            elif unit:
                progress.show(done, total, unit)
            else:
                progress.wait()

        yield heard
