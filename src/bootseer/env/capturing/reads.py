"""Record which files a setup opens, so that a snapshot is not trusted if its key does not cover one of them.

A helper process watches the mounts of the capture's private mount namespace with fanotify. Only processes in that
namespace open files through these mounts, so all events are the setup's, and no process ids need to be checked. Writes
to places that are not captured are recorded, too. Not seen: `stat` and listings without an open, and mounts that the
setup makes itself. Without the privilege to watch, `Reads.complete` is False and `why` has the reason: the snapshot is
then "unobserved".

The helper sends two JSON lines through a pipe: that it watches or why it cannot, and finally the recorded paths. It
ends when the other pipe, `stop`, is closed, or when its parent dies.
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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from msgspec.structs import replace

from bootseer.env.capturing.fanotify import OPENED, WRITTEN, Group, Overflow
from bootseer.env.capturing.leftovers import SCRATCH
from bootseer.errors import BootseerError, PermanentError
from bootseer.mounts.kernel import Mount, is_below, mount_table, visible
from bootseer.mounts.process import die_with, end_child, json_lines

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
# Pause between reads, during which the kernel merges events of the same file.
_PAUSE_S = 0.02
_NUM_DESCRIPTORS = 4096
# Bounds the reads of a queue that only fails.
_MAX_FAILED = 1000
_NAMESPACE = "/proc/self/ns/mnt"
_DELETED = " (deleted)"


def _run_watching(
    parent: int,
    captured: Sequence[str],
    passthrough: Sequence[str],
    enter: Callable[[], None],
    report: int,
    order: int,
    *,
    below: str = "",
    ready: Callable[[], object] | None = None,
) -> NoReturn:
    """Run the helper process. `report` and `order` are ends of pipes to the parent; see `Watch.begin` for the rest."""
    try:
        # Ctrl-C is for the setup, whose last accesses must still be recorded.
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        gc.freeze()  # a collection would write to all objects of the parent, and so copy their pages
        die_with(parent)  # `enter` may wait for long
        try:
            group, table = _start_watching(parent, captured, passthrough, enter, below)
        except (BootseerError, OSError, ValueError) as error:
            _send(report, {"why": str(error)})
            if ready is not None:
                ready()
            os._exit(1)
        _close_other_files({group.fileno(), report, order})
        _send(report, {"why": ""})
        log = _AccessLog(group)
        if ready is not None:
            ready()
        while not select.select([order], [], [], _PAUSE_S)[0]:
            select.select([group.fileno(), order], [], [])
            log.drain()
        log.drain()
        _send(report, log.report(table, passthrough))
    finally:
        os._exit(1)  # nothing may unwind into the parent's code


def _start_watching(
    parent: int, captured: Sequence[str], passthrough: Sequence[str], enter: Callable[[], None], below: str
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
    table = [mount for mount in visible(mount_table()) if mount.kind not in _PSEUDO]
    if below:
        table = [mount for mount in table if is_below(mount.path, below)]
    for mount in table:
        mask = OPENED if mount.path in captured else OPENED | WRITTEN
        if mount.path in passthrough:
            mask = WRITTEN if mount.path in SCRATCH else 0
        try:
            if mask:
                group.watch_mount(mount.path, mask)
        except BootseerError:
            if os.access(mount.path, os.R_OK):  # another user's FUSE mount, which even root cannot access, is skipped
                raise
    # When the container runtime pivots its root, the root of this process changes with it: paths are then the
    # container's.
    return group, [replace(mount, path=mount.path.removeprefix(below)) for mount in table]


def _close_other_files(files: set[int]) -> None:
    """Close all other inherited files: other processes may wait for the end of a pipe."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    last = 2
    for number in sorted(files):
        os.closerange(last + 1, number)
        last = number
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))


def _send(pipe: int, message: dict[str, object]) -> None:
    with os.fdopen(os.dup(pipe), "wb") as file:
        file.write(json.dumps(message).encode() + b"\n")


