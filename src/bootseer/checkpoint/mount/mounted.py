"""Mounting a place on a folder of this machine, and unmounting it.

Mounts are recorded in the runtime folder, so that any process can query and unmount them.

`plain_folder` decides whether a folder is better read directly than through a mount. A mount pays off for remote
storage: it asks many servers at once, reads ahead, and caches. A local disk has one copy, which the kernel reads faster
than a daemon that reads it, verifies it, and writes it into a cache on the same disk.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from msgspec import Struct
from msgspec.structs import replace

from bootseer.checkpoint.head import STRIPES
from bootseer.checkpoint.mount.serving import MountedPlace, MountRequest
from bootseer.errors import BootseerError, NotFoundError, PermanentError, TransientError, UsageError, os_errors_as
from bootseer.fuse.attach import detach
from bootseer.io.locks import flocked
from bootseer.mounts import kernel
from bootseer.mounts.control import FILES
from bootseer.mounts.daemon import Daemon, Waiting, start_daemon
from bootseer.mounts.kernel import mount_table, visible
from bootseer.mounts.serve import DaemonSpec
from bootseer.mounts.state import MountState, Runtime
from bootseer.places import open_place

END_S = 600.0
"""How long an unmount waits for unsent data."""
_START_S = 60.0
_WINDOW_S = 1800.0
"""The longest start that is recorded; `began` ends the recording earlier."""
_LEAST_FILES = 256
"""Eight files that are read at once take 80. With too few, reads fail with EIO."""
_FOLDER = "checkpoints"
_KIND = "fuse.bootseer"


class MountedCheckpoint(Struct, frozen=True):
    """A mounted place, found or mounted by this process."""

    runtime: Runtime
    state: MountState

    @property
    def target(self) -> Path:
        return Path(self.state.target)

    @property
    def health(self) -> str:
        """`mounted`, `daemon dead` or `gone`."""
        return self.runtime.health(self.state)

    def status(self) -> dict[str, Any]:
        """The daemon's status; empty if it does not answer."""
        daemon = self._daemon()
        if daemon is not None:
            with contextlib.suppress(BootseerError):
                return daemon.status()
        return {}

    def ending(self) -> str:
        """What an unmount will wait for, as a message."""
        is_writing = self.status().get("unpublished")
        return f"sending what was written to {self.state.what}" if is_writing else f"unmounting {self.target}"

    def began(self, *, training: bool = True) -> dict[str, Any]:
        """The startup is over: what was read so far is the next start's hot list. Returns the daemon's status.

        Without `training` the command ended before: then a list that contains what it read stays.
        """
        daemon = self._daemon()
        if daemon is None:
            raise NotFoundError(f"the daemon that serves {self.target} does not run")
        if training:
            daemon.end_startup()
        return daemon.status()

    def _daemon(self) -> Daemon | None:
        process = self.state.daemon
        # Version 0.2 recorded a bind mount with the process of its run, which is no daemon.
        has_daemon = process is not None and process.alive and self.state.details.get("access") != "plain"
        return Daemon(self.runtime.folder(self.state), process) if process and has_daemon else None

    def unmount(self, *, force: bool = False, waiting: Waiting = lambda: None) -> Mapping[str, Any]:
        """Unmount. With `force`, programs that use its files get errors, and what was written so far is published.

        The result lists files: `published` by this call, and `lost` ones that could not be published, now or after an
        earlier close. If another mount namespace has a copy of the mount, the daemon runs until that is gone. `waiting`
        is called twice a second; when it raises, the daemon finishes its work all the same.

        Raises `TransientError` while its files are in use, unless `force`.
        """
        daemon = self._daemon()
        reply: Mapping[str, Any] = {}
        # Another file system may be mounted there by now, and a forced unmount would end it for all its users.
        kinds = [mount.kind for mount in kernel.mounts_at(self.target)]
        is_plain = self.state.details.get("access") == "plain"
        is_ours = bool(kinds) and (is_plain or kinds[-1] == _KIND)
        if _KIND in kinds and not is_ours:
            raise TransientError(f"{self.target}: another file system is mounted over it; unmount that before")
        if daemon is None:
            if is_ours:
                detach(self.target, force=not is_plain, lazy=True)
        elif force:
            reply = daemon.stop(timeout_s=END_S, force=True, waiting=waiting)
        else:
            try:
                reply = daemon.stop(timeout_s=END_S, waiting=waiting)
            except PermanentError as error:
                if kernel.is_mount(self.target):
                    raise TransientError(self._busy(str(error))) from error
                # The daemon ends with the mount's copy in another namespace; `clean` removes its record then.
                return {"lost": self.status().get("lost", [])}
        self.runtime.remove(self.state)
        return reply

    def _busy(self, reason: str) -> str:
        writing = self.status().get("unpublished") or []
        names = f"; being written: {', '.join(writing[:5])}" if writing else ""
        return f"{reason}{names}; fuser -vm {self.target} shows who uses it"


