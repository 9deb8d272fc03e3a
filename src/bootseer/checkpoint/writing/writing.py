"""All writing to a place by one process: its threads, its room on the local disk, its knowledge of excluded nodes.

One `Writing` serves all files of a mount or of a job; make another one after a fork.

Writing a file as programs do: at any offset, of any length, with an unknown number of bytes to come.

Everything goes to the spool first, and is sent from there while the program goes on (`sending`). So sequential writers
need little room whatever the size of the file, and all others need as much as they write out of order.

`sync` and `commit` make what was written so far durable, verified and visible, in one step, and nothing is visible
before. A file that is written on after a `sync` shows the content of that moment until the next one.

Methods may be called from many threads; those that change the file take turns.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import CHUNK_BYTES, Policy
from bootseer.checkpoint.writing.lane import ExcludedNodes, WritingSettings
from bootseer.checkpoint.writing.pipeline import Read, write_replayed
from bootseer.checkpoint.writing.publication import Progress, Publication, Written, check_target, write_ordinary
from bootseer.checkpoint.writing.sending import Budget, Sending, Spool, TooLargeError
from bootseer.errors import PermanentError
from bootseer.io.executor import Executor, run_reported
from bootseer.io.timer import Timer

_STUCK_S = 300.0
"""A writer that waits for room in the spool fails when for so long none comes back."""
Check = Callable[[], None]
"""Called now and then while something waits; what it raises ends the waiting."""


def _wait_on() -> None:
    """For callers that wait to the end."""


class FileWriter:
    """A new file. It ends with `commit`, which shows it, or with `abort`, which leaves what was shown before."""

    def __init__(
        self,
        files: Files,
        publication: Publication,
        policy: Policy,
        spool: Spool,
        budget: Budget,
        *,
        mode: int,
        verify: str,
        workers: Executor,
        excluded: ExcludedNodes,
        settings: WritingSettings,
        free_some: Callable[[], bool],
        ended: Callable[[FileWriter], None],
    ) -> None:
        """`free_some` says whether room in the spool will come back; `ended` is called at the end."""
        self.sending = Sending(publication.target(excluded), policy, spool, budget, workers)
        """For the `Writing`, which looks after all files."""
        self._files = files
        self._publication = publication
        self._policy = policy
        self._spool = spool
        self._budget = budget
        self._mode = mode
        self._verify = verify
        self._settings = settings
        self._free_some = free_some
        self._ended = ended
        # Held by the thread that changes the file, for as long as it takes.
        self._turn = threading.RLock()
        self._size_bytes = 0
        self._written: Written | None = None
        self._is_dirty = True
        self._goes_on = False
        """Whether there were writes after a `sync`."""
        self._is_open = True

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def path(self) -> str:
        """Where it will be visible. It may be changed to another name in the same folder."""
        return self._publication.path

    @path.setter
    def path(self, path: str) -> None:
        with self._turn:
            self._publication.path = path

    def write_at(self, offset: int, data: bytes | bytearray | memoryview, check: Check = _wait_on) -> None:
        """Write bytes. Gaps are zeros. Waits while the spool is full of what is being sent.

        Raises what sending raised meanwhile, `NoSpaceError` when the local disk is full, `TooLargeError` for what does
        not fit into the spool and cannot be sent yet, and `TransientError` when nothing could be sent for minutes.
        """
        length = memoryview(data).nbytes
        if length == 0:
            return

        def free_some() -> bool:
            check()
            return self._free_some()

        with self._turn:
            self._check()
            end = offset + length
            with self.sending.keeping(offset):
                if end > self._size_bytes:
                    self._before_growth(offset)
                self.sending.take_back(offset, end)
                fresh = self.sending.missing(offset, end)
                if fresh:
                    self._budget.take(fresh, free_some=free_some, stuck_s=_STUCK_S)
                try:
                    self._spool.write(offset, data)
                except BaseException:
                    self._budget.give_back(fresh)
                    # What it took of this must not show through when the file becomes longer.
                    self._spool.truncate(self._size_bytes)
                    raise
            self._size_bytes = max(self._size_bytes, end)
            self._touched()
            self.sending.wrote(offset, end)

    def read_at(self, offset: int, length: int) -> bytes:
        """The bytes from `offset` on as they were last written; fewer at the end of the file."""
        return self.sending.read(offset, min(offset + length, self._size_bytes))

    def truncate(self, size_bytes: int) -> None:
        """Make the file so long: cut, or continued by zeros. Raises `TooLargeError` for too many of these."""
        with self._turn:
            self._check()
            if size_bytes == self._size_bytes:
                return
            if size_bytes > self._size_bytes:
                self._before_growth(size_bytes)
            else:
                with self.sending.keeping(size_bytes):
                    self.sending.cut(size_bytes, self._size_bytes)
            self._size_bytes = size_bytes
            self._touched()

    def sync(self, check: Check = _wait_on) -> Written:
        """Make what was written so far durable, verified and visible. The file may be written on, also when this was
        ended by `check`."""
        with self._turn:
            self._check()
            return self._publish(check)

    def commit(self) -> Written:
        """`sync`, and end. After an error the writer is aborted: what was visible before is visible still."""
        with self._turn:
            try:
                self._check()
                return self._publish()
            finally:
                self.abort()

    def abort(self) -> None:
        """End, and drop what is not visible. Safe to call at any time, also after `commit`."""
        with self._turn:
            if not self._is_open:
                return
            self._is_open = False
            # First: what is still on its way makes files in the folder that is to be removed.
            self.sending.close(self._settings.end_s)
            self._publication.remove_rest()
        self._ended(self)

    def _check(self) -> None:
        self.sending.check()
        if not self._is_open:
            raise PermanentError(f"{self.path}: written to after its end")

    def _touched(self) -> None:
        self._is_dirty = True
        self._goes_on = self._goes_on or self._written is not None

    def _before_growth(self, offset: int) -> None:
        """The file is about to become longer, by a write at `offset`: its last chunk need not stay short."""
        size_bytes = self._size_bytes
        if offset - size_bytes > self._settings.random_bytes:
            raise TooLargeError(f"{self.path}: a gap of {offset - size_bytes} bytes is too large")
        if size_bytes % CHUNK_BYTES:
            self.sending.take_back(size_bytes - 1, size_bytes)

    def _publish(self, check: Check = _wait_on) -> Written:
        if self._written is not None and not self._is_dirty:
            return self._written
        size_bytes = self._size_bytes
        if self._policy.is_striped(size_bytes):
            segments = self.sending.send_all(size_bytes, tail_apart=self._goes_on, check=check)
            # Parts that were taken back are removed when nothing makes them any more.
            self.sending.wait_idle(self._settings.end_s)
            written = self._publication.publish(segments, verify=self._verify)
        else:
            with self.sending.keeping(0):
                self.sending.take_back(0, size_bytes)
                self.sending.wait_idle(self._settings.end_s)
                written = write_ordinary(
                    self._files, self._publication, size_bytes, self._spool.read,
                    policy=self._policy, mode=self._mode,
                )  # fmt: skip
        self._written = replace(written, num_retries=written.num_retries + self.sending.num_retries)
        self._is_dirty = False
        return self._written


_SPOOL = "/var/tmp"  # noqa: S108 - files without names; /tmp is memory on many machines
Verify = Literal["length", "read"]
"""How parts are checked before their file is shown: by their lengths, as the place says them, or by reading them.

