"""Raw lines as received: the source of truth, from which everything else can be derived again.

    <day>/<job>/attempt-<n>/<sequence>-<digest>-<sender>.events.zst     day of arrival, since 1970

One immutable, compressed object per batch and attempt; `bootseer report` can read such a folder. The name contains a
digest of the lines, so a batch that is sent again maps to the same object.

No line of a log names its job. If the folder's name does not either, the job follows in a skippable frame of zstd,
which all other readers ignore.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Final, NamedTuple

import zstandard

from bootseer.errors import BootseerError, CorruptError, NotFoundError, PermanentError
from bootseer.io.tasks import Tasks
from bootseer.store.file import FileStore, PlaceStore
from bootseer.store.store import MAX_CREATE_BYTES, Store
from bootseer.trace.event import fingerprint
from bootseer.trace.sinks import SUFFIX, safe_name
from bootseer.trace.spools import folder_name

EVENTS: Final = f"{SUFFIX}.zst"
"""Suffix of a batch of event lines."""
LOG: Final = ".log.zst"
"""Suffix of a batch of a job's own log, for the log parsers."""
MAX_PLAIN_BYTES: Final = 32 << 20
"""Size of the lines in one object."""
_READERS: Final = 8
_AT_ONCE: Final = 1000
_SKIPPABLE: Final = b"\x5b\x2a\x4d\x18"  # begins a skippable frame; its size follows, in four bytes
_NAME: Final = re.compile(
    r"(?P<day>\d{1,6})/(?P<folder>[^/]{1,255})/attempt-(?P<attempt>\d{1,18})/"
    r"(?P<sequence>\d{1,19})-[0-9a-f]{16}-(?P<sender>[^/]{1,80})\.(?:events|log)\.zst"
)


class Key(NamedTuple):
    """The parts of an object's name."""

    day: int
    folder: str
    """The job's folder, from `job_folder`."""
    attempt: int
    sender: str
    sequence: int


class Kept(NamedTuple):
    """A durable batch."""

    name: str
    is_new: bool
    """False: the same batch had been stored before."""


class RawStore:
    """Objects of raw lines in a store. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._folder = store if isinstance(store, FileStore) else None

    def put(
        self, lines: bytes, *, day: int, job: str, attempt: int, sender: str, sequence: int, suffix: str = EVENTS
    ) -> Kept:
        """Store the lines of one attempt durably. `sequence`: the number of the sender's batch.

        Raises like `Store.create`: the batch may then be sent again; and `PermanentError` if they are too many to be
        read again.
        """
        if len(lines) > MAX_PLAIN_BYTES:
            raise PermanentError(f"{len(lines):,} bytes of lines are too many for one object")
        digest = hashlib.sha256(lines).hexdigest()[:16]
        name = f"{day:d}/{job_folder(job)}/attempt-{attempt:d}/{sequence:d}-{digest}-{safe_name(sender)}{suffix}"
        packed = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(lines)
        if suffix == LOG and job_folder(job) != job:
            named = job.encode()
            packed += _SKIPPABLE + len(named).to_bytes(4, "little") + named
        if len(packed) <= MAX_CREATE_BYTES:
            made = self._create_here(name, packed) if self._folder else self.store.create(name, packed)
            return Kept(name, made)
        upload = self.store.upload()
        try:
            upload.write(packed)
            upload.commit(name)  # may replace an object with the same content
        finally:
            upload.abort()
        return Kept(name, True)

    def _create_here(self, name: str, packed: bytes) -> bool:
        """`Store.create` in a local folder that only services write to. It needs two syncs, of file and folder, instead
        of four for an upload."""
        assert self._folder is not None  # noqa: S101 - checked by the caller
        try:
            return self._folder.place.create_bytes(name, packed, mode=0o640)
        except NotFoundError:
            self._folder.make_folder(name.rpartition("/")[0])
            return self._folder.place.create_bytes(name, packed, mode=0o640)

    def read(self, name: str) -> bytes:
        """The lines of an object. Raises `CorruptError` if it is damaged."""
        packed = b"".join(self.store.read(name))
        try:
            size = zstandard.frame_content_size(packed)
            if not 0 <= size <= MAX_PLAIN_BYTES:
                raise CorruptError(f"{self.store.uri}: {name} is damaged: its size is given as {size} bytes")
            lines = zstandard.ZstdDecompressor().decompress(packed)
        except zstandard.ZstdError as error:
            raise CorruptError(f"{self.store.uri}: {name} is damaged: {error}") from error
        return lines

    def job_of_log(self, name: str, folder: str) -> str:
        """The job of a log in this folder: the folder's name, or that after the lines."""
        unpacker = zstandard.ZstdDecompressor().decompressobj()
        unpacker.decompress(b"".join(self.store.read(name)))
        job = unpacker.unused_data[len(_SKIPPABLE) + 4 :].decode(errors="replace")
        return job if job_folder(job) == folder else folder

    def names(self, day: int | None = None) -> Iterator[str]:
        """The objects of a day; without it, all."""
        for stored in self.store.list("" if day is None else f"{day}/"):
            if parse_name(stored.name) is not None:
                yield stored.name

    def of_attempt(self, names: Iterable[str], gone: set[str]) -> Iterator[tuple[str, bytes]]:
        """Each object's lines. Names of objects that are gone, by retention or by hand, are added to `gone`.

        A large job has a hundred thousand objects, which no bucket returns one after the other before the deadline of
        an analysis.
        """

        def read(name: str) -> bytes | None:
            with contextlib.suppress(NotFoundError):
                return self.read(name)
            return None

        rest = iter(names)
        with Tasks("bootseer-raw", _READERS) as pool:  # starts no thread before it is used
            while some := list(islice(rest, _READERS)):
                found = map(read, some) if self._folder is not None else pool.map(read, some)
                for name, lines in zip(some, found, strict=True):
                    if lines is None:
                        gone.add(name)
                    else:
                        yield name, lines

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, and the folders that are empty then."""
        with Tasks("bootseer-raw", _READERS) as pool:
            for first in range(0, len(names), _AT_ONCE):
                list(pool.map(self.store.delete, names[first : first + _AT_ONCE]))
        if isinstance(self.store, PlaceStore):  # a bucket has no folders
            folders = {folder for name in names for folder in accumulate(name.split("/")[:-1], "{}/{}".format)}
            for folder in sorted(folders, reverse=True):  # those within it first
                with contextlib.suppress(BootseerError):  # it has other objects
                    self.store.place.delete(folder)


def job_folder(job: str) -> str:
    """The folder of a job's lines: its name, or a digest of it if it is not valid in object names. Two jobs may share a
    folder; their lines are told apart by their content."""
    name = folder_name(job)
    return name if name[0].isalnum() or name[0] == "_" else f"_{fingerprint(job)[:16]}"


def parse_name(name: str) -> Key | None:
    """The parts of an object's name; None if it is not an object of raw lines."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Key(int(match["day"]), match["folder"], int(match["attempt"]), match["sender"], int(match["sequence"]))
