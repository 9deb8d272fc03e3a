"""The life of one mount of an artifact's files, from its options to the handle that takes it away again.

`LazyMount.run` is the walk: what nothing uses is released, the artifact is found, its block files are opened in the
cache, a kind's own `show_files` brings them to a tree, and what is mounted is written down, so that a later process
finds it after this one was killed. What failed is taken away again.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bootseer.artifact.child import breaks_forks, run_in_child
from bootseer.artifact.loading import CachedLayer
from bootseer.artifact.materialize import Materializer, MountOptions, Subject, failures, peer_numbers
from bootseer.artifact.places import blocks_folder
from bootseer.artifact.progress import Say, Show, Stage
from bootseer.artifact.room import Room, release_unused
from bootseer.blocks.index import Index
from bootseer.cache.cache import Cache
from bootseer.errors import BootseerError, PermanentError
from bootseer.mounts.control import LOG
from bootseer.mounts.daemon import Daemon
from bootseer.mounts.ladder import Way
from bootseer.mounts.process import ProcessId
from bootseer.mounts.state import MountState, Runtime

_KEEP_S = 5.0
_POLL_S = 0.01


class LazyMount(ABC):
    """One mount in the making. Call `run` while this process has one thread."""

    layers: Materializer
    """The block files on their way; there once they are found."""
    target: Path | None = None
    """Where the user wants it; None: below the mount's own folder."""

    def __init__(self, options: MountOptions, *, lifeline: bool, stage: Stage, say: Say, show: Show) -> None:
        """`lifeline`: the daemon of a lazy mount ends with this process."""
        self.options = options
        self.runtime = Runtime(options.runtime)
        self.lifeline = lifeline
        self.stage = stage
        self.say = say
        self.show = show
        self.details: dict[str, str] = {}
        """What is written down of the mount beside what all have."""

    @abstractmethod
    def find(self, *, in_child: bool = False) -> tuple[Subject, Sequence[Index]]:
        """What is mounted, and the indexes of its block files, the lowest first."""

    @abstractmethod
    def show_files(self) -> tuple[Way, Path]:
        """Have the files shown by the best way that works here; which one it was, and where they are."""

    @abstractmethod
    def undo(self) -> None:
        """Take away what `show_files` has mounted."""

    @abstractmethod
    def owner(self) -> ProcessId | None:
        """The process with which the mount ends, if it does."""

    def run(self, store_uri: str | None) -> tuple[MountState, dict[str, object]]:
        """Mount it: what was written down of it, and its facts. Raises `BootseerError` where no fallback helps."""
        cache = Cache(blocks_folder(self.options.cache))
        room = Room(cache, self.say)
        if breaks_forks(store_uri):
            with self.stage("store"):
                run_in_child(self._fetch_metadata)
        subject, indexes = self.find()
        release_unused(self.runtime, room, self.options.cache, [index.identity for index in indexes])
        folder = self.runtime.new_folder()
        with contextlib.ExitStack() as opened:
            try:
                stack = [
                    CachedLayer(index, opened.enter_context(contextlib.closing(room.open(index)))) for index in indexes
                ]
                self.layers = Materializer(
                    subject, cache, folder, stack, self.lifeline, self.stage, self.say, self.show, room
                )
                return self._mount()
            except BaseException as error:
                with contextlib.suppress(BootseerError, OSError):
                    self.runtime.clear(folder)
                if isinstance(error, OSError):
                    raise PermanentError(
                        f"{error.filename or self.target or folder}: {error.strerror or error}"
                    ) from error
                raise

    def _fetch_metadata(self) -> None:
        """In a child: get all that must be known before the mount from the store to this node."""
        subject, _ = self.find(in_child=True)
        options = self.options
        if options.workload:
            from bootseer.artifact.hotsets import HotSets

            sets = HotSets(options.cache, subject.digest, subject.store, self.say, options.signatures)
            sets.fetch(options.workload)

    def _mount(self) -> tuple[MountState, dict[str, object]]:
        layers = self.layers
        local_bytes = sum(layer.stored_bytes - layer.missing_bytes for layer in layers.stack)
        try:
            way, target = self.show_files()
            state = MountState(
                id=layers.folder.name,
                target=os.path.abspath(target),  # noqa: PTH100 - as `Runtime.find` compares
                what=layers.subject.name,
                boot=self.runtime.boot,
                layers=tuple(layer.index.identity for layer in layers.stack),
                daemon=layers.daemon.process if layers.daemon is not None else None,
                owner=self.owner(),
                made_s=time.time(),
                details={"digest": layers.subject.digest, "mode": layers.mode, **self.details},
            )
            self.runtime.write(state)
        except BaseException:
            self.undo()
            layers.stop_daemon()
            raise
        return state, {
            "digest": layers.subject.digest,
            "workload": self.options.workload,
            "mode": layers.mode,
            "reason": layers.reason,
            "way": way.value,
            "stored_bytes": sum(layer.stored_bytes for layer in layers.stack),
            "local_bytes": local_bytes,
        }


