"""Putting a checkpoint from a local disk into a place: hidden until it is complete, then published in one step.

A process that is killed at any step leaves published checkpoints as they are. The next put of the same name reuses the
striped files that were complete, if they match the source; any other put into the same folder removes the leftovers.
`latest` moves last.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bootseer.checkpoint.attempts import Attempt, collect
from bootseer.checkpoint.catalog import is_job, missing_parts, remove, superseded, walk
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.head import PEEK_BYTES, check_size, is_head_size, is_hidden, parts_folder, peek
from bootseer.checkpoint.latest import LATEST, can_be_checkpoint, check_no_link, move_latest, step_of
from bootseer.checkpoint.layout import Policy, encode_policy
from bootseer.checkpoint.writing.lane import WritingSettings
from bootseer.checkpoint.writing.spool import FileSource
from bootseer.checkpoint.writing.writing import Writing
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    IsFolderError,
    NoSpaceError,
    NoSpaceNowError,
    NotFoundError,
    PermanentError,
    TransientError,
    UsageError,
    os_errors_as,
)
from bootseer.io.tasks import Count, Tasks
from bootseer.places.place import Place, join, make_folder_like_parent
from bootseer.units import format_bytes

_FILES_AT_ONCE = 4
"""Files that are written concurrently; their parts share the threads of the `Writing`."""
_COMPARED_BYTES = 4 << 20
"""Read at once of the source, to compare it with what an interrupted put has left: whole chunks."""


@dataclass(frozen=True, slots=True)
class PutSettings:
    """How a checkpoint is put."""

    replace: bool = False
    """Replace an existing checkpoint."""
    policy: Policy | None = None
    """How its files are striped; None: by the folder's policy."""
    move_latest: bool = True
    keep_last: int | None = None
    """Afterwards remove older checkpoints of the same kind beyond this number, see `catalog.superseded`; None: none."""
    dry_run: bool = False
    """Check what can be checked; write and remove nothing."""
    writing: WritingSettings | None = None


@dataclass(frozen=True, slots=True)
class Put:
    """A checkpoint that was published."""

    path: str
    size_bytes: int
    num_files: int
    num_striped: int
    latest: str | None
    """What `latest` names now, which may be a higher step; None if it was not to be moved."""
    removed: Sequence[tuple[str, int]]
    """Names and bytes of the older checkpoints that were removed."""
    kept_bytes: int = 0
    """Bytes that an interrupted put had written."""


