"""The life cycle of one lazy mount, from its options to the handle that unmounts it.

`LazyMount.run` is the sequence: release unused mounts, find the artifact, open its block files in the cache, let the
subclass mount them (`mount_files`), and record the mount, so that a later process finds it even if this one is killed.
A failure undoes all of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bootseer.artifact.cache_space import CacheSpace, release_unused
from bootseer.artifact.child import breaks_forks, run_in_child
from bootseer.artifact.materialize import Materializer, Subject, failures, peer_numbers
from bootseer.artifact.places import blocks_folder
from bootseer.blocks.index import Index
from bootseer.cache.cache import Cache
from bootseer.cache.cached_file import CachedFile
from bootseer.errors import BootseerError, NotFoundError, PermanentError
from bootseer.io.files import lines_of
from bootseer.mounts.control import LOG
from bootseer.mounts.layers import MountMethod
from bootseer.mounts.process import ProcessId
from bootseer.mounts.shared_layers import unmount_own
from bootseer.mounts.state import MountState, Runtime

_KEEP_S = 5.0
_POLL_S = 0.01


@dataclass(kw_only=True)
class LazyMount(Materializer, ABC):
    """A mount in the making. Call `run` while this process has one thread."""

    target: Path | None = None
    """The mount point; None: below the mount's own folder."""
    is_cached: bool = field(init=False, default=False)
    """Whether `find` used metadata of an earlier start."""
    missing: str = field(init=False, default="")
    """Why the store does not have the artifact, if a child process has found out: then `find` does not ask it."""
    details: dict[str, str] = field(init=False, default_factory=dict)
    """Kind-specific fields of the mount's record."""

    def __post_init__(self) -> None:
        self.runtime = Runtime(self.options.runtime)

    @abstractmethod
    def find(self, *, in_child: bool = False) -> tuple[Subject, Sequence[Index]]:
        """Find the artifact and the indexes of its block files, the lowest first. `in_child`: raise `NotFoundError`
        instead of making it on this node, because a child process has a deadline."""

    def is_outdated(self) -> bool:
        """Whether the cached metadata are useless now, since the store has deleted what they name; then the next `find`
        reads the store's."""
        return False

    @abstractmethod
    def mount_files(self) -> tuple[MountMethod, Path]:
        """Mount the files by the best method that works here; returns the method and the mount point."""

    def unmount_files(self) -> None:
        """Undo `mount_files`."""
        unmount_own(self.folder)

    def owner(self) -> ProcessId | None:
        """The process with which the mount ends, if any."""
        return ProcessId.of(os.getpid())

    def run(self, store_uri: str | None) -> tuple[MountState, dict[str, object]]:
        """Mount; returns the mount's record and facts for the report. Raises `BootseerError` if no fallback works."""
        self.cache = Cache(blocks_folder(self.options.cache))
        self.space = CacheSpace(self.cache, self.say)
        self.subject, indexes = self._find(store_uri)
        # Before the files are opened: idle shared layers pin their files, of which the disk may be full.
        release_unused(self.runtime, self.space, self.options.cache, [index.identity for index in indexes])
        self.folder = self.runtime.new_folder()
        with contextlib.ExitStack() as opened:

            def open_all() -> list[CachedFile]:
                return [opened.enter_context(contextlib.closing(self.space.open(index))) for index in indexes]

            try:
                self.stack = open_all()
                is_complete = all(layer.complete for layer in self.stack)
                ask = partial(run_in_child, self.is_outdated) if breaks_forks(store_uri) else self.is_outdated
                if self.is_cached and not is_complete and ask():
                    self.subject, indexes = self._find(store_uri)
                    self.stack = open_all()
                return self._mount()
            except BaseException as error:
                with contextlib.suppress(BootseerError, OSError):
                    self.runtime.remove_folder(self.folder)
                if isinstance(error, OSError):
                    place = error.filename or self.target or self.folder
                    raise PermanentError(f"{place}: {error.strerror or error}") from error
                raise

    def _find(self, store_uri: str | None) -> tuple[Subject, Sequence[Index]]:
        if breaks_forks(store_uri):
            with self.stage("store"), self.show(f"waiting for {store_uri}", "") as on_progress:
                try:
                    run_in_child(self._fetch_metadata, waiting=lambda: on_progress(0, 0))
                except NotFoundError as error:
                    self.missing = str(error)
        return self.find()

    def _fetch_metadata(self) -> None:
        """In a child process: copy all metadata that the mount needs from the store to this node."""
        subject, _ = self.find(in_child=True)
        options = self.options
        if options.workload:
            from bootseer.artifact.hotsets import HotSets

            sets = HotSets(options.cache, subject.digest, subject.store, self.say, options.signatures)
            sets.copy_to_node(options.workload)

    def _fetch_process(self) -> None:
        """Begin to fetch the process snapshot, also if all files are on this node."""
        subject, options = self.subject, self.options
        if options.process is not None and options.workload and subject.is_shared:
            options.process.fetch(
                digest=subject.digest,
                workload=options.workload,
                store_uri=subject.store_uri,
                plain_http=options.plain_http,
                signatures=options.signatures,
                publish=options.publish,
            )

    def _mount(self) -> tuple[MountState, dict[str, object]]:
        self._fetch_process()
        local_bytes = sum(layer.index.stored_bytes - layer.missing_bytes for layer in self.stack)
        try:
            method, target = self.mount_files()
            state = MountState(
                id=self.folder.name,
                target=os.path.abspath(target),  # noqa: PTH100 - as `Runtime.find` compares
                what=self.subject.name,
                boot=self.runtime.boot,
                layers=tuple(layer.index.identity for layer in self.stack),
                daemon=self.daemon.process if self.daemon is not None else None,
                owner=self.owner(),
                made_s=time.time(),
                details={"digest": self.subject.digest, "mode": self.mode, **self.details},
            )
            self.runtime.write(state)
        except BaseException:
            self.unmount_files()
            self.stop_daemon()
            raise
        return state, {
            "digest": self.subject.digest,
            "workload": self.options.workload,
            "mode": self.mode,
            "reason": self.reason,
            "way": method.value,
            "stored_bytes": sum(layer.index.stored_bytes for layer in self.stack),
            "local_bytes": local_bytes,
        }


