"""What a snapshot holds, path by path: the list that restores of single files and every verification go by.

It is JSON lines in a zstd frame, docs/formats/environment.md, and lies in a store that others write to: nothing in it
is believed before it was checked, and memory is bounded by what is parsed, not by what it says. Decides and touches
nothing. Called by `write`, by `stored_manifest`, and by whoever compares files with a snapshot.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import zstandard

from bootseer.env.changes import Action
from bootseer.env.snapshot.entry import Entry, Kind
from bootseer.env.snapshot.entry_checks import Checks, wrong
from bootseer.errors import CorruptError, PermanentError

SCHEMA = "bootseer.manifest/1"
MAX_STORED_BYTES = 256 << 20
MAX_TEXT_BYTES = 1 << 30
MAX_ENTRIES = 2_000_000
MAX_LINE_BYTES = 1 << 20
_MAX_OWNER = 2**32 - 2  # the last number means "nobody" to the kernel
_MAX_SIZE = 2**63 - 1
_LEVEL = 3
_WINDOW = 1 << 23
_STEP = 1 << 10
_KINDS: Mapping[str, Kind] = {kind: kind for kind in get_args(Kind)}


@dataclass(frozen=True, slots=True)
class Manifest:
    """All entries, sorted by the bytes of their paths."""

    entries: tuple[Entry, ...]

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of what the snapshot holds: neither what was there before nor how it is shown counts."""
        found = hashlib.sha256()
        for entry in self.entries:
            found.update(_line(_content(entry)))
        return f"sha256:{found.hexdigest()}"

    def encode(self) -> bytes:
        """The bytes for a store; the same manifest gives the same bytes. Raises `PermanentError` for too many."""
        if len(self.entries) > MAX_ENTRIES:
            raise PermanentError(f"{len(self.entries)} paths in an environment snapshot; {MAX_ENTRIES} are possible")
        compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
        parts = [compressor.compress(_line({"schema": SCHEMA, "entries": len(self.entries)}))]
        total = 0
        for entry in self.entries:
            line = _line(_content(entry) | _circumstances(entry))
            total += len(line)
            parts.append(compressor.compress(line))
        parts.append(compressor.flush())
        data = b"".join(parts)
        if total > MAX_TEXT_BYTES - MAX_LINE_BYTES or len(data) > MAX_STORED_BYTES:
            raise PermanentError(f"the manifest of an environment snapshot takes {total} bytes, too many to be read")
        return data

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read a manifest. Raises `CorruptError`, or `PermanentError` for a version that is not known here."""
        lines = _lines(data)
        head = _object(next(lines, b""))
        schema = head.get("schema")
        if schema != SCHEMA:
            if isinstance(schema, str) and schema.startswith("bootseer.manifest/"):
                raise PermanentError(f"a manifest of the version {schema[:64]!r}; this BootSeer knows {SCHEMA}")
            raise CorruptError("this is not the manifest of an environment snapshot")
        entries: list[Entry] = []
        checks = Checks()
        for line in lines:
            if len(entries) >= MAX_ENTRIES:
                raise CorruptError(f"a manifest has more than {MAX_ENTRIES} entries")
            entries.append(checks.checked(_entry(_object(line))))
        if head.get("entries") != len(entries):
            raise CorruptError(f"a manifest announces {head.get('entries')!r} entries and has {len(entries)}")
        return cls(tuple(entries))


def _content(entry: Entry) -> dict[str, Any]:
    """The part of an entry that the digest covers. What is usual is left out."""
    found: dict[str, Any] = {"path": entry.path, "kind": entry.kind, "mode": entry.mode}
    for name in ("uid", "gid", "size", "digest", "target", "link", "opaque"):
        value = getattr(entry, name)
        if value:
            found[name] = value
    if entry.xattrs:
        found["xattrs"] = {
            name: base64.b64encode(value).decode("ascii") for name, value in sorted(entry.xattrs.items())
        }
    return found


def _circumstances(entry: Entry) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if entry.action is Action.MODIFIED:
        found["modified"] = True
    if entry.before:
        found["before"] = entry.before
    if entry.loose:
        found["loose"] = True
    return found


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def _lines(data: bytes) -> Iterator[bytes]:
    if len(data) > MAX_STORED_BYTES:
        raise CorruptError(f"a manifest of {len(data)} bytes, more than the {MAX_STORED_BYTES} that are read")
    total, rest = 0, b""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
    view = memoryview(data)
    try:
        # A little at a time: four bytes may say 128 KiB.
        for at in range(0, len(data), _STEP):
            text = decompressor.decompress(view[at : at + _STEP])
            total += len(text)
            if total > MAX_TEXT_BYTES:
                raise CorruptError(f"a manifest of more than {MAX_TEXT_BYTES} bytes of text")
            *whole, rest = (rest + text).split(b"\n")
            yield from whole
            if len(rest) > MAX_LINE_BYTES:
                raise CorruptError(f"a manifest has a line of more than {MAX_LINE_BYTES} bytes")
    except zstandard.ZstdError as error:
        raise CorruptError(f"a manifest cannot be decompressed: {error}") from error
    if rest or not decompressor.eof or decompressor.unused_data:
        raise CorruptError("a manifest does not end where it should")


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorruptError("a manifest has a line that is not JSON") from error
    if not isinstance(value, dict):
        raise CorruptError("a manifest has a line that is not an object")
    return value


def _entry(value: dict[str, Any]) -> Entry:
    kind = _KINDS.get(_text(value, "kind"))
    path = _text(value, "path")
    if kind is None:
        raise wrong(path, "a kind that does not exist")
    xattrs = value.get("xattrs", {})
    if not isinstance(xattrs, dict) or not all(isinstance(content, str) for content in xattrs.values()):
        raise wrong(path, "extended attributes that are none")
    try:
        decoded = {name: base64.b64decode(content, validate=True) for name, content in xattrs.items()}
    except ValueError as error:
        raise wrong(path, "extended attributes that are none") from error
    modified = _flag(value, "modified")
    action = Action.DELETED if kind == "deleted" else Action.MODIFIED if modified else Action.ADDED
    return Entry(
        path=path,
        kind=kind,
        mode=_number(value, "mode", 0o7777),
        uid=_number(value, "uid", _MAX_OWNER),
        gid=_number(value, "gid", _MAX_OWNER),
        size=_number(value, "size", _MAX_SIZE),
        digest=_text(value, "digest"),
        target=_text(value, "target"),
        xattrs=decoded,
        link=_text(value, "link"),
        opaque=_flag(value, "opaque"),
        action=action,
        before=_text(value, "before"),
        loose=_flag(value, "loose"),
    )


def _text(value: dict[str, Any], name: str) -> str:
    found = value.get(name, "")
    if not isinstance(found, str):
        raise CorruptError(f"a manifest has a {name} that is no text")
    return found


def _flag(value: dict[str, Any], name: str) -> bool:
    found = value.get(name, False)
    if not isinstance(found, bool):
        raise CorruptError(f"a manifest has a {name} that is neither true nor false")
    return found


def _number(value: dict[str, Any], name: str, limit: int) -> int:
    found = value.get(name, 0)
    if type(found) is not int or not 0 <= found <= limit:
        raise CorruptError(f"a manifest has an impossible {name}")
    return found
