"""Send growing logs to the service, each as one stream of batches, also across rotations and crashes.

A state file records how far each log was sent. A batch is recorded before it is sent: after a crash the same bytes are
sent again with the same number, by which the service detects the duplicate.

A log file is identified by a checksum of its first bytes, not by its name or inode. If it was renamed, or copied and
truncated (`copytruncate`), its remaining bytes are read from its new path, followed by newer files in the order of
their times, because the log may have been rotated several times since the last poll.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bootseer.io import trusted_folder
from bootseer.io.locks import claim
from bootseer.logs import logger
from bootseer.trace import ship
from bootseer.trace.event import fingerprint
from bootseer.trace.sinks import safe_name

STATE: Final = "BOOTSEER_SHIP_STATE"
_LOG = logger(__name__)
_OTHERWISE: Final = f"set {STATE} to another folder"
_HEAD_BYTES: Final = 4096
_PACKED: Final = (".gz", ".zst", ".xz", ".bz2", ".lz4")
_ROTATED: Final = re.compile(r"(.+?)[.-][0-9][0-9.-]*")
_MAX_AGE_S, _TOUCH_S = 30 * 86_400, 86_400
_SETTLED_S: Final = 2.0
_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(slots=True)
class _Stream:
    """The position in a log. `sequence` is the number of the next batch, `offset` the first byte not sent."""

    sender: str
    sequence: int = 0
    offset: int = 0
    head_size: int = 0
    head: int = 0
    """Checksum of the first bytes of the file that `offset` refers to."""
    inode: int = 0
    size: int = 0
    """Size of the batch being sent; 0 without one."""


def _is_same_log(path: str, stream: _Stream, *, same_inode: bool) -> bool:
    """Whether the file at `path` is the one that was sent up to `offset`."""
    try:
        file = os.open(path, _FILE)
    except OSError:
        return False
    try:
        status = os.fstat(file)
        good = status.st_size >= stream.offset + stream.size and (status.st_ino == stream.inode or not same_inode)
        return good and zlib.crc32(os.pread(file, stream.head_size, 0)) == stream.head
    finally:
        os.close(file)


def _next_inode(path: str, before: os.stat_result) -> int:
    """Inode of the log's oldest file that is newer than `before`; 0 if there is none yet."""
    folder, name = os.path.split(path)
    newer = []
    with os.scandir(folder) as entries:
        for entry in entries:
            rotated = _ROTATED.fullmatch(entry.name)
            if entry.name == name or (rotated and rotated[1] == name):
                status = entry.stat()
                if status.st_mtime_ns > before.st_mtime_ns:
                    newer.append((status.st_mtime_ns, status.st_ino))
    return min(newer)[1] if newer else 0


def state_folder(env: Mapping[str, str]) -> Path:
    """The folder for state files: `$BOOTSEER_SHIP_STATE`, else `/var/lib/bootseer/ship` for root, or a folder in the
    user's state folder.

    Raises `AccessError` if other users can change it.
    """
    folder = env.get(STATE) or trusted_folder.state_folder(env, "ship", otherwise=_OTHERWISE)
    return trusted_folder.trusted_folder(folder, otherwise=_OTHERWISE, private=True)


