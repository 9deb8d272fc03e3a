"""Read-ahead: predicts from the reads of one file which bytes will be read next.

Several readers may go through one file at once: threads, processes that share a descriptor, eight ranks behind one
mount. So reads are grouped by their offsets, not by file handles: each sequential *stream* has a position, and a read
belongs to the nearest stream. Around that position reads may arrive out of order, as the kernel sends them, and may
skip a little. A stream earns its window: it doubles while the stream continues, and starts over when less than half of
the bytes passed were read. Reads outside of any stream cause no read-ahead.

Decides and touches nothing. Not safe for threads.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

_MIB = 1 << 20
_DISORDER = 4
"""So many requests of a stream may be in flight at once, and arrive in any order."""
_MIN_SLACK = 64 << 10


class ReadAheadSettings(Struct, frozen=True):
    """How far reads may be from a stream's position, and how much is read ahead. All in bytes."""

    first_bytes: int = 2 * _MIB
    """The first window of a stream: little is lost if it ends there, as after the read of a header."""
    max_bytes: int = 64 * _MIB
    """The largest window: 0.1 s of a 5 Gbit/s link, more than is ever in flight. Files with large blocks on alternating
    disks need more."""
    forward_bytes: int = 16 * _MIB
    """A read up to so far ahead of a stream belongs to it."""
    backward_bytes: int = 4 * _MIB
    """A read up to so far behind a stream belongs to it: the kernel has a few requests of 1 MiB in flight."""
    max_streams: int = 64
    """Per file; the least recently used one is dropped."""


class Advice(NamedTuple):
    """What to do after a read."""

    sequential: bool
    """Whether the bytes around this read will probably be read too."""
    start: int
    end: int
    """The range to read ahead; empty if both are equal."""
    stream: int
    """To be passed to `refused`."""


class _Stream(Struct, eq=False):
    """A sequential reader. `reached` is the end of what it has read."""

    reached: int
    asked: int
    window: int
    used: int
    proven: bool
    origin: int
    read: int

    def restart(self, offset: int, length: int) -> None:
        """Start measuring from here."""
        self.origin = offset
        self.read = length


class ReadAhead:
    """The streams of one file."""

    def __init__(self, size_bytes: int, settings: ReadAheadSettings | None = None, *, row_bytes: int = 1) -> None:
        """`row_bytes`: windows end at multiples of it, so that rows are read as a whole."""
        self._size = size_bytes
        self._settings = settings or ReadAheadSettings()
        self._row = row_bytes
        self._streams: dict[int, _Stream] = {}
        self._num_made = 0
        self._num_reads = 0

    @property
    def num_streams(self) -> int:
        return sum(stream.proven for stream in self._streams.values())

    def on_read(self, offset: int, length: int, limit_bytes: int) -> Advice:
        """Note a read inside the file. `limit_bytes`: current read-ahead limit of one stream."""
        self._num_reads += 1
        end = offset + length
        number = self._nearest(offset)
        if number is None:
            # A reader that starts at 0 reads a header or everything. Elsewhere, one read proves nothing.
            number = self._begin(offset, end, proven=offset == 0)
        else:
            self._follow(self._streams[number], offset, end)
        stream = self._streams[number]
        stream.used = self._num_reads
        if not stream.proven:
            return Advice(False, end, end, number)
        start, stop = self._wanted(stream, min(stream.window, limit_bytes))
        return Advice(True, start, stop, number)

    def refused(self, advice: Advice, start: int) -> None:
        """The range of an advice was not read from `start` on, for lack of memory: it is advised again."""
        stream = self._streams.get(advice.stream)
        if stream is not None:
            stream.asked = min(stream.asked, start)

    def _nearest(self, offset: int) -> int | None:
        settings = self._settings
        distances = {number: offset - stream.reached for number, stream in self._streams.items()}
        near = [
            number for number, ahead in distances.items() if -settings.backward_bytes <= ahead <= settings.forward_bytes
        ]
        return min(near, key=lambda number: abs(distances[number]), default=None)

    def _begin(self, offset: int, end: int, *, proven: bool) -> int:
        if len(self._streams) >= self._settings.max_streams:
            del self._streams[min(self._streams, key=lambda number: self._streams[number].used)]
        self._num_made += 1
        first_bytes = self._settings.first_bytes
        self._streams[self._num_made] = _Stream(end, end, first_bytes, self._num_reads, proven, offset, end - offset)
        return self._num_made

    def _follow(self, stream: _Stream, offset: int, end: int) -> None:
        length = end - offset
        slack = max(_DISORDER * length, _MIN_SLACK)
        distance = abs(stream.reached - offset)
        stream.reached = max(stream.reached, end)
        stream.asked = max(stream.asked, stream.reached)
        stream.read += length
        passed = stream.reached - stream.origin
        if stream.read * 2 + slack < passed:
            # The reader skips: what was read ahead is useless, and its next position is unknown.
            stream.proven = False
            stream.window = self._settings.first_bytes
            stream.asked = stream.reached
            stream.restart(offset, length)
            return
        stream.proven = stream.proven or distance <= slack
        if passed >= stream.window:
            stream.window = min(stream.window * 2, self._settings.max_bytes)
            stream.restart(stream.reached, 0)

    def _wanted(self, stream: _Stream, window: int) -> tuple[int, int]:
        """The next range to read ahead: at least half a window: few large requests cost less than many small ones."""
        if window <= 0:
            return 0, 0
        goal = min(-(-(stream.reached + window) // self._row) * self._row, self._size)
        missing = goal - stream.asked
        if missing <= 0 or (missing * 2 < window and goal < self._size):
            return 0, 0
        start, stream.asked = stream.asked, goal
        return start, goal
