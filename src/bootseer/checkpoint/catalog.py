"""The checkpoints of a job: listing, completeness, removal, retention; and the layout of one file (`anatomy`).

A checkpoint is a folder in the job's folder, or a file there with an ending that training code uses, with no ending, or
that `latest` names. Trees written without BootSeer are listed as well.

`anatomy` shows both where a head says that parts were put and where they are now: HDFS moves blocks when nodes come and
go.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from bootseer.checkpoint.attempts import collect
from bootseer.checkpoint.files import FileInfo, Files, check_visible
from bootseer.checkpoint.head import ATTEMPTS, Head, Part, Segment, part_path
from bootseer.checkpoint.latest import LATEST, STEP_NAME, drop_latest, latest_or_none, step_of
from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.errors import AccessError, BootseerError, CorruptError, IsFolderError, NotFoundError, UsageError
from bootseer.io.tasks import Tasks
from bootseer.places.place import join, name_of

_ENDINGS = (
    ".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".tar", ".npz", ".pkl", ".distcp", ".h5", ".keras",
    ".onnx", ".gguf", ".msgpack", ".zip", ".gz", ".zst",
)  # fmt: skip
_OTHERS = ("README", "LICENSE", "NOTICE", "Makefile", "Dockerfile")
_NUMBER = re.compile(r"\d+")
_AT_ONCE = 4
"""Checkpoints that are measured in parallel; the files of each are, too."""


class Checkpoint(Struct, frozen=True):
    """A published checkpoint."""

    name: str
    path: str
    is_folder: bool
    step: int | None
    """The number at the end of its name; None without one."""
    size_bytes: int
    num_files: int
    num_striped: int
    """Number of striped files."""
    mtime_ns: int
    """The latest modification time of its files."""
    is_latest: bool


def checkpoints(files: Files, folder: str, refused: Callable[[str], None] = lambda name: None) -> list[Checkpoint]:
    """The readable checkpoints in a folder, newest last: by step, and those without a step by time.

    `refused` is called with the names of unreadable ones.
    """
    latest = latest_or_none(files.place, folder)
    return _sorted(files, [info for info in files.list(folder) if _is_checkpoint(info, latest)], latest, refused)


def walk(files: Files, path: str, *, folders: bool = False) -> Iterator[FileInfo]:
    """All files of a checkpoint, or the file that it is; with `folders` those below it too. Raises `NotFoundError`."""
    info = files.stat(path)
    if not info.is_folder:
        yield info
        return
    waiting = [path]
    while waiting:
        for below in files.list(waiting.pop()):
            if below.is_folder:
                waiting.append(below.path)
            if folders or not below.is_folder:
                yield below


def also_folders(infos: Iterable[FileInfo]) -> list[str]:
    """Files that have the name of a folder, as tools can make them in a bucket. Of these, other programs see one."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for info in infos:
        names[info.is_folder].add(info.path)
    return sorted(names[True] & names[False])


FILE_AND_FOLDER: Final = "is a file and a folder; rename one of them with the tool that made them"


def missing_parts(files: Files, path: str) -> list[str]:
    """Paths of a checkpoint's parts that are missing or of the wrong length, by listings alone."""

    def missing(one: str) -> list[str]:
        head = files.head(one)
        return [] if head is None else [part_path(one, head.id, name) for name in files.lost_parts(one, head)]

    striped = [info.path for info in walk(files, path) if info.is_striped]
    with Tasks("bootseer-parts", _AT_ONCE) as threads:
        return [part for parts in threads.map(missing, striped) for part in parts]


UNSAVED: Final = "was not saved completely: PyTorch's .metadata is missing"


def unsaved(paths: Iterable[str]) -> set[str]:
    """The folders with checkpoints of PyTorch's DCP whose save did not end, of these paths of files."""
    names = [path.rpartition("/") for path in paths]
    # PyTorch writes that last. A folder may hold several of its checkpoints.
    saved = {folder for folder, _, name in names if name.endswith(".metadata")}
    return {folder for folder, _, name in names if name.endswith(".distcp")} - saved


