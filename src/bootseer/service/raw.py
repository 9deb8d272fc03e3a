"""Lines as they came: the truth, from which all else can be derived again.

    <day>/<job>/attempt-<n>/<sequence>-<digest>-<sender>.events.zst     days since 1970, when the batch arrived

One object for each batch and attempt, compressed, never changed; `bootseer report` reads such a folder as it is. The
name holds a digest of the lines: a batch that is sent again is the object that is there.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import zstandard

from bootseer.errors import CorruptError, NotFoundError
from bootseer.store.file import STORE_GROUP, FileStore
from bootseer.store.store import MAX_CREATE_BYTES, Store
from bootseer.trace.sinks import SUFFIX, safe_name
from bootseer.trace.spools import fingerprint, folder_name

EVENTS: Final = f"{SUFFIX}.zst"
"""What a batch of event lines is called; `LOG`: of a job's own log, in which the log parser looks."""
LOG: Final = ".log.zst"
MAX_PLAIN_BYTES: Final = 32 << 20
"""Of the lines in one object."""
_NAME: Final = re.compile(
    r"(?P<day>\d{1,6})/(?P<folder>[^/]{1,255})/attempt-(?P<attempt>\d{1,18})/"
    r"(?P<sequence>\d{1,19})-[0-9a-f]{16}-(?P<sender>[^/]{1,80})\.(?:events|log)\.zst"
)


class Key(NamedTuple):
    """What the name of an object says."""

    day: int
    folder: str
    """Of the job: `job_folder`."""
    attempt: int
    sender: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A batch that is durable."""

    name: str
    day: int
    is_new: bool
    """False: the same batch was there already."""
    stored_bytes: int


class RawStore:
    """Objects of raw lines in a store. Safe to use from many threads."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._folder = store if isinstance(store, FileStore) and not os.environ.get(STORE_GROUP) else None

    def put(
        self, lines: bytes, *, day: int, job: str, attempt: int, sender: str, sequence: int, suffix: str = EVENTS
    ) -> Kept:
        """Keep the lines of one attempt; durable when it returns. `sequence` counts the sender's batches.

        Raises what `Store.create` does: the batch may then be sent again.
        """
        digest = hashlib.sha256(lines).hexdigest()[:16]
        name = f"{day:d}/{job_folder(job)}/attempt-{attempt:d}/{sequence:d}-{digest}-{safe_name(sender)}{suffix}"
        packed = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(lines)
        if len(packed) <= MAX_CREATE_BYTES:
            made = self._create_here(name, packed) if self._folder else self.store.create(name, packed)
            return Kept(name, day, made, len(packed))
        upload = self.store.upload()
        try:
            upload.write(packed)
            upload.commit(name)  # in the place of the same bytes, if they are there already
        finally:
            upload.abort()
        return Kept(name, day, True, len(packed))

    def _create_here(self, name: str, packed: bytes) -> bool:
        """`Store.create` in a folder of this machine that only services write to: it is synced twice, file and folder,
        where an upload is synced four times."""
        assert self._folder is not None  # noqa: S101 - the caller has looked
        try:
            return self._folder.place.create_bytes(name, packed, mode=0o640)
        except NotFoundError:
            self._folder.make_folder(name.rpartition("/")[0])
            return self._folder.place.create_bytes(name, packed, mode=0o640)

    def read(self, name: str) -> bytes:
        """The lines of an object. Raises `CorruptError` for one that is damaged."""
        packed = b"".join(self.store.read(name))
        try:
            size = zstandard.frame_content_size(packed)
            if not 0 <= size <= MAX_PLAIN_BYTES:
                raise CorruptError(f"{self.store.uri}: {name} is damaged: it says that it has {size} bytes")
            lines = zstandard.ZstdDecompressor().decompress(packed)
        except zstandard.ZstdError as error:
            raise CorruptError(f"{self.store.uri}: {name} is damaged: {error}") from error
        return lines

    def names(self, day: int | None = None, folder: str = "", attempt: int | None = None) -> Iterator[str]:
        """The objects of a day, of a job's folder of that day, or of one of its attempts; all without a day."""
        front = "" if day is None else f"{day}/"
        front += f"{folder}/" if folder else ""
        front += f"attempt-{attempt}/" if attempt is not None else ""
        for stored in self.store.list(front):
            if parse_name(stored.name) is not None:
                yield stored.name

    def of_attempt(self, names: Iterable[str], gone: set[str]) -> Iterator[tuple[str, bytes]]:
        """Each object's lines. What is not there any more, because retention or a person has removed it, is put into
        `gone`."""
        for name in names:
            try:
                yield name, self.read(name)
            except NotFoundError:
                gone.add(name)

    def delete(self, names: Sequence[str]) -> None:
        """Forget these."""
        for name in names:
            self.store.delete(name)


def job_folder(job: str) -> str:
    """The folder of a job's lines: its name, or one made from it where that is not a name of objects. Two jobs may have
    the same one; their lines tell them apart."""
    name = folder_name(job)
    return name if name[0].isalnum() or name[0] == "_" else f"_{fingerprint(job)[:16]}"


def parse_name(name: str) -> Key | None:
    """What the name of an object says; None for what is not one of raw lines."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Key(int(match["day"]), match["folder"], int(match["attempt"]), match["sender"], int(match["sequence"]))
