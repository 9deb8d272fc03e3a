"""What a setup did besides writing files: processes, mounts, kernel state, files where no capture keeps them.

A restore brings back files and the environment, and starts again what it can of processes (`daemons`). So any of the
rest makes a setup "not snapshot-safe", in words that say what it was. Users and groups are lines of files and come back
with /etc; they are told as notes.

*Processes* are the setup's when they run in its mount namespace or have its mark in their environment. Neither depends
on which process is the parent now: a daemon has none. They are left alone, as the job may need them. In a mount
namespace none can hide; without one (a capture by comparing) those go unseen that drop or overwrite their environment.
What another program starts for the setup (systemd, a container engine) is not the setup's and never seen.

*The kernel's* modules, settings and shared memory are compared. Settings are files of /proc/sys: those that may be
written, without the few that move by themselves, so that nothing is blamed on a setup that it did not do.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bootseer.artifact.child import run_in_child
from bootseer.env.capturing.daemons import Found, Setup, recorded, rights
from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.capturing.leftovers import SCRATCH, is_mentioned, left_elsewhere, left_in_scratch
from bootseer.env.capturing.watch import Reads
from bootseer.env.changes import Change
from bootseer.env.processes import process
from bootseer.errors import BootseerError
from bootseer.mounts.kernel import mount_table

MARK = "BOOTSEER_SETUP"
"""The environment variable that tells the setup's processes."""
_POLL_S = 0.02
# Servers that build tools and version control keep for their own speed; they start again by themselves.
_HARMLESS = frozenset((
    "dirmngr", "gpg-agent", "keyboxd", "scdaemon", "sccache", "ccache", "dbus-launch", "watchman",
))  # fmt: skip
_MAX_NAMED = 5


def new_mark() -> str:
    """A value that is used nowhere else."""
    return secrets.token_hex(8)


def left_running(mark: str, namespace: int | None, *, grace_s: float = 1.0) -> dict[int, str]:
    """Names of the processes that the setup left, by process id. `namespace`: the inode of its mount namespace.

    Those that are just ending are waited for, at most `grace_s`.
    """
    end = time.monotonic() + grace_s
    while (found := _running(mark, namespace)) and time.monotonic() < end:
        time.sleep(_POLL_S)
    return found


def _running(mark: str, namespace: int | None) -> dict[int, str]:
    needle = f"{MARK}={mark}".encode()
    found = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):  # noqa: PTH208 - numbers, not paths
        if pid != os.getpid() and _is_of_setup(pid, needle, namespace):
            one = process(pid)
            if one is not None and one.name not in _HARMLESS:
                found[pid] = one.name
    return found


def _is_of_setup(pid: int, needle: bytes, namespace: int | None) -> bool:
    try:
        if namespace is not None and os.stat(f"/proc/{pid}/ns/mnt").st_ino == namespace:  # noqa: PTH116
            return True
        return needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return False


def _named(reasons: Sequence[str]) -> list[str]:
    more = [f"it left {len(reasons) - _MAX_NAMED} more processes running"] if len(reasons) > _MAX_NAMED else []
    return [*reasons[:_MAX_NAMED], *more]


_SETTINGS = "/proc/sys"
_MOVING = frozenset((
    "kernel.ns_last_pid", "kernel.perf_event_max_sample_rate", "kernel.sched_domain", "kernel.tainted",
    "kernel.pty.nr", "vm.stat_refresh",
))  # fmt: skip
# The first may be a mount that appears when it is touched; random numbers differ each time they are read.
_NOT_ENTERED = ("fs/binfmt_misc", "kernel/random")
_MAX_SETTING_BYTES = 4096


@dataclass(frozen=True, slots=True)
class KernelState:
    """A look at it. Takes some 25 ms."""

    modules: frozenset[str]
    settings: dict[str, bytes]
    """By names as sysctl(8) has them: `vm.max_map_count`."""
    shared_memory: frozenset[str]
    """Ids of System V segments of this user."""

    @classmethod
    def now(cls) -> KernelState:
        """What can be read at this moment; the rest is left out."""
        return cls(
            frozenset(line.split()[0] for line in _lines("/proc/modules")),
            dict(_settings()),
            frozenset(_shared_memory()),
        )

    def changes(self, before: KernelState) -> list[str]:
        """What is different from `before`, for people."""
        found = [f"it loaded the kernel module {name}" for name in sorted(self.modules - before.modules)]
        found += [
            f"it changed the kernel setting {name}"
            for name, value in sorted(self.settings.items())
            if before.settings.get(name, value) != value
        ]
        if new := self.shared_memory - before.shared_memory:
            found.append(f"it left shared memory behind (System V, id {', '.join(sorted(new))})")
        return found


