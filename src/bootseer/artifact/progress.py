"""What callers hand down to see a long work: its stages, lines for people, and a progress display.

`Show` comes from the command line through `launch`, which must not know how anything is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

Stage = Callable[[str], AbstractContextManager[dict[str, Any]]]
"""Marks a part of the work; what is put into the dict it gives are facts about it."""
Say = Callable[[str], None]
"""Gets one line for people."""
ProgressCallback = Callable[[int, int], None]
"""So much is done of so much; may be called from any thread, as often as needed. A total of 0 is not known."""
Unit = Literal["bytes", "blocks", ""]
"""Of the two numbers; "" where nothing can be counted, and all that is shown is that it goes on."""
Show = Callable[[str, Unit], AbstractContextManager[ProgressCallback]]
"""Shows what is done, "fetching registry:5000/train:7", while the block lasts."""


@contextmanager
def no_progress(label: str, unit: Unit) -> Iterator[ProgressCallback]:
    """A `Show` without a display."""
    yield lambda done, total: None
