"""Loading a plan: many reads in flight, decoded in threads, within a memory budget.

Only the calling thread uses the planner, since planners are not thread-safe. The first error ends the load at once:
other ranks wait for this one in a collective.

A `Job` is one read: `Load.prepare` allocates its destinations in the calling thread, `Load.perform` reads and decodes
in any thread.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import IO, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from bootseer.checkpoint.dcp.items import Expected, Part, Stored, part_for
from bootseer.checkpoint.dcp.saved import Layout, Pieces, layout_of
from bootseer.checkpoint.ranges import GAP_BYTES, Range, Span, join, spread
from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.checkpoint.tensors import empty_bytes, memory_of
from bootseer.errors import CorruptError, PermanentError
from bootseer.io.deadline import within
from bootseer.io.tasks import Tasks

_EDGE_BYTES = 4096
"""Enough of an archive's beginning and end to know its layout, when only a part of the elements is read."""
_WORTH_SKIPPING = 4 << 20

Undo = Callable[[Stored, IO[bytes]], IO[bytes]]
"""Undoes the transformations that an object was written with."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """The defaults suit a node with a few GB of free memory for each rank."""

    threads: int = 16
    """Reads in flight, each of up to `span_bytes`; the waiting threads also decode."""
    span_bytes: int = 32 << 20
    """Maximum size of a read that joins neighbours."""
    gap_bytes: int = GAP_BYTES
    """Maximum gap between joined neighbours."""
    buffer_bytes: int = 512 << 20
    """Memory for what cannot be read straight into a tensor. A larger object is still read, alone."""
    direct_bytes: int = 128 << 10
    """Smaller tensors are read together with their neighbours and copied: cheaper than checking each."""


@dataclass(slots=True)
class Delivery:
    """One object of a read, and its destination."""

    item: Stored
    content: Pieces
    """The item, as far as it is read."""
    buffer: torch.Tensor | None = None
    """The whole item, unless it is read straight into a tensor."""
    part: Part | None = None
    """The part that is read straight into the target."""
    at: int = 0
    """Expected offset of the elements in the item."""
    targets: tuple[tuple[ReadItem, torch.Tensor], ...] = ()


@dataclass(slots=True)
class Job:
    """One read."""

    file: str
    end: int
    reads: list[tuple[int, memoryview]] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    buffer_bytes: int = 0

    def buffer(self, length: int) -> tuple[torch.Tensor, memoryview]:
        self.buffer_bytes += length
        buffer = empty_bytes(length)
        return buffer, memory_of(buffer)


Results = list[tuple[ReadItem, torch.Tensor | bytes]]
"""Each request with its filled tensor, or its object's bytes."""


