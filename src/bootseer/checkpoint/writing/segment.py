"""One segment on its way to a place: its parts are written side by side, each as fast as its own node takes it.

A segment may begin before its bytes are all there, and before it is known how many they will be: `grow` says how far
they are, with `seal` that no more come. It ends once, by a `head.Segment` or by an error.

Chunks of a part are read, digested and written one by one, and all again after a failure. Bytes come from the source,
which keeps them until the segment has ended; so a part that fails costs its own bytes once more, and nothing else waits
for it. It is written again under a new name: what became of the failed file is not known, and hdfs-native cannot go on
in it.

Where a part lies is chosen when it is begun, by the place, and read back when it has ended. If it lies on a node of a
sibling all the same, that is recorded and not repaired: the place has tried to avoid it before the first byte, so that
another try would most likely end the same, and readers go by the recorded places.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from bootseer.blocks.codec import DIGEST_BYTES
from bootseer.checkpoint.head import Part, Segment, make_segment
from bootseer.checkpoint.layout import CHUNK_BYTES, num_chunks, parity_chunk, part_size, row_of
from bootseer.checkpoint.writing.lane import ExcludedNodes, Lane, NodeLoad, WritingSettings
from bootseer.errors import BootseerError, PermanentError, TransientError
from bootseer.logs import logger
from bootseer.places.place import PartWriter, Place

_LOG = logger(__name__)


class PartTask:
    """What a `Lane` runs. Its segment's lock guards `queued`; everything else belongs to the step that runs."""

    def __init__(self, segment: SegmentWriter, number: int) -> None:
        self.number = number
        """Of the stripe; the parity comes behind the last one."""
        self.order = (segment.start, number)
        """The smallest goes first."""
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
        """Write one chunk, never raise: whether there is more to do now."""
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
                segment.excluded.exclude(writer.nodes)
            if self.row and len(self.nodes) == 1:
                segment.use.remove(self.nodes)
            # A dead node may hold this for seconds.
            segment.lane.apart(lambda: _abort(writer))
        self._failures += 1
        now_s = time.monotonic()
        if self.row or self._failing_since_s is None:  # a try that reached a node was not a wait for none
            self._failing_since_s = now_s
        if (
            isinstance(error, TransientError)
            and self._failures < segment.settings.part_tries
            and now_s < self._failing_since_s + segment.settings.retry_for_s
        ):
            _LOG.info(
                "%s: part %d is begun again, try %d of %d: %s",
                segment.path, self.number, self._failures + 1, segment.settings.part_tries, error,
            )  # fmt: skip
            segment.pause(self._failures, error)
            return True
        segment.give_up(error)
        return False


def _abort(writer: PartWriter) -> None:
    with contextlib.suppress(BootseerError):
        writer.abort()


_MUCH_SLOWER = 3.0
"""A node that takes so many times longer than the others is left; one that two parts share takes twice as long."""
_FEW = 4
"""One part in so many may be judged by the others."""
_JUDGED_ROWS = 2
_WORTH_S = 1.0
"""A slow part that is as near to its end is waited for."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the parts of a file go, and how."""

    place: Place
    folder: str
    """Of the parts of this file."""
    stripes: int
    parity: bool
    part_bytes: int
    replication: int | None
    mode: int
    excluded: ExcludedNodes
    use: NodeLoad
    settings: WritingSettings
    begins: Callable[[], None] = lambda: None
    """Called before something is written there."""


