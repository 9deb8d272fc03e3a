"""Deadlines for libraries that have none: their calls run in threads that are left behind when time is over.

hdfs-native waits for a hung NameNode for ever, and retries a dead one for minutes; obstore's timeouts are fixed when
its client is made. Both release the GIL while they wait, so that a thread is all it takes.

A thread that is left behind ends with the call that it waits for. Their number is bounded: when too many hang, new
calls fail at once, which is what they would do later.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from bootseer.errors import TransientError
from bootseer.io.executor import Executor

T = TypeVar("T")

_MAX_THREADS = 256
_AHEAD = 4
"""Pieces that are read ahead of the consumer: enough to overlap both, too few to matter for memory."""
_threads = Executor("bootseer-store", _MAX_THREADS)


def within(timeout_s: float, label: str, call: Callable[[], T]) -> T:
    """What `call` returns, or a `TransientError` when it has not returned in time. Its own errors are passed on."""
    with contextlib.closing(stream_within(timeout_s, label, lambda: [call()])) as results:
        return next(results)


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect over TCP. Raises `OSError`, or `TransientError` if the name is not resolved in time, which has no timeout
    of its own."""
    until_s = time.monotonic() + timeout_s
    found = within(timeout_s, host, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    failed = OSError(errno.EADDRNOTAVAIL, "the name has no address")
    for number, (*_, address) in enumerate(found):
        # Each gets its share: the first may be of a network that only drops packets, as IPv6 often is.
        share_s = (until_s - time.monotonic()) / (len(found) - number)
        try:
            return socket.create_connection((str(address[0]), port), timeout=max(share_s, 0.001))
        except OSError as error:
            failed = error
    raise failed


def stream_within(
    timeout_s: float, label: str, produce: Callable[[], Iterable[T]], *, each: bool = False
) -> Generator[T, None, None]:
    """What `produce` yields, or a `TransientError` when it has not come to its end in time.

    `each`: the time is for each item; what goes on coming may go on for any time.
    The producer works ahead of the consumer by a few items, and stops soon after the consumer has closed this.
    """
    items: queue.Queue[tuple[T] | Exception | None] = queue.Queue(_AHEAD)
    """Items in tuples; then None at the end, or the error that ended it."""
    stopped = threading.Event()

    def run() -> None:
        try:
            for item in produce():
                items.put((item,))
                if stopped.is_set():
                    return
            items.put(None)
        except BaseException as error:
            # Panics of Rust code are not Exceptions, and callers would end with a traceback.
            items.put(error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}"))

    until = time.monotonic() + timeout_s
    try:
        _threads.submit(run, at_once=True)
    except TransientError as error:
        raise TransientError(f"{label}: {error}") from None
    try:
        while True:
            try:
                # Looked at even when time is over: what has arrived has arrived in time.
                item = items.get(timeout=max(until - time.monotonic(), 0.0))
            except queue.Empty:
                raise TransientError(f"{label}: no complete answer within {timeout_s:.1f} s") from None
            if isinstance(item, Exception):
                raise item
            if item is None:
                return
            yield item[0]
            if each:
                until = time.monotonic() + timeout_s
    finally:
        stopped.set()
        with contextlib.suppress(queue.Empty):  # makes room for the item that the producer may be about to put
            while True:
                items.get_nowait()
