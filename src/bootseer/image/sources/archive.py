"""Images in a docker archive: the tar file of `docker save`, with `manifest.json` in it. Called by `source`.

The archive has no manifest with a digest. One is made of what identifies the image, its configuration and layers, so
that the same image in two archives has the same digest.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Generator
from functools import partial
from pathlib import Path

from bootseer.errors import CorruptError, PermanentError, UsageError
from bootseer.image.reference import Reference
from bootseer.image.sources.manifest import MAX_MANIFEST_BYTES, archive_digest, read_config, read_diff_ids
from bootseer.image.sources.source import Source, SourceLayer, open_plain

_MAX_MEMBERS = 100_000
_PIECE = 1 << 20


def open_archive(reference: Reference) -> Source:
    """The image of a name (`repository:tag`), or the only one."""
    where = str(reference)
    path = Path(reference.path)
    members = _members(path, where)
    entry = _entry(_small(path, members, "manifest.json", where), reference, where)
    config_name, layer_names = entry.get("Config"), entry.get("Layers")
    if not isinstance(config_name, str) or not isinstance(layer_names, list) or not layer_names:
        raise CorruptError(f"{where}: manifest.json names no configuration or no layers")
    data = _small(path, members, config_name, where)
    config = read_config(data, where)
    diff_ids = read_diff_ids(config, len(layer_names), where)
    layers = []
    for name, diff_id in zip(layer_names, diff_ids, strict=True):
        begin, size = _place(members, str(name), where)
        layers.append(SourceLayer("", size, diff_id, partial(_read_range, path, begin, size)))
    return Source(where, archive_digest(data, diff_ids), config, data, tuple(layers))


def _members(path: Path, where: str) -> dict[str, tarfile.TarInfo]:
    """Everything in the archive, by name. Only headers are read."""
    members: dict[str, tarfile.TarInfo] = {}
    try:
        with open_plain(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                members[member.name.removeprefix("./")] = member
                if len(members) > _MAX_MEMBERS:
                    raise CorruptError(f"{where}: more than {_MAX_MEMBERS} members, this is no docker archive")
    except FileNotFoundError as error:
        raise UsageError(f"{where}: no such file", hint="name the file that `docker save` wrote") from error
    except (OSError, tarfile.TarError, ValueError) as error:
        raise UsageError(f"{where}: not a tar file: {error}", hint="decompress it first if it is compressed") from error
    return members


def _entry(data: bytes, reference: Reference, where: str) -> dict[str, object]:
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{where}: manifest.json is not JSON: {error}") from error
    entries = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    if not entries:
        raise CorruptError(f"{where}: manifest.json names no image")
    if not reference.tag:
        if len(entries) > 1:
            raise UsageError(f"{where}: several images", hint=f"add one of: {', '.join(_names(entries))}")
        return entries[0]
    wanted = reference.tag if ":" in reference.tag.rpartition("/")[2] else reference.tag + ":latest"
    for entry in entries:
        if wanted in _names([entry]):
            return entry
    raise UsageError(f"{where}: no such image", hint=f"names there: {', '.join(_names(entries)) or 'none'}")


def _names(entries: list[dict[str, object]]) -> list[str]:
    found: list[str] = []
    for entry in entries:
        tags = entry.get("RepoTags")
        found += [str(tag) for tag in tags] if isinstance(tags, list) else []
    return found


def _place(members: dict[str, tarfile.TarInfo], name: str, where: str) -> tuple[int, int]:
    """Where a member's data lies. Equal layers are links to one member in some archives."""
    for _ in range(8):
        member = members.get(name.removeprefix("./"))
        if member is None:
            raise CorruptError(f"{where}: {name!r} is not in the archive")
        if member.isreg() and not member.issparse():
            return member.offset_data, member.size
        if not (member.issym() or member.islnk()):
            break
        beside = os.path.dirname(member.name) if member.issym() else ""  # noqa: PTH120 - of an archive, not a host
        name = os.path.normpath(os.path.join(beside, member.linkname))  # noqa: PTH118
    raise CorruptError(f"{where}: {name!r} is not a file of the archive")


def _small(path: Path, members: dict[str, tarfile.TarInfo], name: str, where: str) -> bytes:
    begin, size = _place(members, name, where)
    if size > MAX_MANIFEST_BYTES:
        raise CorruptError(f"{where}: {name} has {size} bytes")
    return b"".join(_read_range(path, begin, size, 0))


def _read_range(path: Path, begin: int, size: int, start: int) -> Generator[bytes, None, None]:
    left = size - start
    try:
        with open_plain(path) as file:
            file.seek(begin + start)
            while left > 0 and (piece := file.read(min(_PIECE, left))):
                left -= len(piece)
                yield piece
    except OSError as error:
        raise PermanentError(f"{path}: {error.strerror}") from error
