"""Work in front of a command that signals may end: pulling an image takes minutes, and Ctrl-C must not wait for it.

`launch.run` holds signals back until there is a command to pass them on to. While `interruptible` lasts, those that ask
a process to end raise `Interrupted` instead, so that what was begun is undone on the way out.
Called by `launch.image_stage` and `cli.image_mount`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from bootseer.errors import Interrupted

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` in the main thread for a signal that asks us to end; what is ignored stays ignored."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted(number, signal.Signals(number).name)

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    before = {number: signal.getsignal(number) for number in _ENDING}
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ours)
        yield
    finally:
        # First hold back, then put back: a signal in between meets neither half-way.
        signal.pthread_sigmask(signal.SIG_BLOCK, ours)
        for number in ours:
            signal.signal(number, before[number])
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
