"""Writing a file as programs do: at any offset, of any length, with an unknown number of bytes to come.

Everything goes to the spool first, and is sent from there while the program goes on (`sending`). So sequential writers
need little room whatever the size of the file, and all others need as much as they write out of order.

`sync` and `commit` make what was written so far durable, verified and visible, in one step, and nothing is visible
before. A file that is written on after a `sync` shows the content of that moment until the next one.

Methods may be called from many threads; those that change the file take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.checkpoint.policy import Policy
from bootseer.checkpoint.writing.placement import ExcludedNodes
from bootseer.checkpoint.writing.publication import Publication, Written, write_ordinary
from bootseer.checkpoint.writing.sending import Sending
from bootseer.checkpoint.writing.settings import WritingSettings
from bootseer.checkpoint.writing.spool import Budget, Spool, TooLargeError
from bootseer.errors import PermanentError
from bootseer.io.executor import Executor

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
        """As long as it is now."""
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
