"""Send the events of spools to the service (`bootseer serve`) without disturbing the job.

Events are always written to the spool first. A sender then sends what the service has not accepted yet: `bootseer run`
while its command runs, `bootseer ship` afterwards, or the node's agent.

The hidden file `.shipped` in a spool folder records how far each file was sent. Its lock is held by the only active
sender, also if nodes share a spool folder. After a crash, the last batch may be sent again: the service counts each
event once. Only event lines are sent.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import random
import stat
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

from bootseer.errors import UsageError
from bootseer.io.locks import try_flock
from bootseer.io.trusted_folder import is_secret
from bootseer.trace.event import Malformed, decode, fingerprint, from_json
from bootseer.trace.sinks import SUFFIX, safe_name
from bootseer.trace.spool_tail import MAX_BYTES_PER_LOOK, new_lines, spool_files

if TYPE_CHECKING:
    from bootseer.trace.stacks import Sampler

BATCH_BYTES: Final = MAX_BYTES_PER_LOOK
"""Size of a batch in bytes, before compression."""
LINES: Final = "/v1/lines"
TOKEN: Final = "BOOTSEER_SERVICE_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_FILE: Final = "BOOTSEER_SERVICE_TOKEN_FILE"  # noqa: S105
SERVICE: Final = "BOOTSEER_SERVICE"

_POSITIONS = ".shipped"
_VERSION = 1
REQUEST_S: Final = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_REFUSED_PAUSE_S = 60.0
_MOST_RETRY_AFTER_S = 600.0
_MAX_POSITIONS = 64 << 20
_MOST_BATCHES = 64
_MOST_OPEN = 32
_OPEN_S, _IDLE_S, _POLL_IDLE_S = 10.0, 600.0, 60.0
"""A folder without new events is closed after `_OPEN_S`; after `_IDLE_S` it is polled only every `_POLL_IDLE_S`."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_Offsets = dict[str, tuple[int, int]]
"""Inode and offset up to which each file was sent."""


