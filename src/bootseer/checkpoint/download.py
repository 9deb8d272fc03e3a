"""Downloading a checkpoint to a local disk: all of it under its name, or nothing.

It is written into a staging folder beside the target, and renamed when every byte is verified, as far as that is
possible, and synced. An existing target is replaced only then.

An interrupted download is resumed: chunks of striped files that match their digests, and complete ordinary files, of
the same versions. A file gets its modification time when all of it is synced.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from pathlib import Path

from bootseer.checkpoint.catalog import FILE_AND_FOLDER, also_folders, walk
from bootseer.checkpoint.files import FileInfo, Files
from bootseer.checkpoint.head import Head
from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.checkpoint.reading.reading import Reading
from bootseer.errors import BootseerError, Interrupted, NotFoundError, PermanentError, TransientError, UsageError
from bootseer.io import proc
from bootseer.io.files import discard, write_all
from bootseer.io.locks import try_flock
from bootseer.io.tasks import Count, Tasks
from bootseer.mounts.kernel import is_mount
from bootseer.places.place import folder_of

PREFIX = ".bootseer-get-"
OLD = "old"
"""In the staging folder: the previous target until it is replaced. A staging folder that contains one is left to
people."""

_NEW = ".bootseer-new-"


@contextlib.contextmanager
def staging_folder(target: Path, key: str) -> Iterator[Path]:
    """A staging folder beside `target` for the download `key`: one that an interrupted process left, or a new one.

    Removed at the end, but kept for a retry after an interrupt or a `TransientError`. Raises `OSError`.
    """
    prefix = f"{PREFIX}{platform.node()}-"
    own = f"{prefix}{hashlib.sha256(key.encode()).hexdigest()[:16]}-"
    folder, lock = _find_abandoned(target.parent, prefix, own) or _create(
        target.with_name(f"{own}{secrets.token_hex(8)}")
    )
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


def _create(folder: Path) -> tuple[Path, int]:
    """Create a staging folder and lock it. It gets its name when it is locked: unlocked ones are removed by others."""
    new = folder.with_name(f"{_NEW}{secrets.token_hex(8)}")
    new.mkdir(mode=0o700)
    lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _try_lock(lock)
        new.rename(folder)
    except BaseException:
        discard(new)
        os.close(lock)
        raise
    return folder, lock


def _remove_unless_old(folder: Path) -> None:
    if not os.path.lexists(folder / OLD):
        discard(folder)


def _find_abandoned(parent: Path, prefix: str, own: str) -> tuple[Path, int] | None:
    """A staging folder whose name begins with `own` and that is not in use, and its lock. All other unused ones, whose
    names begin with `prefix`, are removed."""
    found = None
    # What cannot be listed or opened belongs to another user.
    with contextlib.suppress(OSError):
        with os.scandir(parent) as entries:
            paths = [Path(entry) for entry in entries if entry.name.startswith(prefix)]
        for path in paths:
            with contextlib.suppress(OSError):
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                # Its last user may have removed it since it was listed; no other folder gets its name.
                if not _try_lock(lock) or not os.path.lexists(path) or os.path.lexists(path / OLD):
                    os.close(lock)
                elif found is None and path.name.startswith(own) and os.fstat(lock).st_uid == os.geteuid():
                    found = path, lock
                else:
                    discard(path)
                    os.close(lock)
    return found


def _try_lock(lock: int) -> bool:
    """Lock; returns False if another process holds it, or if the file system has no such locks."""
    with contextlib.suppress(OSError):
        return try_flock(lock)
    return False


_PIECE_BYTES = 16 << 20
_NEAR = 3
"""File names suggested in place of one that does not exist."""
_AT_ONCE = 4
"""Pieces, or small files, that are read concurrently; `reading` reads each from several nodes."""


@dataclass(frozen=True, slots=True)
class DownloadResult:
    """What was downloaded."""

    size_bytes: int
    num_files: int
    kept_bytes: int = 0
    """Bytes of it that an interrupted download had left."""


def get_checkpoint(
    files: Files,
    reading: Reading,
    path: str,
    target: Path,
    *,
    only: Sequence[str] = (),
    replace: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> DownloadResult:
    """Download a checkpoint or one file to `target`; with `only`, those of its files that match one of these patterns.

    Raises `UsageError` if the target exists, unless `replace`, and for a pattern without a match; `TransientError` if
    the checkpoint changes meanwhile.
    """
    target = _absolute(target)
    _check_free(target, replace)
    if replace and target.is_dir():
        _check_harmless(files, target)
    if files.place.is_local and target.parent.is_relative_to(Path("/", files.place.uri.removeprefix("file://"), path)):
        raise UsageError(f"{target} lies in what is copied", hint="name a folder outside of it")
    info = files.stat(path)
    found = sorted(walk(files, path, folders=True), key=lambda info: info.path)
    if names := also_folders(found):
        raise PermanentError(f"{files.place.uri}/{names[0]} {FILE_AND_FOLDER}")
    infos = [info for info in found if not info.is_folder]
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
                folders = (
                    [folder_of(one.path) for one in infos] if only else [one.path for one in found if one.is_folder]
                )
                for folder in folders:
                    (copy / _below(path, folder)).mkdir(parents=True, exist_ok=True)
            failed: BootseerError | None = None
            try:
                kept_bytes = _copy_all(files, reading, path, infos, copy, progress)
            except PermanentError as error:
                failed = error
            # Each file is one version, but files of another checkpoint may be among them.
            if not _is_still(files, path, infos, all_of_it=not only):
                raise TransientError(
                    f"{files.place.uri}/{path} was changed while it was copied; get it again"
                ) from failed
            if failed is not None:
                raise failed
            for one in found:
                if one.is_folder and (local := copy / _below(path, one.path)).is_dir():
                    local.chmod(local.stat().st_mode & (one.entry.mode | 0o7700))  # not more than the umask allows
            _move_into_place(copy, target, replace)
    return DownloadResult(sum(info.size_bytes for info in infos), len(infos), kept_bytes)


def _drop_others(own: Path, copy: Path, path: str, infos: Iterable[FileInfo], *, is_folder: bool) -> None:
    """Remove what an earlier download left of other versions, and record the versions of this one."""
    noted, now = own / "versions", {_below(path, info.path): info.entry.version for info in infos}
    try:
        before = json.loads(noted.read_bytes())
    except (OSError, ValueError):
        before = {}
    if copy.is_dir() != is_folder:
        discard(copy)
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
    """The files that match a pattern, or whose folder does. Raises `UsageError` for a pattern without a match."""
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


def _absolute(target: Path) -> Path:
    """The target's path with its parent resolved. Raises `UsageError` if it has no name."""
    if target.name in ("", "..") and target != Path():
        raise UsageError(f"{target} cannot be the name of a copy", hint="give the new folder's or file's own name")
    return Path(os.path.realpath(target.absolute().parent), target.absolute().name)


