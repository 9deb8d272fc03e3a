"""Images in local files: an OCI layout, or a docker archive as `docker save` writes it.

A layout is a folder with `index.json` and `blobs/sha256/`. An archive is a tar file with a `manifest.json` that has no
digest. The image's digest is then computed from its configuration and layers, so that it is equal in all archives.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from bootseer.artifact.document import readable
from bootseer.errors import CorruptError, PermanentError, UsageError, os_errors_as
from bootseer.image.reference import Reference
from bootseer.image.sources.manifest import (
    MAX_LAYER_BYTES,
    MAX_MANIFEST_BYTES,
    Descriptor,
    Platform,
    archive_digest,
    checked,
    choose,
    read_config,
    read_diff_ids,
    resolve_manifest,
)
from bootseer.image.sources.source import ImageSource, SourceLayer, open_plain, source_of
from bootseer.store.store import parse_object

_TAG = "org.opencontainers.image.ref.name"


def open_layout(reference: Reference, platform: Platform) -> ImageSource:
    """The image of a tag, or the only image if no tag is given. Raises as `source.open_source` does."""
    where = str(reference)
    folder = Path(reference.path)
    if not (folder / "index.json").is_file():
        raise UsageError(f"{where}: {folder} is not an OCI layout", hint="name a folder with index.json in it")
    index = parse_object(_read_file(folder / "index.json", MAX_MANIFEST_BYTES), where, MAX_MANIFEST_BYTES)
    entry = _layout_entry(index, reference, platform, where)

    def read(digest: str) -> tuple[bytes, str, str]:
        data = _read_file(_blob(folder, digest), MAX_MANIFEST_BYTES)
        # Only the type of the entry's own document is known here: one below an index states its type, or is a manifest.
        media_type = entry.media_type if digest == entry.digest else ""
        return checked(data, Descriptor(digest, len(data)), where), media_type, digest

    manifest, digest = resolve_manifest(read, entry.digest, platform, where)
    data = _read_file(_blob(folder, manifest.config.digest), manifest.config.size_bytes)

    def read_layer(layer: Descriptor, start: int) -> Generator[bytes, None, None]:
        return _read_range(_blob(folder, layer.digest), 0, MAX_LAYER_BYTES, start)

    return source_of(where, digest, manifest, data, read_layer)


def _layout_entry(index: dict[str, object], reference: Reference, platform: Platform, where: str) -> Descriptor:
    rows = index.get("manifests")
    entries = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    if not entries:
        raise CorruptError(f"{where}: index.json lists no manifests")
    tags = [_tag(entry) for entry in entries]
    if reference.tag:
        entries = [entry for entry, tag in zip(entries, tags, strict=True) if tag == reference.tag]
        if not entries:
            known = ", ".join(sorted(tag for tag in tags if tag)) or "none"
            raise UsageError(f"{where}: no such tag", hint=f"tags there: {known}")
    elif len(entries) > 1 and any("platform" not in entry for entry in entries):
        raise UsageError(f"{where}: several images", hint=f"add one of the tags: {', '.join(sorted(set(tags)))}")
    if len(entries) == 1:  # a layout with a single image is used for any platform
        entries = [{key: value for key, value in entries[0].items() if key != "platform"}]
    return choose({"manifests": entries}, platform, where)


def _tag(entry: dict[str, object]) -> str:
    annotations = entry.get("annotations")
    return str(annotations.get(_TAG, "")) if isinstance(annotations, dict) else ""


def _blob(folder: Path, digest: str) -> Path:
    return folder / "blobs" / "sha256" / digest.removeprefix("sha256:")  # safe: digests were checked to be hex


def _read_file(path: Path, limit: int) -> bytes:
    with os_errors_as(PermanentError, path), open_plain(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CorruptError(f"{path}: more than {limit} bytes")
    return data


_MAX_MEMBERS = 100_000
_PIECE = 1 << 20


@readable
class _Saved(Struct, rename={"config": "Config", "layers": "Layers", "tags": "RepoTags"}):
    """One image in `manifest.json`."""

    config: str
    layers: Annotated[list[str], Meta(min_length=1)]
    tags: list[str] | None = None


def open_archive(reference: Reference) -> ImageSource:
    """The image of a name (`repository:tag`), or the only image if no name is given. Raises as `source.open_source`."""
    where = str(reference)
    path = Path(reference.path)
    members = _members(path, where)
    entry = _archive_entry(_read_document(path, members, "manifest.json", where), reference, where)
    data = _read_document(path, members, entry.config, where)
    config = read_config(data, where)
    diff_ids = read_diff_ids(config, len(entry.layers), where)
    layers = []
    for name, diff_id in zip(entry.layers, diff_ids, strict=True):
        begin, size = _locate(members, name, where)
        layers.append(SourceLayer("", size, diff_id, partial(_read_range, path, begin, size)))
    return ImageSource(where, archive_digest(data, diff_ids), config, data, tuple(layers))


def _members(path: Path, where: str) -> dict[str, tarfile.TarInfo]:
    members: dict[str, tarfile.TarInfo] = {}
    try:
        with open_plain(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                members[member.name.removeprefix("./")] = member
                if len(members) > _MAX_MEMBERS:
                    raise CorruptError(f"{where}: not a docker archive: more than {_MAX_MEMBERS} members")
    except FileNotFoundError as error:
        raise UsageError(f"{where}: no such file", hint="name the file that `docker save` wrote") from error
    except (OSError, tarfile.TarError, ValueError) as error:
        raise UsageError(f"{where}: not a tar file: {error}", hint="decompress it first if it is compressed") from error
    return members


def _archive_entry(data: bytes, reference: Reference, where: str) -> _Saved:
    try:
        entries: list[_Saved] = msgspec.json.decode(data, type=Annotated[list[_Saved], Meta(min_length=1)])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptError(f"{where}: manifest.json: {error}") from error
    if not reference.tag:
        if len(entries) > 1:
            raise UsageError(f"{where}: several images", hint=f"add one of: {', '.join(_names(entries))}")
        return entries[0]
    wanted = reference.tag if ":" in reference.tag.rpartition("/")[2] else reference.tag + ":latest"
    for entry in entries:
        if wanted in _names([entry]):
            return entry
    raise UsageError(f"{where}: no such image", hint=f"names there: {', '.join(_names(entries)) or 'none'}")


def _names(entries: list[_Saved]) -> list[str]:
    return [tag for entry in entries for tag in entry.tags or ()]


def _locate(members: dict[str, tarfile.TarInfo], name: str, where: str) -> tuple[int, int]:
    """Offset and size of a member's data. Follows links: some archives store equal layers once."""
    for _ in range(8):
        member = members.get(name.removeprefix("./"))
        if member is None:
            raise CorruptError(f"{where}: {name!r} is not in the archive")
        if member.isreg() and not member.issparse():
            return member.offset_data, member.size
        if not (member.issym() or member.islnk()):
            break
        folder = os.path.dirname(member.name) if member.issym() else ""  # noqa: PTH120 - a path in the archive
        name = os.path.normpath(os.path.join(folder, member.linkname))  # noqa: PTH118
    raise CorruptError(f"{where}: {name!r} is not a file in the archive")


def _read_document(path: Path, members: dict[str, tarfile.TarInfo], name: str, where: str) -> bytes:
    begin, size = _locate(members, name, where)
    if size > MAX_MANIFEST_BYTES:
        raise CorruptError(f"{where}: {name} has {size} bytes, more than {MAX_MANIFEST_BYTES}")
    return b"".join(_read_range(path, begin, size, 0))


def _read_range(path: Path, begin: int, size: int, start: int) -> Generator[bytes, None, None]:
    left = size - start
    with os_errors_as(PermanentError, path), open_plain(path) as file:
        file.seek(begin + start)
        while left > 0 and (piece := file.read(min(_PIECE, left))):
            left -= len(piece)
            yield piece
