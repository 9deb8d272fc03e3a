"""Files that are not striped: too small to gain anything, or of a folder whose policy says so.

Small ones are one call of the place. Larger ones are written under a hidden name, checked, and renamed. Called by
`writing` and `file_writer`.
"""

from __future__ import annotations

from collections.abc import Callable

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.checkpoint.places.place import SMALL_COPIES
from bootseer.checkpoint.policy import Policy
from bootseer.checkpoint.writing.publication import Progress, Publication, Written
from bootseer.errors import NotFoundError

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
        _write(files, names[-1], size_bytes, read, policy, mode, progress, failed_on)

    publication.again(write)
    try:
        publication.put(lambda: _rename(files, names[-1], path, size_bytes))
    finally:
        publication.remove_rest()
    return Written(path, size_bytes, is_striped=False, num_retries=len(names) - 1)


def _write(
    files: Files,
    path: str,
    size_bytes: int,
    read: Callable[[int, int], bytes],
    policy: Policy,
    mode: int,
    progress: Progress | None,
    failed_on: set[str],
) -> None:
    # As one part: the longest that it may get, so that the place need not guess.
    part_bytes = max(-(-size_bytes // CHUNK_BYTES), 1) * CHUNK_BYTES
    (writer,) = files.place.begin_parts(
        [path], part_bytes=part_bytes, mode=mode, replication=policy.replication, avoid=frozenset(failed_on)
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


def _rename(files: Files, temporary: str, path: str, size_bytes: int) -> None:
    try:
        files.place.rename(temporary, path)
    except NotFoundError:
        # A try whose answer was lost may have done it.
        if files.place.stat(path).size_bytes != size_bytes:
            raise