def _check_harmless(files: Files, target: Path) -> None:
    """Refuse to replace a folder that contains the place itself or the working directory, or a mount point."""
    if is_mount(target):  # the kernel refuses it, but only after all was copied to the file system above it
        raise UsageError(f"{target} is a mount point: it is not replaced", hint=f"name a folder in it: {target}/NAME")
    scheme, _, root = files.place.uri.partition("://")
    inside = [Path.cwd(), *([Path(root or "/")] if scheme == "file" else [])]
    for one in inside:
        if one.is_relative_to(os.path.realpath(target)):
            raise UsageError(f"{target} contains {one}: it is not replaced", hint="give another name")


def _is_still(files: Files, path: str, infos: Iterable[FileInfo], *, all_of_it: bool) -> bool:
    """Whether the files have not changed since they were listed; with `all_of_it`, whether none was added either."""
    try:
        now = _versions(walk(files, path))
    except NotFoundError:  # it is being replaced just now
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
    """Copy all files; returns the bytes that were there already."""
    total = sum(info.size_bytes for info in infos)
    done, kept = Count(total, progress), Count(total, None)
    allowed = 0o777 & ~int(proc.status().get("Umask", "022"), 8)
    own = threading.local()

    def copy_piece(file: CheckpointFile, head: Head | None, local: Path, offset: int) -> None:
        if not hasattr(own, "buffer"):  # reused: freed buffers of this size are not returned to the system
            own.buffer = bytearray(_PIECE_BYTES)
        view = memoryview(own.buffer)[: file.size_bytes - offset]
        with local.open("r+b", buffering=0) as copy:
            copy.seek(offset)
            is_kept = head is not None and copy.readinto(view) == len(view) and head.matches(offset, view)
            if not is_kept:
                length = file.readinto(offset, view)
                if length != len(view):
                    raise PermanentError(
                        f"{file.path}: {length} bytes instead of {len(view)}; it was changed while it was read"
                    )
                write_all(copy.fileno(), view, offset)
        done.add(len(view))
        kept.add(len(view) if is_kept else 0)

    def copy_file(info: FileInfo, each: Callable[..., Iterator[None]]) -> None:
        local = temporary / _below(path, info.path)
        if not info.is_striped and _is_complete(info, local):
            done.add(info.size_bytes)
            kept.add(info.size_bytes)
            return
        head = files.head(info.path) if info.is_striped and local.exists() else None
        if head is None:
            local.unlink(missing_ok=True)
            local.touch(mode=0o600)
        else:
            local.chmod(0o600)
        # Open from the first write on: `fsync` reports errors of writing that have occurred since.
        with local.open("rb") as copy:
            with reading.open(info.path) as file:
                deque(each(partial(copy_piece, file, head, local), range(0, file.size_bytes, _PIECE_BYTES)), maxlen=0)
            os.fsync(copy.fileno())
            os.fchmod(copy.fileno(), info.entry.mode & allowed)
            os.utime(copy.fileno(), ns=(info.entry.mtime_ns, info.entry.mtime_ns))
            os.fsync(copy.fileno())

    # The pieces of a large file side by side, small files side by side.
    with Tasks("bootseer-get", _AT_ONCE) as threads:
        for info in infos:
            if info.size_bytes > _PIECE_BYTES:
                copy_file(info, threads.map)
        small = [info for info in infos if info.size_bytes <= _PIECE_BYTES]
        deque(threads.map(lambda info: copy_file(info, map), small), maxlen=0)
    return kept.done


def _is_complete(info: FileInfo, local: Path) -> bool:
    """Whether an earlier download has completed this version of an ordinary file."""
    try:
        found = local.stat()
    except FileNotFoundError:
        return False
    return (found.st_size, found.st_mtime_ns) == (info.size_bytes, info.entry.mtime_ns)


def _move_into_place(temporary: Path, target: Path, replace: bool) -> None:
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
        discard(old)
        return
    _check_free(target, replace)
    temporary.rename(target)


def _check_free(target: Path, replace: bool) -> None:
    if os.path.lexists(target) and not replace:
        raise UsageError(f"{target} already exists", hint="give another name, or --replace", exit_code=1)


@contextlib.contextmanager
def _local_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        more = "; make room and try again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise PermanentError(f"{target}: {error.strerror}{more}") from error
