"""Checkpoints on their way: written in a hidden folder, shown by one renaming, and removed when their writer has died.

    <folder>/.attempts/<id>/        what is being written
    <folder>/.attempts/<id>.lease   a file whose age says whether the writer is alive
    <folder>/.attempts/<id>.old     what a replacing attempt has taken away, until it is replaced
    <folder>/.attempts/<id>.gone    what is being deleted

A writer that was killed or interrupted leaves all of it. The next one of the same checkpoint takes that over
(`Attempt.take_over`): at once when it ran on this machine, otherwise when its lease is old.

The writer writes its lease again every minute. One that is older than ten minutes by the place's own clock is
stale, and `collect` removes what it stood for; a writer that was stopped for so long notices when it publishes. No
clock of any node matters.

Files that are written in place, through a mount, leave parts without a head when their writer dies. Writers keep a file
`lease` among the parts as long as they are on their way; where there is none, `collect` waits for a day.
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
    NotFoundError,
    PermanentError,
    TransientError,
)
from bootseer.io.executor import Executor, report_exception
from bootseer.logs import logger
from bootseer.mounts.process import ProcessId
from bootseer.places.place import TEMPORARY, Entry, Place, folder_of, join, make_alike, name_of

_LOG = logger(__name__)

LEASE_S = 600.0
"""A lease that was not renewed for so long is stale."""
LEASE_NAME = "lease"
"""Of a file's parts on their way, among them."""
_RENEW_S = 60.0
_END_S = 10.0
_NO_LEASE_S = 24 * 3600.0
_SCHEMA = "bootseer.lease/1"
_MAX_LEASE_BYTES = 1 << 16
_OLD = ".old"
_LEASE = ".lease"
_TRIES = 8
"""How often others may replace a name between two steps of ours."""


def lease_bytes(target: str, how: str = "") -> bytes:
    """A lease for what is to become `target`, written as `how` says: for a person who wants to know its owner."""
    lease = {"host": platform.node(), "pid": os.getpid(), "process": _process(), "target": target, "how": how}
    return json.dumps({"schema": _SCHEMA, **lease}).encode()


def _process() -> str:
    """This process, unique across machines; "" where that is not known."""
    own = ProcessId.of(os.getpid())
    try:
        return f"{_machine()} {own.pid} {own.started}" if own is not None else ""
    except OSError:
        return ""