class MountHandle:
    """What one start reads. Seen by the process that mounted it."""

    def __init__(
        self,
        label: str,
        facts: Mapping[str, object],
        runtime: Runtime,
        state: MountState,
        daemon: Daemon | None,
        say: Say,
        *,
        lifeline: bool = False,
    ) -> None:
        """`what` it is for people: `the image`. No `daemon`: all was here, and nothing is fetched or recorded.
        `lifeline`: it serves one command, and is of no use when that has ended."""
        self.facts = facts
        """What is known since it was mounted: mode, reason, sizes."""
        self._what = label
        self._runtime = runtime
        self._state = state
        self._daemon = daemon
        self._say = say
        self._lifeline = lifeline

    def began(self) -> dict[str, object]:
        """The start is over: end its record and report what it cost. Without a daemon nothing is fetched."""
        numbers: dict[str, object] = {"demand_bytes": 0, "hot_bytes": 0, "cold_bytes": 0, "requests": 0}
        if self._daemon is None:
            return numbers
        try:
            self._daemon.began()
            status = self._daemon.status()
        except BootseerError as error:
            if self._daemon.process.alive:  # that it died is for `tell_problems`
                self._say(f"{error}; what this start cost is not known")
            return numbers
        return numbers_of(status)

    def tell_problems(self) -> None:
        """Say what reads failed for while the command ran, which itself saw I/O errors alone."""
        daemon = self._daemon
        if daemon is None:
            return
        if not daemon.process.alive:
            line = _last_line(daemon.folder / LOG)
            self._say(
                f"the mount daemon died while the command ran: its reads of {self._what} failed from then on"
                f" (log: {line or 'empty, so that it was killed'})"
            )
            return
        fetch = failures(daemon)
        if fetch.get("first_corrupt"):
            self._say(f"reads of {self._what} failed, its store has damaged blocks: {fetch['first_corrupt']}")
        elif fetch.get("first_failure"):
            self._say(f"{fetch['failed_reads']} reads of {self._what} failed: {fetch['first_failure']}")

    def keep_record(self) -> None:
        """Wait a moment until the record has become part of the hot set, and say what did not work."""
        if self._daemon is None:
            return
        from bootseer.artifact.hotsets import KEPT

        path = self._daemon.folder / KEPT
        until = time.monotonic() + _KEEP_S
        while not path.exists() and self._daemon.process.alive:
            if time.monotonic() > until:
                return  # it goes on beside, and tells its log
            time.sleep(_POLL_S)
        with contextlib.suppress(OSError, ValueError):
            for note in json.loads(path.read_text()):
                self._say(str(note))


def numbers_of(status: Mapping[str, Any]) -> dict[str, object]:
    """What a start cost so far, by what a daemon says of itself; in the words of reports (`analysis.images`)."""
    fetch = status.get("fetch") or {}
    by_purpose = fetch.get("bytes_by_purpose") or {}
    foreseen = bool(fetch.get("hot_blocks"))
    return {
        "demand_bytes": by_purpose.get("demand", 0),
        "hot_bytes": by_purpose.get("hot", 0),
        "cold_bytes": by_purpose.get("cold", 0),
        "requests": sum((fetch.get("requests_by_purpose") or {}).values()),
        "coverage": round(fetch["covered"] / fetch["needs"], 4) if foreseen and fetch.get("needs") else None,
        "wasted_blocks": fetch.get("wasted_blocks", 0),
        "late_blocks": fetch.get("late", 0) if foreseen else 0,
        "waited_s": round(fetch.get("waited_s", 0.0), 3),
        **peer_numbers(fetch),
    }


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