class Target(NamedTuple):
    """The service's address. Never print it as a whole, because it contains the token."""

    secure: bool
    host: str
    port: int
    path: str
    token: str

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Connects at the first request."""
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout_s)


def target(url: str, env: Mapping[str, str]) -> Target:
    """The service at `url` (empty: `BOOTSEER_SERVICE`), with the token in `BOOTSEER_SERVICE_TOKEN` or in the file
    `BOOTSEER_SERVICE_TOKEN_FILE`.

    Raises `UsageError` for other URLs than http and https, and for a token file that others may read.
    """
    given = (url or env.get(SERVICE, "")).strip()
    try:
        parts = urlsplit(given)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and not parts.username
    except ValueError:
        good = False
    if not good:
        problem = f"{given.rpartition('@')[2]!r} is not the address of a service" if given else "no service is named"
        raise UsageError(problem, hint=f"give its address, as http://HOST:8765, or set {SERVICE}")
    path = parts.path.rstrip("/")
    return Target(parts.scheme == "https", str(parts.hostname), port, path, _token(env))


def _token(env: Mapping[str, str]) -> str:
    token, path = env.get(TOKEN, ""), env.get(TOKEN_FILE, "")
    if not token and path:
        try:
            with open(path, encoding="ascii") as file:
                if not is_secret(os.fstat(file.fileno())):
                    raise UsageError(f"{path} may be read by others", hint=f"chmod 600 {path}")
                token = file.read(4096).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{TOKEN_FILE} {path}: cannot be read: {error}") from None
    if token and not (token.isascii() and token.isprintable()):
        raise UsageError(f"{TOKEN} has characters that a token cannot have")
    return token


class Link:
    """The connection to a service, with backoff and the pauses that the service requests. For one thread."""

    def __init__(self, where: Target, timeout_s: float = REQUEST_S) -> None:
        self.problem = ""
        """Why the last request failed; empty after a success, and before the first."""
        self.is_refused = False
        """Whether the service refused the last batch (HTTP 4xx), so that an early retry is useless."""
        self.not_before = 0.0
        """Earliest time of the next request, on the monotonic clock."""
        self.batches = 0
        """Number of accepted batches."""
        self.next_s = 2.0
        """Seconds until the service expects the next request."""
        self._wanted_stacks: object = None
        self._sampler: Sampler | None = None
        self._where = where
        self.service = f"{where.host}:{where.port}{where.path}"
        """Its name, in the records of what it has."""
        self._timeout_s = timeout_s
        self._pause_s = _FIRST_PAUSE_S
        self._connection: http.client.HTTPConnection | None = None

    def send(self, lines: bytes, sender: str, sequence: int | None, more: Mapping[str, str] | None = None) -> bool:
        """Send a batch; returns whether the service has stored it. Never raises; after a failure, `not_before` is the
        time of the next try."""
        packer = zlib.compressobj(6, wbits=31)
        body = packer.compress(lines) + packer.flush()
        headers = {"Content-Encoding": "gzip", "X-Bootseer-Sender": sender, "User-Agent": "bootseer", **(more or {})}
        if sequence is not None:
            headers["X-Bootseer-Sequence"] = str(sequence)
        if self._where.token:
            headers["Authorization"] = f"Bearer {self._where.token}"
        try:
            status, retry_after, message = self._post(body, headers)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.is_refused = False
            self._note_failure(getattr(error, "strerror", None) or str(error) or type(error).__name__, None)
            return False
        if status == http.client.ACCEPTED:  # 200 may be the page of a proxy or of another server
            self.problem, self.is_refused, self._pause_s = "", False, _FIRST_PAUSE_S
            self.batches += 1
            return True
        self.is_refused = status < 500 and status not in (408, 429)
        if status == http.client.UNAUTHORIZED:  # its file may have a new token
            with contextlib.suppress(UsageError):
                self._where = self._where._replace(token=_token(os.environ) or self._where.token)
        self._note_failure(f"HTTP {status}{': ' if message else ''}{message}", retry_after)
        return False

    def _post(self, body: bytes, headers: Mapping[str, str]) -> tuple[int, float | None, str]:
        is_new = self._connection is None
        try:
            connection = self._connection = self._connection or self._where.connection(self._timeout_s)
            connection.request("POST", self._where.path + LINES, body, dict(headers))
            with connection.getresponse() as response:
                content = response.read(65_536)
                wait = response.getheader("Retry-After", "")
                with contextlib.suppress(ValueError):
                    next_s = float(response.getheader("X-Bootseer-Next", "2"))
                    self.next_s = min(max(next_s, 0.1), 60.0) if math.isfinite(next_s) else self.next_s
                if response.will_close or response.read(1):
                    self.close()
                answer = _decode_object(content)
                self._wanted_stacks = answer.get("stacks")
                why = _error_text(answer)
                if response.status < 400 and not why:
                    moved = response.getheader("Location", "").partition("?")[0]
                    why = f"redirects to {moved[:200]!a}" if moved else "not the answer of a BootSeer service"
                return response.status, float(wait) if wait.isdecimal() and len(wait) < 9 else None, why
        except (ConnectionError, http.client.BadStatusLine):
            self.close()
            if is_new:
                raise
            return self._post(body, headers)  # the service has closed a kept-alive connection
        except BaseException:
            self.close()
            raise

    def _note_failure(self, why: str, retry_after_s: float | None) -> None:
        self.problem = why
        pause_s = _REFUSED_PAUSE_S if self.is_refused else self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if retry_after_s is not None:
            pause_s = max(min(retry_after_s, _MOST_RETRY_AFTER_S), 0.5)
        self.not_before = time.monotonic() + pause_s * random.uniform(0.75, 1.25)  # noqa: S311 - spreads load

    def send_stacks(self, sender: str) -> None:
        """Send the stacks of processes of this node that the service's last answer requested. Never raises."""
        if not self._wanted_stacks:
            return
        from bootseer.trace.stacks import Sampler, read_requests

        self._sampler = self._sampler or Sampler()
        wanted, self._wanted_stacks = read_requests(self._wanted_stacks), None
        for line in self._sampler.lines(wanted):
            self.send(line, sender, None)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _decode_object(body: bytes) -> dict[str, object]:
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(body)
        if isinstance(document, dict):
            return document
    return {}


def _error_text(answer: Mapping[str, object]) -> str:
    error = answer.get("error")
    return "".join(letter for letter in error[:200] if letter.isprintable()) if isinstance(error, str) else ""


