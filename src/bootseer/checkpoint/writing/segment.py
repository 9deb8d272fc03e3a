"""One segment being written: its parts concurrently, each as fast as its own node allows.

A segment may start before its bytes are available and before its length is known: `grow` reports bytes that are
available, `seal` that no more come. It ends once, with a `head.Segment` or an error.

The chunks of a part are read, digested and written one by one. A failed part starts over: bytes come from the source,
which keeps them until the segment has ended, so other parts do not wait. It starts over under a new name, because the
state of the failed file is unknown, and hdfs-native cannot continue it.

The place chooses a part's node when the part is started; the actual nodes are read back when it is complete. If a part
still shares a node with a sibling, this is recorded and not repaired: the place has tried to avoid it before the first
byte, so another attempt would most likely end the same, and readers use the recorded nodes.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from blake3 import blake3

from bootseer.blocks.codec import DIGEST_BYTES
from bootseer.checkpoint.head import Part, Segment, make_segment
from bootseer.checkpoint.layout import CHUNK_BYTES, make_ready, num_chunks, parity_chunk, part_size, row_of
from bootseer.errors import BootseerError, PermanentError, TransientError
from bootseer.io.retry import pause_s
from bootseer.logs import logger
from bootseer.places.place import PartWriter

if TYPE_CHECKING:
    from bootseer.checkpoint.writing.sending import Sending

_LOG = logger(__name__)


class PartTask:
    """One part, as a `Lane` runs it. The segment's lock guards `queued`; all else belongs to the step that runs."""

    def __init__(self, segment: SegmentWriter, number: int) -> None:
        self.number = number
        """Index of the stripe; the parity part comes last."""
        self.order = (segment.start, number)
        """Priority: the smallest runs first."""
        self.row = 0
        """The next row to write."""
        self.queued = True
        """Whether a step runs or is queued. A part that waits for bytes is not queued."""
        self.nodes: tuple[str, ...] = ()
        """The nodes that store it, once known."""
        self.is_sent = False
        """Whether all its bytes are written, though its file may not be complete."""
        self.result: Part | None = None
        self._segment = segment
        self._writer: PartWriter | None = None
        self._sha256 = hashlib.sha256()
        self._failures = 0
        self._failing_since_s: float | None = None
        self._rows_sent = 0
        self._write_s = 0.0
        self._written_s = 0.0
        self._was_moved = False

    @property
    def is_parity(self) -> bool:
        """Whether it stores the parity of the others."""
        return self.number == self._segment.stripes

    def begin(self, writer: PartWriter) -> None:
        self._writer, self.nodes = writer, ()
        self._sha256 = hashlib.sha256()
        self.row = 0
        self._write_s = 0.0
        self.is_sent = False

    @property
    def seconds_per_row(self) -> float:
        """Mean time that its node takes for a chunk."""
        return self._write_s / max(self.row, 1)

    def is_idle(self, idle_s: float) -> bool:
        """Whether it has waited for bytes for so long since its latest chunk."""
        return self.row > 0 and not self.queued and time.monotonic() - self._written_s >= idle_s

    def step(self) -> bool:
        """Write one chunk. Returns whether there is more to do now; never raises."""
        segment = self._segment
        try:
            if segment.is_over:
                self.drop()
                return False
            if self._writer is None:
                self.begin(segment.create_part_file(self))
            elif not self._was_moved and segment.is_much_slower(self):
                self._was_moved = True  # once only: the next node may be no better
                raise TransientError(f"{' '.join(self.nodes)}: much slower than the nodes of the other parts")
            if not self._write_row():
                self.is_sent = True
                segment.part_placed()
                # Completing the file blocks on the place; meanwhile the lane's next part uses the link.
                segment.lane.run_blocking(self._finish)
                return False
        except BaseException as error:  # panics of Rust code are not Exceptions
            return self._failed(error)
        return segment.has_more(self)

    def drop(self) -> None:
        """Discard what was written, unless it is complete."""
        writer, self._writer = self._writer, None
        if writer is not None:
            _abort(writer)

    def _write_row(self) -> bool:
        """Write this part's chunk of the next row; returns False if the segment ends before it."""
        segment, writer = self._segment, self._writer
        assert writer is not None  # noqa: S101 - step has begun it
        size_bytes = segment.size_bytes
        chunks = -(-size_bytes // CHUNK_BYTES)
        first = self.row * segment.stripes
        number = first if self.is_parity else first + self.number
        if number >= chunks:
            return False
        if self.is_parity:
            pieces = [segment.read(chunk, size_bytes) for chunk in row_of(first, chunks, segment.stripes)]
            data = bytes(parity_chunk(pieces, len(pieces[0])))
        else:
            data = segment.read(number, size_bytes)
            segment.set_digest(number, blake3(data).digest())
        self._sha256.update(data)
        began_s = time.monotonic()
        writer.write(data)
        self._written_s = time.monotonic()
        self._write_s += self._written_s - began_s
        self.nodes = writer.nodes  # known from the first bytes on
        if self.row == 0 and len(self.nodes) == 1:  # with replicas, readers can choose another node
            segment.publication.load.add(self.nodes)
        self.row += 1
        if self.row == 1:
            segment.part_placed()
        if not self.is_parity and self.row > self._rows_sent:
            self._rows_sent = self.row
            segment.sending.chunk_sent(len(data))
        return True

    def _finish(self) -> None:
        """Complete the file. If that fails, the part starts over in its lane."""
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
        except BaseException as error:
            if self._failed(error):
                segment.lane.schedule(self)
            return
        segment.part_ended()

    def _failed(self, error: BaseException) -> bool:
        """Returns whether to start over."""
        segment = self._segment
        writer, self._writer = self._writer, None
        if writer is not None:
            if isinstance(error, TransientError):  # other errors are not the node's fault
                segment.publication.place.exclude(writer.nodes)
            if self.row and len(self.nodes) == 1:
                segment.publication.load.remove(self.nodes)
            # On a dead node this may block for seconds.
            segment.lane.run_blocking(lambda: _abort(writer))
        settings = segment.publication.settings
        self._failures += 1
        now_s = time.monotonic()
        if self.row or self._failing_since_s is None:  # an attempt that reached a node ends the time without one
            self._failing_since_s = now_s
            self.row = 0
        if (
            isinstance(error, TransientError)
            and self._failures < settings.part_tries
            and now_s < self._failing_since_s + settings.retry_for_s
        ):
            _LOG.info(
                "%s: part %d starts over, attempt %d of %d: %s",
                segment.publication.folder, self.number, self._failures + 1, settings.part_tries, error,
            )  # fmt: skip
            segment.pause(pause_s(self._failures, error, cap_s=settings.retry_s))
            return True
        segment.fail(error)
        return False


def _abort(writer: PartWriter) -> None:
    with contextlib.suppress(BootseerError):
        writer.abort()


_SLOW_FACTOR = 3.0
"""A part is moved off a node that takes so many times longer than the others; two parts on one node take twice as long.
"""
_FEW = 4
"""A part is compared with the others when at most one in so many is unfinished."""
_MIN_MEASURED_ROWS = 2
_WORTH_S = 1.0
"""A slow part that needs less than this is not moved."""


class SegmentWriter:
    """A segment from `start` on, of `stripes` parts.

    Worker threads call `segment_ended` of `sending` once, when it has ended; `begin_next` when its placement is known,
    possibly repeatedly; `chunk_sent` with the length of each chunk that was written for the first time.
    """

    def __init__(self, sending: Sending, start: int, *, stripes: int) -> None:
        self.start = start
        self.stripes = stripes
        self.sending = sending
        self.lane = sending.lane
        self.publication = sending.publication
        self.error: BootseerError | None = None
        self.result: Segment | None = None
        """Set by `sending` when it is complete, unless it is no longer a part of the file."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.size_bytes = 0
        """Available bytes: whole chunks, except for the last one of a sealed segment."""
        self.is_started = False
        """Set by `sending` when its files are to be created."""
        self.is_sealed = False
        """Whether the segment does not grow any more."""
        self._num_ended = 0
        self._digests = bytearray()
        self._parts: list[PartTask] = []

    @property
    def end(self) -> int:
        return self.start + self.size_bytes

    @property
    def is_over(self) -> bool:
        """Whether it has failed or was cancelled."""
        return self._over.is_set()

    @property
    def capacity(self) -> int:
        return self.stripes * self.publication.policy.part_bytes

    @property
    def is_placed(self) -> bool:
        """Whether all parts have nodes, or a link is already free because a part was sent."""
        parts = self._parts
        return bool(parts) and (all(part.row for part in parts) or any(part.is_sent for part in parts))

    def is_idle(self, idle_s: float) -> bool:
        """Whether one of its parts has waited for bytes for so long."""
        with self._lock:
            return any(part.is_idle(idle_s) for part in self._parts)

    def part_placed(self) -> None:
        """A part has a node, or has been sent."""
        if self.is_placed:
            self.sending.begin_next()

    def begin(self) -> None:
        """Start creating the files, in the background."""
        try:
            self.lane.run_blocking(self._begin)
            if self.publication.policy.parity:
                self.lane.run_blocking(make_ready)  # until it has ended, parity is computed more slowly
        except TransientError as error:
            self.fail(error)

    def grow(self, end: int, *, seal: bool = False) -> None:
        """Bytes up to `end` are available: a whole number of chunks, unless `seal` says that no more come."""
        with self._lock:
            self.size_bytes = end - self.start
            self.is_sealed = seal
            self._digests.extend(bytes(num_chunks(self.size_bytes) * DIGEST_BYTES - len(self._digests)))
        self._wake()

    def cancel(self) -> None:
        """Cancel the segment; written parts are removed in the background, and `segment_ended` is not called."""
        self._over.set()
        self._wake()

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, BootseerError):
            # Not reported elsewhere, and the thread that waits for the segment would wait forever.
            error = PermanentError(f"{self.publication.folder}: {type(error).__name__}: {error}")
        with self._lock:
            if self._over.is_set():
                return
            self.error = error
            self._over.set()
        self.sending.segment_ended(self, None)
        self._wake()

    def read(self, chunk: int, size_bytes: int) -> bytes:
        """The bytes of a chunk of a segment that has `size_bytes`."""
        offset = chunk * CHUNK_BYTES
        return self.sending.spool.read(self.start + offset, min(CHUNK_BYTES, size_bytes - offset))

    def set_digest(self, chunk: int, digest: bytes) -> None:
        """Record a chunk's digest. Raises `PermanentError` if it differs from an earlier one of the same chunk."""
        at = chunk * DIGEST_BYTES
        with self._lock:
            known = bytes(self._digests[at : at + DIGEST_BYTES])
            self._digests[at : at + DIGEST_BYTES] = digest
        if any(known) and known != digest:
            raise PermanentError(f"{self.publication.folder}: the data changed while it was written; write it again")

    def part_size(self, part: PartTask) -> int:
        """Bytes of a part of a sealed segment."""
        return part_size(self.size_bytes, self._used_stripes(), 0 if part.is_parity else part.number)

    def has_more(self, part: PartTask) -> bool:
        """Whether a part can continue now; if not, `_wake` queues it when it can."""
        with self._lock:
            part.queued = self._has_work(part)
            return part.queued

    def pause(self, seconds: float) -> None:
        self._over.wait(seconds)

    def create_part_file(self, part: PartTask) -> PartWriter:
        """A new file for a part: not on a sibling's node if there is another one."""
        siblings = [sibling.nodes for sibling in self._parts if sibling is not part]
        # With replicas the siblings are on nearly all nodes.
        taken = [nodes[0] for nodes in siblings if nodes] if all(len(nodes) <= 1 for nodes in siblings) else []
        (writer,) = self._begin_files([part.number], frozenset(taken))
        return writer

    def is_much_slower(self, part: PartTask) -> bool:
        """Whether nearly all other parts are sent, and restarting this one on another node would be faster."""
        if not self.is_sealed or not part.nodes or part.row < _MIN_MEASURED_ROWS:
            return False
        left_s = (num_chunks(self.part_size(part)) - part.row) * part.seconds_per_row
        others = sorted(other.seconds_per_row for other in self._parts if other.is_sent)
        if left_s < _WORTH_S or not others or len(others) < len(self._parts) - max(1, len(self._parts) // _FEW):
            return False
        return part.seconds_per_row > _SLOW_FACTOR * others[len(others) // 2]

    def part_ended(self) -> None:
        """A part is complete, or stays empty."""
        with self._lock:
            self._num_ended += 1
            if self._over.is_set() or self._num_ended < len(self._parts):
                return
        try:
            result = self._as_segment()
        except Exception as error:
            self.fail(error)
            return
        self.sending.segment_ended(self, result)

    def _begin(self) -> None:
        numbers = range(self.stripes + self.publication.policy.parity)

        def begin() -> Sequence[PartWriter]:
            if self.is_over:
                raise PermanentError(f"{self.publication.folder}: not written any more")
            return self._begin_files(numbers, frozenset())

        try:
            writers = self.publication.settings.retry(begin, self.pause)
        except BaseException as error:
            self.fail(error)
            return
        parts = [PartTask(self, number) for number in numbers]
        for part, writer in zip(parts, writers, strict=True):
            part.begin(writer)
            part.queued = False
        with self._lock:
            self._parts = parts
        self._wake()

    def _begin_files(self, numbers: Sequence[int], avoid: frozenset[str]) -> Sequence[PartWriter]:
        publication, policy = self.publication, self.publication.policy
        # The random suffix: names are never reused, not even those of attempts with an unknown outcome.
        names = [
            f"{self.start // CHUNK_BYTES:06x}.{'p' if number == self.stripes else number}.{secrets.token_hex(4)}"
            for number in numbers
        ]
        publication.check_folder()
        return publication.place.begin_parts(
            [f"{publication.folder}/{name}" for name in names],
            part_bytes=policy.part_bytes,
            mode=publication.mode,
            replication=policy.replication,
            avoid=avoid,
            last_resort=publication.load.most_loaded(self.stripes + policy.parity),
        )

    def _wake(self) -> None:
        woken = []
        with self._lock:
            for part in self._parts:
                if not part.queued and (self._over.is_set() or self._has_work(part)):
                    part.queued = True
                    woken.append(part)
        for part in woken:
            try:
                self.lane.schedule(part)
            except TransientError as error:
                self.fail(error)

    def _has_work(self, part: PartTask) -> bool:
        if self.is_sealed or self._over.is_set():
            return True  # if only to end
        chunks = self.size_bytes // CHUNK_BYTES
        first = part.row * self.stripes
        return first + self.stripes <= chunks if part.is_parity else first + part.number < chunks

    def _used_stripes(self) -> int:
        return min(self.stripes, num_chunks(self.size_bytes))

    def _as_segment(self) -> Segment:
        results: list[Part] = []
        for part in self._parts[: self._used_stripes()]:
            assert part.result is not None  # noqa: S101 - all have ended
            results.append(part.result)
        parity = self._parts[-1].result if self.publication.policy.parity else None
        return make_segment(self.start, self.size_bytes, self._digests, tuple(results), parity)
