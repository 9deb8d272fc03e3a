"""Side effects of a setup besides captured files: processes, mounts, kernel state, files that no capture keeps.

A restore brings back files and the environment, and starts recorded processes again. Any other side effect
makes a setup "not snapshot-safe", with a reason.

*Processes* belong to the setup if they run in its mount namespace or have its mark in their environment; the parent
process does not matter, as daemons have none. They are left running, as the job may need them. In a mount namespace no
process is missed; without one (a scan), those are that drop or overwrite their environment. Processes that another
program starts on behalf of the setup (systemd, a container engine) are not found.

*Kernel state:* modules, settings and shared memory are compared. Settings are the writable files of /proc/sys, without
the few that change by themselves.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bootseer.artifact.child import run_in_child
from bootseer.env.capturing.daemons import SetupContext, find_restartable, privileges
from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.capturing.leftovers import SCRATCH, is_mentioned, left_elsewhere, left_in_scratch
from bootseer.env.capturing.reads import Reads
from bootseer.env.changes import Change
from bootseer.env.document import Daemon
from bootseer.env.processes import process
from bootseer.errors import BootseerError
from bootseer.io import proc
from bootseer.io.files import lines_of, open_unfollowed
from bootseer.mounts.kernel import mount_table
from bootseer.units import listed

MARK = "BOOTSEER_SETUP"
"""The environment variable by which the setup's processes are found."""
_POLL_S = 0.02
# Background servers of build tools and version control, which are started again on demand.
_HARMLESS = frozenset((
    "dirmngr", "gpg-agent", "keyboxd", "scdaemon", "sccache", "ccache", "dbus-launch", "watchman",
))  # fmt: skip


def leftover_processes(mark: str, namespace: int | None, *, grace_s: float = 1.0) -> dict[int, str]:
    """Names of the setup's processes, by process id. `namespace` is the inode of its mount namespace.

    Waits at most `grace_s` for processes that are about to end.
    """
    end = time.monotonic() + grace_s
    while (found := _running(mark, namespace)) and time.monotonic() < end:
        time.sleep(_POLL_S)
    if not found and namespace is None:
        time.sleep(_POLL_S)
        found = _running(mark, namespace)  # again: in the middle of its execve(2) a process has no environment
    return found


def _running(mark: str, namespace: int | None) -> dict[int, str]:
    needle = f"{MARK}={mark}".encode()
    found = {}
    for pid in proc.pids():
        if pid != os.getpid() and _is_of_setup(pid, needle, namespace):
            one = process(pid)
            if one is not None and one.name not in _HARMLESS and not proc.is_dying(pid):
                found[pid] = one.name
    return found


def _is_of_setup(pid: int, needle: bytes, namespace: int | None) -> bool:
    try:
        if namespace is not None and os.stat(f"/proc/{pid}/ns/mnt").st_ino == namespace:  # noqa: PTH116
            return True
        return needle in proc.read(pid, "environ").split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return False


_SETTINGS = "/proc/sys"
_VOLATILE = frozenset((
    "kernel.ns_last_pid", "kernel.perf_event_max_sample_rate", "kernel.sched_domain", "kernel.tainted",
    "kernel.pty.nr", "vm.stat_refresh",
))  # fmt: skip
# The first may be a mount that appears when it is touched; random numbers differ each time they are read.
_NOT_ENTERED = ("fs/binfmt_misc", "kernel/random")
_MAX_SETTING_BYTES = 4096


@dataclass(frozen=True, slots=True)
class KernelState:
    """A record of kernel state. Taking one costs some 25 ms."""

    settings: dict[str, bytes]
    """By names as sysctl(8) has them: `vm.max_map_count`."""
    others: frozenset[str]
    """Modules, and System V segments of this user, as messages about their appearance."""

    @classmethod
    def now(cls) -> KernelState:
        """The current state, as far as it is readable."""
        modules = [f"it loaded the kernel module {line.split()[0]}" for line in lines_of("/proc/modules")]
        segments = [f"it left shared memory behind (System V, id {number})" for number in _shared_memory()]
        return cls(dict(_settings()), frozenset((*modules, *segments)))

    def changes(self, before: KernelState) -> list[str]:
        """The differences from `before`, as messages."""
        settings = [name for name, value in self.settings.items() if before.settings.get(name, value) != value]
        changed = [f"it changed the kernel setting {name}" for name in sorted(settings)]
        return sorted(self.others - before.others) + changed


