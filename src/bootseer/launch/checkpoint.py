"""`bootseer run --checkpoint`: a folder of checkpoints, mounted before anything else of the start and read ahead, or
given to the command as it lies on a local disk.

    model_initialization.checkpoint_mount     it is mounted; what the start will read is fetched from now on
    checkpoint_start                          training began, or the command ended: what was read until then, from where
    checkpoint_datanode                       what one node of the file system served of it

What the job itself does with it, `model_initialization.checkpoint_read`, is marked by the hook.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from bootseer.artifact.progress import ProgressCallback, Show
from bootseer.errors import AccessError, Interrupted, TransientError
from bootseer.launch.interrupt import interruptible
from bootseer.launch.observers import ENDED, StartEnd, harmless
from bootseer.launch.session import Session, staged
from bootseer.launch.supervise import say
from bootseer.trace.event import INSTANT

if TYPE_CHECKING:
    from bootseer.checkpoint.mount.mounted import MountedCheckpoint, Way

STAGE = "model_initialization.checkpoint_mount"
VARIABLE = "BOOTSEER_CHECKPOINT"
"""Tells the command where its checkpoints are mounted."""


@dataclass(frozen=True, slots=True)
class CheckpointWanted:
    """What the user said of the checkpoint."""

    uri: str
    target: Path | None
    """Where to mount it; None: in a folder of its own."""
    memory_bytes: int | None
    cache: Path | None
    """The node's cache; None: nothing is kept."""
    runtime: Path
    way: Way = "auto"


class CheckpointStart:
    """One start's checkpoint, from the mount to its end."""

    def __init__(self, wanted: CheckpointWanted, session: Session | None, show: Show) -> None:
        self._wanted = wanted
        self._session = session
        self._show = show
        self._mounted: MountedCheckpoint | None = None
        self._plain: Path | None = None
        """The folder that is read without a mount of ours, if one is."""
        self._reason = ""
        self._seconds = 0.0
        self._end = StartEnd(session, self._record)

    def __enter__(self) -> dict[str, str]:
        """Mount it; the variable that tells the command where. Signals must be blocked.

        Raises `BootseerError` and `Interrupted`.
        """
        waiting = self._show(f"waiting for {self._wanted.uri}", "")
        with interruptible(), staged(self._session, STAGE), waiting as on_progress:
            began_s = time.monotonic()
            # Its imports are a part of what it takes.
            from bootseer.checkpoint.mount.mounted import plain_folder

            self._plain, self._reason = plain_folder(self._wanted.uri, self._wanted.way)
            if self._plain is not None:
                self._show_plainly(self._plain)
            if self._plain is None:
                self._mounted = self._mount(on_progress)
            self._seconds = time.monotonic() - began_s
        if self._session is not None:
            self._session.also_beside(self._end.watch)
        return {VARIABLE: str(self._mounted.target if self._mounted is not None else self._plain)}

    def _mount(self, on_progress: ProgressCallback) -> MountedCheckpoint:
        from bootseer.checkpoint.mount.mounted import mount_checkpoint

        wanted = self._wanted
        return mount_checkpoint(
            wanted.uri,
            wanted.target,
            runtime=wanted.runtime,
            cache=wanted.cache,
            memory_bytes=wanted.memory_bytes,
            slot=_slot(self._session),
            lifeline=True,
            waiting=lambda: on_progress(0, 0),
        )

    def _show_plainly(self, folder: Path) -> None:
        """Where it is wanted elsewhere, show it there; where that is not possible, it is mounted after all."""
        target = self._wanted.target
        if target is None or target.resolve() == folder.resolve():
            return
        from bootseer.checkpoint.mount.mounted import show_plainly

        try:
            self._mounted = show_plainly(folder, target, runtime=self._wanted.runtime)
        except AccessError as error:
            if self._wanted.way == "plain":
                raise
            self._plain, self._reason = None, f"it cannot be shown in {target} otherwise ({error})"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The command has ended: tell what was read, and take the mount away.

        A signal ends the wait for what is still being sent, and not the sending: the daemon notices our end.
        """
        mounted = self._mounted
        if mounted is not None or self._plain is not None:
            self._end.tell(ENDED)
        if mounted is None:
            return
        uri = self._wanted.uri
        with harmless("the checkpoint was not unmounted"):
            try:
                with interruptible(), self._show(mounted.ending(), "") as on_progress:
                    mounted.unmount(waiting=lambda: on_progress(0, 0))
            except TransientError as busy:
                say(f"{busy}; it is taken away now all the same, and what still uses it gets errors")
            except Interrupted as interrupted:
                say(f"interrupted by {interrupted}; what was written goes on being sent to {uri} in the background")

    def _record(self, until: str) -> None:
        if self._session is None or (self._mounted is None and self._plain is None):
            return
        from bootseer.report.analysis.starts import (  # not in front of the command
            CHECKPOINT_DATANODE,
            CHECKPOINT_START,
            MAX_DATANODES,
        )

        status = self._mounted.began() if self._mounted is not None and self._plain is None else {"place": {}}
        tracer, parent = self._session.tracer, self._session.span
        how = {"mode": "mounted" if self._plain is None else "plain", "reason": self._reason}
        attrs = {"uri": self._wanted.uri, "until": until, **how, "seconds": round(self._seconds, 3), **_numbers(status)}
        tracer.emit(CHECKPOINT_START, INSTANT, parent=parent, attrs=attrs)
        nodes = status["place"].get("nodes", {})
        for name in sorted(nodes, key=lambda name: -nodes[name]["bytes"])[:MAX_DATANODES]:
            tracer.emit(CHECKPOINT_DATANODE, INSTANT, parent=parent, attrs={"datanode": name, **nodes[name]})


def _slot(session: Session | None) -> str:
    """Which of the job's nodes this is: each reads its own part of a checkpoint. Empty for the only one."""
    identity = session.tracer.identity if session is not None else None
    if identity is None or (identity.num_nodes or 1) == 1:
        return ""
    return f"{identity.node if identity.node_rank is None else identity.node_rank} of {identity.num_nodes}"


def _numbers(status: Mapping[str, Any]) -> dict[str, Any]:
    """The daemon's figures under the names of the report."""
    place, peers = status["place"], status.get("peers") or {}
    names = ("read_bytes", "place_bytes", "cache_bytes", "peer_bytes", "same_bytes", "rebuilt", "refused")
    return {
        "late_requests": sum(peers.get("late", {}).values()),
        "late_peers": " ".join(sorted(peers.get("late", ()))),
        "wrong_peers": " ".join(sorted(peers.get("liars", ()))),
        **{name: status.get(name, 0) for name in names},
        **{name: place.get(name, 0) for name in ("retries", "hedges", "hedges_won")},
        "fallback": place.get("fallback", ""),
    }
