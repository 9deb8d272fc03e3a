"""Let signals interrupt the work before a command: pulling an image takes minutes, and Ctrl-C must not wait for it.

`launch.run` blocks signals until there is a command to forward them to. Inside `interruptible`, signals that ask a
process to end raise `Interrupted` instead, so that cleanup runs on the way out.

Cleanup may wait for servers that do not answer. A verb whose leftovers are removed later by another process sets
`grace_s`, the time after which the process exits without finishing its cleanup.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType

from bootseer.errors import Interrupted
from bootseer.launch.supervise import ENDING

_JOIN_S = 0.25


@contextmanager
def interruptible(grace_s: float | None = None, leftovers: str = "") -> Iterator[None]:
    """Raise `Interrupted` in the main thread for a terminating signal; ignored signals stay ignored.

    `grace_s`: exit the process if the block has not ended this long after the first signal, with the message
    `leftovers` about what was not cleaned up; further signals have no effect then. Such a block must not fork.
    """
    is_signalled = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_signalled
        if grace_s is not None and is_signalled:
            return
        is_signalled = True
        raise Interrupted(number, signal.Signals(number).name)

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    before = {number: signal.getsignal(number) for number in ENDING}
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    with nullcontext() if grace_s is None else _exit_after(grace_s, leftovers, ours):
        for number in ours:
            signal.signal(number, interrupt)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ours)
            yield
        finally:
            # Block first, then restore the handlers, so that no signal meets a half-restored state.
            signal.pthread_sigmask(signal.SIG_BLOCK, ours)
            for number in ours:
                signal.signal(number, before[number])
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextmanager
def _exit_after(grace_s: float, leftovers: str, numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Exit the process if the block lasts longer than `grace_s` after one of these signals.

    A thread does this, told of the signal by Python's wake-up descriptor, because the main thread may be where Python
    runs no handlers: in a library call, or waiting for a lock.
    """
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(write_end, False)
    has_ended = threading.Event()

    def watch() -> None:
        number = 0
        while number not in numbers:
            byte = os.read(read_end, 1)
            if not byte:
                return
            number = byte[0]
        if not has_ended.wait(grace_s):
            with suppress(OSError):  # standard error is closed
                os.write(2, f"\nbootseer: ended while servers did not answer; {leftovers}\n".encode())
            os._exit(128 + number)

    watcher = threading.Thread(target=watch, name="bootseer-patience", daemon=True)
    watcher.start()
    previous = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield
    finally:
        has_ended.set()
        signal.set_wakeup_fd(previous)
        os.close(write_end)
        watcher.join(_JOIN_S)
        if not watcher.is_alive():  # otherwise it is just exiting the process
            os.close(read_end)
