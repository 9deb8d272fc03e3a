"""How a file is published: the folder of its parts, the check of the parts, the head that refers to them.

The order matters: parts are complete and checked before the head is renamed to the file's name, which is atomic. So
readers see the old version or the whole new one, whenever the writer dies. A dead writer leaves a folder of parts
without a head and a stale lease: `attempts.collect` removes it.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from blake3 import blake3
from msgspec import Struct

from bootseer.checkpoint.attempts import LEASE_NAME, lease_bytes, rename
from bootseer.checkpoint.files import Files, check_name
from bootseer.checkpoint.head import ATTEMPTS, Head, Segment, encode_head, parts_folder
from bootseer.checkpoint.layout import CHUNK_BYTES, Policy, chunk_place
from bootseer.checkpoint.writing.lane import NodeLoad, WritingSettings
from bootseer.errors import BootseerError, CorruptError, IsFolderError, NotFoundError, TransientError
from bootseer.io.executor import Executor
from bootseer.logs import logger
from bootseer.places.place import SMALL_FILE_REPLICAS, TEMPORARY_PREFIX, Entry, OpenFile, folder_of, read_blocking

_LOG = logger(__name__)

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with the bytes written so far and in total."""


class Written(Struct, frozen=True):
    """A file that is published: visible, durable, checked."""

    is_striped: bool
    entry: Entry | None = None
    """Attributes of a small file that is not striped; None otherwise."""