def flaw(files: Files, path: str) -> str:
    """Why a checkpoint is not complete, by listings alone, to follow its name and "which"; "" if it seems to be."""
    try:
        names = [info.path for info in walk(files, path)]
        if unsaved(names):
            return UNSAVED
        if not names:
            return "is empty"
        return "has lost some of its parts" if missing_parts(files, path) else ""
    except CorruptError as error:
        return f"is damaged: {error}"
    except NotFoundError:
        return "does not exist"


def newest_whole(files: Files, folder: str, *, without: str | None = None) -> str | None:
    """The name of the newest complete checkpoint; None if there is none."""
    names = (found.name for found in reversed(checkpoints(files, folder)))
    return next((name for name in names if name != without and not flaw(files, join(folder, name))), None)


def remove(files: Files, folder: str, name: str, *, force: bool = False, by_names: bool = True) -> int:
    """Remove a checkpoint, hidden first, so that no reader gets a part of it. Returns its size in bytes.

    Raises `UsageError` for the one that `latest` names, and for a job's folder (`by_names`: see `is_job`). With `force`
    they are removed, and `latest` names the newest complete one of the others.
    """
    path = join(folder, name)
    check_visible(path)
    found = _measured(files, files.stat(path), None)
    if found.is_folder and not force and is_job(files, path, by_names=by_names):
        raise UsageError(
            f"{files.place.uri}/{path} is a job with checkpoints of its own; nothing was removed",
            hint="name one of its checkpoints, or --force",
            exit_code=1,
        )
    is_latest = latest_or_none(files.place, folder) == name
    if is_latest and not force:
        raise UsageError(
            f"{files.place.uri}/{path} is what `latest` names; nothing was removed",
            hint="--force, or let latest name another one first",
            exit_code=1,
        )
    if is_latest:
        drop_latest(files, folder, name, other := newest_whole(files, folder, without=name))
    try:
        if found.is_folder:
            files.remove_folder(path, recursive=True)
        else:
            files.remove(path)
    except AccessError:  # it is shown again
        if is_latest and not flaw(files, path):
            drop_latest(files, folder, other, name)
        raise
    collect(files.place, folder)
    return found.size_bytes


def superseded(files: Files, folder: str, name: str, keep: int | None) -> list[Checkpoint]:
    """The checkpoints beyond the `keep` newest ones, among which `name` is counted, oldest first; none for None.

    Only those whose names differ from `name` in their numbers alone, and have a lower step. Never what `latest` names,
    nor a job; none for a name without a step.
    """
    step, kind = step_of(name), _NUMBER.sub("#", name)
    if step is None or keep is None:
        return []
    alike = [one for one in checkpoints(files, folder) if one.name != name and _NUMBER.sub("#", one.name) == kind]
    older = [one for one in alike if one.step is not None and one.step < step]
    # With fewer than `keep` in all, the difference is negative, and would count from the end of the list.
    num_removed = min(max(len(alike) + 1 - keep, 0), len(older))
    return [one for one in older[:num_removed] if not one.is_latest and not (one.is_folder and is_job(files, one.path))]


def is_job(files: Files, path: str, *, by_names: bool = False) -> bool:
    """Whether a folder is a job: checkpoints were put into it. With `by_names` also if folders in it are named by their
    steps, and it is not itself, as a `checkpoint-9` that contains DeepSpeed's `global_step9`."""
    names = [name_of(entry.path) for entry in files.place.list(path) if entry.is_folder]
    is_named_so = by_names and not STEP_NAME.match(name_of(path)) and any(map(STEP_NAME.match, names))
    return ATTEMPTS in names or is_named_so


def _is_checkpoint(info: FileInfo, latest: str | None) -> bool:
    name = name_of(info.path)
    if info.is_folder:
        return not name.startswith(".")
    is_bare = "." not in name and name not in _OTHERS
    return name != LATEST and (is_bare or name == latest or name.endswith(_ENDINGS))