def runtime_of(root: Path) -> Runtime:
    """Where mounts of checkpoints are recorded, below the runtime folder."""
    return Runtime(Runtime(root).root / _FOLDER)


def mount_checkpoint(
    request: MountRequest,
    target: Path | None,
    *,
    runtime: Path,
    lifeline: bool = False,
    waiting: Waiting = lambda: None,
) -> MountedCheckpoint:
    """Mount a place on `target`, an absolute path that is created if missing; None: on a folder of its own.

    `runtime` is the runtime folder. The daemon is forked: this process must not have used anything before that does not
    survive a fork. With `lifeline` the daemon ends with this process.
    `waiting` is called twice a second while the place does not answer; when it raises, the mount is cancelled. A mount
    on `target` whose daemon is dead is removed first. Raises `UsageError` when something else is mounted there or
    too few files may be open, and errors of the place.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < _LEAST_FILES:
        hint = "raise the hard limit where bootseer is started"
        raise UsageError(f"a mount needs {_LEAST_FILES} open files; ulimit -Hn allows {most}", hint=hint)
    uri, request = request.uri, replace(request, uri=_absolute(request.uri))
    record = runtime_of(runtime)
    record.remove_stale()
    with contextlib.nullcontext() if target is None else _mount_point(record, request, target):
        folder = record.new_folder()
        serve = partial(MountedPlace, request)
        spec = DaemonSpec(folder, serve, label=uri, window_s=_WINDOW_S, at=target, lifeline=lifeline)
        try:
            daemon = start_daemon(spec, deadline_s=_START_S, waiting=waiting)
        except BaseException:
            with contextlib.suppress(BootseerError, OSError):
                if kernel.is_mount(target or folder / FILES):
                    detach(target or folder / FILES, force=True)
                record.remove_folder(folder)
            raise
    state = MountState(
        id=folder.name,
        target=str(target or folder / FILES),
        what=uri,
        boot=record.boot,
        daemon=daemon.process,
        made_s=time.time(),
        details={"access": "ro" if request.read_only else "rw", "cache": str(request.cache or "")},
    )
    try:
        record.write(state)
    except BaseException:
        daemon.stop(timeout_s=END_S, force=True)
        raise
    return MountedCheckpoint(record, state)


@contextlib.contextmanager
def _mount_point(record: Runtime, request: MountRequest, target: Path) -> Iterator[None]:
    """Create the mount point, and remove a mount that a dead daemon has left there. Other processes mount there before
    or after the block: the upper one of two mounts hides the other, and is unmounted in its place. They do not wait
    long, because this mount will be there then."""

    def refuse(pids: list[int]) -> NoReturn:
        who = f"process {pids[0]}" if pids else "another process"
        raise UsageError(f"{target}: {who} is mounting there", hint="name another folder, or none in bootseer run")

    with flocked(record.root / f"{zlib.crc32(os.fsencode(target)):08x}.lock", deadline_s=_START_S, on_wait=refuse):
        state = record.find(target) if kernel.is_mount(target) else None
        if state is not None and record.health(state) == "daemon dead":
            MountedCheckpoint(record, state).unmount()
        if kernel.is_mount(target):
            hint = f"name another folder, or none in bootseer run; if unused: bootseer ckpt umount {target}"
            raise UsageError(f"{target}: something is mounted there", hint=hint)
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise UsageError(f"{target}: not a folder", hint=f"name a folder to mount on: {os.path.realpath(target)}")
        # The daemon would access its own mount, and deadlock.
        place = request.uri.removeprefix("file://")
        if "://" not in place and _lies_in(target, place):
            raise UsageError(f"{target} lies in {place}", hint="mount it outside of what is mounted")
        for own in (None if "://" in place else place, request.cache, request.spool, record.root):
            if own is not None and _lies_in(own, target):
                raise UsageError(f"{own} lies in {target}", hint="mount it beside what the mount itself needs")
        is_new = not target.exists()
        with os_errors_as(PermanentError, target):
            target.mkdir(parents=True, exist_ok=True)
        try:
            yield
        except BaseException:
            if is_new:  # a job that finds the folder would save its checkpoints on this machine's disk
                with contextlib.suppress(OSError):
                    target.rmdir()
            raise


def _absolute(uri: str) -> str:
    """The address with an absolute path: the daemon runs in another working directory."""
    return uri if ":" in uri.partition("/")[0] or not uri else str(Path(uri).absolute())


def _lies_in(path: Path | str, folder: Path | str) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def find_checkpoint(runtime: Runtime, target: Path) -> MountedCheckpoint:
    """The mount on `target`. Raises `UsageError` when there is none."""
    state = runtime.find(target)
    if state is None:
        hint = "bootseer ckpt mounted shows what is"
        if Runtime(runtime.root.parent).find(target) is not None:
            hint = f"an image is: bootseer image umount {target}"
        elif kernel.is_mount(target):
            hint = f"if they are, {runtime.root} is not their runtime folder, or was emptied: umount {target}"
        raise UsageError(f"{target}: no checkpoints are mounted there", hint=hint)
    return MountedCheckpoint(runtime, state)


def all_mounted(runtime: Runtime) -> list[MountedCheckpoint]:
    """All mounts, including those whose daemon is dead."""
    return [MountedCheckpoint(runtime, state) for state in runtime.all() if runtime.health(state) != "gone"]


Way = Literal["auto", "mount", "plain"]
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "tmpfs", "ramfs", "overlay"})
"""File systems of disks and memory. All others may be remote."""
_MAX_FOLDERS = 10_000


def plain_folder(uri: str, way: Way) -> tuple[Path | None, str]:
    """The folder to read directly, or None for a mount; and the reason, "" when there was no choice.

    Raises `UsageError` when `way` asks for a direct read that is not possible.
    """
    folder = Path(uri.removeprefix("file://")).absolute()
    is_far = not uri or (":" in uri.partition("/")[0] and not uri.startswith("file:///"))
    if is_far or not os.path.isdir(folder):  # noqa: PTH112 - pathlib raises for one that may not be looked at
        # The mount reports a missing folder.
        needed, reason = f"{uri} is not a folder of this machine", ""
    else:
        needed = reason = _needs_mount(folder)
    if way == "plain":
        if needed:
            raise UsageError(f"the checkpoint cannot be read plainly: {needed}", hint="leave --checkpoint-read out")
        reason = "--checkpoint-read plain was given"
    elif needed or way == "mount":
        return None, reason if needed else "--checkpoint-read mount was given"
    elif (kind := _file_system(folder)) in _LOCAL:
        reason = f"it lies on this machine ({kind}), where a mount and a second copy would only cost time"
    else:
        return None, f"its file system ({kind or 'unknown'}) may be far away"
    open_place(uri).close()  # refuses folders that a mount refuses too
    return folder, reason


def _needs_mount(folder: Path) -> str:
    """Why the folder's files, present or future, need a mount; "" if they do not."""
    policies = (f"{above}/{STRIPES}/policy.json" for above in folder.resolve().parents)
    if policy := next(filter(os.path.exists, policies), ""):
        return f"{policy} asks for striped files"
    for number, (path, names, _) in enumerate(os.walk(folder)):
        if STRIPES in names:
            return f"striped files, or a policy that asks for them, are in {path}"
        if number == _MAX_FOLDERS:
            return f"more than {_MAX_FOLDERS:,} folders would have to be searched for striped files"
        names[:] = [name for name in names if not name.startswith(".")]
    return ""


def _file_system(folder: Path) -> str:
    """The type of the file system of a folder; "" if unknown."""
    real = folder.resolve()
    above = [mount for mount in visible(mount_table()) if real.is_relative_to(mount.path)]
    return max(above, key=lambda mount: len(mount.path)).kind if above else ""
