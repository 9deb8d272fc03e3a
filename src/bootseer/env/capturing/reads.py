"""Record which files a setup opens, so that a snapshot is not trusted if its key does not cover one of them.

A helper process (`launch.environment.watch`) watches the mounts of the capture's private mount namespace with fanotify.
Only processes in that namespace open files through these mounts, so all events are the setup's, and no process ids need
to be checked. Writes to places that are not captured are recorded, too. Not seen: `stat` and listings without an open,
and mounts that the setup makes itself. Without the privilege to watch, `Reads.complete` is False and `why` has the
reason: the snapshot is then "unobserved".
"""

from __future__ import annotations

import contextlib
import os
import resource
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bootseer.env.capturing.fanotify import OPENED, WRITTEN, Group, Overflow
from bootseer.env.capturing.leftovers import SCRATCH
from bootseer.env.changes import nearest
from bootseer.errors import BootseerError, PermanentError
from bootseer.mounts.kernel import Mount, is_below, mount_table, visible

# File systems without files that a setup could install or depend on.
# fmt: off
_PSEUDO = frozenset((
    "autofs", "binder", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs",
    "efivarfs", "fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs",
    "sysfs", "tracefs",
))
# File systems of this node alone. All others (NFS, Lustre, FUSE, ...) count as shared.
_LOCAL = frozenset((
    "bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "msdos", "ntfs3", "overlay", "ramfs",
    "reiserfs", "tmpfs", "udf", "vfat", "xfs", "zfs",
))
# fmt: on
MAX_FILES = 4_000_000
"""Maximum number of recorded files, about 1 GiB of names."""
_NUM_DESCRIPTORS = 4096
_NAMESPACE = "/proc/self/ns/mnt"
_MAX_PATHS = 500
"""In one part of a report."""
_DELETED = " (deleted)"


def start_watching(
    captured: Sequence[str], passthrough: Sequence[str], enter: Callable[[], None], below: str
) -> tuple[Group, list[Mount]]:
    """Enter the setup's namespace by `enter`, in a process of its own, and watch its mounts; the queue of events, and
    the mounts.

    Raises `BootseerError` and `OSError`. If `enter` leads to no other namespace, nothing is watched, as accesses of all
    processes would be seen.
    """
    ours = Path(_NAMESPACE).readlink()
    enter()
    if Path(_NAMESPACE).readlink() == ours:
        raise PermanentError("the setup has no mounts of its own")
    os.chdir("/")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _NUM_DESCRIPTORS:
        wanted = _NUM_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _NUM_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    group = Group()
    table = [mount for mount in visible(mount_table()) if mount.kind not in _PSEUDO]
    if below:
        table = [mount for mount in table if is_below(mount.path, below)]
    for mount in table:
        mask = OPENED if mount.path in captured else OPENED | WRITTEN
        if mount.path in passthrough:
            mask = WRITTEN if mount.path in _scratch() else 0
        try:
            if mask:
                group.watch_mount(mount.path, mask)
        except BootseerError:
            if os.access(mount.path, os.R_OK):  # another user's FUSE mount, which even root cannot access, is skipped
                raise
    # When the container runtime pivots its root, the root of this process changes with it: paths are then the
    # container's.
    return group, [replace(mount, path=mount.path.removeprefix(below)) for mount in table]


class AccessLog:
    """The files that were opened and written so far."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._links = os.open("/proc/self/fd", os.O_PATH | os.O_CLOEXEC)
        self._opened: set[str] = set()
        self._written: set[str] = set()
        self._problem = ""

    def drain(self) -> None:
        """Take the events of the queue. After an error the result is not complete, and those left do not matter."""
        try:
            while self._batch():
                pass
        except Overflow:
            self._problem = "the kernel dropped events: too many files were opened at once"
        except OSError as error:
            self._problem = f"a file that the setup opened could not be identified: {error.strerror}"

    def _batch(self) -> bool:
        has_events = False
        for mask, file in self._group.read_events():
            has_events = True
            path = os.readlink(str(file), dir_fd=self._links)
            if mask & WRITTEN:
                self._written.add(path)
            if mask & OPENED:
                if path in self._opened:
                    self._group.ignore_opens(file)
                elif len(self._opened) < MAX_FILES:
                    self._opened.add(path)
                else:
                    self._problem = f"the setup opened more than {MAX_FILES:,} files"
        return has_events

    def report(self, table: Iterable[Mount], passthrough: Iterable[str]) -> Iterator[dict[str, Any]]:
        """The result in parts, for `Reads.of`."""
        written = {path.removesuffix(_DELETED) for path in self._written}
        opened = {path.removesuffix(_DELETED) for path in self._opened} - written
        scratch = _scratch()
        local = {mount.path.rstrip("/"): mount.kind in _LOCAL for mount in table}
        # Passthrough folders inside a scratch folder are not mounts of their own.
        local.update((path.rstrip("/"), False) for path in passthrough if path not in scratch)
        linked = {real: name for real, name in scratch.items() if real != name}

        def named(path: str) -> str:
            """The path as rules and commands have it: by the name of the scratch folder, if that is a link."""
            mount = nearest(path, local)
            return f"{linked[mount]}{path[len(mount) :]}" if mount in linked else path

        outside = sorted(named(path) for path in _existing(written) if local.get(nearest(path, local)))
        for kind, paths in (("read", map(named, _existing(opened))), ("written", iter(outside))):
            while part := list(islice(paths, _MAX_PATHS)):
                yield {kind: part}
        yield {"why": self._problem}


def _existing(paths: Iterable[str]) -> Iterator[str]:
    """The paths that are existing regular files: files that the setup has deleted again do not matter."""
    for path in paths:
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.lstat(path).st_mode):
                yield path


def _scratch() -> dict[str, str]:
    """The names of scratch folders, by their real paths."""
    return {os.path.realpath(name): name for name in reversed(SCRATCH)}


@dataclass(frozen=True, slots=True)
class Reads:
    """The files that a setup read and wrote, as real paths in its own view."""

    paths: frozenset[str]
    """Existing files that it opened, captured writes included, without those in `outside_writes`."""
    outside_writes: tuple[str, ...]
    """Existing files that it wrote on local mounts that are not captured, sorted."""
    why: str
    """Why it is not complete; empty if no access was missed."""
    listening: Mapping[int, float] = field(default_factory=dict)
    """Since when sockets listen that did not before, by inode, on the monotonic clock."""

    @property
    def complete(self) -> bool:
        return not self.why

    @classmethod
    def of(cls, parts: Iterable[Mapping[str, Any]]) -> Reads | None:
        """The result from the parts of a report (`AccessLog.report`); None if the last one is missing."""
        parts = list(parts)
        reason = next((part["why"] for part in parts if "why" in part), None)
        read, written = ([path for part in parts for path in part.get(kind, ())] for kind in ("read", "written"))
        since = dict(pair for part in parts for pair in part.get("listening", ()))
        return None if reason is None else cls(frozenset(read), tuple(written), reason, since)


def not_watched(reason: str) -> Reads:
    """The result if the setup was not watched."""
    return Reads(frozenset(), (), reason)