def _machine() -> str:
    """This boot of this machine, and the numbers that processes have here."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').stat().st_ino}"


def _has_ended(process: object) -> bool:
    """Whether a process of this machine, as a lease names it, does not run any more."""
    try:
        machine, pid, started = str(process).rsplit(" ", 2)
        return machine == _machine() and not ProcessId(int(pid), int(started)).alive
    except (OSError, ValueError):
        return False


class Attempt:
    """A hidden folder, `path`, that becomes the checkpoint `target` when it is published. Use it in a `with`."""

    def __init__(self, place: Place, target: str, *, how: str = "", lease_s: float = LEASE_S) -> None:
        """`how` it is written: only what was written in the same way is taken over."""
        self._place = place
        self._target = target
        self._how = how
        self._lease_s = lease_s
        attempts = join(folder_of(target), ATTEMPTS)
        self.path = f"{attempts}/{secrets.token_hex(8)}"
        self._over = threading.Event()
        self.has_whole_files = False
        """Whether another try could go on with something."""
        self._has_taken = False
        """Whether what had the target's name may lie in our `.old`."""
        make_alike(place, attempts)
        self._renew()
        place.make_folder(self.path)
        self._thread = Executor("bootseer-lease", 1)
        self._thread.submit(self._keep)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what was not published. After an interrupt or a `TransientError` whole files stay for another try."""
        self._over.set()
        # A place that does not answer holds it up; what it writes then is a lease that is not renewed.
        self._thread.close(_END_S)
        if self.has_whole_files and isinstance(error, (TransientError, Interrupted)):
            return
        if self._has_taken:
            return  # it could not be put back: `collect` will do it, and needs the lease to know its name
        with contextlib.suppress(TransientError):  # a place that does not answer is not asked again
            for rest in (self.path, self.path + _LEASE):
                with contextlib.suppress(PermanentError):
                    self._place.delete(rest, recursive=True)

    def take_over(self) -> list[str]:
        """Take what dead writers of the same target have written: hidden folders in this attempt, to be removed."""
        attempts, found = folder_of(self.path), []
        entries = {name_of(entry.path): entry for entry in _listed(self._place, attempts)}
        for name, entry in entries.items():
            path, lease = f"{attempts}/{name}", entries.get(name + _LEASE)
            # One that has taken away what it was to replace needs its lease.
            if not entry.is_folder or lease is None or name + _OLD in entries or path == self.path:
                continue
            with contextlib.suppress(PermanentError):  # another one was faster, or it belongs to another user
                if self._is_left(path, lease):
                    inside = f"{self.path}/{TEMPORARY}{secrets.token_hex(8)}"
                    # In one step: of two that want it one gets it, and a writer that wakes up cannot publish.
                    self._place.rename(path, inside, replace=False)
                    _delete(self._place, path + _LEASE)
                    _LOG.info("%s: goes on with what the dead writer of %s left", self._what(), path)
                    found.append(inside)
        for folder in found:  # and what that writer had taken over; the list grows meanwhile
            below = _listed(self._place, folder)
            found += [entry.path for entry in below if entry.is_folder and name_of(entry.path).startswith(TEMPORARY)]
        return found

    def _is_left(self, path: str, lease: Entry) -> bool:
        try:
            said = json.loads(self._place.read_bytes(path + _LEASE, _MAX_LEASE_BYTES))
            target, how, process = said["target"], said["how"], said["process"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return False
        # The name alone: that writer's place may have had its root in another folder.
        if how != self._how or str(target).rpartition("/")[2] != self._target.rpartition("/")[2]:
            return False
        return _has_ended(process) or self._place.now_s() - lease.mtime_ns / 1e9 > self._lease_s

    def publish(self, *, replace: bool = False) -> None:
        """Show the folder as the target. Raises `AlreadyExistsError` when there is something of this name.

        With `replace` that is removed. For a moment there is nothing of the name then: no place can exchange two
        folders. After a crash in this moment `collect` puts the old one back.
        """
        self._check_lease()
        try:
            if replace:
                self._show_over()
            else:
                self._show()
        except BaseException as error:
            self._put_back()
            if isinstance(error, AlreadyExistsError):
                raise AlreadyExistsError(f"{self._what()} is there already; give another name, or replace it") from None
            if isinstance(error, NotFoundError):
                self._check_lease()
            raise
        self._drop_taken()

    def publish_file(self, name: str, *, replace: bool = False) -> None:
        """Show one file of the folder as the target, its parts first. Raises `AlreadyExistsError`."""
        self._check_lease()
        files = Files(self._place, within=self.path)
        source = f"{self.path}/{name}"
        head = files.head(source)
        visible = Files(self._place)
        replaced = None
        if replace:
            with contextlib.suppress(NotFoundError, CorruptError):
                replaced = visible.head(self._target)
        if head is not None:
            make_alike(self._place, join(folder_of(self._target), STRIPES))
            self._place.rename(parts_folder(source, head.id), parts_folder(self._target, head.id))
        try:
            _rename(self._place, source, self._target, replace=replace)
        except PermanentError as error:
            visible.drop_parts(self._target, head)
            if isinstance(error, AlreadyExistsError):
                raise AlreadyExistsError(f"{self._what()} is there already; give another name, or replace it") from None
            raise
        with contextlib.suppress(BootseerError):  # it is published; `collect` removes what is left
            visible.drop_parts(self._target, replaced)

    def _show(self) -> None:
        _rename(self._place, self.path, self._target, replace=False)

    def _show_over(self) -> None:
        for _ in range(_TRIES):
            with contextlib.suppress(AlreadyExistsError):
                self._show()
                return
            # What we took away before was replaced by another writer.
            self._drop_taken()
            self._has_taken = True
            try:
                self._place.rename(self._target, self.path + _OLD, replace=False)
            except NotFoundError:  # another writer has just taken it away
                self._has_taken = False
        raise TransientError(f"{self._what()}: others keep replacing it; try again")

    def _put_back(self) -> None:
        """We do not replace what was taken away: let it have its name again."""
        if self._has_taken:
            with contextlib.suppress(BootseerError):
                try:
                    self._place.rename(self.path + _OLD, self._target, replace=False)
                except AlreadyExistsError:
                    self._drop_taken()
                except NotFoundError:
                    pass
                self._has_taken = False

    def _drop_taken(self) -> None:
        """Something else has its name. Renamed first: a half of it must never be put back."""
        if self._has_taken:
            gone = f"{self.path}-{secrets.token_hex(4)}{GONE}"
            with contextlib.suppress(BootseerError):  # `collect` can do it as well
                self._place.rename(self.path + _OLD, gone, replace=False)
                self._has_taken = False
                _delete(self._place, gone)

    def _keep(self) -> None:
        while not self._over.wait(min(_RENEW_S, self._lease_s / 5)):
            try:
                if not _is_there(self._place, self.path + _LEASE):
                    return  # our lease was taken as stale, and must not be renewed
                self._renew()
            except BootseerError:
                continue  # a place that does not answer for a while may do so again before the lease has run out
            except Exception:
                report_exception()  # the next renewal may succeed

    def _renew(self) -> None:
        self._place.write_bytes(self.path + _LEASE, lease_bytes(self._target, self._how))

    def _check_lease(self) -> None:
        """The lease of a writer that was stopped for long may have gone stale."""
        if not (_is_there(self._place, self.path) and _is_there(self._place, self.path + _LEASE)):
            raise PermanentError(
                f"{self._what()} was not published: its writer was stopped for so long that its lease went stale"
            )
        self._renew()

    def _what(self) -> str:
        return f"{self._place.uri}/{self._target}"


def collect(place: Place, folder: str, *, lease_s: float = LEASE_S, no_lease_s: float = _NO_LEASE_S) -> int:
    """Remove what dead writers have left in a folder. Returns how many things that were.

    What cannot be removed, because it belongs to another user, stays.
    """
    now_s = place.now_s()
    attempts = join(folder, ATTEMPTS)
    removed = _collect_attempts(place, attempts, now_s - lease_s)
    entries = list(place.list(folder))
    for entry in entries:
        if name_of(entry.path).startswith(TEMPORARY) and _is_dead_temporary(place, entry, now_s - lease_s):
            removed += _delete(place, entry.path)
    removed += _collect_parts(place, folder, now_s, lease_s, no_lease_s)
    if removed:
        _LOG.info("%s/%s: %d leftovers of dead writers were removed", place.uri, folder, removed)
    return removed


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
        lease = entries.get(one + _LEASE)
        if lease is not None and lease.mtime_ns / 1e9 >= oldest_s:
            continue
        path = f"{attempts}/{one}"
        if one + _OLD in entries:
            _put_back(place, path)
        # Before the folder: a writer that wakes up and goes on in a new folder of this name must not publish that.
        if lease is not None:
            _delete(place, path + _LEASE)
        if one in entries:
            # Renamed first: a writer that wakes up now publishes all of it or nothing.
            with contextlib.suppress(NotFoundError, AlreadyExistsError, AccessError):
                place.rename(path, path + GONE, replace=False)
                removed += _delete(place, path + GONE)
    return removed


def _put_back(place: Place, path: str) -> None:
    """A writer died between taking away what it was to replace and replacing it, or just after."""
    try:
        target = json.loads(place.read_bytes(path + _LEASE, _MAX_LEASE_BYTES))["target"]
    except (PermanentError, ValueError, LookupError, TypeError, RecursionError):
        return  # it is not known what it was: it stays, for people
    # The name alone: the writer's place may have had its root in another folder.
    name = target.rpartition("/")[2] if isinstance(target, str) else ""
    if name in ("", ".", "..") or is_hidden(name):
        return
    try:
        place.rename(path + _OLD, join(folder_of(folder_of(path)), name), replace=False)
    except AlreadyExistsError:
        _delete(place, path + _OLD)
    except PermanentError:
        pass  # another one was faster, or it is a name that nothing can have: then it stays, for people


def _is_dead_temporary(place: Place, entry: Entry, oldest_s: float) -> bool:
    if entry.path.endswith(GONE):
        return True
    if entry.mtime_ns / 1e9 >= oldest_s:
        return False
    # A folder that is just being removed goes back to its place when it shows something.
    return not entry.is_folder or all(is_hidden(name_of(below.path)) for below in _listed(place, entry.path))


def _collect_parts(place: Place, folder: str, now_s: float, lease_s: float, no_lease_s: float) -> int:
    """Remove folders of parts that no head names and no writer fills."""
    old = [
        entry
        for entry in _listed(place, join(folder, STRIPES))
        if entry.is_folder and _is_abandoned(place, entry, now_s, lease_s, no_lease_s)
    ]
    if not old:
        return 0
    try:
        # After their ages, and twice: a head that is renamed meanwhile may be missed by one listing.
        named = _ids_of_heads(place, place.list(folder)) | _ids_of_heads(place, place.list(folder))
    except (AccessError, CorruptError):
        return 0  # a head that cannot be read can name any of them
    return sum(_delete(place, entry.path) for entry in old if name_of(entry.path) not in named)


def _is_abandoned(place: Place, entry: Entry, now_s: float, lease_s: float, no_lease_s: float) -> bool:
    if entry.mtime_ns / 1e9 >= now_s - lease_s:
        return False  # something was added a moment ago
    try:
        lease = place.stat(f"{entry.path}/{LEASE_NAME}")
    except NotFoundError:
        return entry.mtime_ns / 1e9 < now_s - no_lease_s
    return lease.mtime_ns / 1e9 < now_s - lease_s


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
    """Remove what another collector may be removing too: 1 if it was there and could be removed."""
    try:
        place.delete(path, recursive=True)
    except PermanentError:
        return 0
    return 1


def _rename(place: Place, source: str, target: str, *, replace: bool) -> None:
    try:
        place.rename(source, target, replace=replace)
    except TransientError:
        # The answer may be lost, and not the question.
        if _is_there(place, source) or not _is_there(place, target):
            raise


def _is_there(place: Place, path: str) -> bool:
    try:
        place.stat(path)
    except NotFoundError:
        return False
    return True