class Logs:
    """Sends new lines of logs. For one thread."""

    def __init__(self, places: Sequence[str], job: str, link: ship.Link, state: Path) -> None:
        """`places`: files, which may not exist yet, and folders. With `job`, all lines are sent as its log; without it,
        only events. Raises `UsageError` if another process sends the same logs."""
        self._places = [os.path.abspath(place) for place in places]
        self._job = job
        self._link = link
        self._more = ship.log_headers(job) if job else {}
        about = json.dumps([link.service, job, sorted(self._places)])
        with contextlib.suppress(OSError):
            for entry in os.scandir(state):
                if time.time() - entry.stat().st_mtime > _MAX_AGE_S:
                    Path(entry).unlink()
        path = state / f"{fingerprint(about)[:32]}.json"
        self._positions = claim(path, "another process follows the same logs for this job and service")
        self._streams = self._load()
        self._unreadable: set[str] = set()

    def step(self) -> bool:
        """Send new lines; returns whether there were any. Never raises."""
        any_sent = False
        for path in list(dict.fromkeys([*self._list_logs(), *self._streams])):
            stream = self._streams.get(path)
            if stream is None:
                sender = f"{safe_name(Path(path).name)[:60]}-{os.urandom(4).hex()}"
                stream = self._streams[path] = _Stream(sender)
            try:
                while self._send_batch(path, stream):
                    any_sent = True
            except FileNotFoundError:
                with contextlib.suppress(FileNotFoundError):
                    if self._find_file(path, stream):  # it was rotated just now; retried at the next call
                        continue
                del self._streams[path]
            except OSError as error:  # retried at the next call
                if path not in self._unreadable:
                    _LOG.warning("%s cannot be read: %s", path, error.strerror)
                    self._unreadable.add(path)
            if time.monotonic() < self._link.not_before:
                break
        if time.time() - os.fstat(self._positions).st_mtime > _TOUCH_S:
            self._save()  # a later start of another sender deletes what was not written for `_MAX_AGE_S`
        return any_sent

    def close(self) -> None:
        """Release the lock for other senders."""
        os.close(self._positions)

    def _send_batch(self, path: str, stream: _Stream) -> bool:
        """Send the next batch of a log, if any; returns whether it was sent. Raises `OSError` if the file is gone."""
        if time.monotonic() < self._link.not_before:
            return False
        place = self._find_file(path, stream)
        if place is None:
            status = os.stat(path)
            if stream.head_size:
                _LOG.warning("%s was replaced or truncated; its lines that were not sent yet are lost", path)
                stream.sequence += bool(stream.size)  # the service may already have the batch
            stream.offset = stream.size = stream.head_size = 0
            stream.inode, place = status.st_ino, path
        file = os.open(place, _FILE)
        try:
            if not stream.size:
                data = os.pread(file, ship.BATCH_BYTES, stream.offset)
                is_over = place != path and os.path.exists(path)
                # The writer may not have switched to the new file yet.
                is_over = is_over and time.time() - os.fstat(file).st_mtime > _SETTLED_S
                end = data.rfind(b"\n") + 1
                if is_over and not data:
                    stream.inode = _next_inode(path, os.fstat(file))
                    stream.offset = stream.head_size = 0
                    return self._send_batch(path, stream)
                if not end and not is_over and len(data) < ship.BATCH_BYTES:
                    return False  # the line is incomplete
                stream.size = end or len(data)
                stream.head_size, stream.inode = min(stream.offset + stream.size, _HEAD_BYTES), os.fstat(file).st_ino
                stream.head = zlib.crc32(os.pread(file, stream.head_size, 0))
                self._save()
            data = os.pread(file, stream.size, stream.offset)
            lines = data if self._job else b"".join(ship.event_lines(data))
            if lines:
                if not self._link.send(lines, stream.sender, stream.sequence, self._more):
                    return False
                stream.sequence += 1
            stream.offset, stream.size = stream.offset + stream.size, 0
            self._save()
        finally:
            os.close(file)
        return True

    @staticmethod
    def _find_file(path: str, stream: _Stream) -> str | None:
        """The path of the file that was sent up to `offset`, or of the next file: the log's own path, or one in the
        same folder that begins with its name. None if it is gone."""
        if stream.head_size and _is_same_log(path, stream, same_inode=True):
            return path
        folder, name = os.path.split(path)
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if entry.name.startswith(name)]
        if not stream.head_size:
            return next((entry.path for entry in found if entry.inode() == stream.inode), None)
        places = [entry.path for entry in found]
        for same_inode in (True, False):
            for place in sorted(places):
                if not place.endswith(_PACKED) and _is_same_log(place, stream, same_inode=same_inode):
                    return place
        return None

    def _list_logs(self) -> Iterator[str]:
        """The existing logs. In folders, compressed, rotated and hidden files are skipped."""
        for place in self._places:
            if not os.path.isdir(place):
                yield place
                continue
            for folder, _, names in os.walk(place):
                there = set(names)
                for name in sorted(names):
                    rotated = _ROTATED.fullmatch(name)
                    path = os.path.join(folder, name)
                    before = path[: len(rotated[1]) - len(name)] if rotated else ""
                    if rotated and (rotated[1] in there or before in self._streams) and path not in self._streams:
                        continue
                    if not name.startswith(".") and not name.endswith(_PACKED):
                        yield path

    def _load(self) -> dict[str, _Stream]:
        try:
            return {path: _Stream(**stream) for path, stream in ship.read_positions(self._positions).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            # New or damaged: all is sent again, as by another sender. The service drops repeated events, but takes the
            # other lines of a job's log for those of another log.
            return {}

    def _save(self) -> None:
        ship.write_positions(self._positions, {path: asdict(stream) for path, stream in self._streams.items()})