def _settings() -> Iterator[tuple[str, bytes]]:
    for folder, below, names in os.walk(_SETTINGS):
        inside = os.path.relpath(folder, _SETTINGS)
        below[:] = [name for name in below if os.path.normpath(f"{inside}/{name}") not in _NOT_ENTERED]
        for name in names:
            path = f"{folder}/{name}"
            setting = os.path.normpath(f"{inside}/{name}").replace("/", ".")
            if setting in _MOVING:
                continue
            try:
                if os.lstat(path).st_mode & 0o600 == 0o600:
                    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a thousand files
                        yield setting, file.read(_MAX_SETTING_BYTES)
            except OSError:
                continue


def _shared_memory() -> Iterator[str]:
    """Segments whose maker is gone: others of the same user may have made theirs meanwhile, and still use them."""
    for fields in map(str.split, _lines("/proc/sysvipc/shm")[1:]):
        _, number, _, _, maker, *_, creator = fields[:10]
        if int(creator) == os.geteuid() and not Path("/proc", maker).exists():
            yield number


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


_MAX_POINTER_BYTES = 65_536


def mentions(changes: Iterable[Change]) -> list[str]:
    """Texts that name such paths, for `leftovers`; files that cannot be read say nothing."""
    found = []
    for change in changes:
        if not change.source:
            continue
        with contextlib.suppress(OSError):
            if _points_python(change.path):
                with Path(change.source).open("rb") as file:
                    found.append(file.read(_MAX_POINTER_BYTES).decode("utf-8", "replace"))
            elif (target := _link(change.source)).startswith(SCRATCH):
                found.append(target)
    return found


