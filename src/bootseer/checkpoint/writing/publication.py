"""How a file becomes visible: the folder of its parts, the check of what lies there, the head that names them.

Nothing is visible until the head is renamed into its place, which is one step of the place. A writer that dies before
leaves a folder of parts that no head names, and a stale lease: `attempts.collect` removes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from blake3 import blake3

from bootseer.checkpoint.attempts import LEASE_NAME, lease_bytes
from bootseer.checkpoint.files import Files, check_name
from bootseer.checkpoint.head import ATTEMPTS, Head, Part, Segment, encode_head, parts_folder
from bootseer.checkpoint.layout import CHUNK_BYTES, Policy, chunk_place
from bootseer.checkpoint.writing.lane import ExcludedNodes, Lane, NodeLoad, WritingSettings
from bootseer.checkpoint.writing.segment import Target
from bootseer.errors import BootseerError, CorruptError, IsFolderError, NotFoundError, TransientError
from bootseer.io.executor import Executor
from bootseer.logs import logger
from bootseer.places.place import SMALL_COPIES, TEMPORARY, Entry, OpenFile, Place, read_now

_LOG = logger(__name__)

_READ_BYTES = 4 << 20
_PARTS_AT_ONCE = 8
_LOOK_S = 0.5


def verify_parts(place: Place, folder: str, parts: Sequence[Part], workers: Executor) -> None:
    """Read all parts and compare their SHA-256. Raises `CorruptError`, and what the place raises."""
    errors: list[Exception] = []
    lane = Lane(workers, _PARTS_AT_ONCE)
    left = iter(parts)
    lock = threading.Lock()

    def verify_some() -> None:
        while not errors:
            with lock:
                part = next(left, None)
            if part is None:
                return
            try:
                _verify(place, f"{folder}/{part.name}", part)
            except Exception as error:  # of a worker: raised below
                errors.append(error)

    for _ in range(min(_PARTS_AT_ONCE, len(parts))):
        lane.apart(verify_some)
    while not lane.wait_idle(_LOOK_S):
        lane.check_moves(f"{place.uri}/{folder}")
    if errors:
        raise errors[0]


def _verify(place: Place, path: str, part: Part) -> None:
    sha256 = hashlib.sha256()
    with contextlib.closing(place.open(path)) as file:
        if file.size_bytes != part.size_bytes:
            raise CorruptError(f"{place.uri}/{path} has {file.size_bytes} bytes after {part.size_bytes} were written")
        for offset in range(0, part.size_bytes, _READ_BYTES):
            sha256.update(read_now(file, offset, min(_READ_BYTES, part.size_bytes - offset), f"{place.uri}/{path}"))
    if sha256.hexdigest() != part.sha256:
        raise CorruptError(f"{place.uri}/{path} does not hold what was written")


def read_segment(
    place: Place, folder: str, segment: Segment, offset: int, end: int, take: Callable[[int, bytearray], None]
) -> None:
    """Give the bytes of a file from `offset` to `end`, which lie in a segment, to `take`, a verified chunk at a time.

    `take` gets the offset in the file of the bytes, and the bytes.
    """
    first = (offset - segment.start) // CHUNK_BYTES
    last = -(-(end - segment.start) // CHUNK_BYTES)
    with contextlib.ExitStack() as stack:
        files: dict[int, OpenFile] = {}
        for chunk in range(first, last):
            stripe, at = chunk_place(chunk, segment.stripes)
            if stripe not in files:
                files[stripe] = stack.enter_context(
                    contextlib.closing(place.open(f"{folder}/{segment.parts[stripe].name}"))
                )
            path = f"{place.uri}/{folder}/{segment.parts[stripe].name}"
            data = read_now(files[stripe], at, segment.index.length(chunk), path)
            if blake3(data).digest() != segment.index.digest(chunk):
                raise CorruptError(f"{path} does not hold what was written")
            start = segment.start + chunk * CHUNK_BYTES
            cut = data[max(offset - start, 0) : end - start]
            take(max(start, offset), cut)


T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with the number of bytes written, and of all."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file that is visible, durable and verified."""

    path: str
    size_bytes: int
    is_striped: bool
    num_parts: int = 0
    num_retries: int = 0
    """Parts that were begun again."""
    num_colocated: int = 0
    """Parts that lie on a node of a sibling: the two cannot be read as fast as others."""
    entry: Entry | None = None
    """What the place says of a small file that is not striped; None of others."""


