"""A mount namespace that this process creates, keeps open and sends children into, without entering it itself.

A forked helper creates the namespace and its mounts and exits; file descriptors keep the result alive. Nothing is
visible on the host, and everything disappears with the last descriptor and the last process inside, also after kill -9.
Because of the fork, create it while this process has one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct, field

from bootseer.errors import BootseerError, PermanentError, TransientError, as_message, from_message
from bootseer.fuse.syscalls import CLONE_NEWNS, CLONE_NEWUSER, MS_NODEV, libc
from bootseer.io.proc import end_child
from bootseer.mounts import kernel, user_namespace
from bootseer.mounts.kernel import is_below, mount_table, visible
from bootseer.mounts.layers import mount_overlay
from bootseer.mounts.process import die_with, json_lines, send_line

_MAPPED, _NOT_MAPPED = b"y", b"n"


class Built(Struct, frozen=True):
    """What the helper reports about the mounts that it made."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Any JSON values."""
    folders: Mapping[str, int] = field(default_factory=dict)
    """Folder descriptors (for example detached mounts) that the parent keeps open too."""


class Namespace:
    """Open as long as children are to enter it. A context manager."""

    def __init__(self, held: Mapping[str, int], folders: Mapping[str, int], facts: Mapping[str, Any]) -> None:
        self._held = dict(held)
        self._folders = dict(folders)
        self.facts = facts
        """What `build` returned."""

    @classmethod
    def create(cls, build: Callable[[], Built | None], *, user: bool = False, deadline_s: float = 30.0) -> Namespace:
        """Run `build` in a child with its own mount namespace and keep that; `user`: in a new user namespace, as root.

        In a user namespace root keeps all ids where the kernel allows it; other users have their own id only. Mounts
        that the host makes later below copies of its mounts still propagate. Raises what `build` raised (as
        `PermanentError` unless it is a BootSeer error), and `TransientError` after `deadline_s` seconds.
        """
        answer_read, answer_write = os.pipe2(os.O_CLOEXEC)
        release_read, release_write = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        try:
            helper = os.fork()
            if helper == 0:
                os.close(release_write)
                _run_helper(build, parent, answer_write, release_read, user=user)
        finally:
            os.close(answer_write)
            os.close(release_read)
        try:
            lines = json_lines(answer_read, time.monotonic() + deadline_s)
            if user:
                _next(lines)
                os.write(release_write, _MAPPED if user_namespace.map_all(helper) else _NOT_MAPPED)
            return cls._of(helper, _next(lines), user=user)
        finally:
            os.close(answer_read)
            os.close(release_write)
            end_child(helper)

    @classmethod
    def _of(cls, helper: int, message: Mapping[str, Any], *, user: bool) -> Namespace:
        held: dict[str, int] = {}
        folders: dict[str, int] = {}
        try:
            for name in ("mnt", "user") if user else ("mnt",):
                held[name] = _open_above_stdio(f"/proc/{helper}/ns/{name}", os.O_RDONLY)
            held["root"] = _open_above_stdio(f"/proc/{helper}/root", os.O_PATH | os.O_DIRECTORY)
            for name, number in message["folders"].items():
                folders[name] = _open_above_stdio(f"/proc/{helper}/fd/{number}", os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            for number in (*held.values(), *folders.values()):
                os.close(number)
            raise PermanentError(f"open a mount namespace: {error}") from error
        return cls(held, folders, message["facts"])

    @property
    def root(self) -> Path:
        """The namespace's root folder, also for other processes of this user. Absolute symbolic links in it resolve
        against the reader's own root."""
        return _fd_path(self._held["root"])

    def folder(self, name: str) -> Path:
        return _fd_path(self._folders[name])

    def enter(self) -> None:
        """Move this single-threaded process into the namespace: for children between fork and exec.

        It keeps its working folder by name, and its user and group ids, also in a user namespace. setns(2) clears the
        parent-death signal, so call `process.die_with` afterwards. Raises `OSError`.
        """
        uid, gid = os.geteuid(), os.getegid()
        place: str | None = None
        with contextlib.suppress(FileNotFoundError):  # it is deleted
            place = os.getcwd()  # noqa: PTH109 - after a fork, before an exec
        here = os.open(".", os.O_PATH | os.O_CLOEXEC)
        try:
            if "user" in self._held:
                _check_result("enter the user namespace", libc.setns(self._held["user"], CLONE_NEWUSER))
            _check_result("enter the mount namespace", libc.setns(self._held["mnt"], CLONE_NEWNS))
            if place is None:
                os.fchdir(here)
            else:
                os.chdir(place)
        finally:
            os.close(here)
        if "user" in self._held and uid != 0:
            _map_own_ids(uid, gid)

    def close(self) -> None:
        """Close the descriptors. The mounts end with the last process inside."""
        while self._held:
            os.close(self._held.popitem()[1])
        while self._folders:
            os.close(self._folders.popitem()[1])


def overlay_in_place(
    target: Path, lowers: list[Path], *, upper: Path | None = None, work: Path | None = None, userxattr: bool = False
) -> tuple[str, ...]:
    """Mount an overlay on the folder `target`; mounts below it are moved onto the overlay.

    Devices are disabled, and so is what the covered mount forbids (set-uid programs). `upper` is mounted volatile (not
    crash-safe): otherwise unmounting would sync the whole file system of `upper`.

    `lowers` with the lowest first; `target` itself may be one of them. Call it in `build`. Returns a line for each
    mount that could not be kept: its folder does not exist in the overlay, or it may not be cloned.
    """
    place = os.path.realpath(target)
    inside = [row.path for row in visible(mount_table()) if is_below(row.path, place)]
    copies: list[tuple[str, int]] = []
    notes = []
    for path in inside:
        if not any(is_below(path, above) for above, _ in copies):
            try:
                copies.append((path, kernel.clone_mount(Path(path), recursive=True)))
            except BootseerError as error:
                notes.append(f"the mount {path} cannot be kept: {error}")
    try:
        attributes = MS_NODEV | os.statvfs(place).f_flag & (os.ST_NOSUID | os.ST_NOEXEC)
        mount_overlay(
            lowers, Path(place), upper=upper, work=work, attributes=attributes, userxattr=userxattr, volatile=True
        )
        while copies:
            path, copy = copies.pop(0)
            try:
                kernel.attach(copy, Path(path))
            except BootseerError as error:
                notes.append(f"the mount {path} cannot be kept: {error}")
    finally:
        for _, copy in copies:
            os.close(copy)
    return tuple(notes)


def _run_helper(
    build: Callable[[], Built | None], parent: int, answer_write: int, release_read: int, *, user: bool
) -> NoReturn:
    """In the child: create the namespace, report it, and stay alive until the parent has opened it."""
    try:
        # Mounts are held by descriptors until they are attached, and a node may have thousands of mounts.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        if user:
            user_namespace.enter_new(functools.partial(_ask_for_ids, answer_write, release_read))
        else:
            kernel.unshare_mounts()
        die_with(parent)
        built = build() or Built()
        send_line(answer_write, {"facts": dict(built.facts), "folders": dict(built.folders)})
        os.read(release_read, 1)
    except BaseException as error:  # must not continue in the parent's code
        send_line(answer_write, as_message(error))
    finally:
        os._exit(0)


def _ask_for_ids(answer_write: int, release_read: int) -> bool:
    send_line(answer_write, {"unshared": True})
    return os.read(release_read, 1) == _MAPPED


def _next(lines: Iterator[Any]) -> Mapping[str, Any]:
    """The helper's next message. Raises the error that it reports."""
    try:
        message: Mapping[str, Any] = next(lines)
    except TimeoutError:
        raise TransientError("the mounts of a namespace were not made in time") from None
    except (StopIteration, ValueError):
        raise PermanentError("the process that makes the mounts of a namespace died") from None
    if "error" in message:
        raise from_message(message)
    return message


def _open_above_stdio(path: str, flags: int) -> int:
    """Open `path` with a number above 2, also when this process was started without its standard streams."""
    number = os.open(path, flags | os.O_CLOEXEC)
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(number)


def _fd_path(number: int) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{number}")


def _map_own_ids(uid: int, gid: int) -> None:
    """In a nested user namespace, map root of the outer one (this process) back to its own ids."""
    _check_result("make a user namespace", libc.unshare(CLONE_NEWUSER))
    for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} 0 1"), ("gid_map", f"{gid} 0 1")):
        Path("/proc/self", name).write_text(line)


def _check_result(step: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno() or errno.EINVAL
        raise OSError(number, os.strerror(number), step)
