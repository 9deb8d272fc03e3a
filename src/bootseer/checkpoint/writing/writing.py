"""All writing to a place by one process: its threads, its room on the local disk, its knowledge of excluded nodes.

One `Writing` serves all files of a mount or of a job; make another one after a fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.policy import Policy
from bootseer.checkpoint.writing.file_writer import FileWriter
from bootseer.checkpoint.writing.placement import ExcludedNodes
from bootseer.checkpoint.writing.publication import Progress, Publication, Written, check_target, write_ordinary
from bootseer.checkpoint.writing.replayed import Replayable, write_replayed
from bootseer.checkpoint.writing.settings import WritingSettings
from bootseer.checkpoint.writing.spool import Budget, Spool
from bootseer.errors import PermanentError
from bootseer.io.executor import Executor, run_reported
from bootseer.io.timer import Timer

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
        source: Replayable,
        *,
        mode: int = 0o644,
        policy: Policy | None = None,
        verify: Verify = "length",
        progress: Progress | None = None,
    ) -> Written:
        """Write a file whose bytes are all there, over what has its name. Its folder must be there.

        It is durable, verified and visible when this returns; when it raises, nothing has changed. `progress` is called
        in this thread. For a file below a hidden folder, as in an attempt, `files` must be made `within` it.
        """
        check_target(self._files, path)
        policy, publication = self._begin(path, policy, mode)
        try:
            if policy.is_striped(source.size_bytes):
                return write_replayed(
                    publication, source, policy,
                    workers=self._workers, excluded=self._excluded, settings=self._settings, verify=verify,
                    progress=progress,
                )  # fmt: skip
            return write_ordinary(
                self._files, publication, source.size_bytes, source.read,
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
