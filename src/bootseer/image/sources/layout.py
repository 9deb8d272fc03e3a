"""Images in an OCI layout: a folder with `index.json` and `blobs/sha256/`. Called by `source`."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from pathlib import Path

from bootseer.artifact.document import parse_object
from bootseer.errors import CorruptError, PermanentError, UsageError
from bootseer.image.reference import Reference
from bootseer.image.sources.manifest import (
    MAX_MANIFEST_BYTES,
    Descriptor,
    Platform,
    checked,
    choose,
    read_config,
    read_diff_ids,
    resolve_manifest,
)
from bootseer.image.sources.source import Source, SourceLayer, open_plain

_TAG = "org.opencontainers.image.ref.name"
_PIECE = 1 << 20


def open_layout(reference: Reference, platform: Platform) -> Source:
    """The image of a tag, or the only one."""
    where = str(reference)
    folder = Path(reference.path)
    if not (folder / "index.json").is_file():
        raise UsageError(f"{where}: {folder} is not an OCI layout", hint="name a folder with index.json in it")
    index = parse_object(_read_file(folder / "index.json", MAX_MANIFEST_BYTES), where, MAX_MANIFEST_BYTES)
    entry = _entry(index, reference, platform, where)

    def read(digest: str) -> tuple[bytes, str, str]:
        data = _read_file(_blob(folder, digest), MAX_MANIFEST_BYTES)
        return checked(data, Descriptor(digest, len(data)), where), entry.media_type, digest

    manifest, digest = resolve_manifest(read, entry.digest, platform, where)
    data = _read_file(_blob(folder, manifest.config.digest), manifest.config.size_bytes)
    config = read_config(checked(data, manifest.config, f"{where}: the configuration"), where)
    diff_ids = read_diff_ids(config, len(manifest.layers), where)
    layers = tuple(
        SourceLayer(layer.digest, layer.size_bytes, diff_id, partial(read_file_from, _blob(folder, layer.digest)))
        for layer, diff_id in zip(manifest.layers, diff_ids, strict=True)
    )
    return Source(where, digest, config, data, layers, manifest=manifest.data)


def read_file_from(path: Path, start: int) -> Generator[bytes, None, None]:
    """A file from an offset on."""
    try:
        with open_plain(path) as file:
            file.seek(start)
            while piece := file.read(_PIECE):
                yield piece
    except OSError as error:
        raise PermanentError(f"{path}: {error.strerror}") from error


def _entry(index: dict[str, object], reference: Reference, platform: Platform, where: str) -> Descriptor:
    rows = index.get("manifests")
    entries = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    if not entries:
        raise CorruptError(f"{where}: its index.json has no manifests")
    tags = [_tag(entry) for entry in entries]
    if reference.tag:
        entries = [entry for entry, tag in zip(entries, tags, strict=True) if tag == reference.tag]
        if not entries:
            known = ", ".join(sorted(tag for tag in tags if tag)) or "none"
            raise UsageError(f"{where}: no such tag", hint=f"tags there: {known}")
    elif len(entries) > 1 and any("platform" not in entry for entry in entries):
        raise UsageError(f"{where}: several images", hint=f"add one of the tags: {', '.join(sorted(set(tags)))}")
    if len(entries) == 1:  # whatever platform it is for: there is no other
        entries = [{key: value for key, value in entries[0].items() if key != "platform"}]
    return choose({"manifests": entries}, platform, where)


def _tag(entry: dict[str, object]) -> str:
    annotations = entry.get("annotations")
    return str(annotations.get(_TAG, "")) if isinstance(annotations, dict) else ""


def _blob(folder: Path, digest: str) -> Path:
    return folder / "blobs" / "sha256" / digest.removeprefix("sha256:")  # a manifest's digests are checked to be hex


def _read_file(path: Path, limit: int) -> bytes:
    try:
        with open_plain(path) as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise PermanentError(f"{path}: {error.strerror}") from error
    if len(data) > limit:
        raise CorruptError(f"{path}: more than {limit} bytes")
    return data