def _sorted(
    files: Files, infos: Sequence[FileInfo], latest: str | None, refused: Callable[[str], None]
) -> list[Checkpoint]:
    found = []
    with Tasks("bootseer-list", _AT_ONCE) as threads:
        for info, measuring in [(info, threads.submit(_measured, files, info, latest)) for info in infos]:
            try:
                found.append(measuring.result())
            except NotFoundError:  # removed meanwhile
                continue
            except AccessError:  # another user's
                refused(name_of(info.path))
    return sorted(found, key=lambda one: (one.step is not None, one.step or 0, one.mtime_ns))


def _measured(files: Files, info: FileInfo, latest: str | None) -> Checkpoint:
    name = name_of(info.path)
    inside = list(walk(files, info.path)) if info.is_folder else [info]
    return Checkpoint(
        name=name,
        path=info.path,
        is_folder=info.is_folder,
        step=step_of(name),
        size_bytes=sum(file.size_bytes for file in inside),
        num_files=len(inside),
        num_striped=sum(file.is_striped for file in inside),
        mtime_ns=max(file.entry.mtime_ns for file in [info, *inside]),
        is_latest=name == latest,
    )


_PARTS_AT_ONCE = 16


def anatomy(files: Files, path: str) -> dict[str, Any]:
    """The layout of one file, as `bootseer ckpt stat --json` prints it. Raises `NotFoundError`, `IsFolderError`, and
    `CorruptError` for a damaged head.

    `bytes_by_node` counts each replica, also of the parity. An ordinary file has no `segments`. A part is now on
    `nodes` (none: unknown), and was written to those in `put_on`.
    """
    info = files.stat(path)
    if info.is_folder:
        raise IsFolderError(f"{files.place.uri}/{path} is a folder; name one of its files")
    head = files.head(path)
    lost = set() if head is None else set(files.lost_parts(path, head))

    def look(head: Head, segment: Segment, part: Part) -> dict[str, Any]:
        nodes: tuple[str, ...] = ()
        problem = "missing, or of the wrong length" if part.name in lost else ""
        if not problem:
            try:
                with contextlib.closing(files.place.open(part_path(path, head.id, part.name))) as file:
                    nodes = file.nodes(0)
            except BootseerError as error:
                problem = str(error)
        return {
            "name": part.name,
            "kind": "parity" if part is segment.parity else "data",
            "size_bytes": part.size_bytes,
            "sha256": part.sha256,
            "nodes": list(nodes),
            "put_on": list(part.nodes),
            "problem": problem,
        }

    segments: list[dict[str, Any]] = []
    by_node = Counter(_ordinary_nodes(files, path) if head is None else {})
    if head is not None:
        with Tasks("bootseer-stat", _PARTS_AT_ONCE) as threads:
            pending = [[threads.submit(look, head, one, part) for part in one.all_parts] for one in head.segments]
            for one, parts in zip(head.segments, pending, strict=True):
                found = [part.result() for part in parts]
                segments.append({"start": one.start, "size_bytes": one.size_bytes, "parts": found})
                for part in found:
                    by_node.update(dict.fromkeys(part["nodes"], part["size_bytes"]))
    entry = info.entry
    return {
        "size_bytes": info.size_bytes,
        "striped": info.is_striped,
        "id": "" if head is None else head.id,
        "mode": f"{entry.mode:04o}",
        "owner": entry.owner,
        "group": entry.group,
        "changed_at": entry.mtime_ns / 1e9,
        "bytes_by_node": dict(by_node),
        "segments": segments,
    }


def _ordinary_nodes(files: Files, path: str) -> Mapping[str, int]:
    by_node: Counter[str] = Counter()
    with contextlib.closing(files.place.open(path)) as file:
        # Blocks end at multiples of 1 MiB, except at the end of a file.
        for offset in range(0, file.size_bytes, CHUNK_BYTES):
            by_node.update(dict.fromkeys(file.nodes(offset), min(CHUNK_BYTES, file.size_bytes - offset)))
    return by_node
