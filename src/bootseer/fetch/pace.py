"""How fast and how reliable an origin is, learned from its responses, and what follows for the next requests.

Decides and touches nothing.
"""

from __future__ import annotations

from collections import deque

from bootseer.errors import BootseerError, TransientError
from bootseer.fetch.fetch_settings import FetchSettings

_RECENT = 64
# Fewer samples give no 90th percentile.
_MIN_SAMPLES = 8
_MAX_WINDOW_S = 1.0
# The weight of what a reader's request brought falls by this factor with each later block.
_DECAY = 0.9
# With less than this part of `first_ahead_bytes` measured, the rate is unknown.
_LITTLE = 1 / 64
_MIN_S = 1e-6
_NEVER = float("-inf")


class Pace:
    """The congestion control and health of one origin, learned from its responses. Times are seconds of one clock.

    The number of concurrent requests grows by one per round of successes and halves on a failure (AIMD). The prefetch
    window follows the measured throughput, so that a reader's request on a slow link does not wait behind seconds of
    prefetch. Retry-After applies to all requests; other failures pause prefetch only, with exponential backoff.
    """

    def __init__(self, settings: FetchSettings) -> None:
        self._settings = settings
        self._limit = float(settings.first_requests)
        self._cut_at = _NEVER
        self._failures = 0
        self._latencies: deque[float] = deque(maxlen=_RECENT)
        self._fastest_s = 0.0
        self.rate = 0.0
        """Measured throughput in bytes per second; 0 if unknown."""
        self._mark = _NEVER
        self._bytes = 0
        self._next_bytes = self._next_s = 0.0
        """What readers' requests brought after their first block, and in what time; older ones count less."""
        self.paused_until = _NEVER
        """From a Retry-After: the origin gets no requests before."""
        self.prefetch_after = _NEVER
        """The origin gets no prefetch requests before."""
        self._down_until = _NEVER
        self.error: BootseerError | None = None
        """The error of the latest request, if nothing has arrived since."""

    @property
    def limit(self) -> int:
        return int(self._limit)

    def request_started(self, num_running: int, now: float) -> None:
        """`num_running` others run already. Idle time does not count as low throughput."""
        if num_running == 0:
            self._mark, self._bytes = now, 0

    def arrived(self, num_bytes: int, now: float) -> None:
        """Bytes of a running request arrived."""
        self._down_until, self.error = _NEVER, None
        self._bytes += num_bytes
        passed = now - self._mark
        if passed >= self._settings.window_s:
            rate = self._bytes / passed
            # Rises at once and falls slowly: readers that request little do not make a link slow.
            self.rate = rate if rate > self.rate else 0.8 * self.rate + 0.2 * rate
            self._mark, self._bytes = now, 0

    def first_block(self, latency_s: float) -> None:
        """The first block of a request arrived after `latency_s`."""
        self._fastest_s = min(self._fastest_s, latency_s) if self._latencies else latency_s
        self._latencies.append(latency_s)
        # After one slow moment all later requests would be for one block, and these measure nothing: it is forgotten.
        self._next_bytes *= _DECAY
        self._next_s *= _DECAY

    def next_block(self, num_bytes: int, after_s: float) -> None:
        """Another block of a reader's request arrived, `after_s` later than the one before."""
        self._next_bytes = _DECAY * self._next_bytes + num_bytes
        self._next_s = _DECAY * self._next_s + after_s

    def ahead_bytes(self) -> int:
        """How much a reader's request reads ahead."""
        if self._next_bytes <= _LITTLE * self._settings.first_ahead_bytes:
            return self._settings.first_ahead_bytes
        rate = self._next_bytes / max(self._next_s, _MIN_S)
        return int(min(rate * self._settings.ahead_s, self._settings.max_ahead_bytes))

    def succeeded(self, num_running: int) -> None:
        """A request succeeded; `num_running` includes it."""
        self._failures = 0
        self._down_until, self.error = _NEVER, None
        self.prefetch_after = _NEVER
        if num_running >= self.limit:
            self._limit = min(self._limit + 1 / self._limit, float(self._settings.max_requests))

    def failed(self, error: BootseerError, started: float, now: float, jitter: float) -> None:
        """A request started at `started` failed; `jitter` is random, 0 to 1."""
        self.error = error
        if self.is_down(now):
            self.reader_timed_out(now)
        if isinstance(error, TransientError) and error.retry_after_s is not None:
            # Jitter against simultaneous retries of all nodes, but never earlier than requested.
            wait = min(max(error.retry_after_s, 0.0), self._settings.max_retry_after_s)
            self.paused_until = max(self.paused_until, now + wait * (1 + 0.1 * jitter))
        if started < self._cut_at:
            return  # it started before the last cut, which already was the reaction to this problem
        self._cut_at = now
        self._limit = max(self._limit / 2, 1.0)
        self._failures += 1
        pause = min(self._settings.backoff_s * 2 ** min(self._failures, 20), self._settings.max_pause_s)
        self.prefetch_after = now + pause * (0.5 + 0.5 * jitter)

    def reader_timed_out(self, now: float) -> None:
        """A reader reached its deadline without a block of this origin."""
        if self.error is not None:
            self._down_until = now + self._settings.deadline_s

    def is_down(self, now: float) -> bool:
        """Whether a reader reached its deadline, and all requests since have failed, the last one recently."""
        return now < self._down_until

    def window_bytes(self) -> int:
        """The limit of prefetch bytes in flight."""
        max_bytes = self._settings.inflight_bytes - self._settings.reserved_bytes
        # By the fastest response: the usual one grows with the window, and the window would grow with it.
        wait_s = max(self._settings.window_s, min(2 * self._fastest_s, _MAX_WINDOW_S))
        return min(max(int(self.rate * wait_s), self._settings.min_window_bytes), max_bytes)

    def hedge_after_s(self) -> float:
        """How long a reader's block may be in flight before it is hedged."""
        known = sorted(self._latencies) if len(self._latencies) >= _MIN_SAMPLES else [0.0]
        return max(self._settings.hedge_s, self._settings.hedge_factor * known[int(0.9 * (len(known) - 1))])