class Publication:
    """The unpublished parts of the file at `path`, and their way into sight."""

    def __init__(
        self, files: Files, path: str, policy: Policy, mode: int, *, settings: WritingSettings, workers: Executor
    ) -> None:
        self.path = path
        self.id = secrets.token_hex(16)
        self.folder = parts_folder(path, self.id)
        self._files = files
        self._policy = policy
        self._mode = mode
        self._settings = settings
        self._workers = workers
        self._use = NodeLoad()
        self._named: frozenset[str] = frozenset()
        """Parts that the visible head names, and those of every head that may be visible."""
        # The first lease comes late: what is written in a minute needs none, `collect` leaves younger folders alone.
        self._renewed_s = time.monotonic()
        self._has_lease = False
        self._has_folder = False
        """Whether there may be a folder of parts."""
        self._is_over = False
        self._in_attempt = ATTEMPTS in path.split("/")
        self._lease_lock = threading.Lock()

    def target(self, excluded: ExcludedNodes) -> Target:
        return Target(
            place=self._files.place,
            folder=self.folder,
            stripes=self._policy.stripes,
            parity=self._policy.parity,
            part_bytes=self._policy.part_bytes,
            replication=self._policy.replication,
            mode=self._mode,
            excluded=excluded,
            use=self._use,
            settings=self._settings,
            begins=self.use_folder,
        )

    def hidden_name(self) -> str:
        """Where a file that is not striped is written before it is shown: among the parts, under their lease, since
        HDFS tells no time of files that are being written. In an attempt, which has a lease, beside the file."""
        folder = f"{self.path.rpartition('/')[0]}/{TEMPORARY}" if self._in_attempt else f"{self.folder}/"
        self.use_folder()
        return f"{folder}{secrets.token_hex(8)}"

    def publish(self, segments: Sequence[Segment], *, verify: str) -> Written:
        """Check the parts, then show the file in place of what has its name, and remove what it does not consist of.

        `verify`: "length" asks the place how long the parts are; "read" reads them.
        """
        head = Head(self.id, sum(segment.size_bytes for segment in segments), tuple(segments))
        data = encode_head(head)
        parts = [part for segment in segments for part in segment.all_parts]
        self._check_lengths(parts)
        if verify == "read":
            verify_parts(self._files.place, self.folder, parts, self._workers)
        names = frozenset(part.name for part in parts)
        self.put(lambda: self._show(data, names), keep=self.id)
        self._named = names
        self.remove_rest()
        colocated = sum(_num_colocated(segment) for segment in segments)
        _LOG.info(
            "%s is published: %d bytes in %d parts, %d of them on a node of a sibling",
            self.path, head.size_bytes, len(parts), colocated,
        )  # fmt: skip
        return Written(self.path, head.size_bytes, True, num_parts=len(parts), num_colocated=colocated)

    def use_folder(self) -> None:
        """Something will be written into the folder of parts: `remove_rest` has something to look for from now on."""
        self._has_folder = True

    def put(self, step: Callable[[], T], *, keep: str = "") -> T:
        """Do the step that shows the file, and remove the parts of what it replaces, unless their id is `keep`. Returns
        what the step returns."""
        replaced = self._replaced()
        done = self.again(step)
        if replaced is not None and replaced.id != keep:
            # No reader can find it any more. What is left costs room, and is not an error of a file that is safe.
            with contextlib.suppress(BootseerError):
                self._files.drop_parts(self.path, replaced)
            if replaced.id == self.id:
                self._named = frozenset()
        return done

    def remove_rest(self) -> None:
        """Remove what no head names. What cannot be removed stays for a collector."""
        if not self._has_folder:
            return
        with contextlib.suppress(BootseerError):
            if not self._named:
                self._files.place.delete(self.folder, recursive=True)
                return
            named = self._named | {LEASE_NAME}
            for entry in list(self._files.place.list(self.folder)):
                if entry.path.rpartition("/")[2] not in named:
                    self._files.place.delete(entry.path)

    def renew(self) -> None:
        """Say that the writer lives, if that has not been said for a while. Files of an attempt have its lease."""
        now_s = time.monotonic()
        with self._lease_lock:
            if self._is_over or self._in_attempt or now_s < self._renewed_s + self._settings.lease_s:
                return
            self._renewed_s = now_s
            self.use_folder()
            # Without a folder there is nothing to collect; a place that does not answer may do so in a while.
            with contextlib.suppress(BootseerError):
                self._files.place.write_bytes(f"{self.folder}/{LEASE_NAME}", lease_bytes(self.path))
                self._has_lease = True

    def end(self) -> None:
        with self._lease_lock:
            self._is_over = True
            renewed = self._has_lease
        if renewed:
            with contextlib.suppress(BootseerError):
                self._files.place.delete(f"{self.folder}/{LEASE_NAME}")

    def again(self, step: Callable[[], T]) -> T:
        """What `step` returns, tried several times, with longer pauses each time."""
        until = None
        for failures in range(1, self._settings.part_tries):
            try:
                return step()
            except TransientError as error:
                until = until or time.monotonic() + self._settings.retry_for_s
                pause_s = self._settings.pause_s(failures, error)
                if time.monotonic() + pause_s >= until:
                    raise
                _LOG.info("%s: tried again in %.1f s: %s", self.path, pause_s, error)
                time.sleep(pause_s)
        return step()

    def _show(self, head: bytes, names: frozenset[str]) -> None:
        """Put a head in place. Only when that was refused, it is certain that no reader sees what it names: of all
        other errors, and of an interrupt, just the answer may have been lost. Then `collect` decides, which can
        wait."""
        before, self._named = self._named, self._named | names
        try:
            self._files.place.write_bytes(self.path, head, mode=self._mode)
        except TransientError:
            raise
        except BootseerError:
            self._named = before
            raise

    def _check_lengths(self, parts: Sequence[Part]) -> None:
        """Raises `TransientError` for parts that are not as they were written."""
        entries = self.again(lambda: list(self._files.place.list(self.folder)))
        sizes = {entry.path.rpartition("/")[2]: entry.size_bytes for entry in entries}
        for part in parts:
            if sizes.get(part.name) != part.size_bytes:
                raise TransientError(
                    f"{self._files.place.uri}/{self.folder}/{part.name} has {sizes.get(part.name, 'no')} bytes "
                    f"after {part.size_bytes} were written; write it again"
                )

    def _replaced(self) -> Head | None:
        """What has the name now; None when there is nothing, or it is not known.

        A file may be written again just because it cannot be read any more. Its parts are left to a collector then.
        """
        try:
            return self._files.head(self.path)
        except IsFolderError:
            raise
        except BootseerError:
            return None


