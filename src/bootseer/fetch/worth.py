"""Is this hot set worth its bandwidth? Judged by how many of the readers' needs it covers.

A hot set recorded from another workload is worse than none: it takes bandwidth and processor time from the readers.
So a set starts on probation, with little in flight; each need that it covers doubles that, each need that it does not
cover halves it. Far more hits than misses: full speed. More misses than hits: suspended, until the latest needs
speak for it again. Several misses in a row put it back on probation, however well it did before. Called by
`schedule`. Decides and touches nothing.
"""

from __future__ import annotations

from collections import deque

from bootseer.fetch.settings import FetchSettings


class Worth:
    """The judgement on one hot set."""

    def __init__(self, settings: FetchSettings) -> None:
        self._settings = settings
        self._latest: deque[bool] = deque(maxlen=settings.judged_window)
        self._score = 0
        self._missed_in_row = 0
        self.needs = 0
        """Blocks that readers needed since there is a hot set."""
        self.covered = 0
        """Those of them that are in the hot set."""
        self.suspended = False
        self.suspensions = 0

    def needed(self, covered: bool) -> None:
        """A reader needed a block for the first time; `covered`: the hot set has it."""
        self.needs += 1
        self.covered += covered
        self._missed_in_row = 0 if covered else self._missed_in_row + 1
        if self._missed_in_row >= self._settings.parted_needs and self._score > 0:
            # The workload has left the path of the record: what it needed before says nothing about what comes.
            self._latest.clear()
            self._score = 0
        if len(self._latest) == self._settings.judged_window:
            self._score -= 1 if self._latest[0] else -1
        self._latest.append(covered)
        self._score += 1 if covered else -1
        if self._score >= self._settings.trust_score:
            self.suspended = False
        elif not self.suspended and (
            self._score <= self._settings.suspend_score
            or (len(self._latest) >= self._settings.judged_needs and self._score < 0)
        ):
            self.suspended = True
            self.suspensions += 1

    @property
    def proven(self) -> bool:
        """Whether the set may use all the bandwidth that readers leave."""
        return self._score >= self._settings.trust_score

    def allowance(self, window_bytes: int) -> int:
        """How much of a full window the set may have in flight."""
        if self.suspended:
            return 0
        if self.proven:
            return window_bytes
        first = self._settings.min_window_bytes
        return min(window_bytes, first << self._score if self._score >= 0 else first >> -self._score)
