"""Work in front of a command that signals may end: pulling an image takes minutes, and Ctrl-C must not wait for it.

`launch.run` holds signals back until there is a command to pass them on to. While `interruptible` lasts, those that ask
a process to end raise `Interrupted` instead, so that what was begun is undone on the way out.
Called by `launch.image_stage` and the verbs of `cli` that take long.

What undoes things may wait for servers that do not answer, whereas who presses Ctrl-C does not: a verb whose rests
others clear away says how long it may take (`patience_s`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from bootseer.errors import Interrupted

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def interruptible(patience_s: float | None = None, rests: str = "") -> Iterator[None]:
    """Raise `Interrupted` in the main thread for a signal that asks us to end; what is ignored stays ignored.

    `patience_s`: the process ends when the block has not ended so long after the signal, and says `rests`: what becomes
    of what was not undone.
    """

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        if patience_s is not None and not signal.getitimer(signal.ITIMER_REAL)[0]:

            def give_up(alarm: int, frame: FrameType | None) -> NoReturn:
                os.write(2, f"\nbootseer: ended while servers did not answer; {rests}\n".encode())
                os._exit(128 + number)

            signal.signal(signal.SIGALRM, give_up)
            signal.setitimer(signal.ITIMER_REAL, patience_s)
        raise Interrupted(number, signal.Signals(number).name)

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    before = {number: signal.getsignal(number) for number in _ENDING}
    alarm = signal.getsignal(signal.SIGALRM)
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ours)
        yield
    finally:
        if patience_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)
        # First hold back, then put back: a signal in between meets neither half-way.
        signal.pthread_sigmask(signal.SIG_BLOCK, ours)
        for number in ours:
            signal.signal(number, before[number])
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