def check_target(files: Files, path: str) -> None:
    """Raise what makes writing a file of this name impossible, before anything is written."""
    folder, _, name = path.rpartition("/")
    check_name(name)
    if not files.stat(folder).is_folder:
        raise NotFoundError(f"there is no folder {files.place.uri}/{folder}")
    with contextlib.suppress(NotFoundError):
        if files.place.stat(path).is_folder:
            raise IsFolderError(f"{files.place.uri}/{path} is a folder")


def _num_colocated(segment: Segment) -> int:
    """Parts whose every node has another part of the segment."""
    seen: set[str] = set()
    colocated = 0
    for part in segment.all_parts:
        colocated += bool(part.nodes) and seen.issuperset(part.nodes)
        seen.update(part.nodes)
    return colocated


_WHOLE_BYTES = 8 << 20
"""Up to here a file is held in memory."""


def write_ordinary(
    files: Files,
    publication: Publication,
    size_bytes: int,
    read: Callable[[int, int], bytes],
    *,
    policy: Policy,
    mode: int,
    progress: Progress | None = None,
) -> Written:
    """Write a file as one file of the place, and show it. `read` gives its bytes."""
    path = publication.path
    # With fewer copies than its siblings have parity for, one dead node would make the whole checkpoint useless.
    if size_bytes <= _WHOLE_BYTES and (policy.replication or 0) <= SMALL_COPIES:
        data = read(0, size_bytes) if size_bytes else b""
        entry = publication.put(lambda: files.place.write_bytes(path, data, mode=mode))
        if progress is not None:
            progress(size_bytes, size_bytes)
        return Written(path, size_bytes, is_striped=False, entry=entry)
    failed_on: set[str] = set()
    names: list[str] = []

    def write() -> None:
        names.append(publication.hidden_name())
        # As one part: the longest that it may get, so that the place need not guess.
        part_bytes = max(-(-size_bytes // CHUNK_BYTES), 1) * CHUNK_BYTES
        (writer,) = files.place.begin_parts(
            names[-1:], part_bytes=part_bytes, mode=mode, replication=policy.replication, avoid=frozenset(failed_on)
        )
        try:
            for offset in range(0, size_bytes, CHUNK_BYTES):
                data = read(offset, min(CHUNK_BYTES, size_bytes - offset))
                writer.write(data)
                if progress is not None:
                    progress(offset + len(data), size_bytes)
            writer.close()
        except BaseException:
            failed_on.update(writer.nodes)
            writer.abort()
            raise

    publication.again(write)
    try:
        publication.put(lambda: _rename(files, names[-1], path, size_bytes))
    finally:
        publication.remove_rest()
    return Written(path, size_bytes, is_striped=False, num_retries=len(names) - 1)


def _rename(files: Files, temporary: str, path: str, size_bytes: int) -> None:
    try:
        files.place.rename(temporary, path)
    except NotFoundError:
        # A try whose answer was lost may have done it.
        if files.place.stat(path).size_bytes != size_bytes:
            raise
