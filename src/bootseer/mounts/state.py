"""The mounts of this node: one folder and one JSON file per mount below the runtime folder.

    <runtime>/mounts/<id>/mount.json    what is mounted where, by which daemon
    <runtime>/mounts/<id>/...           mount points, control socket and log of that mount
    <runtime>/layers/...                see `shared_layers`

Whether a mount or process exists is always read from the kernel. These files only record where to look, so that a mount
can be found, used and removed after the process that made it was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, field

from bootseer.errors import BootseerError, PermanentError, os_errors_as
from bootseer.io.files import delete_tree, replace_file
from bootseer.io.trusted_folder import own_folder
from bootseer.logs import logger
from bootseer.mounts import control, kernel
from bootseer.mounts.control import LOG
from bootseer.mounts.process import ProcessId

_LOG = logger(__name__)
SCHEMA = "bootseer.mount/1"
_RECORD = "mount.json"
_MAKER = "maker"
"""File with pid and start time of the process that is mounting."""
_ABANDONED_S = 600.0
_ID = re.compile(r"[0-9a-f]{12}")
Health = Literal["mounted", "daemon dead", "gone"]


class MountState(Struct, frozen=True):
    """One mount. `target` is the absolute path that the user sees."""

    id: str
    target: str
    what: str
    """Name of the image, snapshot or checkpoint, for messages."""
    boot: str
    """The kernel's boot id at the time of the mount."""
    layers: tuple[str, ...] = ()
    """Identities of its block files."""
    daemon: ProcessId | None = None
    owner: ProcessId | None = None
    """The process whose private mount namespace has the mount, which ends with it; None: visible on the host."""
    made_s: float = 0.0
    """Seconds since 1970."""
    details: Mapping[str, str] = field(default_factory=dict)
    schema: str = SCHEMA


# Examined at the import, because msgspec crashes the process if threads do so at the same time (`artifact.document`).
msgspec.json.Decoder(MountState)


class Runtime:
    """The runtime folder, preferably on a file system that is emptied at boot."""

    def __init__(self, root: Path) -> None:
        """Create the folder if it is missing. Raises `PermanentError` when that fails, or other users can change it."""
        # Resolved, as the kernel writes paths in the mount table.
        otherwise = "set BOOTSEER_RUNTIME to another folder"
        self.root = own_folder(root, otherwise=otherwise)
        self.mounts = own_folder(self.root / "mounts", otherwise=otherwise)
        self.layers = own_folder(self.root / "layers", otherwise=otherwise)
        self.boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def new_folder(self) -> Path:
        """Create the folder of a new mount; its name is the mount's id. It counts as a mount after `write`.

        Raises `PermanentError` when the runtime folder is full or read-only.
        """
        folder = self.mounts / secrets.token_hex(6)
        with os_errors_as(PermanentError, self.mounts, "; make room there, or name another runtime folder"):
            folder.mkdir(mode=0o700)
            maker = ProcessId.of(os.getpid())
            (folder / _MAKER).write_text(f"{maker.pid} {maker.started}" if maker is not None else "")
        return folder

    def folder(self, state: MountState) -> Path:
        return self.mounts / state.id

    def log(self, state: MountState) -> str:
        """The log of a mount's daemon; "" when it has none."""
        return "" if state.daemon is None else str(self.folder(state) / LOG)

    def write(self, state: MountState) -> None:
        """Create or update the record of a mount."""
        # By `json`: paths that are not UTF-8 have lone surrogates, which msgspec refuses to write and to read.
        record = json.dumps(msgspec.to_builtins(state))
        replace_file(self.folder(state) / _RECORD, f"{record}\n".encode())

    def all(self) -> Iterator[MountState]:
        """All recorded mounts, dead or alive. Invalid records are skipped."""
        for folder in sorted(self.mounts.iterdir()):
            with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
                yield _read(folder)

    def is_mounting(self) -> bool:
        """Whether a process may be mounting now. What it uses is not recorded yet, and must not be removed."""
        for folder in self.mounts.iterdir():
            with contextlib.suppress(OSError):
                if _is_unrecorded(folder) and not _is_abandoned(folder):
                    return True
        return False

    def find(self, target: Path) -> MountState | None:
        """The mount at `target`; the newest of several."""
        wanted = os.path.abspath(target)  # noqa: PTH100 - resolving links would access a mount that may hang
        found = [state for state in self.all() if state.target == wanted]
        alive = [state for state in found if self.health(state) != "gone"]
        return max(alive or found, key=lambda state: state.made_s, default=None)

    def health(self, state: MountState) -> Health:
        """Whether the mount exists. Does not access the mount, because a dead one would block."""
        if state.boot != self.boot:
            return "gone"
        exists = state.owner.alive if state.owner is not None else kernel.is_mount(Path(state.target))
        if not exists:
            return "gone"
        return "mounted" if state.daemon is None or state.daemon.alive else "daemon dead"

    def remove(self, state: MountState) -> None:
        self.remove_folder(self.folder(state))

    def remove_folder(self, folder: Path) -> None:
        """Unmount everything in a folder of `new_folder`, the last mounted first, and delete it.

        Raises `PermanentError` for a mount that remains, and then deletes nothing: that would hit its content.
        """
        for point in reversed(kernel.mounts_below(folder)):
            kernel.unmount(Path(point), lazy=True)
        if left := kernel.mounts_below(folder):  # one of a parent namespace cannot be unmounted
            raise PermanentError(f"{left[0]} is still mounted")
        delete_tree(folder)

    def remove_stale(self) -> None:
        """Remove the records and folders of all mounts that are gone.

        A mount that exists although its daemon is dead is kept, so that the user can see it. A folder without a record
        belongs to a process that is mounting, or, ten minutes after the last change in it, was left by a killed one.
        """
        for state in list(self.all()):
            if self.health(state) == "gone" and (state.daemon is None or not state.daemon.alive):
                with contextlib.suppress(BootseerError, OSError):
                    self.remove(state)
                    _LOG.info("mount %s at %s is gone: record removed", state.id, state.target)
        for folder in self.mounts.iterdir():
            with contextlib.suppress(BootseerError, OSError):
                if _is_unrecorded(folder) and _is_abandoned(folder):
                    with contextlib.suppress(BootseerError):
                        control.send_request(folder, "stop")
                    self.remove_folder(folder)
                    _LOG.info("%s was left by a process that died: removed", folder)


def _is_unrecorded(folder: Path) -> bool:
    return not (folder / _RECORD).exists()


def _is_abandoned(folder: Path) -> bool:
    """Old, and its maker has ended: a mount may wait for an image of 100 GB. Age counts too, because a maker in another
    PID namespace cannot be seen."""
    if time.time() - folder.stat().st_mtime <= _ABANDONED_S:
        return False
    with contextlib.suppress(OSError, ValueError):
        pid, started = map(int, (folder / _MAKER).read_text().split())
        return not ProcessId(pid, started).alive
    return True


def _read(folder: Path) -> MountState:
    state = msgspec.convert(json.loads((folder / _RECORD).read_bytes()), MountState)
    if state.schema != SCHEMA or state.id != folder.name or not _ID.fullmatch(state.id):
        raise ValueError
    return state
