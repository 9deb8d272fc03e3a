"""Writing to a place by one process: its threads and its spool space.

One `Writing` serves all files of a mount or a job; make another one after a fork.

`FileWriter` is for programs that write at any offset, any length, without a known size. All data goes to the spool
first and is sent from there in the background (`sending`). So sequential writers need little spool space whatever the
file's size, others as much as they write out of order.

`sync` and `commit` publish what was written so far in one step: durable, checked and visible. Nothing is visible
before. A file that is written on after a `sync` stays visible as it was then until the next one.

Methods may be called from many threads; those that change a file are serialized.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.head import check_size
from bootseer.checkpoint.layout import CHUNK_BYTES, Policy
from bootseer.checkpoint.writing.lane import WritingSettings
from bootseer.checkpoint.writing.publication import Progress, Publication, Written, check_target, write_ordinary
from bootseer.checkpoint.writing.sending import Sending
from bootseer.checkpoint.writing.spool import Budget, Read, Replayed, Spool, TooLargeError
from bootseer.errors import BootseerError, NoSpaceError, PermanentError
from bootseer.io.executor import Executor, run_reported
from bootseer.io.timer import Timer
from bootseer.places.place import folder_of

_STUCK_S = 300.0
"""A writer that waits for spool space fails when none is freed for so long."""
_PIECE_BYTES = 4 << 20
"""Longer writes are spooled in pieces, which are sent meanwhile: `torch.save` writes a tensor at once."""
Check = Callable[[], None]
"""Called regularly during a wait; what it raises ends the wait."""


def no_check() -> None:
    """For callers that cannot be interrupted."""


class FileWriter:
    """A new file. Ends with `commit`, which publishes it, or with `abort`, which keeps the previous version."""

    def __init__(self, writing: Writing, publication: Publication, spool: Spool) -> None:
        self.sending = Sending(publication, spool, writing.budget)
        """For the `Writing`, which balances spool space among its files."""
        self._writing = writing
        self._publication = publication
        self._settings = publication.settings
        self._spool = spool
        # Held by the thread that changes the file, for the whole change.
        self._turn = threading.RLock()
        self._size_bytes = 0
        self._written: Written | None = None
        self._is_dirty = True
        self._is_continued = False
        """Whether there were writes after a `sync`."""
        self._is_open = True

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def path(self) -> str:
        """The path at which it is published. May be set to another name in the same folder."""
        return self._publication.path

    @path.setter
    def path(self, path: str) -> None:
        with self._turn:
            self._publication.path = path

    def write_at(self, offset: int, data: bytes | bytearray | memoryview, check: Check = no_check) -> None:
        """Write bytes; gaps are zeros. Blocks while the spool is full of data in flight. After an error the file is
        no longer than before, but a part of a long write over old bytes may be in it.

        Raises errors of the background sending, `NoSpaceError` when the local disk is full, `TooLargeError` for data
        that neither fits into the spool nor can be sent yet, and `TransientError` when nothing could be sent for
        minutes.
        """
        view = memoryview(data).cast("B")

        def free_some() -> bool:
            check()
            return self._writing.free_some()

        with self._turn:
            before = self._size_bytes
            try:
                for at in range(0, len(view), _PIECE_BYTES):
                    self._write_piece(offset + at, view[at : at + _PIECE_BYTES], free_some)
            except BaseException:
                if self._size_bytes > before:
                    with suppress(BootseerError):
                        self.truncate(before)
                raise

    def _write_piece(self, offset: int, piece: memoryview, free_some: Callable[[], bool]) -> None:
        self._check()
        end, budget = offset + len(piece), self._writing.budget
        with self.sending.hold_back(offset):
            if end > self._size_bytes:
                self._before_growth(offset)
            self.sending.recall(offset, end)
            fresh = self.sending.missing(offset, end)
            if fresh:
                budget.reserve(fresh, free_some=free_some, stuck_s=_STUCK_S)
            try:
                # The disk may have less space than the budget: data in flight frees some.
                if not budget.repeat(lambda: self._is_spooled(offset, piece), free_some=free_some, stuck_s=_STUCK_S):
                    self._spool.write(offset, piece)
            except BaseException:
                budget.free(fresh)
                # A partial write must not show through when the file grows later.
                self._spool.truncate(self._size_bytes)
                raise
        self._size_bytes = max(self._size_bytes, end)
        self._mark_dirty()
        self.sending.on_written(offset, end)

    def _is_spooled(self, offset: int, piece: memoryview) -> bool:
        """Write to the spool; returns whether its disk has room."""
        with suppress(NoSpaceError):
            self._spool.write(offset, piece)
            return True
        return False

    def read_at(self, offset: int, length: int) -> bytes:
        """The bytes from `offset` on, including unpublished ones; fewer at the end of the file."""
        return self.sending.read(offset, min(offset + length, self._size_bytes))

    def truncate(self, size_bytes: int) -> None:
        """Cut the file or extend it by zeros. Raises `TooLargeError` for too long a gap."""
        with self._turn:
            self._check()
            if size_bytes == self._size_bytes:
                return
            if size_bytes > self._size_bytes:
                self._before_growth(size_bytes)
            else:
                with self.sending.hold_back(size_bytes):
                    self.sending.truncate(size_bytes, self._size_bytes)
            self._size_bytes = size_bytes
            self._mark_dirty()

    def sync(self, check: Check = no_check) -> Written:
        """Publish what was written so far. The file may be written on, also after `check` has interrupted this."""
        with self._turn:
            self._check()
            return self._publish(check)

    def commit(self) -> Written:
        """`sync`, and end. After an error the writer is aborted: the previous version stays visible."""
        with self._turn:
            try:
                self._check()
                return self._publish()
            finally:
                self.abort()

    def abort(self) -> None:
        """End, and discard what is not published. May be called at any time, also after `commit`."""
        with self._turn:
            if not self._is_open:
                return
            self._is_open = False
            # First, because requests in flight create files in the folder that is about to be removed.
            self.sending.close(self._settings.end_s)
            self._publication.remove_unreferenced()
        self._writing.end(self._publication)

    def _check(self) -> None:
        self.sending.check()
        if not self._is_open:
            raise PermanentError(f"{self.path}: written to after its end")

    def _mark_dirty(self) -> None:
        self._is_dirty = True
        self._is_continued = self._is_continued or self._written is not None

    def _before_growth(self, offset: int) -> None:
        """The file is about to grow by a write at `offset`: its last chunk may no longer be short."""
        size_bytes = self._size_bytes
        if offset - size_bytes > self._settings.random_bytes:
            raise TooLargeError(f"{self.path}: a gap of {offset - size_bytes} bytes is too large")
        if size_bytes % CHUNK_BYTES:
            self.sending.recall(size_bytes - 1, size_bytes)

    def _publish(self, check: Check = no_check) -> Written:
        if self._written is not None and not self._is_dirty:
            return self._written
        size_bytes = self._size_bytes
        if self._publication.policy.is_striped(size_bytes):
            segments = self.sending.send_all(size_bytes, separate_tail=self._is_continued, check=check)
            # Parts of recalled segments are removed once no request in flight creates them any more.
            self.sending.lane.wait_idle(self._settings.end_s)
            written = self._publication.publish(segments)
        else:
            with self.sending.hold_back(0):
                self.sending.recall(0, size_bytes)
                self.sending.lane.wait_idle(self._settings.end_s)
                written = write_ordinary(self._publication, size_bytes, self._spool.read)
        self._written = written
        self._is_dirty = False
        return self._written


_SPOOL = "/var/tmp"  # noqa: S108 - files without names; /tmp is memory on many machines


class Writing:
    """Writes files. Safe to use from many threads.

    `spool` is a folder on a local disk with `settings.spool_bytes` of space, by default `$TMPDIR` or /var/tmp.
    """

    def __init__(
        self,
        files: Files,
        *,
        spool: Path | None = None,
        settings: WritingSettings | None = None,
    ) -> None:
        self._files = files
        self._spool = spool or Path(os.environ.get("TMPDIR") or _SPOOL)
        self._settings = settings or WritingSettings()
        self._workers = Executor("bootseer-write", self._settings.max_threads)
        self.budget = Budget(self._settings.spool_bytes, self._settings.random_bytes)
        """The spool space of its files."""
        self._lock = threading.Lock()
        self._in_flight: dict[Publication, FileWriter | None] = {}
        """The files that are being written, with the writer of one that is written piece by piece."""
        self._timer = Timer("bootseer-writing", 1)
        self._is_maintained = False
        """Whether the timer maintains the files in flight."""
        self._is_open = True

    def write_file(
        self,
        path: str,
        size_bytes: int,
        read: Read,
        *,
        mode: int = 0o644,
        policy: Policy | None = None,
        progress: Progress | None = None,
    ) -> Written:
        """Write a file whose bytes are all available, replacing an existing one. `read` returns them, those of a failed
        part again. The folder must exist.

        When this returns, the file is published; when it raises, nothing has changed. `progress` is called in this
        thread. For a file below a hidden folder, as in an attempt, `files` must be made `within` it.
        """
        check_target(self._files, path)
        publication = self._begin(path, policy, mode)
        try:
            if publication.policy.is_striped(size_bytes):
                return self._send_whole(publication, size_bytes, read, progress)
            return write_ordinary(publication, size_bytes, read, progress)
        finally:
            self.end(publication)

    def _send_whole(
        self,
        publication: Publication,
        size_bytes: int,
        read: Read,
        progress: Progress | None,
    ) -> Written:
        """Send a striped file without a spool, and publish it. A failure leaves nothing behind."""
        check_size(size_bytes)
        spool = Replayed(read)
        sending = Sending(publication, spool, self.budget)

        def check() -> None:
            if progress is not None:
                progress(sending.sent_bytes, size_bytes)

        try:
            segments = sending.send_all(size_bytes, separate_tail=False, check=check)
            check()
            return publication.publish(segments)
        except BaseException:
            # First, because requests in flight create files in the folder that is about to be removed.
            sending.close(self._settings.end_s)
            publication.remove_unreferenced()
            raise
        finally:
            spool.close()

    def open(
        self,
        path: str,
        *,
        mode: int = 0o644,
        policy: Policy | None = None,
        is_checked: bool = False,
    ) -> FileWriter:
        """Begin a file that is written piece by piece; `commit` replaces an existing one. `is_checked`: the caller
        knows that the folder exists and that the path is not a folder."""
        if not is_checked:
            check_target(self._files, path)
        publication = self._begin(path, policy, mode)
        try:
            writer = FileWriter(self, publication, Spool(self._spool))
        except BaseException:
            self.end(publication)
            raise
        with self._lock:
            self._in_flight[publication] = writer
        return writer

    def facts(self) -> dict[str, object]:
        """Files in flight, and spool space in use."""
        with self._lock:
            num_files = len(self._in_flight)
        return {"files": num_files, "spool_bytes": self.budget.used_bytes}

    def close(self) -> None:
        """Abort files that were not committed."""
        with self._lock:
            self._is_open = False
        for writer in self._writers():
            writer.abort()
        self._workers.close()
        self._timer.close()

    def _begin(self, path: str, policy: Policy | None, mode: int) -> Publication:
        publication = Publication(
            self._files, path, policy or self._files.policy(folder_of(path)), mode,
            settings=self._settings, workers=self._workers,
        )  # fmt: skip
        with self._lock:
            if not self._is_open:
                raise PermanentError(f"{self._files.place.uri} is not written to any more: it was closed")
            if not self._is_maintained:
                self._schedule_maintenance()
                self._is_maintained = True
            self._in_flight[publication] = None
        return publication

    def end(self, publication: Publication) -> None:
        """A file that was begun is published, or was aborted."""
        publication.end()
        with self._lock:
            self._in_flight.pop(publication, None)

    def _writers(self) -> list[FileWriter]:
        with self._lock:
            return [writer for writer in self._in_flight.values() if writer is not None]

    def free_some(self) -> bool:
        """Whether spool space will be freed. With no data in flight, the file with most sendable data sends it."""
        with self._lock:  # of two threads that look, the second one must see what the first one has let be sent
            sendings = [writer.sending for writer in self._in_flight.values() if writer is not None]
            rooms = [(*sending.expected_free_bytes(), sending) for sending in sendings]
            if any(on_the_way for on_the_way, _, _ in rooms):
                return True
            waiting = max(rooms, key=lambda room: room[1], default=None)
            return waiting is not None and waiting[2].flush_some()

    def _schedule_maintenance(self) -> None:
        self._timer.after(min(self._settings.idle_s, self._settings.lease_s) / 3, self._maintain)

    def _maintain(self) -> None:
        """Renew leases and seal idle segments, as long as files are in flight."""
        with self._lock:
            publications = list(self._in_flight)
            self._is_maintained = bool(publications)
        if not publications:
            return
        for writer in self._writers():
            run_reported(partial(writer.sending.seal_idle, self._settings.idle_s))
        for publication in publications:
            run_reported(publication.renew)
        self._schedule_maintenance()
