"""Let signals interrupt the work before a command: pulling an image takes minutes, and Ctrl-C must not wait for it.

`launch.run` blocks signals until there is a command to forward them to. Inside `interruptible`, signals that ask a
process to end raise `Interrupted` instead, so that cleanup runs on the way out.

Cleanup may wait for servers that do not answer. If leftovers of a verb are removed later by another process, a second
Ctrl-C ends it at once. Other signals do not: `timeout` sends each twice.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from bootseer.errors import Interrupted
from bootseer.launch.supervise import ENDING, say


@contextmanager
def interruptible(*, once: bool = False) -> Iterator[None]:
    """Raise `Interrupted` in the main thread for a terminating signal; ignored signals stay ignored.

    `once`: of further signals, only SIGINT has an effect, its default action.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if once:
            for each in ours:
                signal.signal(each, signal.SIG_DFL if each == signal.SIGINT else signal.SIG_IGN)
            say("interrupted: cleaning up; Ctrl-C ends it at once")
        raise Interrupted(number, signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in ENDING}
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ours)
    for number in ours:
        signal.signal(number, interrupt)
    if once and signal.SIGINT in ours:
        _reset_when_caught(signal.SIGINT)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ours)
        yield
    finally:
        # Block first, then restore the handlers, so that no signal meets a half-restored state.
        signal.pthread_sigmask(signal.SIG_BLOCK, ours)
        for number in ours:
            signal.signal(number, before[number])
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _reset_when_caught(number: int) -> None:
    """Have the kernel restore a signal's default action when it is caught, as Python may run the handler much later: if
    the main thread is in a library's call. The signal must be blocked."""
    import ctypes  # not in front of a command

    from bootseer.fuse.syscalls import libc

    with suppress(AttributeError):  # another C library than glibc
        set_handler = libc.sysv_signal
        set_handler.restype, set_handler.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
        set_handler(number, set_handler(number, None))
