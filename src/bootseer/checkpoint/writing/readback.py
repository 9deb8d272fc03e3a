"""Reading back what was written: to verify it before it is shown, and for writers that come back to what was sent.

For reading checkpoints there is `checkpoint.reading`.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Sequence

from blake3 import blake3

from bootseer.checkpoint.head import Part, Segment
from bootseer.checkpoint.layout import CHUNK_BYTES, chunk_place
from bootseer.checkpoint.places.place import OpenFile, Place, read_now
from bootseer.checkpoint.writing.lane import Lane
from bootseer.errors import CorruptError
from bootseer.io.executor import Executor

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