Places acknowledge what they have stored; `read` checks that. Files that are not striped have no
digests to compare with: always by their length."""


class Writing:
    """Writes files. Safe to use from many threads.

    `policy_of` says how the file of a path is striped; by default the policy of its folder. `spool` is a folder on a
    local disk with `settings.spool_bytes` of room; by default `$TMPDIR`, or /var/tmp.
    """

    def __init__(
        self,
        files: Files,
        *,
        policy_of: Callable[[str], Policy] | None = None,
        spool: Path | None = None,
        settings: WritingSettings | None = None,
    ) -> None:
        self._files = files
        self._policy_of = policy_of or (lambda path: files.policy(path.rpartition("/")[0]))
        self._spool = spool or Path(os.environ.get("TMPDIR") or _SPOOL)
        self._settings = settings or WritingSettings()
        self._workers = Executor("bootseer-write", self._settings.max_threads)
        self._excluded = ExcludedNodes(self._settings.excluded_s)
        self._budget = Budget(self._settings.spool_bytes, self._settings.random_bytes)
        self._lock = threading.Lock()
        self._writers: set[FileWriter] = set()
        self._publications: set[Publication] = set()
        self._timer = Timer("bootseer-writing", 1)
        self._is_kept = False
        """Whether the timer looks after what is on its way."""
        self._is_open = True

    def write_file(
        self,
        path: str,
        size_bytes: int,
        read: Read,
        *,
        mode: int = 0o644,
        policy: Policy | None = None,
        verify: Verify = "length",
        progress: Progress | None = None,
    ) -> Written:
        """Write a file whose bytes are all there, over what has its name: `read` gives them, a part that failed again.
        Its folder must be there.

        It is durable, verified and visible when this returns; when it raises, nothing has changed. `progress` is called
        in this thread. For a file below a hidden folder, as in an attempt, `files` must be made `within` it.
        """
        check_target(self._files, path)
        policy, publication = self._begin(path, policy, mode)
        try:
            if policy.is_striped(size_bytes):
                return write_replayed(
                    publication, size_bytes, read, policy,
                    workers=self._workers, excluded=self._excluded, settings=self._settings, verify=verify,
                    progress=progress,
                )  # fmt: skip
            return write_ordinary(
                self._files, publication, size_bytes, read,
                policy=policy, mode=mode, progress=progress,
            )  # fmt: skip
        finally:
            self._end(publication)

    def open(
        self,
        path: str,
        *,
        mode: int = 0o644,
        policy: Policy | None = None,
        verify: Verify = "length",
        is_checked: bool = False,
    ) -> FileWriter:
        """Begin a file that is written piece by piece, over what has its name when it is committed. `is_checked`: the
        caller has seen that its folder is there, and no folder of its name."""
        if not is_checked:
            check_target(self._files, path)
        policy, publication = self._begin(path, policy, mode)
        try:
            writer = FileWriter(
                self._files, publication, policy, Spool(self._spool), self._budget,
                mode=mode, verify=verify, workers=self._workers, excluded=self._excluded, settings=self._settings,
                free_some=self._free_some, ended=lambda writer: self._ended(writer, publication),
            )  # fmt: skip
        except BaseException:
            self._end(publication)
            raise
        with self._lock:
            self._writers.add(writer)
        return writer

    def facts(self) -> dict[str, object]:
        """What is on its way, and nodes that are avoided."""
        with self._lock:
            num_files = len(self._publications)
        return {"files": num_files, "spool_bytes": self._budget.used_bytes, "sick": sorted(self._excluded.names())}

    def close(self) -> None:
        """Abort what was not committed."""
        with self._lock:
            self._is_open = False
            writers = list(self._writers)
        for writer in writers:
            writer.abort()
        self._workers.close()
        self._timer.close()

    def _begin(self, path: str, policy: Policy | None, mode: int) -> tuple[Policy, Publication]:
        policy = policy or self._policy_of(path)
        publication = Publication(self._files, path, policy, mode, settings=self._settings, workers=self._workers)
        with self._lock:
            if not self._is_open:
                raise PermanentError(f"{self._files.place.uri} is not written to any more: it was closed")
            if not self._is_kept:
                self._keep_later()
                self._is_kept = True
            self._publications.add(publication)
        return policy, publication

    def _end(self, publication: Publication) -> None:
        publication.end()
        with self._lock:
            self._publications.discard(publication)

    def _ended(self, writer: FileWriter, publication: Publication) -> None:
        self._end(publication)
        with self._lock:
            self._writers.discard(writer)

    def _free_some(self) -> bool:
        """Whether room in the spool will come back. When none is on its way, the file that can sends what it has."""
        with self._lock:
            rooms = [(*writer.sending.room_to_come(), writer) for writer in self._writers]
        if any(on_the_way for on_the_way, _, _ in rooms):
            return True
        waiting = max(rooms, key=lambda room: room[1], default=None)
        return waiting is not None and waiting[2].sending.send_now()

    def _keep_later(self) -> None:
        self._timer.after(min(self._settings.idle_s, self._settings.lease_s) / 3, self._keep)

    def _keep(self) -> None:
        """Renew leases, and end segments to which nothing is added, as long as anything is on its way."""
        with self._lock:
            writers, publications = list(self._writers), list(self._publications)
            self._is_kept = bool(publications)
        if not publications:
            return
        for writer in writers:
            run_reported(partial(writer.sending.end_idle, self._settings.idle_s))
        for publication in publications:
            run_reported(publication.renew)
        self._keep_later()