class _AccessLog:
    """The files that were opened and written so far."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._links = os.open("/proc/self/fd", os.O_PATH | os.O_CLOEXEC)
        self._opened: set[str] = set()
        self._written: set[str] = set()
        self._problem = ""
        self._num_failed = 0

    def drain(self) -> None:
        while self._batch():
            pass

    def _batch(self) -> bool:
        has_events = False
        try:
            for mask, file, _ in self._group.read_events():
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
        except Overflow:
            has_events, self._problem = True, "the kernel dropped events: too many files were opened at once"
        except OSError as error:
            has_events, self._problem = True, f"a file that the setup opened could not be identified: {error.strerror}"
            self._num_failed += 1
            if self._num_failed > _MAX_FAILED:
                raise
        return has_events

    def report(self, table: Iterable[Mount], passthrough: Iterable[str]) -> dict[str, object]:
        written = {path.removesuffix(_DELETED) for path in self._written}
        opened = {path.removesuffix(_DELETED) for path in self._opened} - written
        local = {mount.path.rstrip("/"): mount.kind in _LOCAL for mount in table}
        # Passthrough folders inside a scratch folder are not mounts of their own.
        local.update((path.rstrip("/"), False) for path in passthrough if path not in SCRATCH)
        outside = sorted(path for path in _existing(written) if _is_local(path, local))
        return {"read": list(_existing(opened)), "written": outside, "why": self._problem}


def _existing(paths: Iterable[str]) -> Iterator[str]:
    """The paths that are existing regular files: files that the setup has deleted again do not matter."""
    for path in paths:
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.lstat(path).st_mode):
                yield path


def _is_local(path: str, local: dict[str, bool]) -> bool:
    while path and path not in local:
        path = path.rpartition("/")[0]
    return local.get(path, False)


READY_S = 10.0
END_S = 60.0
_MAX_REPORT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Reads:
    """The files that a setup read and wrote, as real paths in its own view."""

    paths: frozenset[str]
    """Existing files that it opened, captured writes included, without those in `outside_writes`."""
    outside_writes: tuple[str, ...]
    """Existing files that it wrote on local mounts that are not captured, sorted."""
    complete: bool
    """Whether no access was missed."""
    why: str = ""
    """Why it is not complete."""


def not_watched(reason: str) -> Reads:
    """The result if the setup was not watched."""
    return Reads(frozenset(), (), complete=False, why=reason)


class Watch:
    """A running watch; `end` must be called."""

    def __init__(self, pid: int, answers: int, stop: int) -> None:
        self.pid = pid
        """The helper process, which is in the capture's namespace but not of the setup; 0 if there is none."""
        self._answers = answers
        self._stop = stop
        self._problem: str | None = None
        """Why it does not watch, empty if it does; None before its first message."""
        self._reads: Reads | None = None

    @classmethod
    def begin(
        cls,
        captured: Sequence[str],
        *,
        passthrough: Sequence[str] = (),
        enter: Callable[[], None],
        below: str = "",
        ready: Callable[[], object] | None = None,
        deadline_s: float = READY_S,
    ) -> Watch:
        """Start to watch all mounts of the namespace that `enter` leads to; `enter` runs in the helper.

        `captured` are mount points whose writes the capture records (`Capture.points`); of `passthrough` folders
        (`Capture.passthrough`) only writes to scratch folders are recorded. If `enter` leads to no other namespace,
        nothing is watched, as accesses of all processes would be seen. Forks: call it while this process has one
        thread. Never raises: the result of `end` has the reason.

        `below` is the mount point of a container's root: only mounts below it are watched, and paths are the
        container's. `ready` runs in the helper once it watches, or cannot; with it this call does not wait for the
        helper, as `enter` may wait for the container.
        """
        parent = os.getpid()
        answers, report = os.pipe2(os.O_CLOEXEC)
        order, stop = os.pipe2(os.O_CLOEXEC)
        watch = cls(0, answers, stop)
        try:
            watch.pid = os.fork()
            if watch.pid == 0:
                _run_watching(parent, captured, passthrough, enter, report, order, below=below, ready=ready)
        except OSError as error:
            watch._problem = f"the watching process could not be started: {error.strerror}"
            watch._kill()
            return watch
        finally:
            os.close(report)
            os.close(order)
        if ready is None:
            watch._wait_until_ready(deadline_s)
        return watch

    def _wait_until_ready(self, deadline_s: float) -> None:
        try:
            self._problem = str(self._answer(deadline_s)["why"])
        except (OSError, ValueError) as error:
            self._problem = f"the watching process could not begin: {error}"
        if self._problem:
            self._kill()

    def end(self) -> Reads:
        """The files that the setup has read and written until the first call. Raises nothing."""
        if self._problem is None:
            self._wait_until_ready(1.0)  # the watched container has ended
        if self._reads is None:
            self._reads = not_watched(self._problem) if self._problem else self._collect()
        return self._reads

    def _collect(self) -> Reads:
        os.close(self._stop)
        self._stop = -1
        try:
            message = self._answer(END_S)
        except (OSError, ValueError) as error:
            return not_watched(f"the watching process gave no answer: {error}")
        finally:
            self._kill()
        return Reads(frozenset(message["read"]), tuple(message["written"]), not message["why"], message["why"])

    def _answer(self, deadline_s: float) -> dict[str, Any]:
        """The helper's next message. Raises `OSError` and `ValueError`."""
        answers = json_lines(self._answers, time.monotonic() + deadline_s, max_bytes=_MAX_REPORT_BYTES)
        message: dict[str, Any] | None = next(answers, None)
        if message is None:
            raise OSError("it has died")
        return message

    def _kill(self) -> None:
        for file in (self._answers, self._stop):
            if file >= 0:
                os.close(file)
        self._answers = self._stop = -1
        if self.pid:
            end_child(self.pid)
        self.pid = 0