def _settings() -> Iterator[tuple[str, bytes]]:
    for folder, below, names in os.walk(_SETTINGS):
        inside = os.path.relpath(folder, _SETTINGS)
        below[:] = [name for name in below if os.path.normpath(f"{inside}/{name}") not in _NOT_ENTERED]
        for name in names:
            path = f"{folder}/{name}"
            setting = os.path.normpath(f"{inside}/{name}").replace("/", ".")
            if setting in _VOLATILE:
                continue
            try:
                if os.lstat(path).st_mode & 0o600 == 0o600:
                    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a thousand files
                        yield setting, file.read(_MAX_SETTING_BYTES)
            except OSError:
                continue


def _shared_memory() -> Iterator[str]:
    """Segments whose creator has ended: those of running processes may belong to the user's other programs."""
    for fields in map(str.split, lines_of("/proc/sysvipc/shm")[1:]):
        _, number, _, _, maker, *_, creator = fields[:10]
        if int(creator) == os.geteuid() and not Path("/proc", maker).exists():
            yield number


_MAX_POINTER_BYTES = 65_536


def mentions(changes: Iterable[Change]) -> list[str]:
    """Link targets and `.pth` files among the changes that may name scratch folders, for `leftovers`."""
    found = []
    for change in changes:
        if not change.source:
            continue
        with contextlib.suppress(OSError):
            if _points_python(change.path):
                with open_unfollowed(change.source) as file:
                    found.append(file.read(_MAX_POINTER_BYTES).decode("utf-8", "replace"))
            elif (target := os.readlink(change.source)).startswith(SCRATCH):  # noqa: PTH115 - half as long
                found.append(target)
    return found


# They may contain the node's name as information only.
_LOG = re.compile(r".*/((\.git|CMakeFiles)/.*|CMakeCache\.txt|config\.(log|status)|[^/]*\.(log|out|err))", re.DOTALL)


def files_of_node(changes: Iterable[Change], patterns: Sequence[re.Pattern[str]]) -> list[str]:
    """Files, such as lists of hosts, that contain one of these names of the node or the job."""
    found = []
    for change in changes if patterns else ():
        with contextlib.suppress(OSError):
            if change.source and not _LOG.fullmatch(change.path) and stat.S_ISREG(os.lstat(change.source).st_mode):
                with open_unfollowed(change.source) as file:
                    text = file.read(_MAX_POINTER_BYTES).decode("utf-8", "replace")
                found += [change.path] if any(pattern.search(text) for pattern in patterns) else []
    return found