class MountHandle:
    """A mount, as used by the process that made it."""

    def __init__(self, label: str, mount: LazyMount, state: MountState, facts: Mapping[str, object]) -> None:
        """`state` and `facts`: what `mount.run` returned. `label`: what it is, for messages: `the image`."""
        self.facts = facts
        """Facts about the mount: mode, reason, sizes."""
        self._label = label
        self._runtime = mount.runtime
        self._state = state
        self._daemon = mount.daemon
        """None if everything is local now: nothing more is fetched or recorded."""
        self._pulled = mount.pulled
        self._say = mount.say

    def end_startup(self) -> dict[str, object]:
        """Report the end of the startup to the daemon; returns the startup's figures, as far as they are known."""
        status: Mapping[str, Any] = {}
        if self._daemon is not None:
            try:
                self._daemon.end_startup()
                status = self._daemon.status()
            except BootseerError as error:
                if self._daemon.process.alive:  # its death is reported by `report_problems`
                    self._say(f"{error}; what this start cost is not known")
                return {"stored_bytes": None}  # or the report would say that nothing of so much was fetched
        return numbers_of(status, self._pulled)

    def report_problems(self) -> str:
        """Say why reads failed while the command ran: the command itself saw only I/O errors. Returns what is damaged
        or missing in the store, if anything."""
        daemon = self._daemon
        if daemon is None:
            return ""
        if not daemon.process.alive:
            line = "".join(lines_of(daemon.folder / LOG)[-1:])
            self._say(
                f"the mount daemon died while the command ran: later reads of {self._label} failed"
                f" (log: {line or 'empty, so it was killed'})"
            )
            return ""
        fetch = failures(daemon)
        damage = str(fetch.get("first_corrupt") or "")
        if damage:
            self._say(f"reads of {self._label} failed, its store has damaged blocks: {damage}")
        elif fetch.get("first_failure"):
            self._say(f"{fetch['failed_reads']} reads of {self._label} failed: {fetch['first_failure']}")
        return damage

    def wait_for_record(self) -> None:
        """Wait shortly until the record is merged into the hot set, and report problems of the merge."""
        if self._daemon is None:
            return
        from bootseer.artifact.hotsets import MERGED

        path = self._daemon.folder / MERGED
        until = time.monotonic() + _KEEP_S
        while not path.exists() and self._daemon.process.alive:
            if time.monotonic() > until:
                return  # it continues in the background, and logs its problems
            time.sleep(_POLL_S)
        with contextlib.suppress(OSError, ValueError):
            for note in json.loads(path.read_text()):
                self._say(str(note))


def numbers_of(status: Mapping[str, Any], pulled: Mapping[str, int]) -> dict[str, object]:
    """The figures of a start from a daemon's status, by the names used in reports (`analysis.starts`). `pulled`: what
    was fetched before the daemon's start (`Materializer.pulled`)."""
    fetch = status.get("fetch") or {}
    by_purpose = fetch.get("bytes_by_purpose") or {}
    has_hot_set = bool(fetch.get("hot_blocks"))
    return {
        "demand_bytes": by_purpose.get("demand", 0),
        "hot_bytes": by_purpose.get("hot", 0),
        "cold_bytes": by_purpose.get("cold", 0) + pulled.get("cold_bytes", 0),
        "requests": sum((fetch.get("requests_by_purpose") or {}).values()) + pulled.get("requests", 0),
        "coverage": round(fetch["covered"] / fetch["needs"], 4) if has_hot_set and fetch.get("needs") else None,
        "wasted_blocks": fetch.get("wasted_blocks", 0),
        "late_blocks": fetch.get("late", 0) if has_hot_set else 0,
        "waited_s": round(fetch.get("waited_s", 0.0), 3),
        **peer_numbers(fetch),
    }
