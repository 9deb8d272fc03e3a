"""See which files a setup opens, so that a snapshot whose key does not know one of them is not trusted.

A process of our own looks at the mounts of the capture's private mount namespace with fanotify: only what runs in that
namespace opens files through them, so that the setup's accesses are told from all others without asking which process
it was. It also sees what the setup writes to places that are not captured. What it cannot see: files that were only
looked at (stat, listings) and mounts that the setup itself makes. Where the right to watch is missing, `Reads.complete`
is False and `why` tells: the snapshot is then "unobserved".

The watching process answers twice through a pipe, in lines of JSON: that it watches or why not, and in the end what it
saw. It ends when the pipe with its orders is closed, or when its parent dies.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from bootseer.env.capturing.fanotify import OPENED, WRITTEN, Group, Overflow
from bootseer.env.capturing.leftovers import SCRATCH
from bootseer.errors import BootseerError, PermanentError
from bootseer.mounts.kernel import Mount, is_below, mount_table, visible
from bootseer.mounts.process import die_with, end_child

# What these file systems show are not files that a setup could install or depend on.
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


def _run_watching(
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
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    last = 2
    for number in sorted(files):
        os.closerange(last + 1, number)
        last = number
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))


def _say(pipe: int, message: dict[str, object]) -> None:
    with os.fdopen(os.dup(pipe), "wb") as file:
        file.write(json.dumps(message).encode() + b"\n")


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
        has_events = False
        try:
            for mask, file, _ in self._group.batch():
                has_events = True
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
            has_events, self._why = True, "the kernel dropped events: too many files were opened at once"
        except OSError as error:
            has_events, self._why = True, f"a file that the setup opened could not be told: {error.strerror}"
            self._num_lost += 1
            if self._num_lost > _MAX_LOST:
                raise
        return has_events

    def told(self, table: Iterable[Mount], real: Iterable[str]) -> dict[str, object]:
        """The answer for the parent."""
        written = {path.removesuffix(_DELETED) for path in self._written}
        opened = {path.removesuffix(_DELETED) for path in self._opened} - written
        local = {mount.path.rstrip("/"): mount.kind in _LOCAL for mount in table}
        # Folders that no snapshot holds may lie in a scratch folder, and are not mounts of their own then.
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


READY_S = 10.0
END_S = 60.0
_MAX_REPORT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Reads:
    """What a setup read and wrote, as paths in its own view with all symbolic links resolved."""

    paths: frozenset[str]
    """Files that it opened and that still exist, without those that it wrote outside of the capture. Files that it
    wrote inside are among them: the capture knows them."""
    outside_writes: tuple[str, ...]
    """Files that it wrote on local mounts that are not captured and that still exist, sorted."""
    complete: bool
    """Whether nothing was missed."""
    why: str = ""
    """Why it is not complete, for people."""


def unobserved(reason: str) -> Reads:
    """The answer where nothing was watched."""
    return Reads(frozenset(), (), complete=False, why=reason)


class Watch:
    """A running watch. Always `end` it."""

    def __init__(self, pid: int, answers: int, stop: int) -> None:
        self.pid = pid
        """The watching process, in the capture's namespace but not of the setup; 0 if there is none."""
        self._answers = answers
        self._stop = stop
        self._why: str | None = None
        """Why it does not watch; None: it has not said yet."""
        self._reads: Reads | None = None

    @classmethod
    def begin(
        cls,
        captured: Sequence[str],
        *,
        real: Sequence[str] = (),
        enter: Callable[[], None],
        below: str = "",
        ready: Callable[[], object] | None = None,
        deadline_s: float = READY_S,
    ) -> Watch:
        """Watch from now on all mounts that are there after `enter`, which runs in the watching process.

        `captured` are mount points whose writes the capture sees (`Capture.points`), `real` folders that no snapshot
        holds (`Capture.real`): there only what is written to scratch folders is of interest. Where `enter` leads to no
        other mounts than ours, nothing is watched: accesses of all processes would be seen. Forks: call it while this
        process has one thread. Never raises: `end` tells why nothing was watched.

        `below` is where a container's root is being made: only mounts below it are watched, and paths are the
        container's. `ready` runs in the watching process once it watches, or cannot; with it nothing waits for that
        here, as `enter` may wait for the container.
        """
        parent = os.getpid()
        answers, report = os.pipe2(os.O_CLOEXEC)
        order, stop = os.pipe2(os.O_CLOEXEC)
        watch = cls(0, answers, stop)
        try:
            watch.pid = os.fork()
            if watch.pid == 0:
                _run_watching(parent, captured, real, enter, report, order, below=below, ready=ready)
        except OSError as error:
            watch._why = f"the watching process could not be started: {error.strerror}"
            watch._kill()
            return watch
        finally:
            os.close(report)
            os.close(order)
        if ready is None:
            watch._begun(deadline_s)
        return watch

    def _begun(self, deadline_s: float) -> None:
        try:
            self._why = str(json.loads(self._line(time.monotonic() + deadline_s))["why"])
        except (OSError, ValueError) as error:
            self._why = f"the watching process could not begin: {error}"
        if self._why:
            self._kill()

    def end(self, *, deadline_s: float = END_S) -> Reads:
        """What the setup has read and written until now, or until the first call. Raises nothing."""
        if self._why is None:
            self._begun(0.0)  # what it was to watch has ended
        if self._reads is None:
            self._reads = unobserved(self._why) if self._why else self._asked(deadline_s)
        return self._reads

    def _asked(self, deadline_s: float) -> Reads:
        os.close(self._stop)
        self._stop = -1
        try:
            message = json.loads(self._line(time.monotonic() + deadline_s))
        except (OSError, ValueError) as error:
            return unobserved(f"the watching process gave no answer: {error}")
        finally:
            self._kill()
        return Reads(frozenset(message["read"]), tuple(message["written"]), not message["why"], message["why"])

    def _line(self, deadline: float) -> bytes:
        pieces, size = [], 0
        while select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(self._answers, 1 << 20)
            pieces.append(piece)
            size += len(piece)
            if piece.endswith(b"\n"):
                return b"".join(pieces)
            if not piece:
                raise OSError("it has died")
            if size > _MAX_REPORT_BYTES:
                raise OSError("its answer is too long")
        raise OSError("it took too long")

    def _kill(self) -> None:
        for file in (self._answers, self._stop):
            if file >= 0:
                os.close(file)
        self._answers = self._stop = -1
        if self.pid:
            end_child(self.pid)
        self.pid = 0