class Publication:
    """A file that is written to `path`: where its parts go and how, and the steps that publish it."""

    def __init__(
        self,
        files: Files,
        path: str,
        policy: Policy,
        mode: int,
        *,
        settings: WritingSettings,
        workers: Executor,
    ) -> None:
        self.path = path
        self.id = secrets.token_hex(16)
        self.place = files.place
        self.folder = parts_folder(path, self.id)
        self.policy = policy
        self.mode = mode
        self.settings = settings
        self.workers = workers
        self.load = NodeLoad()
        self._files = files
        self._referenced: frozenset[str] = frozenset()
        """Parts that a head refers to which is, or may be, visible."""
        # The first lease is written late: most files take less than a minute, and `collect` ignores folders that young.
        self._renewed_s = time.monotonic()
        self._has_lease = False
        self.has_folder = False
        """Whether a folder of parts may exist, for `remove_unreferenced`."""
        self._is_over = False
        self._in_attempt = ATTEMPTS in path.split("/")
        self._lease_lock = threading.Lock()

    def hidden_name(self) -> str:
        """The hidden name under which an ordinary file is written: among the parts, covered by their lease, because
        HDFS does not update the mtime of files that are being written. In an attempt, which has a lease, beside the
        file."""
        folder = f"{self.path.rpartition('/')[0]}/{TEMPORARY_PREFIX}" if self._in_attempt else f"{self.folder}/"
        self.has_folder = True
        return f"{folder}{secrets.token_hex(8)}"

    def check_folder(self) -> None:
        """Raise `NotFoundError` if the file's folder was removed or renamed: with its parts it would come back."""
        self.place.stat(folder_of(self.path))

    def publish(self, segments: Sequence[Segment]) -> Written:
        """Check the lengths of the parts, publish the file in place of its predecessor, and remove other parts."""
        head = Head(self.id, sum(segment.size_bytes for segment in segments), tuple(segments))
        data = encode_head(head)
        lost = self.settings.retry(lambda: self._files.lost_parts(self.path, head))
        if lost:
            raise TransientError(
                f"{self.place.uri}/{self.folder}/{lost[0]} is missing, or not as long as written; write it again"
            )
        names = frozenset(part.name for part in head.parts)
        self.publish_step(lambda: self._show(data, names), keep=self.id)
        self._referenced = names
        self.remove_unreferenced()
        _LOG.info("%s is published: %d bytes in %d parts", self.path, head.size_bytes, len(names))
        return Written(is_striped=True)

    def read(self, segment: Segment, offset: int, end: int, take: Callable[[int, bytearray], None]) -> None:
        """Pass the bytes of the file from `offset` to `end`, which lie in one complete segment, to `take`, one verified
        chunk at a time.

        `take` gets their offset in the file and the bytes.
        """
        first = (offset - segment.start) // CHUNK_BYTES
        last = -(-(end - segment.start) // CHUNK_BYTES)
        with contextlib.ExitStack() as stack:
            files: dict[int, OpenFile] = {}
            for chunk in range(first, last):
                stripe, at = chunk_place(chunk, segment.stripes)
                path = f"{self.folder}/{segment.parts[stripe].name}"
                if stripe not in files:
                    files[stripe] = stack.enter_context(contextlib.closing(self.place.open(path)))
                uri = f"{self.place.uri}/{path}"
                data = read_blocking(files[stripe], at, segment.index.length(chunk), uri)
                if blake3(data).digest() != segment.index.digest(chunk):
                    raise CorruptError(f"{uri} does not hold what was written")
                start = segment.start + chunk * CHUNK_BYTES
                cut = data[max(offset - start, 0) : end - start]
                take(max(start, offset), cut)

    def publish_step(self, step: Callable[[], T], *, keep: str = "") -> T:
        """Run the step that publishes the file, and remove the parts of the version it replaces, unless that has the id
        `keep`. Returns what `step` returns."""
        replaced = self._files.replaced_id(self.path)
        done = self.settings.retry(step)
        if replaced is not None and replaced != keep:
            # No reader can find the old parts any more. If they cannot be removed, space is lost, but the file is safe.
            with contextlib.suppress(BootseerError):
                self._files.drop_parts(self.path, replaced)
            if replaced == self.id:
                self._referenced = frozenset()
        return done

    def remove_unreferenced(self) -> None:
        """Remove parts that no head refers to. What cannot be removed is left to `collect`."""
        if not self.has_folder:
            return
        with contextlib.suppress(BootseerError):
            if not self._referenced:
                self.place.delete(self.folder, recursive=True)
                return
            referenced = self._referenced | {LEASE_NAME}
            for entry in list(self.place.list(self.folder)):
                if entry.path.rpartition("/")[2] not in referenced:
                    self.place.delete(entry.path)

    def renew(self) -> None:
        """Renew the lease when it is due. Files of an attempt are covered by the attempt's lease."""
        now_s = time.monotonic()
        with self._lease_lock:
            if self._is_over or self._in_attempt or now_s < self._renewed_s + self.settings.lease_s:
                return
            self._renewed_s = now_s
            self.has_folder = True
            # Without a folder there is nothing to collect. After an error the next renewal may succeed.
            with contextlib.suppress(BootseerError):
                self.place.write_bytes(f"{self.folder}/{LEASE_NAME}", lease_bytes(self.path))
                self._has_lease = True

    def end(self) -> None:
        with self._lease_lock:
            self._is_over = True
            renewed = self._has_lease
        if renewed:
            with contextlib.suppress(BootseerError):
                self.place.delete(f"{self.folder}/{LEASE_NAME}")

    def _show(self, head: bytes, names: frozenset[str]) -> None:
        """Write the head. Only an explicit refusal proves that no reader sees it. After any other error, and after an
        interrupt, the write may have succeeded and only the answer been lost: then its parts count as referenced, and
        `collect` decides later."""
        before, self._referenced = self._referenced, self._referenced | names
        try:
            self.place.write_bytes(self.path, head, mode=self.mode)
        except TransientError:
            raise
        except BootseerError:
            self._referenced = before
            raise


def check_target(files: Files, path: str) -> None:
    """Raise the error that writing this path would end with, before anything is written."""
    folder, _, name = path.rpartition("/")
    check_name(name)
    if not files.stat(folder).is_folder:
        raise NotFoundError(f"there is no folder {files.place.uri}/{folder}")
    with contextlib.suppress(NotFoundError):
        if files.place.stat(path).is_folder:
            raise IsFolderError(f"{files.place.uri}/{path} is a folder")


_WHOLE_BYTES = 8 << 20
"""Files up to this size are written from memory in one request."""


def write_ordinary(
    publication: Publication,
    size_bytes: int,
    read: Callable[[int, int], bytes],
    progress: Progress | None = None,
) -> Written:
    """Write an ordinary file and publish it. `read` returns its bytes."""
    path, place = publication.path, publication.place
    # With less redundancy than its striped siblings, a small file would make the whole checkpoint depend on one node.
    if size_bytes <= _WHOLE_BYTES and (publication.policy.replication or 0) <= SMALL_FILE_REPLICAS:
        data = read(0, size_bytes) if size_bytes else b""
        entry = publication.publish_step(lambda: place.write_bytes(path, data, mode=publication.mode))
        if progress is not None:
            progress(size_bytes, size_bytes)
        return Written(is_striped=False, entry=entry)
    names: list[str] = []

    def write() -> None:
        publication.check_folder()
        names.append(publication.hidden_name() if place.shows_unfinished else path)
        # The exact length, so that the place can choose the block size.
        part_bytes = max(-(-size_bytes // CHUNK_BYTES), 1) * CHUNK_BYTES
        (writer,) = place.begin_parts(
            names[-1:],
            part_bytes=part_bytes,
            mode=publication.mode,
            replication=publication.policy.replication,
        )
        try:
            for offset in range(0, size_bytes, CHUNK_BYTES):
                data = read(offset, min(CHUNK_BYTES, size_bytes - offset))
                writer.write(data)
                if progress is not None:
                    progress(offset + len(data), size_bytes)
            writer.close()
        except BaseException:
            place.exclude(writer.nodes)
            writer.abort()
            raise

    step: Callable[[], None] = write
    try:
        if place.shows_unfinished:
            publication.settings.retry(write)
            step = lambda: rename(place, names[-1], path, replace=True)  # noqa: E731
        publication.publish_step(step)
    finally:
        publication.remove_unreferenced()
    return Written(is_striped=False)