class Load:
    """One load of a plan. `prepare` uses the planner, in the calling thread; `perform` is for any thread."""

    def __init__(self, planner: LoadPlanner, undo: Undo, settings: LoadSettings) -> None:
        self._planner = planner
        self._undo = undo
        self._settings = settings
        self._expected = Expected()

    def prepare(self, file: str, span: Span[Stored]) -> Job:
        """Allocate destinations for a span."""
        job = Job(file, span.end)
        at = span.start
        for one in span.ranges:
            if at < one.start:  # reading this gap costs less than a second request
                job.reads.append((at, job.buffer(one.start - at)[1]))
            self._prepare_item(job, one.item)
            at = one.end
        return job

    def perform(self, job: Job, file: CheckpointFile) -> Results:
        """Read and decode. Raises `CorruptError`."""
        if job.end > file.size_bytes:
            raise CorruptError(f"{job.file} has {file.size_bytes} bytes; the metadata places objects up to {job.end}")
        file.read_ranges(job.reads)
        done: Results = []
        for delivery in job.deliveries:
            if not delivery.item.is_tensor:
                content = self._undo(delivery.item, cast("IO[bytes]", delivery.content)).read(-1)
                done.extend((request, content) for request in delivery.item.requests)
            else:
                if delivery.part is None:
                    self._copy(delivery)
                elif not self._is_in_place(delivery, delivery.part, file):
                    with self._expected.again:
                        self._copy(_whole(delivery, file))
                done.extend(delivery.targets)
        return done

    def _prepare_item(self, job: Job, item: Stored) -> None:
        targets = tuple((one, self._target(item, one)) for one in item.requests) if item.is_tensor else ()
        direct = self._direct(item, targets)
        if direct is None:
            buffer, view = job.buffer(item.length)
            job.reads.append((item.offset, view))
            job.deliveries.append(Delivery(item, Pieces(item.length, [(0, view)]), buffer, targets=targets))
            return
        part, at = direct
        # Everything around the elements, or enough to know their layout.
        is_whole = part.length == part.total
        head = at if is_whole else min(_EDGE_BYTES, at + part.start)
        tail = item.length - (at + part.total if is_whole else max(item.length - _EDGE_BYTES, at + part.total))
        edges = [(0, job.buffer(head)[1]), (item.length - tail, job.buffer(tail)[1])]
        elements = (at + part.start, memory_of(targets[0][1]))
        job.reads.extend((item.offset + start, view) for start, view in (elements, *edges))
        job.deliveries.append(Delivery(item, Pieces(item.length, edges), None, part, at, targets))

    def _direct(self, item: Stored, targets: tuple[tuple[ReadItem, torch.Tensor], ...]) -> tuple[Part, int] | None:
        """The part to read straight into the target, and its expected offset; None if impossible or not worth it."""
        if len(targets) != 1 or item.descriptors:
            return None
        request, target = targets[0]
        part = part_for(item, request, target)
        if part is None or part.length < self._settings.direct_bytes or target.dtype != item.dtype:
            return None
        at = self._expected.of(item)
        if not at or at + part.total >= item.length or 0 < part.total - part.length < _WORTH_SKIPPING:
            return None
        return part, at

    def _target(self, item: Stored, request: ReadItem) -> torch.Tensor:
        target = self._planner.resolve_tensor(request).detach()
        if target.size() != torch.Size(request.lengths):
            raise PermanentError(
                f"{item.index.fqn}: the checkpoint's part has the shape {tuple(request.lengths)}, the tensor to load"
                f" {tuple(target.size())}"
            )
        return target

    def _is_in_place(self, delivery: Delivery, part: Part, file: CheckpointFile) -> bool:
        """Whether the target holds its elements, after a second read if they were at another offset."""
        item, target = delivery.item, delivery.targets[0][1]
        layout = layout_of(delivery.content)
        if layout is None or layout.size != item.sizes or layout.dtype != target.dtype or not layout.is_contiguous:
            self._expected.note(item, 0)
            return False
        self._expected.note(item, layout.at)
        if layout.at != delivery.at:
            # Read again, not moved within the target: tensors may share memory (tied weights), and another thread may
            # be filling it.
            file.read_ranges([(item.offset + layout.at + part.start, memory_of(target))])
        return True

    def _copy(self, delivery: Delivery) -> None:
        item = delivery.item
        try:
            tensor = self._tensor(delivery)
        except Exception as error:  # torch.load raises anything for damaged data
            raise CorruptError(
                f"{item.file}: {item.index.fqn}, bytes {item.offset} to {item.end}, is not a saved tensor:"
                f" {type(error).__name__}: {error}"
            ) from error
        if tuple(tensor.size()) != item.sizes:
            raise CorruptError(
                f"{item.file}: {item.index.fqn}, bytes {item.offset} to {item.end}, has the shape"
                f" {tuple(tensor.size())}; the metadata says {item.sizes}"
            )
        for request, target in delivery.targets:
            target.copy_(narrow_tensor_by_index(tensor, request.storage_offsets, request.lengths))

    def _tensor(self, delivery: Delivery) -> torch.Tensor:
        item, content, buffer = delivery.item, delivery.content, delivery.buffer
        if item.descriptors:
            stream: IO[bytes] = io.BytesIO(self._undo(item, cast("IO[bytes]", content)).read(-1))
        else:
            layout = layout_of(content)
            if layout is not None:
                self._expected.note(item, layout.at if layout.is_contiguous else 0)
                if buffer is not None and layout.at % layout.dtype.itemsize == 0:
                    return _elements(buffer, layout)
            content.seek(0)
            stream = cast("IO[bytes]", content)
        tensor = torch.load(stream, map_location="cpu", weights_only=True)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a {type(tensor).__name__}")
        return tensor


