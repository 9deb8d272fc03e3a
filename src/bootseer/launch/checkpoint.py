"""`bootseer run --checkpoint`: mount a folder of checkpoints before the rest of the start and prefetch from it, or pass
a local folder to the command unmounted.

The job's own reads, `model_initialization.checkpoint_read`, are marked by the hook.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from bootseer.artifact.progress import ProgressCallback, Show
from bootseer.errors import Interrupted, TransientError, UsageError
from bootseer.launch.interrupt import interruptible
from bootseer.launch.observers import COMMAND_ENDED, StartReport, reporting_errors
from bootseer.launch.session import Session, session_stage
from bootseer.launch.supervise import say
from bootseer.trace.event import INSTANT
from bootseer.units import listed

if TYPE_CHECKING:
    from bootseer.checkpoint.mount.mounted import MountedCheckpoint, Way

STAGE = "model_initialization.checkpoint_mount"
VARIABLE = "BOOTSEER_CHECKPOINT"
"""Environment variable of the command: the folder with its checkpoints."""


class CheckpointOptions(Struct, frozen=True):
    """The options of `--checkpoint`."""

    uri: str
    target: Path | None
    """Mount point; None: a new folder."""
    memory_bytes: int | None
    cache: Path | None
    """The node's cache; None: no cache."""
    runtime: Path
    way: Way = "auto"


class CheckpointStart:
    """The checkpoint mount of one start."""

    def __init__(self, options: CheckpointOptions, session: Session, show: Show) -> None:
        self._options = options
        self._session = session
        self._show = show
        self._mounted: MountedCheckpoint | None = None
        self._plain_folder: Path | None = None
        """The local folder that is used without a mount, if any."""
        self._reason = ""
        self._seconds = 0.0
        self._report = StartReport(session, self._record)

    def __enter__(self) -> dict[str, str]:
        """Mount it; returns the variable with the folder for the command. Signals must be blocked.

        Raises `BootseerError` and `Interrupted`.
        """
        waiting = self._show(f"waiting for {self._options.uri}", "")
        with interruptible(), session_stage(self._session, STAGE), waiting as on_progress:
            began_s = time.monotonic()
            # Imported here, so that the import is part of the measured stage.
            from bootseer.checkpoint.mount.mounted import plain_folder

            self._plain_folder, self._reason = plain_folder(self._options.uri, self._options.way)
            if self._plain_folder is not None:
                self._check_target(self._plain_folder)
            else:
                self._mounted = self._mount(on_progress)
            self._seconds = time.monotonic() - began_s
        return {VARIABLE: str(self._mounted.target if self._mounted is not None else self._plain_folder)}

    def _mount(self, on_progress: ProgressCallback) -> MountedCheckpoint:
        from bootseer.checkpoint.mount.mounted import mount_checkpoint
        from bootseer.checkpoint.mount.serving import MEMORY_BYTES, MountRequest

        options = self._options
        request = MountRequest(
            options.uri,
            cache=options.cache,
            memory_bytes=options.memory_bytes or MEMORY_BYTES,
            slot=_slot(self._session),
        )
        return mount_checkpoint(
            request, options.target, runtime=options.runtime, lifeline=True, waiting=lambda: on_progress(0, 0)
        )

    def _check_target(self, folder: Path) -> None:
        """Refuse another path for a folder that is not mounted. Through a mount, new files in it would be striped."""
        target = self._options.target
        # `Path.resolve` raises `RuntimeError` for a loop of links.
        if target is not None and os.path.realpath(target) != os.path.realpath(folder):
            raise UsageError(
                f"{folder} is read directly and cannot be shown in {target}",
                hint=f"leave --checkpoint-dir out: ${VARIABLE} has its path; or give --checkpoint-read mount",
            )

    def __exit__(self, *_: object) -> None:
        """After the command: report what was read, and unmount.

        A signal ends the wait for pending write-back, not the write-back itself: the daemon finishes it alone.
        """
        mounted = self._mounted
        if mounted is not None or self._plain_folder is not None:
            self._report.send(COMMAND_ENDED)
        if mounted is None:
            return
        uri = self._options.uri
        with reporting_errors("the checkpoint was not unmounted"):
            try:
                with interruptible(), self._show(mounted.ending(), "") as on_progress:
                    lost = mounted.unmount(waiting=lambda: on_progress(0, 0)).get("lost")
                if lost:
                    say(f"NOT published to {uri} when their programs, or the mount, were killed: {listed(lost)}")
            except TransientError as busy:
                say(f"{busy}; it is unmounted anyway, and processes that still use it get errors")
            except Interrupted as interrupted:
                say(f"interrupted by {interrupted}; written data is still being sent to {uri} in the background")

    def _record(self, until: str) -> None:
        if not self._session.is_measured or (self._mounted is None and self._plain_folder is None):
            return
        from bootseer.report.analysis.starts import (  # not in front of the command
            CHECKPOINT_DATANODE,
            CHECKPOINT_START,
            MAX_DATANODES,
        )

        status: dict[str, Any] = {"place": {}}
        if self._mounted is not None:
            status = self._mounted.began(training=until != COMMAND_ENDED)
        tracer, parent = self._session.tracer, self._session.span
        how = {"mode": "mounted" if self._plain_folder is None else "plain", "reason": self._reason}
        attrs = {
            "uri": self._options.uri,
            "until": until,
            **how,
            "seconds": round(self._seconds, 3),
            **_report_figures(status),
        }
        tracer.emit(CHECKPOINT_START, INSTANT, parent=parent, attrs=attrs)
        nodes = status["place"].get("nodes", {})
        for name in sorted(nodes, key=lambda name: -nodes[name]["bytes"])[:MAX_DATANODES]:
            tracer.emit(CHECKPOINT_DATANODE, INSTANT, parent=parent, attrs={"datanode": name, **nodes[name]})


def _slot(session: Session) -> str:
    """`<rank> of <nodes>` of this node, as each node reads its own part of a checkpoint; empty for a single node."""
    identity = session.tracer.identity
    if (identity.num_nodes or 1) == 1:
        return ""
    return f"{identity.node if identity.node_rank is None else identity.node_rank} of {identity.num_nodes}"


def _report_figures(status: Mapping[str, Any]) -> dict[str, Any]:
    from bootseer.artifact.materialize import peer_numbers  # not in front of the command

    place = status["place"]
    names = ("read_bytes", "place_bytes", "cache_bytes", "peer_bytes", "rebuilt", "refused")
    return {
        "late_requests": 0,
        "late_peers": "",
        "wrong_peers": "",
        **peer_numbers(status),
        **{name: status.get(name, 0) for name in names},
        **{name: place.get(name, 0) for name in ("retries", "hedges", "hedges_won")},
        "fallback": place.get("fallback", ""),
    }
