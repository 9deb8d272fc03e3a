"""Copying a checkpoint to a local disk: all of it under its name, or nothing.

It is written beside its name and renamed when every byte of it has been verified as far as it can be, and is on the
disk. A name that is taken is taken away only then.

A copy that was interrupted is gone on with: of files of the same version, chunks of striped ones that match their
digests, and ordinary ones that were complete. A file gets its time of change when all of it is on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path

from bootseer.blocks.codec import digest_of
from bootseer.cache.disk import write_all
from bootseer.checkpoint.catalog import walk
from bootseer.checkpoint.files import FileInfo, Files
from bootseer.checkpoint.head import Head
from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.checkpoint.reading.reading import Reading
from bootseer.errors import BootseerError, Interrupted, NotFoundError, PermanentError, TransientError, UsageError
from bootseer.io.locks import try_flock
from bootseer.io.tasks import Count, Tasks

FRONT = ".bootseer-get-"
OLD = "old"
"""In the folder: what had the name, until it is replaced. A folder that has one is left to people."""

_NEW = ".bootseer-new-"
_WHAT = "what"
"""In the folder: what is made there."""


@contextlib.contextmanager
def staging_folder(target: Path, key: str) -> Iterator[Path]:
    """Such a folder, in that of `target`, for download `key`: the one that an interrupted process left, or a new one.

    Removed at the end, but left for another try after an interrupt and after a `TransientError`. Raises `OSError`.
    """
    prefix = f"{FRONT}{platform.node()}-"
    folder, lock = _left(target.parent, prefix, key) or _made(target.with_name(f"{prefix}{secrets.token_hex(8)}"), key)
    try:
        yield folder
    except (TransientError, Interrupted):
        raise
    except BaseException:
        _remove_unless_old(folder)
        raise
    else:
        _remove_unless_old(folder)
    finally:
        os.close(lock)


def _made(folder: Path, key: str) -> tuple[Path, int]:
    """A new folder, and its lock. It gets its name when it is locked: without a lock others would remove it."""
    new = folder.with_name(f"{_NEW}{secrets.token_hex(8)}")
    new.mkdir(mode=0o700)
    lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _take(lock)
        (new / _WHAT).write_text(key)
        new.rename(folder)
    except BaseException:
        remove(new)
        os.close(lock)
        raise
    return folder, lock


def _remove_unless_old(folder: Path) -> None:
    if not os.path.lexists(folder / OLD):
        remove(folder)


def remove(path: Path) -> None:
    """Remove a file or folder, as far as that can be."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _left(parent: Path, prefix: str, key: str) -> tuple[Path, int] | None:
    """A folder for `what` that is not in use any more, and its lock. All others that are not are removed."""
    found = None
    # What cannot be listed or opened belongs to another user.
    with contextlib.suppress(OSError):
        with os.scandir(parent) as entries:
            paths = [Path(entry) for entry in entries if entry.name.startswith(prefix)]
        for path in paths:
            with contextlib.suppress(OSError):
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                if not _take(lock) or os.path.lexists(path / OLD):
                    os.close(lock)
                elif found is None and _says(path, key):
                    found = path, lock
                else:
                    remove(path)
                    os.close(lock)
    return found


def _says(folder: Path, key: str) -> bool:
    try:
        return folder.stat().st_uid == os.geteuid() and (folder / _WHAT).read_text() == key
    except (OSError, ValueError):
        return False


def _take(lock: int) -> bool:
    """Whether no other process has it. Where there are no such locks, that is not known."""
    with contextlib.suppress(OSError):
        return try_flock(lock)
    return False


_PIECE_BYTES = 16 << 20
_NEAR = 3
"""File names that are suggested in place of one that is not there."""
_AT_ONCE = 4
"""Pieces, or small files, that are read at the same time; `reading` reads each from several nodes."""


@dataclass(frozen=True, slots=True)
class Got:
    """What was copied."""

    size_bytes: int
    num_files: int
    kept_bytes: int = 0
    """Of these, what an earlier copy that was interrupted had brought."""


