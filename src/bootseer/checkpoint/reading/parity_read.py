"""The parity of one row, on its way from its part into memory of its own. Made by `row`.

Nothing says whether its bytes are right: what is computed from them has a digest.
"""

from __future__ import annotations

from collections.abc import Callable

from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.checkpoint.places.place import OpenFile, Outcome, Ticket
from bootseer.checkpoint.reading.instead import is_late
from bootseer.checkpoint.reading.means import Means
from bootseer.checkpoint.reading.segments import OpenSegment
from bootseer.checkpoint.reading.source import failure
from bootseer.errors import BootseerError


class ParityRead:
    """One read. `ended` is called once after `start`, from any thread; then `error` or `data` holds."""

    def __init__(self, means: Means, segment: OpenSegment, first_chunk: int, ended: Callable[[], None]) -> None:
        """`first_chunk`: of the row; none is longer."""
        self.data = memoryview(bytearray(segment.index.length(first_chunk - segment.first_chunk)))
        self.error: BootseerError | None = None
        self._means = means
        self._ended = ended
        self._part, self._offset = segment.parity_of(first_chunk)
        self._expected_s = self._part.delay_s(self._offset, CHUNK_BYTES)
        self._since_s = means.timer.now_s()
        self._cancelled = self._is_over = False
        self._ticket: Ticket | None = None

    def start(self) -> None:
        """Begin."""
        try:
            self._part.then(self._opened)
        except BaseException as error:
            self._end(failure(error, self._part.path))
            if not isinstance(error, Exception):
                raise

    def cancel(self) -> None:
        """It is of no use any more; it still ends."""
        self._cancelled = True
        if (ticket := self._ticket) is not None:
            ticket.cancel()

    def is_late(self, now: float) -> bool:
        """Whether it has taken too long by `now`."""
        return is_late(now - self._since_s, self._expected_s, self._means.settings)

    def left_s(self) -> float:
        """Seconds until it will be here, by estimate; 0 where nobody knows."""
        ticket = self._ticket
        return 0.0 if ticket is None else ticket.left_s()

    def _opened(self, file: OpenFile | None, problem: BootseerError | None) -> None:
        if file is None:
            self._end(problem)
            return
        try:
            ticket = file.read_into(
                self._offset, self.data, self._arrived, check=False, deadline_s=self._means.settings.deadline_s
            )
        except BaseException as error:
            self._end(failure(error, self._part.path))
            if not isinstance(error, Exception):
                raise
            return
        self._ticket = ticket
        if self._cancelled:
            ticket.cancel()

    def _arrived(self, outcome: Outcome) -> None:
        if outcome.error is None:
            self._means.facts.add("place_bytes", len(self.data))
        self._end(outcome.error)

    def _end(self, error: BootseerError | None) -> None:
        if not self._is_over:
            self._is_over = True
            self.error = error
            self._ended()
