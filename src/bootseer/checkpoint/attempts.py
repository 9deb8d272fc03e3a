"""Unpublished checkpoints: written in a hidden folder, published by one rename, collected when their writer has died.

    <folder>/.attempts/<id>/        what is being written
    <folder>/.attempts/<id>.lease   a file whose age says whether the writer is alive
    <folder>/.attempts/<id>.old     the version that a replacing attempt has moved away
    <folder>/.attempts/<id>.gone    what is being deleted

A writer that was killed or interrupted leaves all of it. The next writer of the same checkpoint takes it over
(`Attempt.take_over`): at once on the same machine, otherwise when the lease is stale.

Leases: the writer renews its lease every minute. A lease older than ten minutes by the place's own clock is stale, and
`collect` removes what it covers; a writer that was stopped for so long finds its lease gone when it publishes. Nodes'
clocks do not matter.

Order of removal: the lease goes before the folder, and folders are renamed before they are deleted, so that a writer
that wakes up at any step either publishes a complete checkpoint or fails.

Files that are written in place, through a mount, leave parts without a head when their writer dies. Their writers keep
a file `lease` among the parts; without one, `collect` waits for a day.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from bootseer.checkpoint.files import GONE, Files, maybe_head
from bootseer.checkpoint.head import ATTEMPTS, PEEK_BYTES, STRIPES, is_hidden, parts_folder, peek_id
from bootseer.errors import (
    AccessError,
    AlreadyExistsError,
    BootseerError,
    CorruptError,
    Interrupted,
    IsFolderError,
    NotFoundError,
    PermanentError,
    TransientError,
)
from bootseer.io.executor import Executor, report_exception
from bootseer.logs import logger
from bootseer.mounts.process import ProcessId
from bootseer.places.place import (
    TEMPORARY_PREFIX,
    Entry,
    Place,
    exists,
    folder_of,
    join,
    make_folder_like_parent,
    name_of,
)

_LOG = logger(__name__)

LEASE_S = 600.0
"""A lease that was not renewed for so long is stale."""
LEASE_NAME = "lease"
"""The lease among the parts of an unpublished file."""
_RENEW_S = 60.0
_END_S = 10.0
_NO_LEASE_S = 24 * 3600.0
_SCHEMA = "bootseer.lease/1"
_MAX_LEASE_BYTES = 1 << 16
_OLD = ".old"
_LEASE = ".lease"
_TRIES = 8
"""How often other writers may replace the target between two of our steps."""


def lease_bytes(target: str, how: str = "") -> bytes:
    """A lease for an attempt at `target`, written in the way `how`; readable for people who look for the owner."""
    lease = {"host": platform.node(), "pid": os.getpid(), "process": _process(), "target": target, "how": how}
    return json.dumps({"schema": _SCHEMA, **lease}).encode()


def _process() -> str:
    """This process, unique across machines; "" if unknown."""
    own = ProcessId.of(os.getpid())
    try:
        return f"{_machine()} {own.pid} {own.started}" if own is not None else ""
    except OSError:
        return ""


def _machine() -> str:
    """This boot of this machine, and its pid namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').stat().st_ino}"


