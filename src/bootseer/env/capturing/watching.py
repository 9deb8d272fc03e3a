"""The process that watches a setup's accesses, from fork to end: the child's half of `watch`.

It answers twice through a pipe, in lines of JSON: that it watches or why not, and in the end what it saw. It ends when
the pipe with its orders is closed, or when its parent dies.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from bootseer.env.capturing.fanotify import OPENED, WRITTEN, Group, Overflow
from bootseer.env.capturing.leftovers import SCRATCH
from bootseer.errors import BootseerError, PermanentError
from bootseer.mounts.kernel import Mount, is_below, mount_table, visible
from bootseer.mounts.process import die_with

# What these file systems show are no files that a setup could install or depend on.
# fmt: off
_STATE = frozenset((
    "autofs", "binder", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs",
    "efivarfs", "fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs",
    "sysfs", "tracefs",
))
# Only this node sees the files of these. All others (NFS, Lustre, FUSE, ...) are taken for shared.
_LOCAL = frozenset((
    "bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "msdos", "ntfs3", "overlay", "ramfs",
    "reiserfs", "tmpfs", "udf", "vfat", "xfs", "zfs",
))
# fmt: on
MAX_FILES = 4_000_000
"""So many different files, about 1 GiB of names; more are not written down."""
# Between two looks the kernel merges what happens to the same file, and we sleep.
_PAUSE_S = 0.02
_NUM_DESCRIPTORS = 4096
# A queue that can only fail must not keep us for ever.
_MAX_LOST = 1000
_NAMESPACE = "/proc/self/ns/mnt"
_DELETED = " (deleted)"


def run(
    parent: int,
    captured: Sequence[str],
    real: Sequence[str],
    enter: Callable[[], None],
    report: int,
    order: int,
    *,
    below: str = "",
    ready: Callable[[], object] | None = None,
) -> NoReturn:
    """Be the watching process. `report` and `order` are ends of pipes to the parent; for the rest see `Watch.begin`."""
    try:
        # Ctrl-C is for the setup, whose last accesses are still to be seen.
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        gc.freeze()
        die_with(parent)  # `enter` may wait for long
        try:
            group, table = _begin(parent, captured, real, enter, below)
        except (BootseerError, OSError, ValueError) as error:
            _say(report, {"why": str(error)})
            if ready is not None:
                ready()
            os._exit(1)
        _keep_only({group.fileno(), report, order})
        _say(report, {"why": ""})
        seen = _Seen(group)
        if ready is not None:
            ready()
        while not select.select([order], [], [], _PAUSE_S)[0]:
            select.select([group.fileno(), order], [], [])
            seen.take()
        seen.take()
        _say(report, seen.told(table, real))
    finally:
        os._exit(1)  # nothing may unwind into the parent's code


def _begin(
    parent: int, captured: Sequence[str], real: Sequence[str], enter: Callable[[], None], below: str
) -> tuple[Group, list[Mount]]:
    ours = Path(_NAMESPACE).readlink()
    enter()
    if Path(_NAMESPACE).readlink() == ours:
        raise PermanentError("the setup has no mounts of its own")
    os.chdir("/")
    die_with(parent)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _NUM_DESCRIPTORS:
        wanted = _NUM_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _NUM_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    group = Group()
    table = [mount for mount in visible(mount_table()) if mount.kind not in _STATE]
    if below:
        table = [mount for mount in table if is_below(mount.path, below)]
    for mount in table:
        mask = OPENED if mount.path in captured else OPENED | WRITTEN
        if mount.path in real:
            mask = WRITTEN if mount.path in SCRATCH else 0
        try:
            if mask:
                group.watch_mount(mount.path, mask)
        except BootseerError:
            if os.access(mount.path, os.R_OK):  # not another user's FUSE mount, which not even root can enter
                raise
    # The watched process makes its root ours, too, when it changes to it.
    return group, [replace(mount, path=mount.path.removeprefix(below)) for mount in table]


def _keep_only(files: set[int]) -> None:
    """Give up everything else that was inherited: others may wait for the end of a pipe."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    last = 2
    for number in sorted(files):
        os.closerange(last + 1, number)
        last = number
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))


def _say(pipe: int, said: dict[str, object]) -> None:
    with os.fdopen(os.dup(pipe), "wb") as file:
        file.write(json.dumps(said).encode() + b"\n")


class _Seen:
    """What was opened and written so far."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._links = os.open("/proc/self/fd", os.O_PATH | os.O_CLOEXEC)
        self._opened: set[str] = set()
        self._written: set[str] = set()
        self._why = ""
        self._num_lost = 0

    def take(self) -> None:
        """Take all events that wait."""
        while self._batch():
            pass

    def _batch(self) -> bool:
        any_came = False
        try:
            for mask, file, _ in self._group.batch():
                any_came = True
                path = os.readlink(str(file), dir_fd=self._links)
                if mask & WRITTEN:
                    self._written.add(path)
                if mask & OPENED:
                    if path in self._opened:
                        self._group.forget_opens(file)
                    elif len(self._opened) < MAX_FILES:
                        self._opened.add(path)
                    else:
                        self._why = f"the setup opened more than {MAX_FILES:,} files"
        except Overflow:
            any_came, self._why = True, "the kernel dropped events: too many files were opened at once"
        except OSError as error:
            any_came, self._why = True, f"a file that the setup opened could not be told: {error.strerror}"
            self._num_lost += 1
            if self._num_lost > _MAX_LOST:
                raise
        return any_came

    def told(self, table: Iterable[Mount], real: Iterable[str]) -> dict[str, object]:
        """The answer for the parent."""
        written = {path.removesuffix(_DELETED) for path in self._written}
        opened = {path.removesuffix(_DELETED) for path in self._opened} - written
        local = {mount.path.rstrip("/"): mount.kind in _LOCAL for mount in table}
        # Folders that no snapshot holds may lie in a scratch folder, and are no mounts of their own then.
        local.update((path.rstrip("/"), False) for path in real if path not in SCRATCH)
        outside = sorted(path for path in _existing(written) if _is_local(path, local))
        return {"read": list(_existing(opened)), "written": outside, "why": self._why}


def _existing(paths: Iterable[str]) -> Iterator[str]:
    """Regular files that are there. What a setup made and took away again (a build folder) says nothing."""
    for path in paths:
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.lstat(path).st_mode):
                yield path


def _is_local(path: str, local: dict[str, bool]) -> bool:
    """Whether the mount that a path lies on is a local one."""
    while path and path not in local:
        path = path.rpartition("/")[0]
    return local.get(path, False)