class Shipper:
    """Sends one folder's events. For one thread."""

    def __init__(self, folder: str, link: Link) -> None:
        self.folder = folder
        self._link = link
        self._positions = -1
        """Descriptor of `.shipped`, locked; -1 while another process sends."""
        self._is_open = False
        self._sender = f"{safe_name(os.uname().nodename)[:60]}-{fingerprint(folder)[:8]}"
        self._files: _Offsets = {}
        self.pending: tuple[_Offsets, bytes] | None = None
        """A batch that was not accepted yet, and the positions after it: the same bytes again are stored once, if only
        the answer was lost."""

    def step(self) -> bool:
        """Send a batch, if there is one and no pause; returns whether it was sent (there may be more). Never raises."""
        if time.monotonic() < self._link.not_before or not self._acquire():
            return False
        try:
            self.pending = self.pending or self._gather()
        except OSError:
            return False  # retried at the next call
        if self.pending is None:
            return False
        positions, lines = self.pending
        if lines and not self._link.send(lines, self._sender, None):
            return False
        self._files |= positions
        self.pending = None
        self._save()
        self._link.send_stacks(self._sender)
        return True

    def all_sent(self) -> bool:
        """Whether the service has everything in the folder; False while another process sends it."""
        try:
            return self._acquire() and (self.pending or self._gather()) is None
        except OSError as error:
            return isinstance(error, FileNotFoundError)  # the folder was deleted

    @property
    def is_stored(self) -> bool:
        """Whether the position is in the folder, which is open and locked."""
        return self._positions >= 0

    def close(self) -> None:
        """Release the lock, so that another process can send."""
        if self._positions >= 0:
            os.close(self._positions)
        self._positions, self._is_open = -1, False

    def _acquire(self) -> bool:
        """Take the lock and load the positions; False while another process holds it. In a folder that cannot be
        written, everything is sent from the beginning, without a lock."""
        if self._is_open:
            return True
        try:
            folder = os.open(self.folder, _FOLDER)
        except OSError:
            return False
        try:
            self._positions = _open_positions(folder)
            if self._positions >= 0 and not try_flock(self._positions):
                self.close()
                return False
        except OSError:  # the file system has no locks, or is full
            self.close()
        finally:
            os.close(folder)
        self._is_open = True
        self._load()
        return True

    def _load(self) -> None:
        self._files, self.pending = {}, None
        # If it is new or damaged, written by another version or for another service, all events are sent.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            old = read_positions(self._positions) if self._positions >= 0 else {}
            if (old["version"], old["service"]) == (_VERSION, self._link.service):
                self._files = {name: (int(inode), max(int(at), 0)) for name, (inode, at) in dict(old["files"]).items()}

    def _save(self) -> None:
        """Write in place: a rename would change the folder's mtime, which identifies the latest attempt."""
        if self._positions < 0:
            return
        write_positions(self._positions, {"version": _VERSION, "service": self._link.service, "files": self._files})

    def _gather(self) -> tuple[_Offsets, bytes] | None:
        """The positions after the next batch, and its event lines; None if nothing is new. Raises `OSError`."""
        positions: _Offsets = {}
        lines: list[bytes] = []
        room = BATCH_BYTES
        problem: OSError | None = None
        listing = spool_files(self.folder)
        for name in self._files.keys() - listing.keys():
            del self._files[name]
        for name, status in listing.items():
            try:
                found = new_lines(self.folder, name, status, self._files.get(name), room)
            except OSError as error:  # the others are sent, also if it stays so, as on a damaged disk
                found, problem = None, error
            if found:
                positions[name], data = found
                lines += event_lines(data)
                room -= len(data)
        if problem is not None and not positions:
            raise problem
        return (positions, b"".join(lines)) if positions else None


