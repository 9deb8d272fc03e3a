"""The service's background threads: each makes a call again and again, and logs its errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from bootseer.errors import BootseerError
from bootseer.logs import logger

_LOG = logger(__name__)
_RETRY_S: Final = 1.0


class Repeated:
    """A thread that makes a call at intervals, and when it is woken. No error ends it; the same one is logged once."""

    def __init__(
        self,
        name: str,
        call: Callable[[], object],
        every_s: float,
        *,
        first_s: float = 0.0,
        pace: float = 0.0,
        retry_s: float = _RETRY_S,
        once_more: bool = False,
    ) -> None:
        """first_s: time before the first call.
        pace: a pause is at least this multiple of the call's duration.
        retry_s: minimum pause after an error.
        once_more: make the call a last time at the end.
        """
        self.ended = threading.Event()
        self._name, self._call, self._every_s, self._first_s = name, call, every_s, first_s
        self._pace, self._retry_s, self._once_more = pace, retry_s, once_more
        self._woken = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"bootseer-{name}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def wake(self) -> None:
        self._woken.set()

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread, and wait for the call in progress, at most for `timeout_s`."""
        self.ended.set()
        self._woken.set()
        if self.thread.ident is not None:  # it was started
            self.thread.join(timeout_s)

    def _run(self) -> None:
        pause_s, problem, is_last = self._first_s, "", False
        while not is_last:
            self._woken.wait(pause_s)
            self._woken.clear()
            is_last = self.ended.is_set()
            if is_last and not self._once_more:
                return
            began_s = time.monotonic()
            try:
                self._call()
                problem = ""
            except Exception as error:
                if repr(error) != problem:
                    _LOG.warning("%s: %s", self._name, error, exc_info=not isinstance(error, BootseerError))
                problem = repr(error)  # some have no text
                self.ended.wait(self._retry_s)
            pause_s = max(self._every_s, self._pace * (time.monotonic() - began_s))