def put_checkpoint(
    place: Place,
    source: Path,
    name: str,
    *,
    folder: str = "",
    settings: PutSettings | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Put:
    """Publish a local folder or file as `name` in a folder of the place. Returns when all of it is durable.

    `progress` gets the bytes done and the total. Raises `AlreadyExistsError` when the name is taken, and
    `PermanentError` when the source changes meanwhile.
    """
    settings = settings or PutSettings()
    files = Files(place)
    target = join(folder, name)
    if not can_be_checkpoint(name) or name.startswith("."):  # `list` does not show folders that begin with a dot
        raise UsageError(f"{name!r} cannot be the name of a checkpoint", hint="--name step-100")
    if settings.keep_last is not None and step_of(name) is None:
        raise UsageError(
            f"{name!r} does not end with a step number: older checkpoints cannot be determined", hint="--name step-100"
        )
    _check_not_inside(place, source)
    check_no_link(place, target, join(folder, LATEST if settings.move_latest else name))
    found = _files_of(source, name)
    _check_names(place, name, found)
    policy = settings.policy or files.policy(folder)
    _check_sizes(place, found, policy, settings)
    if settings.dry_run:
        return _dry_run(files, folder, name, found, policy, settings)
    place.make_folder(folder, parents=True)
    how = encode_policy(policy).decode()
    needed = found.size_bytes * (policy.replication or 1) * (policy.stripes + policy.parity) // policy.stripes
    message = f"{place.uri}/{target} needs {format_bytes(needed)}"
    with _with_needed_space(message), Attempt(place, target, how=how) as attempt:
        leftovers = attempt.take_over()
        collect(place, folder)
        _check_free(files, target, found, settings.replace)
        # Fail early if it cannot fit. Local file systems may compress, so their free space does not tell.
        if not leftovers and place.uri.startswith("hdfs://"):
            with suppress(TransientError):  # routers do not know it while one of their clusters is down
                if needed > (free := place.space()[1]):
                    raise NoSpaceError(f"no space, {format_bytes(free)} are free on all DataNodes together")
        inside = Files(place, within=attempt.path)
        kept_bytes = _write_all(inside, attempt, found, policy, settings, progress, leftovers)
        for rest in leftovers:
            with suppress(NotFoundError):  # it was in another one
                place.delete(rest, recursive=True)
        num_striped = _check_written(inside, attempt.path, found)
        if found.is_file:
            attempt.publish_file(found.files[0].name, replace=settings.replace)
        else:
            attempt.publish(replace=settings.replace)
    latest = move_latest(files, folder, name) if settings.move_latest else None
    removed = []
    try:
        for old in superseded(files, folder, name, settings.keep_last):
            with suppress(NotFoundError):  # another writer was faster
                removed.append((old.name, remove(files, folder, old.name, by_names=False)))
    except BootseerError as error:
        raise PermanentError(
            f"{place.uri}/{target} is published, but older ones are not all removed: {error}"
        ) from error
    return Put(target, found.size_bytes, len(found.files), num_striped, latest, removed, kept_bytes)


def _dry_run(files: Files, folder: str, name: str, source: _LocalSource, policy: Policy, settings: PutSettings) -> Put:
    target = join(folder, name)
    _check_free(files, target, source, settings.replace)
    try:
        old = superseded(files, folder, name, settings.keep_last)
    except NotFoundError:  # the job does not exist yet
        old = []
    num_striped = sum(policy.is_striped(file.size_bytes) for file in source.files)
    removed = [(one.name, one.size_bytes) for one in old]
    return Put(target, source.size_bytes, len(source.files), num_striped, None, removed)


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    """Path relative to the source."""
    local: Path
    size_bytes: int
    mtime_ns: int
    mode: int


@dataclass(frozen=True, slots=True)
class _LocalSource:
    root: Path
    is_file: bool
    files: Sequence[_File]
    folders: Sequence[tuple[str, int]]
    """Paths relative to the source and their modes, parents first."""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@contextmanager
def _with_needed_space(message: str) -> Iterator[None]:
    """Add the needed space to errors of a full place."""
    try:
        yield
    except (NoSpaceError, NoSpaceNowError) as error:
        raise type(error)(f"{message}: {error}") from error


def _check_not_inside(place: Place, source: Path) -> None:
    """Refuse a place inside the source: its own files would be part of the next checkpoint."""
    scheme, _, root = place.uri.partition("://")
    if scheme == "file" and Path(root or "/").is_relative_to(os.path.realpath(source)):
        raise UsageError(f"{place.uri} lies in {source}", hint="put it into a folder outside")


def _files_of(source: Path, name: str) -> _LocalSource:
    """The files to be written; `name` is the name for a single file. Links to files are followed, as model hubs create
    them; other special files are refused."""
    with os_errors_as(UsageError, source, hint="name a local folder or file"):
        status = source.stat()
    if stat.S_ISREG(status.st_mode):
        return _LocalSource(source, True, [_file(name, source)], [])
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{source} is neither a folder nor a file", hint="name a local folder or file")
    files: list[_File] = []
    folders: list[tuple[str, int]] = []
    waiting = [source]
    while waiting:
        for local in _listed(waiting.pop()):
            path = local.relative_to(source).as_posix()
            if is_hidden(local.name):
                raise UsageError(
                    f"{local} is a part of BootSeer's own storage, not of a checkpoint",
                    hint="bootseer ckpt get or a mount shows the files of a place",
                )
            found = _status(local)
            if not stat.S_ISDIR(found.st_mode):
                files.append(_file(path, local))
            elif local.is_symlink():
                raise UsageError(f"{local} is a link to a folder", hint="copy what it shows, or put that folder")
            else:
                folders.append((path, stat.S_IMODE(found.st_mode)))
                waiting.append(local)
    if not files:
        raise UsageError(f"{source} has no files", hint="name the folder of a checkpoint")
    return _LocalSource(source, False, files, folders)


def _check_names(place: Place, name: str, source: _LocalSource) -> None:
    """Refuse invalid names now: the place would refuse them after hours of writing."""
    paths = [name, *(file.name for file in source.files), *(folder for folder, _ in source.folders)]
    for one in sorted({one for path in paths for one in path.split("/")}):
        if reason := place.name_problem(one):
            raise UsageError(f"{one!r} cannot be a name in {place.uri}: {reason}", hint="rename it")


def _check_sizes(place: Place, source: _LocalSource, policy: Policy, settings: PutSettings) -> None:
    """Refuse sizes that could not be published after hours of writing."""
    check_size(max((file.size_bytes for file in source.files if policy.is_striped(file.size_bytes)), default=0))
    most = place.max_rename_bytes(replace=settings.replace)
    # A striped file is published by a rename of its head, which is small, and a folder by one of the folder.
    is_renamed_whole = source.is_file and not policy.is_striped(source.size_bytes)
    if is_renamed_whole and most is not None and source.size_bytes > most:
        or_replace = "" if settings.replace else ", or --replace if no other process writes it"
        raise UsageError(
            f"{place.uri} takes a new file of more than {format_bytes(most)} only in stripes",
            hint=f"--stripes 2{or_replace}",
        )


def _listed(folder: Path) -> list[Path]:
    with os_errors_as(PermanentError, folder):
        return sorted(folder.iterdir())


def _status(local: Path) -> os.stat_result:
    with os_errors_as(PermanentError, local):
        return local.stat()


def _file(name: str, local: Path) -> _File:
    status = _status(local)
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{local} is not a regular file", hint="sockets, pipes and devices cannot be put")
    return _File(name, local, status.st_size, status.st_mtime_ns, stat.S_IMODE(status.st_mode) & 0o777)


def _check_free(files: Files, target: str, source: _LocalSource, replace: bool) -> None:
    """Fail early if the name is taken; the rename at the end decides."""
    try:
        existing = files.stat(target)
    except NotFoundError:
        return
    uri = f"{files.place.uri}/{target}"
    if not replace:
        raise AlreadyExistsError(f"{uri} already exists; give another name, or replace it")
    if existing.is_folder and source.is_file:
        raise IsFolderError(f"{uri} is a folder, which a file does not replace; give another name, or remove it")
    if existing.is_folder and is_job(files, target):
        raise UsageError(
            f"{uri} is a job with checkpoints of its own; it is not replaced",
            hint=f"put it into {uri}, or give another name",
            exit_code=1,
        )


def _write_all(
    files: Files,
    attempt: Attempt,
    source: _LocalSource,
    policy: Policy,
    settings: PutSettings,
    progress: Callable[[int, int], None] | None,
    leftovers: Sequence[str],
) -> int:
    """Write all files; returns the bytes that were reused from leftovers of other attempts."""
    root = attempt.path
    for path, mode in source.folders:
        # Writable for the owner until everything is written: the folders' other bits are set last.
        files.place.make_folder(f"{root}/{path}", mode=mode | 0o700)
    done, kept = Count(source.size_bytes, progress), Count(source.size_bytes, None)
    stopped = threading.Event()

    def write(file: _File) -> None:
        before = 0

        def on_progress(count: int, _: int) -> None:
            nonlocal before
            if stopped.is_set():  # an error elsewhere, or a signal: stop here
                raise PermanentError(f"{file.local}: no longer written")
            done.add(count - before)
            before = count

        with FileSource(file.local) as opened:
            if is_head_size(file.size_bytes) and peek(opened.read(0, PEEK_BYTES)) is not None:
                raise PermanentError(
                    f"{file.local} is the head of a striped file, not its content; bootseer ckpt get reads that"
                )
            if any(_reuse(files, rest, root, file, opened) for rest in leftovers):
                on_progress(file.size_bytes, file.size_bytes)
                attempt.has_whole_files = True
                kept.add(file.size_bytes)
            else:
                written = writing.write_file(
                    f"{root}/{file.name}", opened.size_bytes, opened.read,
                    mode=file.mode, policy=policy, progress=on_progress,
                )  # fmt: skip
                attempt.has_whole_files |= written.is_striped
        if _file(file.name, file.local) != file:
            raise PermanentError(f"{file.local} was changed while it was written; put it again when it is complete")

    with (
        closing(Writing(files, settings=settings.writing)) as writing,
        Tasks("bootseer-put", _FILES_AT_ONCE) as threads,
    ):
        tasks = [threads.submit(write, file) for file in source.files]
        try:
            # Each ends: a file without progress in the storage for minutes fails (`writing.lane`).
            wait(tasks, return_when=FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            stopped.set()
            for task in tasks:
                task.cancel()
    if _files_of(source.root, source.files[0].name) != source:
        raise PermanentError(f"{source.root} was changed while it was written; put it again when it is complete")
    for path, mode in reversed(source.folders):
        files.set_mode(f"{root}/{path}", mode | 0o700)  # or the owner could never remove the checkpoint
    return kept.done


def _reuse(files: Files, rest: str, root: str, file: _File, source: FileSource) -> bool:
    """Move a file from another attempt's leftovers, if it is striped, complete, and matches the source."""
    old, new = f"{rest}/{file.name}", f"{root}/{file.name}"
    target_files = Files(files.place, within=rest)
    try:
        head = target_files.head(old)
        if head is None or head.size_bytes != file.size_bytes or target_files.lost_parts(old, head):
            return False
        for at in range(0, head.size_bytes, _COMPARED_BYTES):
            data = source.read(at, min(_COMPARED_BYTES, head.size_bytes - at))
            if not head.matches(at, memoryview(data)):
                return False
        target_files.set_mode(old, file.mode)
        make_folder_like_parent(files.place, parts_folder(new, head.id).rpartition("/")[0])
        files.place.rename(parts_folder(old, head.id), parts_folder(new, head.id), replace=False)
        files.place.rename(old, new, replace=False)
    except PermanentError:  # it is written anew, which also shows what is wrong with the source
        return False
    return True


def _check_written(files: Files, root: str, source: _LocalSource) -> int:
    """Check names and lengths of everything that was written. Returns the number of striped files."""
    infos = {info.path[len(root) + 1 :]: info for info in walk(files, root)}
    existing = {name: info.size_bytes for name, info in infos.items()}
    wanted = {file.name: file.size_bytes for file in source.files}
    lost = missing_parts(files, root)
    if existing != wanted or lost:
        names = sorted(
            {name for name in wanted.keys() | existing.keys() if wanted.get(name) != existing.get(name)} | set(lost)
        )
        raise PermanentError(f"{files.place.uri}/{root}: {', '.join(names[:3])} is not as it was written; put it again")
    return sum(info.is_striped for info in infos.values())
