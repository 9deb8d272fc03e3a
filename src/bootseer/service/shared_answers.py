"""Answers to HTTP requests, computed in a few threads and shared between equal requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

_LASTS: Final = 5.0
"""An answer about weeks is reused for this multiple of the time that it took to compute."""
_KEPT: Final = 32
_THREADS: Final = 4
"""More threads would only compete for the interpreter lock, and delay batches."""


@dataclass(slots=True)
class _Asked:
    """An answer that is being computed, or was computed last."""

    lock: asyncio.Lock
    users: int = 0
    began_s: float = float("-inf")
    until_s: float = float("-inf")
    answer: Response | None = None


class Answers:
    """Computes answers in a few threads, and shares them between equal requests.

    A computation that began after a request arrived is as fresh as one of its own, so it serves all equal requests that
    were waiting. Answers about weeks of data are also reused for some time, in proportion to the time they took, which
    bounds the cost of 200 readers on any machine.
    """

    def __init__(self) -> None:
        self._asked: dict[tuple[str, str, str], _Asked] = {}
        self._threads: anyio.CapacityLimiter | None = None

    async def of(self, request: Request, make: Callable[[Request], Response], *, of_weeks: bool = False) -> Response:
        """The result of `make` for the request, or a shared result of an equal request. If it is cancelled, as by a
        deadline, a thread whose database hangs waits on; the number of connections limits that of such threads."""
        arrived_s = time.monotonic()
        self._threads = self._threads or anyio.CapacityLimiter(_THREADS)
        key = (request.url.path, request.url.query, request.state.grant.team)
        asked = self._asked.setdefault(key, _Asked(asyncio.Lock()))
        asked.users += 1
        try:
            async with asked.lock:
                # While this request waited for the lock, another one may have computed an answer that is new enough.
                if asked.answer is None or (asked.began_s < arrived_s and asked.until_s < time.monotonic()):
                    began_s = time.monotonic()
                    asked.answer = await anyio.to_thread.run_sync(
                        make, request, limiter=self._threads, abandon_on_cancel=True
                    )
                    asked.began_s, now_s = began_s, time.monotonic()  # not if an exception ended it
                    # After an error the database may be back at once.
                    lasts = of_weeks and asked.answer.status_code < 500
                    asked.until_s = now_s + _LASTS * (now_s - asked.began_s) if lasts else now_s
                return asked.answer
        finally:
            asked.users -= 1
            self._forget()

    def _forget(self) -> None:
        now_s = time.monotonic()
        over = [key for key, asked in self._asked.items() if not asked.users and asked.until_s <= now_s]
        free = [key for key, asked in self._asked.items() if not asked.users and asked.until_s > now_s]
        for key in (*over, *free[:-_KEPT]):
            del self._asked[key]