class SegmentWriter:
    """A segment from `start` on, of `stripes` parts. `read` gives bytes of the file that are there.

    `on_end` is called once, by a worker, when it has ended; `on_placed` when it is known where it lies, maybe more
    than once; `on_sent` with the length of each chunk that was written for the first time.
    """

    def __init__(
        self,
        target: Target,
        lane: Lane,
        start: int,
        read: Callable[[int, int], bytes],
        on_end: Callable[[SegmentWriter], None],
        on_placed: Callable[[], None],
        on_sent: Callable[[int], None],
        *,
        stripes: int,
    ) -> None:
        self.on_sent = on_sent
        self.start = start
        self.stripes = stripes
        self.lane = lane
        self.excluded = target.excluded
        self.use = target.use
        self.settings = target.settings
        self.path = target.folder
        self.error: BootseerError | None = None
        self.result: Segment | None = None
        self.num_retries = 0
        self._target = target
        self._read = read
        self._on_end = on_end
        self._on_placed = on_placed
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._size_bytes = 0
        self._is_sealed = False
        self._num_ended = 0
        self._digests = bytearray()
        self._parts: list[PartTask] = []

    @property
    def size_so_far(self) -> int:
        """Bytes that are there: whole chunks, but for the last one of a sealed segment."""
        return self._size_bytes

    @property
    def end(self) -> int:
        return self.start + self._size_bytes

    @property
    def is_sealed(self) -> bool:
        """Whether no more bytes come."""
        return self._is_sealed

    @property
    def is_over(self) -> bool:
        """Whether it has failed or was cancelled."""
        return self._over.is_set()

    @property
    def capacity(self) -> int:
        return self.stripes * self._target.part_bytes

    @property
    def is_placed(self) -> bool:
        """Whether all its parts have nodes, or as many as there is a free link."""
        parts = self._parts
        return bool(parts) and (all(part.row for part in parts) or any(part.is_sent for part in parts))

    def part_placed(self) -> None:
        """A part has a node, or has been sent."""
        if self.is_placed:
            self._on_placed()

    def begin(self) -> None:
        """Begin its files, soon."""
        try:
            self.lane.apart(self._begin)
        except TransientError as error:
            self.give_up(error)

    def grow(self, end: int, *, seal: bool = False) -> None:
        """The file's bytes up to `end` are there: a whole number of chunks, unless no more come (`seal`)."""
        with self._lock:
            self._size_bytes = end - self.start
            self._is_sealed = seal
            self._digests.extend(bytes(num_chunks(self._size_bytes) * DIGEST_BYTES - len(self._digests)))
        self._wake()

    def cancel(self) -> None:
        """It is not wanted any more: what was written is removed, soon; `on_end` is not called."""
        self._over.set()
        self._wake()

    def give_up(self, error: Exception) -> None:
        if not isinstance(error, BootseerError):
            # It is not reported elsewhere: the thread that waits for the segment would wait for ever.
            error = PermanentError(f"{self.path}: {type(error).__name__}: {error}")
        with self._lock:
            if self._over.is_set():
                return
            self.error = error
            self._over.set()
        self._on_end(self)
        self._wake()

    def read(self, chunk: int, size_bytes: int) -> bytes:
        """The bytes of a chunk of a segment that has so many."""
        offset = chunk * CHUNK_BYTES
        return self._read(self.start + offset, min(CHUNK_BYTES, size_bytes - offset))

    def set_digest(self, chunk: int, digest: bytes) -> None:
        """Remember a chunk's digest. Raises `PermanentError` when it was another one before."""
        at = chunk * DIGEST_BYTES
        with self._lock:
            known = bytes(self._digests[at : at + DIGEST_BYTES])
            self._digests[at : at + DIGEST_BYTES] = digest
        if any(known) and known != digest:
            raise PermanentError(f"{self.path}: what is written was changed meanwhile; write it again")

    def part_size(self, part: PartTask) -> int:
        """Bytes of a part of a sealed segment."""
        return part_size(self._size_bytes, self._used_stripes(), 0 if part.is_parity else part.number)

    def has_more(self, part: PartTask) -> bool:
        """Whether a part can go on now; if not, it is woken when it can."""
        with self._lock:
            part.queued = self._can_go_on(part)
            return part.queued

    def pause(self, failures: int, error: TransientError) -> None:
        with self._lock:
            self.num_retries += 1
        self._over.wait(self.settings.pause_s(failures, error))

    def begin_again(self, part: PartTask) -> PartWriter:
        """A new file for a part: not on a node that failed, and not on a sibling's if there is another one."""
        excluded = self.excluded.names()
        siblings = [sibling.nodes for sibling in self._parts if sibling is not part]
        # With replicas the siblings are everywhere, and only nodes that fail are worth avoiding.
        taken = [nodes[0] for nodes in siblings if nodes] if all(len(nodes) <= 1 for nodes in siblings) else []
        (writer,) = self._begin_files([part.number], excluded.union(taken))
        return writer

    def is_much_slower(self, part: PartTask) -> bool:
        """Whether nearly all other parts are sent, and this one would take longer than beginning again elsewhere."""
        if not self._is_sealed or not part.nodes or part.row < _JUDGED_ROWS:
            return False
        left_s = (num_chunks(self.part_size(part)) - part.row) * part.seconds_per_row
        others = sorted(other.seconds_per_row for other in self._parts if other.is_sent)
        if left_s < _WORTH_S or not others or len(others) < len(self._parts) - max(1, len(self._parts) // _FEW):
            return False
        return part.seconds_per_row > _MUCH_SLOWER * others[len(others) // 2]

    def part_ended(self) -> None:
        """A part is complete, or has nothing to hold."""
        with self._lock:
            self._num_ended += 1
            if self._over.is_set() or self._num_ended < len(self._parts):
                return
        try:
            self.result = self._as_segment()
        except Exception as error:
            self.give_up(error)
            return
        self._on_end(self)

    def _begin(self) -> None:
        numbers = range(self.stripes + self._target.parity)
        until = time.monotonic() + self.settings.retry_for_s
        for failures in range(1, self.settings.part_tries + 1):
            if self.is_over:
                return
            try:
                writers = self._begin_files(numbers, self.excluded.names())
                break
            except TransientError as error:
                if failures == self.settings.part_tries or time.monotonic() >= until:
                    self.give_up(error)
                    return
                self.pause(failures, error)
            except Exception as error:
                self.give_up(error)
                return
        parts = [PartTask(self, number) for number in numbers]
        for part, writer in zip(parts, writers, strict=True):
            part.begin(writer)
            part.queued = False
        with self._lock:
            self._parts = parts
        self._wake()

    def _begin_files(self, numbers: Sequence[int], avoid: frozenset[str]) -> Sequence[PartWriter]:
        target = self._target
        # The random end: names are never used again, not even by a try whose end is unknown.
        names = [
            f"{self.start // CHUNK_BYTES:06x}.{'p' if number == self.stripes else number}.{secrets.token_hex(4)}"
            for number in numbers
        ]
        return target.place.begin_parts(
            [f"{target.folder}/{name}" for name in names],
            part_bytes=target.part_bytes,
            mode=target.mode,
            replication=target.replication,
            avoid=avoid,
            spare=target.use.most_loaded(self.stripes + target.parity, self.excluded.names()),
        )

    def _wake(self) -> None:
        woken = []
        with self._lock:
            for part in self._parts:
                if not part.queued and (self._over.is_set() or self._can_go_on(part)):
                    part.queued = True
                    woken.append(part)
        for part in woken:
            try:
                self.lane.ready(part)
            except TransientError as error:
                self.give_up(error)

    def _can_go_on(self, part: PartTask) -> bool:
        if self._is_sealed or self._over.is_set():
            return True  # at least to end
        chunks = self._size_bytes // CHUNK_BYTES
        first = part.row * self.stripes
        return first + self.stripes <= chunks if part.is_parity else first + part.number < chunks

    def _used_stripes(self) -> int:
        return min(self.stripes, num_chunks(self._size_bytes))

    def _as_segment(self) -> Segment:
        results: list[Part] = []
        for part in self._parts[: self._used_stripes()]:
            assert part.result is not None  # noqa: S101 - all have ended
            results.append(part.result)
        parity = self._parts[-1].result if self._target.parity else None
        return make_segment(self.start, self._size_bytes, self._digests, tuple(results), parity)