def _lease_at(place: Place, path: str) -> dict[str, object]:
    """What the lease of an attempt says; nothing if it is gone or damaged."""
    try:
        said = json.loads(place.read_bytes(path + _LEASE, _MAX_LEASE_BYTES))
    except (PermanentError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _has_ended(process: object) -> bool:
    """Whether the process that a lease names ran on this machine and has ended."""
    try:
        machine, pid, started = str(process).rsplit(" ", 2)
        return machine == _machine() and not ProcessId(int(pid), int(started)).alive
    except (OSError, ValueError):
        return False


class Attempt:
    """A hidden folder, `path`, that becomes the checkpoint `target` when it is published. Used in a `with` block."""

    def __init__(self, place: Place, target: str, *, how: str = "") -> None:
        """`how` it is written: only attempts of the same kind are taken over."""
        self._place = place
        self._target = target
        self._how = how
        attempts = join(folder_of(target), ATTEMPTS)
        self.path = f"{attempts}/{secrets.token_hex(8)}"
        self._ended = threading.Event()
        self.has_whole_files = False
        """Whether a retry could reuse something."""
        self._has_old = False
        """Whether the target's previous version may lie in our `.old`."""
        make_folder_like_parent(place, attempts)
        self._renew()
        place.make_folder(self.path)
        self._thread = Executor("bootseer-lease", 1)
        self._thread.submit(self._renew_periodically)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what was not published. After an interrupt or a `TransientError`, whole files stay for a retry."""
        self._ended.set()
        # A place that does not answer may delay a renewal beyond this; such a lease goes stale by itself.
        self._thread.close(_END_S)
        if self.has_whole_files and isinstance(error, (TransientError, Interrupted)):
            return
        if self._has_old:
            return  # the previous version was not restored: `collect` will do it, and needs the lease for its name
        with contextlib.suppress(TransientError):  # a place that does not answer is not asked again
            for rest in (self.path, self.path + _LEASE):
                with contextlib.suppress(PermanentError):
                    self._place.delete(rest, recursive=True)

    def take_over(self) -> list[str]:
        """Take over what dead writers of this target have left: hidden folders in this attempt, to be removed."""
        attempts, found, user = folder_of(self.path), [], self._place.stat(self.path).owner
        entries = {name_of(entry.path): entry for entry in _listed(self._place, attempts)}
        for name, entry in entries.items():
            path, lease = f"{attempts}/{name}", entries.get(name + _LEASE)
            # An attempt that has moved the previous version away needs its lease. In HDFS another user's could be moved
            # here, and not be removed.
            if not entry.is_folder or lease is None or name + _OLD in entries or entry.owner != user:
                continue
            with contextlib.suppress(PermanentError):  # another process was faster, or it belongs to another user
                if path != self.path and self._can_take_over(path, lease):
                    inside = f"{self.path}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
                    # An atomic rename: one of several takers gets it, and its writer cannot publish any more.
                    self._place.rename(path, inside, replace=False)
                    _delete(self._place, path + _LEASE)
                    _LOG.info("%s: takes over %s of a dead writer", self._place.uri_of(self._target), path)
                    found.append(inside)
        for folder in found:  # including what that writer had taken over itself; the list grows meanwhile
            below = _listed(self._place, folder)
            found += [
                entry.path for entry in below if entry.is_folder and name_of(entry.path).startswith(TEMPORARY_PREFIX)
            ]
        return found

    def _can_take_over(self, path: str, lease: Entry) -> bool:
        said = _lease_at(self._place, path)
        # Compare the name alone: the other writer's place may have had its root in another folder.
        if said.get("how") != self._how or name_of(str(said.get("target"))) != name_of(self._target):
            return False
        age_s = self._place.now_s(folder_of(path)) - lease.mtime_ns / 1e9
        return age_s > LEASE_S or _has_ended(said.get("process"))

    def publish(self, *, replace: bool = False) -> None:
        """Rename the folder to the target. Raises `AlreadyExistsError` if the target exists.

        With `replace` the previous version is removed. For a moment there is no target: places cannot exchange two
        folders. After a crash in this moment `collect` restores the previous version: on the same machine at once.
        """
        self._check_lease()
        replaced = self._replaced_id() if replace else None
        try:
            if replace:
                self._replace_target()
            else:
                rename(self._place, self.path, self._target, replace=False)
        except BaseException as error:
            self._put_back()
            if isinstance(error, NotFoundError):
                self._check_lease()
            if self._has_old and isinstance(error, TransientError | AccessError):  # an expired login
                job = self._place.uri_of(folder_of(self._target))
                raise type(error)(
                    f"{error}; the previous version is hidden: after this process, `bootseer ckpt clean {job}` shows it"
                ) from error
            raise
        self._drop_old()
        if not self._has_old:  # otherwise `collect` may restore it
            self._drop_parts(replaced)

    def publish_file(self, name: str, *, replace: bool = False) -> None:
        """Publish one file of the folder as the target, its parts first. Raises `AlreadyExistsError`."""
        self._check_lease()
        files = Files(self._place, within=self.path)
        source = f"{self.path}/{name}"
        head_id = files.id_of(source)
        replaced = self._replaced_id() if replace else None
        if head_id is not None:
            make_folder_like_parent(self._place, join(folder_of(self._target), STRIPES))
            self._place.rename(parts_folder(source, head_id), parts_folder(self._target, head_id))
        try:
            rename(self._place, source, self._target, replace=replace)
        except PermanentError:
            Files(self._place).drop_parts(self._target, head_id)
            raise
        self._drop_parts(replaced)

    def _replaced_id(self) -> str | None:
        with contextlib.suppress(IsFolderError):
            return Files(self._place).replaced_id(self._target)
        return None

    def _drop_parts(self, head_id: str | None) -> None:
        with contextlib.suppress(BootseerError):  # the new version is published; `collect` removes what is left
            Files(self._place).drop_parts(self._target, head_id)

    def _replace_target(self) -> None:
        for _ in range(_TRIES):
            with contextlib.suppress(AlreadyExistsError):
                rename(self._place, self.path, self._target, replace=False)
                return
            # What we had moved away was replaced by another writer.
            self._drop_old()
            self._has_old = True
            try:
                self._place.rename(self._target, self.path + _OLD, replace=False)
            except NotFoundError:  # another writer has just moved it away
                self._has_old = False
        raise TransientError(f"{self._place.uri_of(self._target)}: others keep replacing it; try again")

    def _put_back(self) -> None:
        if self._has_old:
            with contextlib.suppress(BootseerError):
                with contextlib.suppress(NotFoundError):
                    _restore(self._place, self.path, self._target)
                self._has_old = False

    def _drop_old(self) -> None:
        if self._has_old:
            with contextlib.suppress(BootseerError):  # otherwise `collect` does it
                _drop_old(self._place, self.path)
                self._has_old = False

    def _renew_periodically(self) -> None:
        while not self._ended.wait(min(_RENEW_S, LEASE_S / 5)):
            try:
                if not exists(self._place.stat, self.path + _LEASE):
                    return  # the lease was collected as stale, and must not be renewed
                self._renew()
            except BootseerError:
                continue  # the place may answer again before the lease becomes stale
            except Exception:
                report_exception()  # the next renewal may succeed

    def _renew(self) -> None:
        self._place.write_bytes(self.path + _LEASE, lease_bytes(self._target, self._how))

    def _check_lease(self) -> None:
        """Fail if the lease went stale while the writer was stopped."""
        if not (exists(self._place.stat, self.path) and exists(self._place.stat, self.path + _LEASE)):
            what = self._place.uri_of(self._target)
            raise PermanentError(
                f"{what} was not published: its writer was stopped for so long that its lease went stale"
            )
        self._renew()


def collect(place: Place, folder: str, *, below: bool = False) -> int:
    """Remove what dead writers have left in a folder, with `below` also in those below it, where files are written in
    place; returns how many. What belongs to other users stays."""
    entries = list(place.list(folder))
    now_s = place.now_s(folder)
    removed = _collect_in(place, folder, entries, now_s)
    while below and entries:
        entry = entries.pop()
        if entry.is_folder and not is_hidden(name_of(entry.path)):
            with contextlib.suppress(NotFoundError, AccessError):
                inside = list(place.list(entry.path))
                removed += _collect_in(place, entry.path, inside, now_s)
                entries += inside
    if removed:
        _LOG.info("%s/%s: %d leftovers of dead writers removed", place.uri, folder, removed)
    return removed


def _collect_in(place: Place, folder: str, entries: Iterable[Entry], now_s: float) -> int:
    removed = _collect_attempts(place, join(folder, ATTEMPTS), now_s - LEASE_S)
    for entry in entries:
        if name_of(entry.path).startswith(TEMPORARY_PREFIX) and _is_dead_temporary(place, entry, now_s - LEASE_S):
            removed += _delete(place, entry.path)
    return removed + _collect_parts(place, folder, now_s)


def _collect_attempts(place: Place, attempts: str, oldest_s: float) -> int:
    entries = {name_of(entry.path): entry for entry in _listed(place, attempts)}
    removed = 0
    ids = set()
    for name, entry in entries.items():
        if name.endswith((_LEASE, _OLD)) or (entry.is_folder and not name.endswith(GONE)):
            ids.add(name.removesuffix(_OLD).removesuffix(_LEASE))
        elif name.endswith(GONE) or entry.mtime_ns / 1e9 < oldest_s:
            removed += _delete(place, entry.path)
    for one in ids:
        lease, path = entries.get(one + _LEASE), f"{attempts}/{one}"
        # While the target's previous version is hidden, it is missing to readers: a writer of this machine that has
        # ended is not waited for.
        is_hiding = one + _OLD in entries and _has_ended(_lease_at(place, path).get("process"))
        if lease is not None and lease.mtime_ns / 1e9 >= oldest_s and not is_hiding:
            continue
        if lease is None and exists(place.stat, path + _LEASE):
            continue  # made after the listing had passed its name: an attempt that has just begun
        if one + _OLD in entries:
            _put_back(place, path)
        # The lease first: a writer that wakes up and re-creates the folder must not publish that.
        if lease is not None:
            _delete(place, path + _LEASE)
        if one in entries:
            # Renamed first: a writer that wakes up now publishes all of it or nothing.
            with contextlib.suppress(NotFoundError, AlreadyExistsError, AccessError):
                place.rename(path, path + GONE, replace=False)
                removed += _delete(place, path + GONE)
    return removed


def _put_back(place: Place, path: str) -> None:
    """Restore the previous version: its writer died between moving it away and replacing it, or just after."""
    # The name alone: the writer's place may have had its root in another folder.
    target = _lease_at(place, path).get("target")
    name = name_of(target) if isinstance(target, str) else ""
    if name in ("", ".", "..") or is_hidden(name):
        return  # its name is unknown: left to people
    with contextlib.suppress(PermanentError):  # another process was faster, or the name is invalid: left to people
        _restore(place, path, join(folder_of(folder_of(path)), name))


def _restore(place: Place, path: str, target: str) -> None:
    """Give the version that the attempt `path` has moved away its name back, or delete it if there is a newer one."""
    try:
        place.rename(path + _OLD, target, replace=False)
    except AlreadyExistsError:
        _drop_old(place, path)


def _drop_old(place: Place, path: str) -> None:
    """Delete the version that was moved away. Renamed first: a partly deleted one must never be restored."""
    gone = f"{path}-{secrets.token_hex(4)}{GONE}"
    place.rename(path + _OLD, gone, replace=False)
    _delete(place, gone)


def _is_dead_temporary(place: Place, entry: Entry, oldest_s: float) -> bool:
    if entry.path.endswith(GONE):
        return True
    if entry.mtime_ns / 1e9 >= oldest_s:
        return False
    # A folder whose removal fails because it is not empty is renamed back by its remover.
    return not entry.is_folder or all(is_hidden(name_of(below.path)) for below in _listed(place, entry.path))


def _collect_parts(place: Place, folder: str, now_s: float) -> int:
    """Remove folders of parts that no head refers to and no writer fills."""
    parts = _listed(place, join(folder, STRIPES))
    old = [entry for entry in parts if entry.is_folder and _is_abandoned(place, entry, now_s)]
    if not old:
        return 0
    try:
        # After the leases were read, and twice: one listing may miss a head that is being renamed.
        named = _ids_of_heads(place, place.list(folder)) | _ids_of_heads(place, place.list(folder))
    except (AccessError, CorruptError):
        return 0  # an unreadable head could refer to any of them
    return sum(_delete(place, entry.path) for entry in old if name_of(entry.path) not in named)


def _is_abandoned(place: Place, entry: Entry, now_s: float) -> bool:
    if entry.mtime_ns / 1e9 >= now_s - LEASE_S:
        return False  # written to recently
    try:
        lease = place.stat(f"{entry.path}/{LEASE_NAME}")
    except NotFoundError:
        return entry.mtime_ns / 1e9 < now_s - _NO_LEASE_S
    return lease.mtime_ns / 1e9 < now_s - LEASE_S


def _ids_of_heads(place: Place, entries: Iterable[Entry]) -> set[str]:
    found = set()
    for entry in entries:
        if maybe_head(entry):
            with contextlib.suppress(NotFoundError):
                found.add(peek_id(place.read_first(entry.path, PEEK_BYTES)))
    return {head_id for head_id in found if head_id is not None}


def _listed(place: Place, folder: str) -> list[Entry]:
    try:
        return list(place.list(folder))
    except NotFoundError:
        return []


def _delete(place: Place, path: str) -> int:
    """Delete; returns 1 if it existed and could be deleted. Another collector may delete it too."""
    try:
        place.delete(path, recursive=True)
    except PermanentError:
        return 0
    return 1


def rename(place: Place, source: str, target: str, *, replace: bool) -> None:
    """Rename to publish. A rename whose answer was lost may have succeeded: that is no error."""
    try:
        place.rename(source, target, replace=replace)
    except AlreadyExistsError:
        raise AlreadyExistsError(f"{place.uri}/{target} already exists; give another name, or replace it") from None
    except TransientError:
        if exists(place.stat, source) or not exists(place.stat, target):
            raise
