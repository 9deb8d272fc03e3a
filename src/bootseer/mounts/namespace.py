"""A mount namespace that this process makes, holds and sends children into, without living in it itself.

A helper child makes the namespace and all mounts in it, and ends; descriptors hold the result. Nothing shows on the
host at any time, and all of it is gone with the last descriptor and the last process inside, by kill -9 too. Make it
while this process has one thread, as the helper is forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from bootseer.errors import BootseerError, PermanentError, TransientError, error_named
from bootseer.fuse.syscalls import MS_NODEV, libc, number_of
from bootseer.mounts import kernel, user_namespace
from bootseer.mounts.kernel import is_below, mount_table, visible
from bootseer.mounts.layers import mount_overlay
from bootseer.mounts.process import die_with, end_child, json_lines

_NEWNS, _NEWUSER = 0x0002_0000, 0x1000_0000
_MAPPED, _NOT_MAPPED = b"y", b"n"


@dataclass(frozen=True, slots=True)
class Built:
    """What a helper child tells of the mounts that it made."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Anything that JSON can say."""
    folders: Mapping[str, int] = field(default_factory=dict)
    """Descriptors of folders, such as of mounts that are attached nowhere, which the parent is to hold as well."""


class Namespace:
    """Hold it as long as children are to be sent in. A context manager."""

    def __init__(self, held: Mapping[str, int], folders: Mapping[str, int], facts: Mapping[str, Any]) -> None:
        self._held = dict(held)
        self._folders = dict(folders)
        self.facts = facts
        """What `build` returned."""

    @classmethod
    def made(cls, build: Callable[[], Built | None], *, user: bool = False, deadline_s: float = 30.0) -> Namespace:
        """Run `build` in a child with mounts of its own and keep them; `user` makes it root of a user namespace first.

        In a user namespace root keeps all ids where the kernel lets it, other users have their own alone. Mounts that
        the host makes later below copies of its mounts still appear. Raises what `build` raised, where that is no
        BootSeer error `PermanentError`; `TransientError` after `deadline_s` seconds.
        """
        answer, tell = os.pipe2(os.O_CLOEXEC)
        stay, release = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        try:
            helper = os.fork()
            if helper == 0:
                os.close(release)
                _help(build, parent, tell, stay, user=user)
        finally:
            os.close(tell)
            os.close(stay)
        try:
            lines = json_lines(answer, time.monotonic() + deadline_s)
            if user:
                _next(lines)
                os.write(release, _MAPPED if user_namespace.map_all(helper) else _NOT_MAPPED)
            return cls._of(helper, _next(lines), user=user)
        finally:
            os.close(answer)
            os.close(release)
            end_child(helper)

    @classmethod
    def _of(cls, helper: int, message: Mapping[str, Any], *, user: bool) -> Namespace:
        held: dict[str, int] = {}
        folders: dict[str, int] = {}
        try:
            for name in ("mnt", "user") if user else ("mnt",):
                held[name] = _hold(f"/proc/{helper}/ns/{name}", os.O_RDONLY)
            held["root"] = _hold(f"/proc/{helper}/root", os.O_PATH | os.O_DIRECTORY)
            for name, number in message["folders"].items():
                folders[name] = _hold(f"/proc/{helper}/fd/{number}", os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            for number in (*held.values(), *folders.values()):
                os.close(number)
            raise PermanentError(f"hold a mount namespace: {error}") from error
        return cls(held, folders, message["facts"])

    @property
    def root(self) -> Path:
        """The namespace's root, for other processes of this user too. Absolute symbolic links in it still lead to the
        reader's own root."""
        return _by_number(self._held["root"])

    def folder(self, name: str) -> Path:
        """A folder that `build` handed over."""
        return _by_number(self._folders[name])

    def enter(self) -> None:
        """Move this process, which must have one thread, into the namespace: for children between fork and exec.

        It keeps its working folder by name, and its user and group: in a user namespace they are called what they were.
        The kernel forgets a death signal on the way, so ask for it later (`process.die_with`).
        Raises `OSError`.
        """
        uid, gid = os.geteuid(), os.getegid()
        place = _working_folder()
        here = os.open(".", os.O_PATH | os.O_CLOEXEC)
        try:
            if "user" in self._held:
                _called("enter the user namespace", libc.setns(self._held["user"], _NEWUSER))
            _called("enter the mount namespace", libc.setns(self._held["mnt"], _NEWNS))
            if place is None:
                os.fchdir(here)
            else:
                os.chdir(place)
        finally:
            os.close(here)
        if "user" in self._held and uid != 0:
            _take_names(uid, gid)

    def close(self) -> None:
        """Let go. The mounts end when the last process inside does."""
        while self._held:
            os.close(self._held.popitem()[1])
        while self._folders:
            os.close(self._folders.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def overlay_in_place(
    target: Path, lowers: list[Path], *, upper: Path | None = None, work: Path | None = None, userxattr: bool = False
) -> tuple[str, ...]:
    """Mount an overlay on the folder `target` and let what is mounted below it shine through, as before.

    It has no devices; what the mount that it covers forbids (set-uid programs) stays forbidden. What is written to
    `upper` need not survive a crash of the machine: without that, the end of the mount would write the whole disk back.

    `lowers` with the lowest first; `target` itself may be one of them. Call it in `build`. Returns a line for each
    mount that could not be kept, because the new folder has no place for it or it may not be copied.
    """
    place = os.path.realpath(target)
    inside = [row.path for row in visible(mount_table()) if is_below(row.path, place)]
    copies: list[tuple[str, int]] = []
    notes = []
    for path in inside:
        if not any(is_below(path, above) for above, _ in copies):
            try:
                copies.append((path, kernel.clone(Path(path), recursive=True)))
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
                kernel.move(copy, Path(path))
            except BootseerError as error:
                notes.append(f"the mount {path} cannot be kept: {error}")
    finally:
        for _, copy in copies:
            os.close(copy)
    return tuple(notes)


def _help(build: Callable[[], Built | None], parent: int, tell: int, stay: int, *, user: bool) -> NoReturn:
    """In the child: make the namespace, tell, and stay until the parent holds it."""
    try:
        if user:
            user_namespace.enter_new(functools.partial(_ask_for_ids, tell, stay))
        else:
            kernel.unshare_mounts()
        die_with(parent)
        built = build() or Built()
        said: dict[str, Any] = {"facts": dict(built.facts), "folders": dict(built.folders)}
        _write(tell, said)
        os.read(stay, 1)
    except BaseException as error:  # nothing may unwind into the parent's code
        own = isinstance(error, BootseerError)
        number = number_of(error) if isinstance(error, BootseerError) else getattr(error, "errno", None) or 0
        message = str(error) if own else f"{type(error).__name__}: {error}"
        _write(tell, {"kind": type(error).__name__, "error": message, "number": number})
    finally:
        os._exit(0)


def _ask_for_ids(tell: int, stay: int) -> bool:
    _write(tell, {"unshared": True})
    return os.read(stay, 1) == _MAPPED


def _write(pipe: int, message: Mapping[str, Any]) -> None:
    data = memoryview(json.dumps(message).encode() + b"\n")
    with contextlib.suppress(OSError):  # the parent has given up
        while data:
            data = data[os.write(pipe, data) :]


def _next(lines: Iterator[Any]) -> Mapping[str, Any]:
    """One line of the helper. Its error is raised."""
    try:
        message: Mapping[str, Any] = next(lines)
    except TimeoutError:
        raise TransientError("the mounts of a namespace were not made in time") from None
    except (StopIteration, ValueError):
        raise PermanentError("the process that makes the mounts of a namespace died") from None
    if "error" in message:
        cause = OSError(message["number"], os.strerror(message["number"])) if message["number"] else None
        raise error_named(message["kind"], message["error"]) from cause
    return message


def _hold(path: str, flags: int) -> int:
    """A descriptor that does not take the place of a standard stream which we were started without."""
    number = os.open(path, flags | os.O_CLOEXEC)
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(number)


def _by_number(number: int) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{number}")


def _working_folder() -> str | None:
    """None when it is deleted: then nothing can be made in it, and the folder itself is as good as its name was."""
    try:
        return os.getcwd()  # noqa: PTH109 - after a fork, before an exec
    except FileNotFoundError:
        return None


def _take_names(uid: int, gid: int) -> None:
    """Call root of the user namespace, which is we, by our own numbers again."""
    _called("make a user namespace", libc.unshare(_NEWUSER))
    for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} 0 1"), ("gid_map", f"{gid} 0 1")):
        Path("/proc/self", name).write_text(line)


def _called(step: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno() or errno.EINVAL
        raise OSError(number, os.strerror(number), step)