def _points_python(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.endswith((".pth", ".egg-link")) or (name.startswith("__editable__") and name.endswith(".py"))


def _link(path: str) -> str:
    """Its target; empty for what is not a link. Half of the cost of `Path.readlink`, for each file of a snapshot."""
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return ""


Enter = Callable[[], None]
LOOK_S = 10.0
_PREFIX_FILES = ("pyvenv.cfg", "conda-meta")


@dataclass(frozen=True, slots=True)
class SideEffects:
    """What a setup did besides writing files, for people."""

    unsafe: tuple[str, ...]
    """Why it is not snapshot-safe; empty when it is."""
    notes: tuple[str, ...]
    """What comes back with the files, and is worth telling."""
    daemons: tuple[Found, ...] = ()
    """What it left running and can be started again."""


_LOOKS, _LOOK_S = 4, 0.1
_OF_STARTS = re.compile(r"/containers/run-[^/]+/root(?:/|$)")
"""Where other starts on this node mount their containers. They unmount them where it was private meanwhile, so that a
copy may stay in the namespace of a capture."""
Mounted = tuple[str, str, str, str]
"""Path, kind of file system, device and root of a mount."""


class Effects:
    """The state before a setup, to compare with."""

    def __init__(self, enter: Enter | None, inside: Mapping[str, Any], kernel: KernelState, mark: str) -> None:
        self._enter = enter
        self._inside = inside
        self._kernel = kernel
        self._mark = mark

    @classmethod
    def before(cls, enter: Enter | None = None) -> Effects:
        """Look before the setup runs. `enter` leads a process into the capture's namespace (`Capture.enter`).

        With `enter` it forks: call it while this process has one thread. What cannot be seen is not compared.
        """
        inside = _look(enter)
        if inside.get("namespace") == _namespace():  # a capture without mounts of its own
            enter = None
        return cls(enter, inside, KernelState.now(), new_mark())

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the setup must get, so that its processes are known."""
        return {MARK: self._mark}

    def after(
        self,
        reads: Reads,
        *,
        mentions: Sequence[str] = (),
        grace_s: float = 1.0,
        relaunch: Setup | None = None,
    ) -> SideEffects:
        """Look once the setup has ended. `reads` is what `Watch.end` gave; `mentions` are texts that tell what the job
        will use (see `leftovers`). Forks like `before`.

        Waits up to `grace_s` seconds for processes that are just ending. What still runs then is unsafe, or one of the
        `daemons` if `relaunch` tells of the setup and they can be started again.
        """
        found = self.running(grace_s=grace_s)
        daemons: list[Found] = []
        if relaunch is None:
            unsafe = [f"it left a process running: {name} ({pid})" for pid, name in sorted(found.items())]
        else:
            daemons, unsafe = recorded(found, replace(relaunch, rights=self._inside.get("rights", {})), reads)
            mentions = [*mentions, *(word for one in daemons for word in one.daemon.argv)]
        unsafe = _named(unsafe)
        again = {path for one in daemons for path in one.made}
        inside = _look(self._enter)
        unsafe += self._mounted(inside)
        unsafe += KernelState.now().changes(self._kernel)
        if reads.complete:
            written = [path for path in reads.outside_writes if path not in again]
            unsafe += left_in_scratch(written, mentions)
            unsafe += left_elsewhere(written, Exclusions())
        else:
            unsafe += self._new_in_scratch(inside, mentions)
        notes = [
            f"it added the {kind} {name}"
            for kind, key in (("user", "users"), ("group", "groups"))
            for name in sorted({*inside.get(key, ())} - {*self._inside.get(key, ())})
        ]
        return SideEffects(tuple(unsafe), tuple(notes), tuple(daemons))

    def running(self, *, grace_s: float = 0.0) -> dict[int, str]:
        """Names of the setup's processes, by process id (`left_running`)."""
        namespace = self._inside.get("namespace") if self._enter is not None else None
        return left_running(self._mark, namespace, grace_s=grace_s)

    def _mounted(self, inside: Mapping[str, Any]) -> list[str]:
        """What the setup mounted and unmounted. What the host mounts shows up inside too, and may come or go at any
        moment, also twice at the same place: only what several looks at both agree on counts."""
        before, after = ({tuple(row) for row in look.get("mounts", ())} for look in (self._inside, inside))
        host = set(_mounts()) if self._enter is not None else set()
        made, gone = after - before - host, (before - after) & host if after else set()
        for _ in range(_LOOKS):
            if self._enter is None or not (made or gone):
                break
            time.sleep(_LOOK_S)
            again = {tuple(row) for row in _look(self._enter).get("mounts", after)}
            host = set(_mounts())
            made, gone = (made & again) - host, (gone - again) & host
        return [
            *(f"it mounted {kind} on {path}" for path, kind, *_ in sorted(made)),
            *(f"it unmounted {path}" for path, *_ in sorted(gone)),
        ]

    def _new_in_scratch(self, inside: Mapping[str, Any], mentions: Sequence[str]) -> list[str]:
        """Without a watch it is unknown which process left what: only what surely matters counts."""
        before = {*map(tuple, self._inside.get("scratch", ()))}
        new = sorted({*map(tuple, inside.get("scratch", ()))} - before)
        return [
            f"it installed into {path}, which is not kept: use another folder"
            for path, is_prefix in new
            if is_prefix or is_mentioned(path, mentions)
        ]


def _look(enter: Enter | None) -> Mapping[str, Any]:
    """What can be seen where the setup runs; empty when nothing can."""
    if enter is None:
        return _seen()

    def inside() -> dict[str, Any]:
        enter()
        return _seen()

    try:
        found: Mapping[str, Any] = run_in_child(inside, deadline_s=LOOK_S)
    except BootseerError:
        return {}
    return found


def _seen() -> dict[str, Any]:
    return {
        "namespace": _namespace(),
        "rights": rights("self"),
        "mounts": _mounts(),
        "users": _names("/etc/passwd"),
        "groups": _names("/etc/group"),
        "scratch": [
            (f"{folder}/{name}", any(Path(folder, name, file).exists() for file in _PREFIX_FILES))
            for folder in SCRATCH
            for name in _listed(folder)
        ],
    }


def _namespace() -> int:
    return Path("/proc/self/ns/mnt").stat().st_ino


def _mounts() -> list[Mounted]:
    return [(row.path, row.kind, row.device, row.root) for row in mount_table() if not _OF_STARTS.search(row.path)]


def _names(path: str) -> list[str]:
    try:
        return [line.partition(":")[0] for line in Path(path).read_text(errors="replace").splitlines() if line]
    except OSError:
        return []


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names
    except OSError:
        return []
