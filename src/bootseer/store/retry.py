"""When to try again, for small requests that a user waits for: indexes, documents, hot sets.

Bulk reads have their own rules (`fetch.schedule`). A retry storm hurts the place that is already in trouble, so that
waits are random, grow, and are never shorter than what the other side asked for.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

from bootseer.errors import CorruptError, PermanentError, TransientError
from bootseer.logs import logger
from bootseer.store.store import Store, is_content_name

_LOG = logger(__name__)
T = TypeVar("T")

BASE_S = 0.1
"""The first wait is random between 0 and this, the next between 0 and twice this, and so on."""
CAP_S = 10.0


def retrying(
    call: Callable[[float], T],
    *,
    attempts: int = 5,
    deadline_s: float = 60.0,
    rng: random.Random | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """What `call` returns, tried again after each `TransientError`.

    `call` gets the seconds that are left of `deadline_s` and must keep to them. The last error is raised when all
    attempts failed, or when the next one could not begin before the deadline.
    """
    rng = rng or random.Random()  # noqa: S311 - spreads requests, keeps no secret
    until = clock() + deadline_s
    attempt = 0
    while True:
        attempt += 1
        try:
            return call(max(until - clock(), 0.0))
        except TransientError as error:
            wait_s = rng.uniform(0, min(BASE_S * 2 ** (attempt - 1), CAP_S))
            if error.retry_after_s is not None:
                # All clients were told the same time: come a little later, each at another moment.
                wait_s += error.retry_after_s
            if attempt >= attempts or clock() + wait_s >= until:
                raise
            _LOG.info("attempt %d of %d failed, the next one in %.1f s: %s", attempt, attempts, wait_s, error)
            sleep(wait_s)


def read_all(store: Store, name: str, max_bytes: int, timeout_s: float = 60.0) -> bytes:
    """A whole small object, with retries until `timeout_s` is over; content names are verified.

    Raises `PermanentError` when it is larger than `max_bytes`, and `CorruptError` when its bytes are not those of its
    content name.
    """

    def read(left_s: float) -> bytes:
        data = bytearray()
        with closing(store.read(name, timeout_s=left_s)) as pieces:
            for piece in pieces:
                data += piece
                if len(data) > max_bytes:
                    raise PermanentError(f"{store.uri}: {name} is larger than {max_bytes} bytes")
        return bytes(data)

    data = retrying(read, deadline_s=timeout_s)
    if is_content_name(name) and hashlib.sha256(data).hexdigest() != name.removeprefix("sha256:"):
        raise CorruptError(f"{store.uri}: the bytes of {name} are not those of its name")
    return data
