"""What is made anew in the child of a fork, in one list for the whole program.

`fork` copies the thread that calls it and no other: in the child, pools have no threads, and a lock that another thread
held is never released. What is to work in both processes registers here a method that makes its locks and its state
anew. The methods run in the order of registration, before anything else runs in the child, so what was made first (the
lower layers) is ready first. One that raises is reported and does not keep the others from running.
"""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Callable
from types import MethodType

_calls: dict[int, Callable[[], Callable[[], None] | None]] = {}
"""Without a lock, which could itself be held at a fork: each change is one operation on the dictionary."""
_numbers = itertools.count()


def after_fork(call: Callable[[], None]) -> None:
    """Have `call` called in every child that this process forks. A method does not keep its object alive."""
    number = next(_numbers)
    if isinstance(call, MethodType):
        # No `WeakMethod`: its own callback fails where an object is collected together with its class.
        owner = weakref.ref(call.__self__, lambda _, calls=_calls: calls.pop(number, None))  # type: ignore[misc]
        name = call.__name__
        _calls[number] = lambda: None if (found := owner()) is None else getattr(found, name)
    else:
        _calls[number] = lambda: call


def in_each_process(begin: Callable[[], None]) -> None:
    """Call `begin` now, and again in every child that this process forks."""
    begin()
    after_fork(begin)


def _in_child() -> None:
    for find in list(_calls.values()):
        if (call := find()) is not None:
            try:
                call()
            except Exception as error:
                sys.excepthook(type(error), error, error.__traceback__)


os.register_at_fork(after_in_child=_in_child)