def _points_python(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.endswith((".pth", ".egg-link")) or (name.startswith("__editable__") and name.endswith(".py"))


Enter = Callable[[], None]
INSPECT_S = 10.0
_PREFIX_FILES = ("pyvenv.cfg", "conda-meta")


_MOUNT_CHECKS, _CHECK_INTERVAL_S = 4, 0.1
_CONTAINER_MOUNT = re.compile(r"/containers/(?:run|start)-[^/]+/root(?:/|$)")
"""Mount points of other starts' containers. A capture's private namespace keeps a copy of such a mount after the other
start has unmounted it."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The state before a setup."""

    _enter: Enter | None
    _before: Mapping[str, Any]
    _kernel: KernelState
    _mark: str

    @classmethod
    def take(cls, enter: Enter | None = None) -> Baseline:
        """Record the state before the setup runs. `enter` is `Capture.enter`.

        Forks if `enter` is given: call it while this process has one thread. What cannot be read is not compared.
        """
        inside = _inspect_inside(enter)
        if inside.get("namespace") == _namespace():  # a capture without mounts of its own
            enter = None
        return cls(enter, inside, KernelState.now(), secrets.token_hex(8))

    @property
    def environment(self) -> dict[str, str]:
        """Variables to set for the setup, by which its processes are found."""
        return {MARK: self._mark}

    def side_effects(
        self,
        reads: Reads,
        *,
        mentions: Sequence[str] = (),
        command: Sequence[str] = (),
        grace_s: float = 0.0,
        relaunch: SetupContext | None = None,
    ) -> tuple[list[str], list[str], list[Daemon]]:
        """Reasons why the setup is not snapshot-safe: what it does each time, and what happened this time; and its
        processes that can be started again.

        `reads` is what it opened; `mentions` and `command` are texts that name what the job will use (see `leftovers`);
        other jobs may have another command. Forks as `take` does.

        Waits at most `grace_s` for processes that are about to end. Those still running are reasons, unless `relaunch`
        is given and they can be started again.
        """
        found = self.running(grace_s=grace_s)
        daemons: list[Daemon] = []
        # Another program may have changed the kernel's state.
        this_time = KernelState.now().changes(self._kernel)
        unsafe: list[str] = []
        if relaunch is None:  # other starts may start them again
            running = [f"it left a process running: {name} ({pid})" for pid, name in sorted(found.items())]
            this_time += [listed(running, 5)] if running else []
        else:
            daemons, unsafe = find_restartable(
                found, replace(relaunch, privileges=self._before.get("privileges", {})), reads
            )
            mentions = [*mentions, *(word for one in daemons for word in one.argv)]
        unsafe = [listed(unsafe, 5)] if unsafe else []
        again = {path for one in daemons for path in (*one.runtime_files, one.output)}
        # If one of the two states could not be read, no difference is known.
        inside = self._before and (_inspect_inside(self._enter) or self._before)
        # Without mounts of its own, or a watch, these may be another program's.
        (this_time if self._enter is None else unsafe).extend(self._mount_changes(inside))
        written = [path for path in reads.outside_writes if path not in again]

        def left(names: Sequence[str]) -> list[str]:
            return left_in_scratch(written, names) if reads.complete else self._new_in_scratch(inside, names)

        unsafe += left_elsewhere(written, Exclusions()) if reads.complete else []
        (unsafe if reads.complete and left(mentions) else this_time).extend(left([*mentions, *command]))
        return unsafe, this_time, daemons

    def running(self, *, grace_s: float = 0.0) -> dict[int, str]:
        """Names of the setup's processes, by process id (`leftover_processes`)."""
        namespace = self._before.get("namespace") if self._enter is not None else None
        return leftover_processes(self._mark, namespace, grace_s=grace_s)

    def _mount_changes(self, inside: Mapping[str, Any]) -> list[str]:
        """Mounts and unmounts of the setup.

        Mounts of the host propagate into the namespace at any moment, even twice at one place, and the two mount tables
        cannot be read atomically. So a difference counts only if it persists over several reads of both tables.
        """
        before, after = ({tuple(row) for row in look.get("mounts", ())} for look in (self._before, inside))
        host = set(_mounts()) if self._enter is not None else set()
        made, gone = after - before - host, (before - after) & host
        for _ in range(_MOUNT_CHECKS):
            if self._enter is None or not (made or gone):
                break
            time.sleep(_CHECK_INTERVAL_S)
            again = {tuple(row) for row in _inspect_inside(self._enter).get("mounts", after)}
            host = set(_mounts())
            made, gone = (made & again) - host, (gone - again) & host
        return [
            *(f"it mounted {kind} on {path}" for path, kind, *_ in sorted(made)),
            *(f"it unmounted {path}" for path, *_ in sorted(gone)),
        ]

    def _new_in_scratch(self, inside: Mapping[str, Any], mentions: Sequence[str]) -> list[str]:
        """New environments, and new entries that the job uses: only a watch knows which process made which file."""
        before = {*map(tuple, self._before.get("scratch", ()))}
        new = sorted({*map(tuple, inside.get("scratch", ()))} - before)
        return [
            f"it installed into {path}, which is not kept: use another folder"
            for path, is_prefix in new
            if is_prefix or is_mentioned(path, mentions)
        ]


def _inspect_inside(enter: Enter | None) -> Mapping[str, Any]:
    """The state seen in the setup's view; empty if it cannot be read."""
    if enter is None:
        return _inspect()

    def inside() -> dict[str, Any]:
        enter()
        return _inspect()

    try:
        found: Mapping[str, Any] = run_in_child(inside, deadline_s=INSPECT_S)
    except BootseerError:
        return {}
    return found


def _inspect() -> dict[str, Any]:
    return {
        "namespace": _namespace(),
        "privileges": privileges("self"),
        "mounts": _mounts(),
        "scratch": [
            # By `os.path`, for which what other users hide does not exist.
            (f"{folder}/{name}", any(os.path.exists(f"{folder}/{name}/{file}") for file in _PREFIX_FILES))  # noqa: PTH110
            for folder in SCRATCH
            for name in (os.listdir(folder) if os.access(folder, os.R_OK) else ())  # noqa: PTH208 - names
        ],
    }


def _namespace() -> int:
    return Path("/proc/self/ns/mnt").stat().st_ino


def _mounts() -> list[tuple[str, str, str, str]]:
    return [
        (row.path, row.kind, row.device, row.root) for row in mount_table() if not _CONTAINER_MOUNT.search(row.path)
    ]
