"""How fast one origin may be asked, learned from its answers.

Requests at once grow by one per round of successes and halve on a failure (additive increase, multiplicative
decrease). What prefetch has in flight follows the measured throughput, so that a reader's request on a thin line is
not stuck behind seconds of prefetch. Retry-After holds for everybody; after failures prefetch alone pauses, longer
each time. One `Pace` per origin, kept by `schedule`. Decides and touches nothing.
"""

from __future__ import annotations

from collections import deque

from bootseer.errors import BootseerError, TransientError
from bootseer.fetch.settings import FetchSettings

_RECENT = 64
# Fewer samples say nothing about the slowest tenth.
_MIN_SAMPLES = 8
_MAX_WINDOW_S = 1.0
_NEVER = float("-inf")


class Pace:
    """What is known about an origin's speed. Times are seconds of any one clock."""

    def __init__(self, settings: FetchSettings) -> None:
        self._settings = settings
        self._limit = float(settings.first_requests)
        self._cut_at = _NEVER
        self._failures = 0
        self._latencies: deque[float] = deque(maxlen=_RECENT)
        self._fastest_s = 0.0
        self._rate = 0.0
        self._mark = _NEVER
        self._bytes = 0
        self.paused_until = _NEVER
        """The origin said when to come back: nobody asks before."""
        self.prefetch_after = _NEVER
        """Prefetch keeps away until then."""
        self._down_until = _NEVER
        self.error: BootseerError | None = None
        """Why the latest request failed, if nothing has come since."""

    @property
    def limit(self) -> int:
        """Prefetch requests at once."""
        return int(self._limit)

    @property
    def rate(self) -> float:
        """Measured throughput, bytes per second; 0 when unknown."""
        return self._rate

    def launched(self, num_running: int, now: float) -> None:
        """A request begins; `num_running` others run already. Idle time is no time of low throughput."""
        if num_running == 0:
            self._mark, self._bytes = now, 0

    def arrived(self, num_bytes: int, now: float) -> None:
        """Bytes of a running request arrived."""
        self._down_until, self.error = _NEVER, None
        self._bytes += num_bytes
        passed = now - self._mark
        if passed >= self._settings.window_s:
            rate = self._bytes / passed
            # Believes more at once and less slowly: readers that ask for little do not make a line thin.
            self._rate = rate if rate > self._rate else 0.8 * self._rate + 0.2 * rate
            self._mark, self._bytes = now, 0

    def first_block(self, latency_s: float) -> None:
        """A request's first block was here after `latency_s`."""
        self._fastest_s = min(self._fastest_s, latency_s) if self._latencies else latency_s
        self._latencies.append(latency_s)

    def succeeded(self, num_running: int) -> None:
        """A request ended well while `num_running` ran, itself included."""
        self._failures = 0
        self._down_until, self.error = _NEVER, None
        self.prefetch_after = _NEVER
        if num_running >= self.limit:
            self._limit = min(self._limit + 1 / self._limit, float(self._settings.max_requests))

    def failed(self, error: BootseerError, started: float, now: float, jitter: float) -> None:
        """A request that began at `started` ended with an error; `jitter` is a random number from 0 to 1."""
        self.error = error
        if self.is_down(now):
            self.gave_up(now)
        if isinstance(error, TransientError) and error.retry_after_s is not None:
            # Not all nodes at the same moment; never earlier than asked.
            wait = min(max(error.retry_after_s, 0.0), self._settings.max_retry_after_s)
            self.paused_until = max(self.paused_until, now + wait * (1 + 0.1 * jitter))
        if started < self._cut_at:
            return  # it belongs to the trouble that the last cut was the answer to
        self._cut_at = now
        self._limit = max(self._limit / 2, 1.0)
        self._failures += 1
        pause = min(self._settings.backoff_s * 2 ** min(self._failures, 20), self._settings.max_pause_s)
        self.prefetch_after = now + pause * (0.5 + 0.5 * jitter)

    def gave_up(self, now: float) -> None:
        """A reader has waited in vain for as long as readers wait."""
        if self.error is not None:
            self._down_until = now + self._settings.deadline_s

    def is_down(self, now: float) -> bool:
        """Whether a reader has waited in vain, and all requests since have failed, the last one lately."""
        return now < self._down_until

    def window_bytes(self) -> int:
        """What prefetch may have in flight."""
        most = self._settings.inflight_bytes - self._settings.reserved_bytes
        # By the fastest answer, not by the usual one: that one grows with the window, and the window would with it.
        wait_s = max(self._settings.window_s, min(2 * self._fastest_s, _MAX_WINDOW_S))
        return min(max(int(self._rate * wait_s), self._settings.min_window_bytes), most)

    def hedge_after_s(self) -> float:
        """How long a reader's block may take before it is asked for a second time."""
        return max(self._settings.hedge_s, self._settings.hedge_factor * self._quantile())

    def _quantile(self) -> float:
        """What 9 of 10 recent requests took to their first block."""
        if len(self._latencies) < _MIN_SAMPLES:
            return 0.0
        return sorted(self._latencies)[int(0.9 * (len(self._latencies) - 1))]