def get_checkpoint(
    files: Files,
    reading: Reading,
    path: str,
    target: Path,
    *,
    only: Sequence[str] = (),
    replace: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Got:
    """Copy a checkpoint, or one file, to `target`; with `only`, those of its files that one of these patterns matches.

    Raises `UsageError` for a name that is taken, unless `replace`, and for a pattern that matches nothing, and
    `TransientError` when the checkpoint changes meanwhile.
    """
    target = _full(target)
    _check_free(target, replace)
    if replace and target.is_dir():
        _check_harmless(files, target)
    info = files.stat(path)
    infos = sorted(walk(files, path), key=lambda info: info.path)
    if only and not info.is_folder:
        raise UsageError(f"{files.place.uri}/{path} is a file", hint="--only chooses files of a folder")
    infos = _chosen(infos, path, only) if only else infos
    with _local_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with staging_folder(target, json.dumps([files.place.uri, path, target.name, sorted(only)])) as own:
            copy = own / "copy"
            _drop_others(own, copy, path, infos, is_folder=info.is_folder)
            if info.is_folder:
                copy.mkdir(exist_ok=True)
                folders = [one.path.rpartition("/")[0] for one in infos] if only else _folders(files, path)
                for folder in folders:
                    (copy / _below(path, folder)).mkdir(parents=True, exist_ok=True)
            failed: BootseerError | None = None
            try:
                kept_bytes = _copy_all(files, reading, path, infos, copy, progress)
            except PermanentError as error:
                failed = error
            # Each file is one version, but some may be of another checkpoint than others, or gone meanwhile.
            if not _is_still(files, path, infos, all_of_it=not only):
                raise TransientError(
                    f"{files.place.uri}/{path} was changed while it was copied; get it again"
                ) from failed
            if failed is not None:
                raise failed
            _take_place(copy, target, replace)
    return Got(sum(info.size_bytes for info in infos), len(infos), kept_bytes)


def _drop_others(own: Path, copy: Path, path: str, infos: Iterable[FileInfo], *, is_folder: bool) -> None:
    """Remove what an earlier copy has of other versions, and note which versions this one is of."""
    noted, now = own / "versions", {_below(path, info.path): info.entry.version for info in infos}
    try:
        before = json.loads(noted.read_bytes())
    except (OSError, ValueError):
        before = {}
    if copy.is_dir() != is_folder:
        remove(copy)
    for local in sorted(copy.rglob("*"), reverse=True) if is_folder else [copy]:
        name = local.relative_to(copy).as_posix() if is_folder else ""
        with contextlib.suppress(OSError):  # a folder that is not empty
            if local.is_dir():
                local.rmdir()
            elif name not in now or before.get(name) != now[name]:
                local.unlink()
    noted.write_text(json.dumps(now))


def _below(path: str, one: str) -> str:
    return one[len(path) :].lstrip("/")


def _chosen(infos: list[FileInfo], path: str, patterns: Sequence[str]) -> list[FileInfo]:
    """The files that a pattern matches, or a folder that they lie in. Raises `UsageError` for one that matches none."""
    names = {_below(path, info.path): info for info in infos}
    chosen: set[str] = set()
    for pattern in patterns:
        found = {
            name
            for name in names
            if any(fnmatchcase(part, pattern) for part in accumulate(name.split("/"), lambda one, two: f"{one}/{two}"))
        }
        if not found:
            near = get_close_matches(pattern, names, _NEAR, cutoff=0.0)
            raise UsageError(f"{pattern!r} matches no file of {path}", hint=f"the nearest are {', '.join(near)}")
        chosen |= found
    return [names[name] for name in sorted(chosen)]


def _full(target: Path) -> Path:
    """A path that stays what it is when its last name is renamed. Raises `UsageError` when it has none."""
    if target.name in ("", "..") and target != Path():
        raise UsageError(f"{target} cannot be the name of a copy", hint="give the new folder's or file's own name")
    return Path(os.path.realpath(target.absolute().parent), target.absolute().name)


def _check_harmless(files: Files, target: Path) -> None:
    """Replacing a folder removes all that it has: never what is read from, or what the user stands in."""
    scheme, _, root = files.place.uri.partition("://")
    inside = [Path.cwd(), *([Path(root or "/")] if scheme == "file" else [])]
    for one in inside:
        if one.is_relative_to(os.path.realpath(target)):
            raise UsageError(f"{target} contains {one}: it is not replaced", hint="give another name")


def _folders(files: Files, path: str) -> Iterator[str]:
    folders = [path]
    while folders:
        below = [entry.path for entry in files.names(folders.pop()) if entry.is_folder]
        yield from below
        folders += below


def _is_still(files: Files, path: str, infos: Iterable[FileInfo], *, all_of_it: bool) -> bool:
    """Whether these are the files of a checkpoint as they were listed, or with `all_of_it` all that it has."""
    try:
        now = _versions(walk(files, path))
    except NotFoundError:  # at this moment it is being replaced
        return False
    then = _versions(infos)
    return now == then if all_of_it else then.items() <= now.items()


def _versions(infos: Iterable[FileInfo]) -> dict[str, str]:
    return {info.path: info.entry.version for info in infos}


def _copy_all(
    files: Files,
    reading: Reading,
    path: str,
    infos: list[FileInfo],
    temporary: Path,
    progress: Callable[[int, int], None] | None,
) -> int:
    """Returns how many bytes were there already."""
    total = sum(info.size_bytes for info in infos)
    done, kept = Count(total, progress), Count(total, None)
    stopped = threading.Event()
    own = threading.local()

    def copy(file: CheckpointFile, head: Head | None, descriptor: int, offset: int, length: int) -> None:
        if stopped.is_set():
            return
        if not hasattr(own, "buffer"):  # used again: what is freed in such pieces is not given back to the system
            own.buffer = bytearray(_PIECE_BYTES)
        view = memoryview(own.buffer)[:length]
        if head is not None and os.preadv(descriptor, [view], offset) == length and _is_right(head, offset, view):
            done.add(length)
            kept.add(length)
            return
        read = file.readinto(offset, view)
        if read != length:
            raise PermanentError(f"{file.path}: {read} bytes instead of {length}; it was changed while it was read")
        write_all(descriptor, view, offset)
        done.add(length)

    def copy_file(info: FileInfo, threads: Tasks | None) -> None:
        if stopped.is_set():
            return
        local = temporary / _below(path, info.path)
        if info.is_striped or not _is_complete(info, local):
            _copy_file(files, reading, info, local, threads, copy)
        else:
            done.add(info.size_bytes)
            kept.add(info.size_bytes)

    with Tasks("bootseer-get", _AT_ONCE) as threads:
        try:
            for info in infos:
                if info.size_bytes > _PIECE_BYTES:
                    copy_file(info, threads)
            _wait_for([threads.submit(copy_file, info, None) for info in infos if info.size_bytes <= _PIECE_BYTES])
        finally:
            stopped.set()
    return kept.done


def _is_complete(info: FileInfo, local: Path) -> bool:
    """Whether an earlier copy has come to the end of an ordinary file of this version."""
    try:
        found = local.stat()
    except FileNotFoundError:
        return False
    return (found.st_size, found.st_mtime_ns) == (info.size_bytes, info.entry.mtime_ns)


def _is_right(head: Head, offset: int, data: memoryview) -> bool:
    """Whether these are the bytes of a striped file from the beginning of a chunk on, by their digests."""
    while data:
        segment = head.segments[head.segment_at(offset)]
        chunk = (offset - segment.start) // CHUNK_BYTES
        length = segment.index.length(chunk)
        if digest_of(data[:length]) != segment.index.digest(chunk):
            return False
        offset, data = offset + length, data[length:]
    return True


def _copy_file(
    files: Files,
    reading: Reading,
    info: FileInfo,
    local: Path,
    threads: Tasks | None,
    copy: Callable[[CheckpointFile, Head | None, int, int, int], None],
) -> None:
    """Copy a file, by these threads or in this one."""
    head = files.head(info.path) if info.is_striped and local.exists() else None
    if head is None:
        local.unlink(missing_ok=True)
    else:
        local.chmod(0o600)
    descriptor = os.open(local, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.closing(reading.open(info.path)) as file:
            pieces = []
            for offset in range(0, file.size_bytes, _PIECE_BYTES):
                length = min(_PIECE_BYTES, file.size_bytes - offset)
                if threads is None:
                    copy(file, head, descriptor, offset, length)
                else:
                    pieces.append(threads.submit(copy, file, head, descriptor, offset, length))
            _wait_for(pieces)
        os.fsync(descriptor)
        os.fchmod(descriptor, info.entry.mode & 0o777)
        os.utime(descriptor, ns=(info.entry.mtime_ns, info.entry.mtime_ns))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _wait_for(pieces: list[Future[None]]) -> None:
    """Wait until no thread uses the file any more; the first error is raised.

    No deadline of its own: each piece reads with one, and writes to the local disk.
    """
    try:
        wait(pieces, return_when=FIRST_EXCEPTION)
    finally:
        for piece in pieces:
            piece.cancel()
        wait(pieces)
    for piece in pieces:
        if not piece.cancelled():
            piece.result()


def _take_place(temporary: Path, target: Path, replace: bool) -> None:
    if replace and os.path.lexists(target):
        if not temporary.is_dir() and (target.is_symlink() or not target.is_dir()):
            temporary.replace(target)
            return
        old = temporary.with_name(OLD)
        target.rename(old)
        try:
            temporary.rename(target)
        except BaseException:
            old.rename(target)
            raise
        remove(old)
        return
    _check_free(target, replace)
    temporary.rename(target)


def _check_free(target: Path, replace: bool) -> None:
    if os.path.lexists(target) and not replace:
        raise UsageError(f"{target} is there already", hint="give another name, or --replace")


@contextlib.contextmanager
def _local_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        more = "; make room and try again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise PermanentError(f"{target}: {error.strerror}{more}") from error