def _open_positions(folder: int) -> int:
    """Open or create the file with the positions, without a change of the folder's mtime; -1 if it cannot be used."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    about = os.fstat(folder)
    try:
        opened = os.open(_POSITIONS, flags, dir_fd=folder)
    except FileNotFoundError:
        try:
            opened = os.open(_POSITIONS, flags | os.O_CREAT, 0o600, dir_fd=folder)
            if os.geteuid() == 0 and about.st_uid:
                os.fchown(opened, about.st_uid, about.st_gid)
            os.utime(folder, ns=(about.st_atime_ns, about.st_mtime_ns))
        except OSError:
            return -1
    status = os.fstat(opened)
    # Another user's folder may have a hard link to any file under this name: write only to a file with a single name.
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid not in (about.st_uid, os.geteuid()):
        os.close(opened)
        return -1
    return opened


def read_positions(file: int) -> Any:
    """The content of a file of positions. Raises `OSError` and `ValueError`."""
    data = os.pread(file, min(os.fstat(file).st_size, _MAX_POSITIONS), 0)
    return json.loads(data.partition(b"\n")[0])


def write_positions(file: int, state: object) -> None:
    data = json.dumps(state).encode() + b"\n"
    with contextlib.suppress(OSError):  # a full disk: a crash now sends some lines again
        os.pwrite(file, data, 0)
        os.ftruncate(file, len(data))


def event_lines(data: bytes) -> Iterator[bytes]:
    """The lines that contain a valid event, each with its newline."""
    for line in data.split(b"\n"):
        for one in from_json(line).splitlines() if b"@bootseer" in line else ():
            with contextlib.suppress(Malformed):
                decode(one)
                yield one + b"\n"


def log_headers(job: str) -> dict[str, str]:
    """HTTP headers of a batch of a job's log."""
    return {"X-Bootseer-Kind": "log", "X-Bootseer-Job": quote(job)}


class Spools:
    """Sends the events in some folders (spool roots, folders of jobs or attempts). For one thread."""

    def __init__(self, places: list[str], link: Link) -> None:
        self._places = places
        self._link = link
        self._shippers: dict[str, Shipper] = {}
        self._changed: dict[str, tuple[float, float]] = {}
        """By folder, the monotonic times of the last new data and of the last poll."""

    def step(self) -> None:
        """Poll each folder once and send new events. Never raises."""
        folders = {folder for place in self._places for folder in attempt_folders(place)}
        for folder in self._shippers.keys() - folders:
            self._shippers.pop(folder).close()
        for folder in self._changed.keys() - folders:
            del self._changed[folder]
        for folder in sorted(folders):
            now_s = time.monotonic()
            if now_s < self._link.not_before:
                break
            changed_s, polled_s = self._changed.get(folder, (-_IDLE_S, -_POLL_IDLE_S))
            if now_s - changed_s > _IDLE_S and now_s - polled_s < _POLL_IDLE_S:
                continue
            shipper = self._shippers.setdefault(folder, Shipper(folder, self._link))
            sent = False
            for _ in range(_MOST_BATCHES):  # then the others have their turn
                if not shipper.step():
                    break
                sent = True
            if sent or shipper.pending:
                changed_s = now_s
            self._changed[folder] = (changed_s, now_s)
            if now_s - changed_s > _OPEN_S or len(self._shippers) > _MOST_OPEN:  # there may be thousands of folders
                self._forget(folder)

    def waiting(self) -> int:
        """Number of folders with events that the service has not accepted yet."""
        count = 0
        for folder in {folder for place in self._places for folder in attempt_folders(place)}:
            if not self._shippers.setdefault(folder, Shipper(folder, self._link)).all_sent():
                count += 1
                self._changed.pop(folder, None)  # the next step polls it
            self._forget(folder)
        return count

    def _forget(self, folder: str) -> None:
        """Close a folder. Where the position cannot be stored, it must be kept here, and nothing is open."""
        if self._shippers[folder].is_stored:
            self._shippers.pop(folder).close()

    def close(self) -> None:
        """Release all locks, so that other processes can send."""
        for shipper in self._shippers.values():
            shipper.close()
        self._shippers.clear()


def attempt_folders(place: str, depth: int = 2) -> Iterator[str]:
    """The folders with spool files at or below `place`, down to `depth` levels. Links are not followed."""
    below = []
    try:
        with os.scandir(place) as entries:
            found = False
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    below.append(entry.path)
                else:
                    found |= entry.name.endswith(SUFFIX)
    except OSError:
        return
    if found:
        yield place
    for path in sorted(below) if depth else ():
        yield from attempt_folders(path, depth - 1)


def pause_s(link: Link) -> float:
    """Seconds until the next poll, with jitter."""
    return link.next_s * random.uniform(0.5, 1.5)  # noqa: S311 - jitter
