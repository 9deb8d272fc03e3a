"""One part of a segment on its way: chunks are read, digested and written one by one, and all again after a failure.

Bytes come from the source, which keeps them until the segment has ended; so a part that fails costs its own bytes
once more, and nothing else waits for it. It is written again under a new name: what became of the failed file is not
known, and hdfs-native cannot go on in it. Called by `segment`, one step at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from typing import TYPE_CHECKING

from blake3 import blake3

from bootseer.checkpoint.head import Part
from bootseer.checkpoint.layout import CHUNK_BYTES, row_of
from bootseer.checkpoint.parity import parity_chunk
from bootseer.checkpoint.places.place import PartWriter
from bootseer.errors import BootseerError, TransientError

if TYPE_CHECKING:
    from bootseer.checkpoint.writing.segment import SegmentWriter


class PartTask:
    """A `Stepper`. Its segment's lock guards `queued`; everything else belongs to the step that runs."""

    def __init__(self, segment: SegmentWriter, number: int) -> None:
        self.number = number
        """Of the stripe; the parity comes behind the last one."""
        self.order = (segment.start, number)
        self.row = 0
        """The next one."""
        self.queued = True
        """Whether a step runs or will. A part is not in a queue while it waits for bytes."""
        self.nodes: tuple[str, ...] = ()
        """Where it lies, or will lie."""
        self.is_sent = False
        """Whether its file has all bytes, and is complete or about to be."""
        self.result: Part | None = None
        self._segment = segment
        self._writer: PartWriter | None = None
        self._sha256 = hashlib.sha256()
        self._failures = 0
        self._failing_since_s: float | None = None
        self._rows_sent = 0
        self._write_s = 0.0
        self._has_left = False

    @property
    def is_parity(self) -> bool:
        """Whether it holds the parity of the others."""
        return self.number == self._segment.stripes

    def begin(self, writer: PartWriter) -> None:
        """Write into this file."""
        self._writer, self.nodes = writer, ()
        self._sha256 = hashlib.sha256()
        self.row = 0
        self._write_s = 0.0
        self.is_sent = False

    @property
    def seconds_per_row(self) -> float:
        """How long its node takes for a chunk."""
        return self._write_s / max(self.row, 1)

    def step(self) -> bool:
        """See `Stepper.step`: one chunk."""
        segment = self._segment
        try:
            if segment.is_over:
                self.drop()
                return False
            if self._writer is None:
                self.begin(segment.begin_again(self))
            elif not self._has_left and segment.is_much_slower(self):
                self._has_left = True  # once: the next node may be no better
                raise TransientError(f"{' '.join(self.nodes)}: much slower than the nodes of the other parts")
            if not self._write_row():
                self.is_sent = True
                segment.part_placed()
                # Ending waits for the place; the lane's next part uses the link meanwhile.
                segment.lane.apart(self._finish)
                return False
        except Exception as error:
            return self._failed(error)
        return segment.has_more(self)

    def drop(self) -> None:
        """Remove what was written, if it is not complete."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(BootseerError):
                writer.abort()

    def _write_row(self) -> bool:
        """Write this part's chunk of the next row; False when there is none, because the segment ends before it."""
        segment, writer = self._segment, self._writer
        assert writer is not None  # noqa: S101 - step has begun it
        size_bytes = segment.size_so_far
        chunks = -(-size_bytes // CHUNK_BYTES)
        first = self.row * segment.stripes
        mine = first if self.is_parity else first + self.number
        if mine >= chunks:
            return False
        if self.is_parity:
            pieces = [segment.read(chunk, size_bytes) for chunk in row_of(first, chunks, segment.stripes)]
            data = bytes(parity_chunk(pieces, len(pieces[0])))
        else:
            data = segment.read(mine, size_bytes)
            segment.set_digest(mine, blake3(data).digest())
        self._sha256.update(data)
        began_s = time.monotonic()
        writer.write(data)
        self._write_s += time.monotonic() - began_s
        self.nodes = writer.nodes  # known since the first bytes
        if self.row == 0 and len(self.nodes) == 1:  # with replicas, readers have a choice
            segment.use.add(self.nodes)
        self.row += 1
        if self.row == 1:
            segment.part_placed()
        if not self.is_parity and self.row > self._rows_sent:
            self._rows_sent = self.row
            segment.on_sent(len(data))
        return True

    def _finish(self) -> None:
        """End the file. It may have to be written again: then the part comes back into its lane."""
        segment, writer = self._segment, self._writer
        try:
            if segment.is_over or writer is None or self.row == 0:
                self.drop()
            else:
                size_bytes = segment.part_size(self)
                self.nodes = writer.close()
                name = writer.path.rpartition("/")[2]
                self.result = Part(name, size_bytes, self._sha256.hexdigest(), self.nodes[:64])
                self._writer = None
        except Exception as error:
            if self._failed(error):
                segment.lane.ready(self)
            return
        segment.part_ended()

    def _failed(self, error: Exception) -> bool:
        """Whether to try again."""
        segment = self._segment
        writer, self._writer = self._writer, None
        if writer is not None:
            if isinstance(error, TransientError):  # others are no fault of a node
                segment.sick.add(writer.nodes)
            if self.row and len(self.nodes) == 1:
                segment.use.remove(self.nodes)
            # A dead node may hold this for seconds.
            segment.lane.apart(lambda: _abort(writer))
        self._failures += 1
        now_s = time.monotonic()
        if self.row or self._failing_since_s is None:  # a try that came as far as a node is no wait for nobody
            self._failing_since_s = now_s
        if (
            isinstance(error, TransientError)
            and self._failures < segment.settings.part_tries
            and now_s < self._failing_since_s + segment.settings.retry_for_s
        ):
            segment.pause(self._failures, error)
            return True
        segment.give_up(error)
        return False


def _abort(writer: PartWriter) -> None:
    with contextlib.suppress(BootseerError):
        writer.abort()