def _whole(delivery: Delivery, file: CheckpointFile) -> Delivery:
    item = delivery.item
    buffer = empty_bytes(item.length)
    view = memory_of(buffer)
    file.read_ranges([(item.offset, view)])
    return Delivery(item, Pieces(item.length, [(0, view)]), buffer, targets=delivery.targets)


def _elements(buffer: torch.Tensor, layout: Layout) -> torch.Tensor:
    record = buffer[layout.at : layout.at + layout.num_elements * layout.dtype.itemsize].view(layout.dtype)
    return record.as_strided(layout.size, layout.stride, layout.first + record.storage_offset())


_OPEN_S = 330.0
"""As long as a read may make no progress. A folder of a network file system whose server is gone never answers."""
_GRACE_S = 5.0
"""How long a failed load waits for reads that still write into tensors."""


def load_all(
    items: Sequence[Stored],
    planner: LoadPlanner,
    open_file: Callable[[str], CheckpointFile],
    undo: Undo,
    settings: LoadSettings,
    position: float = 0.0,
) -> None:
    """Fill the planner's tensors, starting at the fraction `position` of the reads. Raises the first error."""
    by_file: dict[str, list[Range[Stored]]] = {}
    for item in items:
        by_file.setdefault(item.file, []).append(Range(item.offset, item.end, item))
    spans = {
        file: join(ranges, max_bytes=settings.span_bytes, gap_bytes=settings.gap_bytes)
        for file, ranges in by_file.items()
    }
    ordered = deque(spread(spans))
    ordered.rotate(-int(len(ordered) * position))
    num_threads = min(settings.threads, len(ordered))
    load, files = Load(planner, undo, settings), _Files(open_file, Counter(file for file, _ in ordered))
    jobs = (load.prepare(file, span) for file, span in ordered)

    def read(job: Job) -> Results:
        with files.use(job.file) as file:
            return load.perform(job, file)

    running: dict[Future[Results], Job] = {}
    with Tasks("bootseer-dcp", num_threads, leave_s=_GRACE_S) as threads, contextlib.closing(files):
        held = next(jobs, None)
        while held is not None or running:
            buffered = sum(job.buffer_bytes for job in running.values())
            while held is not None and len(running) < 2 * num_threads:
                if running and buffered + held.buffer_bytes > settings.buffer_bytes:
                    break
                buffered += held.buffer_bytes
                running[threads.submit(read, held)] = held
                held = next(jobs, None)
            done = wait(running, return_when=FIRST_COMPLETED).done  # each read fails if nothing arrives for minutes
            for future in done:
                del running[future]
                for request, result in future.result():
                    if isinstance(result, bytes):
                        planner.load_bytes(request, io.BytesIO(result))
                    else:
                        planner.commit_tensor(request, result)
            del done, future  # with their results, which `buffered` does not count any more


class _Files:
    """The files of a load: opened on first use, closed after their last read."""

    def __init__(self, open_file: Callable[[str], CheckpointFile], reads_of: Counter[str]) -> None:
        self._open_file = open_file
        self._reads_of = reads_of
        self._lock = threading.Lock()  # guards what follows; each file has another one for its opening
        self._opening = {file: threading.Lock() for file in reads_of}
        self._open: dict[str, CheckpointFile] = {}
        self._is_closed = False

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[CheckpointFile]:
        with self._opening[name]:
            file = self._open.get(name)
            if file is None:
                file = within(_OPEN_S, name, lambda: self._open_file(name))
                with self._lock:
                    self._open[name] = file
        try:
            if self._is_closed:  # by an error: a read that was queued must not write to the tensors any more
                raise PermanentError(f"{name}: the load has ended")
            yield file
        finally:
            with self._lock:
                self._reads_of[name] -= 1
                is_last = self._is_closed or not self._reads_of[name]
                mine = self._open.pop(name, None) if is_last else None
            if mine is not None:
                mine.close()

    def close(self) -> None:
        """Close the files, which fails reads in flight."""
        with self._lock:
            self._is_closed = True
            left = list(self._open.values())
            self._open.clear()
        for file in left:
            file.close()
