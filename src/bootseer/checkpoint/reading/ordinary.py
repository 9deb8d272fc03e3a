"""Ordinary files: read as they lie in the place, in pieces that several disks bring at once.

The blocks of an ordinary file lie one after the other, each on disks of its own; the place tells which. Reads of
different blocks are different lanes, so that a large read keeps all of their disks busy. What is right or wrong is for
the place's own checksums to say. Made by `reading`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from bootseer.checkpoint.places.place import OpenFile, Outcome, Ticket
from bootseer.checkpoint.reading.facts import Facts
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.checkpoint.reading.source import Job, Want, failure


class Ordinary:
    """A `Source` over one open file. Takes it over."""

    whole_units = False
    num_lanes = 0

    def __init__(self, file: OpenFile, settings: ReadingSettings, facts: Facts) -> None:
        self.size_bytes = file.size_bytes
        self.version = file.version
        self.unit_bytes = self.row_bytes = settings.unit_bytes
        self.max_ahead_bytes = settings.ahead_ordinary_bytes
        self._file = file
        self._settings = settings
        self._facts = facts

    def prepare(self) -> None:
        """See `Source.prepare`."""

    def is_local(self, start: int) -> bool:
        """See `Source.is_local`: without digests, nothing can be kept safely."""
        return False

    def read_local(self, start: int, into: memoryview) -> bool:
        """See `Source.read_local`."""
        return False

    def jobs(self, wants: Sequence[Want]) -> list[Job]:
        """See `Source.jobs`."""
        return [_Piece(self._file, want, self._settings.deadline_s, self._facts) for want in wants]

    def close(self) -> None:
        """See `Source.close`."""
        self._file.close()


class _Piece:
    """A `Job`: one range of the file."""

    __slots__ = ("_cancelled", "_deadline_s", "_facts", "_file", "_ticket", "_want", "lane", "num_bytes")

    def __init__(self, file: OpenFile, want: Want, deadline_s: float, facts: Facts) -> None:
        self.lane: Hashable = frozenset(file.nodes(want.start))
        self.num_bytes = len(want.into)
        self._file = file
        self._want = want
        self._deadline_s = deadline_s
        self._facts = facts
        self._cancelled = False
        self._ticket: Ticket | None = None

    def start(self, *, urgent: bool) -> None:
        """See `Job.start`."""
        want = self._want
        try:
            ticket = self._file.read_into(
                want.start, want.into, self._arrived, urgent=urgent, deadline_s=self._deadline_s, here=want.here
            )
        except BaseException as error:
            want.done(failure(error, f"bytes {want.start} to {want.start + self.num_bytes}"))
            if not isinstance(error, Exception):
                raise
            return
        self._ticket = ticket
        if self._cancelled:
            ticket.cancel()

    def hurry(self) -> None:
        """See `Job.hurry`."""
        if self._ticket is not None:
            self._ticket.hurry()

    def cancel(self) -> None:
        """See `Job.cancel`."""
        self._cancelled = True
        if self._ticket is not None:
            self._ticket.cancel()

    def _arrived(self, outcome: Outcome) -> None:
        if outcome.error is None:
            self._facts.add("chunks")
            self._facts.add("place_bytes", self.num_bytes)
        self._want.done(outcome.error)
