"""Work in front of a command that signals may end: pulling an image takes minutes, and Ctrl-C must not wait for it.

`launch.run` holds signals back until there is a command to pass them on to. While `interruptible` lasts, those that ask
a process to end raise `Interrupted` instead, so that what was begun is undone on the way out.

What undoes things may wait for servers that do not answer, whereas a user who presses Ctrl-C does not: a verb whose
leftovers others clear away says how long it may take (`patience_s`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType

from bootseer.errors import Interrupted
from bootseer.launch.supervise import ENDING

_NUDGE_S = 0.25


@contextmanager
def interruptible(patience_s: float | None = None, rests: str = "") -> Iterator[None]:
    """Raise `Interrupted` in the main thread for a signal that asks us to end; what is ignored stays ignored.

    `patience_s`: the process ends when the block has not ended so long after the first signal, and says `rests`: what
    becomes of what was not undone. Further signals do not hurry it then. Such a block must not fork.
    """
    event = threading.Event()
    telling = threading.RLock()  # this handler may interrupt itself
    """Held while the main thread is told again: it may be outside of the block, without our handlers, right after it
    has heard."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if patience_s is not None and event.is_set():
            return
        with telling:
            event.set()
        raise Interrupted(number, signal.Signals(number).name)

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    before = {number: signal.getsignal(number) for number in ENDING}
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    with nullcontext() if patience_s is None else _ended_after(patience_s, rests, ours, event, telling):
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


@contextmanager
def _ended_after(
    patience_s: float, rests: str, numbers: Sequence[signal.Signals], event: threading.Event, telling: threading.RLock
) -> Iterator[None]:
    """End the process when the block lasts so long after one of these signals.

    A thread does it. The main thread may be where Python's handlers do not run: in a library, or in a lock that it
    began to wait for just after the signal, which does not wake it then. The next one does, so it is sent one.
    """
    heard_of, tell = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(tell, False)
    ended = threading.Event()

    def watch() -> None:
        number = 0
        while number not in numbers:
            byte = os.read(heard_of, 1)
            if not byte:
                return
            number = byte[0]
        until_s = time.monotonic() + patience_s
        while not ended.wait(min(_NUDGE_S, max(until_s - time.monotonic(), 0))):
            if time.monotonic() >= until_s:
                with suppress(OSError):  # standard error is closed
                    os.write(2, f"\nbootseer: ended while servers did not answer; {rests}\n".encode())
                os._exit(128 + number)
            with telling:
                if not event.is_set():
                    signal.pthread_kill(main, number)

    main = threading.get_ident()
    watching = threading.Thread(target=watch, name="bootseer-patience", daemon=True)
    watching.start()
    previous = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(previous)
        os.close(tell)
        watching.join(_NUDGE_S)
        if not watching.is_alive():  # otherwise it ends the process just now
            os.close(heard_of)
