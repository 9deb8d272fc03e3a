"""What people see while they wait for something long: whoever does it counts, whoever has a terminal shows.

`Show` is handed down from the command line through `launch`, which must not know how anything is shown. Called by
whatever pulls, converts and mounts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

Heard = Callable[[int, int], None]
"""So much is done of so much; may be called from any thread, as often as anybody likes. A total of 0 is not known."""
Unit = Literal["bytes", "blocks", ""]
"""Of the two numbers; "" where nothing can be counted, and all that is told is that it goes on."""
Show = Callable[[str, Unit], AbstractContextManager[Heard]]
"""Shows what is done, "fetching registry:5000/train:7", while the block lasts."""


@contextmanager
def unseen(what: str, unit: Unit) -> Iterator[Heard]:
    """Nobody looks."""
    yield lambda done, total: None
