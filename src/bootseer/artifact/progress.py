"""Callbacks for the progress of long operations: stages, messages, and a progress display.

`Show` comes from the command line through `launch`, which does not depend on the display.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Literal

_TICK_S = 0.5
Stage = Callable[[str], AbstractContextManager[dict[str, Any]]]
"""Marks a stage; facts about it are put into the dict."""
Say = Callable[[str], None]
"""Gets one line for the user."""
ProgressCallback = Callable[[int, int], None]
"""Done and total; called from any thread, at any rate. A total of 0: unknown."""
Unit = Literal["bytes", "blocks", ""]
"""The unit of both numbers; "" when nothing is counted and only activity is shown."""
Show = Callable[[str, Unit], AbstractContextManager[ProgressCallback]]
"""Shows progress under a label ("fetching registry:5000/train:7") for the duration of the block."""


@contextmanager
def shown_while(show: Show, label: str) -> Iterator[None]:
    """Show that the block takes long. Nothing may be forked in it: a thread shows it."""
    import threading  # not in front of a command that needs none

    over = threading.Event()
    with show(label, "") as on_progress:

        def tell() -> None:
            while not over.wait(_TICK_S):
                on_progress(0, 0)

        thread = threading.Thread(target=tell, name="bootseer-shown", daemon=True)
        try:
            with suppress(RuntimeError):  # no thread can be started
                thread.start()
            yield
        finally:
            over.set()
            if thread.ident is not None:
                thread.join(_TICK_S)  # standard error may be a stopped terminal


@contextmanager
def no_progress(label: str, unit: Unit) -> Iterator[ProgressCallback]:
    """A `Show` without a display."""
    yield lambda done, total: None
