"""State renewed in the child of a fork, in one list for the whole program.

`fork` copies only the calling thread: in the child, pools have no threads, and a lock held by another thread is never
released. Objects used in both processes register here a method that renews their locks and state.

The methods run in the order of registration, before other code in the child, so that lower layers are renewed first.
Errors are reported and do not stop the others.
"""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Callable
from types import MethodType

_calls: dict[int, Callable[[], Callable[[], None] | None]] = {}
"""Without a lock, which could itself be held at a fork: each change is a single operation on the dictionary."""
_numbers = itertools.count()


def after_fork(call: Callable[[], None]) -> None:
    """Call `call` in every child forked by this process. A method does not keep its object alive."""
    number = next(_numbers)
    if isinstance(call, MethodType):
        # Not `WeakMethod`: its callback fails if an object is collected together with its class.
        owner = weakref.ref(call.__self__, lambda _, calls=_calls: calls.pop(number, None))  # type: ignore[misc]
        name = call.__name__
        _calls[number] = lambda: None if (found := owner()) is None else getattr(found, name)
    else:
        _calls[number] = lambda: call


def in_each_process(begin: Callable[[], None]) -> None:
    """Call `begin` now and in every child forked by this process."""
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
