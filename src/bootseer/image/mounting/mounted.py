"""An image that is mounted: what is known of it, and how it is taken away again.

Works from what was written down of the mount, so that another process than the one that mounted it can do both.
Called by `image.mounting.mount`, which makes it, by `launch.image_stage` and by `cli.image_mount`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bootseer.bring.hand_over import KEPT
from bootseer.bring.places import RUNTIME
from bootseer.errors import BootseerError, TransientError, UsageError
from bootseer.mounts import kernel
from bootseer.mounts.daemon import LOG, Daemon
from bootseer.mounts.state import MountState, Runtime
from bootseer.mounts.user_namespace import may_mount

CHANGES = "changes"
"""Key of a mount's details: the folder with what was changed in it, which goes with the mount."""
_KEEP_S = 5.0
_POLL_S = 0.01


class MountedImage:
    """One mounted image, seen by the process that mounted it."""

    def __init__(
        self,
        root: Path,
        config: Mapping[str, object],
        facts: Mapping[str, object],
        runtime: Runtime,
        state: MountState,
        daemon: Daemon | None,
        say: Callable[[str], None],
    ) -> None:
        self.root = root
        self.config = config
        self.facts = facts
        """What is known since it was mounted: mode, reason, sizes."""
        self._runtime = runtime
        self._state = state
        self._daemon = daemon
        self._say = say

    def began(self) -> dict[str, object]:
        """The start is over: its record ends, and what it cost is told. Nothing is fetched where no daemon is."""
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
        """Say what reads of the image failed for while the command ran, which itself saw I/O errors alone."""
        daemon = self._daemon
        if daemon is None:
            return
        if not daemon.process.alive:
            said = _last_line(daemon.folder / LOG)
            self._say(
                "the mount daemon died while the command ran: its reads of the image failed from then on"
                f" (log: {said or 'empty, so that it was killed'})"
            )
            return
        with contextlib.suppress(BootseerError):
            fetch = daemon.status().get("fetch")
            if isinstance(fetch, dict) and fetch.get("first_corrupt"):
                self._say(f"reads of the image failed, its store has damaged blocks: {fetch['first_corrupt']}")

    def keep_record(self) -> None:
        """Wait a moment until the record has become part of the hot set, and say what did not work."""
        if self._daemon is None:
            return
        path = self._runtime.folder(self._state) / KEPT
        until = time.monotonic() + _KEEP_S
        while not path.exists() and self._state.daemon is not None and self._state.daemon.alive:
            if time.monotonic() > until:
                return  # it goes on beside, and tells its log
            time.sleep(_POLL_S)
        with contextlib.suppress(OSError, ValueError):
            for note in json.loads(path.read_text()):
                self._say(str(note))

    def undo_command(self) -> list[str]:
        """A command line that takes the mount away, for when this process cannot."""
        # In a user namespace another folder would be the usual one: there everybody is root.
        where = f"{RUNTIME}={self._runtime.root}"
        return ["env", where, sys.executable, "-m", "bootseer", "image", "umount", str(self.root)]

    def close(self) -> None:
        """Take the mount away. Raises `BootseerError` when it is in use."""
        unmount(self._runtime, self._state)


def unmount(runtime: Runtime, state: MountState) -> None:
    """Take away a mount that was written down: the tree, its layers, its daemon. Layers that others may use stay.

    Raises `TransientError` while a process has a file of it open.
    """
    if kernel.is_mount(Path(state.target)):
        dead = state.daemon is not None and not state.daemon.alive
        if may_mount():
            try:
                kernel.unmount(Path(state.target), lazy=dead)
            except TransientError as error:
                raise TransientError(f"{error}; fuser -vm {state.target} shows who uses it") from error
        else:  # then it was mounted by a program that has the right
            from bootseer.fuse.attach import detach

            detach(Path(state.target), force=dead)
    folder = runtime.folder(state)
    if state.daemon is not None and state.daemon.alive:
        # The layers above the daemon's files first: it ends only when nobody uses them.
        prefix = f"{folder}/layers/"
        for point in [point for point in kernel.mount_points() if point.startswith(prefix)]:
            kernel.unmount(Path(point))
        Daemon(folder, state.daemon).stop()
    runtime.remove(state)
    changes = state.details.get(CHANGES)
    if changes and not any(point.startswith(f"{os.path.realpath(changes)}/") for point in kernel.mount_points()):
        shutil.rmtree(changes, ignore_errors=True)


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""


def find_mount(runtime: Runtime, target: Path) -> MountState:
    """What was written down of the mount at `target`. Raises `UsageError` when nothing was."""
    state = runtime.find(target)
    if state is None:
        raise UsageError(f"{target}: no image is mounted there", hint="bootseer image list shows what is")
    return state


def status_of(runtime: Runtime, state: MountState) -> dict[str, Any]:
    """What the daemon of a mount says of itself; empty when it has none or does not answer."""
    if state.daemon is None or not state.daemon.alive:
        return {}
    try:
        return Daemon(runtime.folder(state), state.daemon).status()
    except BootseerError:
        return {}


def share_here(status: Mapping[str, Any]) -> float | None:
    """Which part of the blocks that a daemon serves is on this node; None when it did not say."""
    files = status.get("files")
    if not isinstance(files, list):
        return None
    total = sum(file["blocks"] for file in files)
    return sum(file["ready_blocks"] for file in files) / total if total else 1.0


def numbers_of(status: Mapping[str, Any]) -> dict[str, object]:
    """What a start cost so far, in the words of the report (`analysis.images`)."""
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
    }
