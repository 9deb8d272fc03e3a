"""What follows from a change of state: calls that are made with no lock held, and never one inside another.

A read that ends starts others, which may end at once, which starts others: a chain without an end, in which each call
would find the state of those above it half changed. So whoever changes state under a lock makes a list of calls, and
hands it over behind the lock. In each thread one loop makes them, in their order; what a call hands over itself comes
behind all others. Threads do not wait for each other's calls: each compares what it received with its digest.

What a call raises is reported, and the next one is made.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from bootseer.io.executor import report_exception

Effect = Callable[[], object]
_own = threading.local()


def carry_out(effects: Iterable[Effect]) -> None:
    """Make these calls; from within such a call, a little later. Ctrl-C is raised again when all of them were made."""
    queue: deque[Effect] | None = getattr(_own, "queue", None)
    if queue is not None:
        queue.extend(effects)
        return
    queue = _own.queue = deque(effects)
    interrupt: BaseException | None = None
    try:
        while queue:
            try:
                queue.popleft()()
            except Exception:
                report_exception()
            except BaseException as error:
                interrupt = error
    finally:
        _own.queue = None
    if interrupt is not None:
        raise interrupt
