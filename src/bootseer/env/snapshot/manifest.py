"""The manifest of a snapshot: its paths with attributes and digests, for restores of single files and verification.

JSON lines in a zstd frame (docs/formats/environment.md). It comes from a store that others may write to: all fields are
checked, and memory is bounded by the parsed bytes, not by announced sizes. Does no I/O.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
import zstandard
from msgspec import Meta, Struct, field

from bootseer.artifact.document import convert, readable
from bootseer.errors import CorruptError, PermanentError

SCHEMA = "bootseer.manifest/1"
MAX_STORED_BYTES = 256 << 20
MAX_TEXT_BYTES = 1 << 30
MAX_ENTRIES = 2_000_000
MAX_LINE_BYTES = 1 << 20
_MAX_OWNER = 2**32 - 2  # the last number means `nobody` to the kernel
_LEVEL = 3
_WINDOW = 1 << 23
_STEP = 1 << 10
MAX_PATH_BYTES = 4095
_MAX_NAME_BYTES = 255
_MARKS = ("trusted.overlay.", "user.overlay.")  # overlayfs would interpret them


Kind = Literal["file", "directory", "symlink", "fifo", "deleted"]
KINDS: Mapping[int, Kind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
}
"""By file type, as in `st_mode`."""
_BEFORE = r"\A(file:sha256:[0-9a-f]{64}|symlink:[\s\S]{1,4095}|directory|other)?\Z"


@readable
class Entry(Struct, frozen=True, omit_defaults=True):
    """One path of a snapshot, as a manifest has it. Directories on the way to it that did not change themselves have no
    entry."""

    path: str
    """Absolute, as the setup saw it; bytes that are not UTF-8 are surrogate escapes."""
    kind: Kind
    mode: Annotated[int, Meta(ge=0, le=0o7777)] = 0
    """Permission bits with set-user-id and the like; 0 for a deletion."""
    uid: Annotated[int, Meta(ge=0, le=_MAX_OWNER)] = 0
    gid: Annotated[int, Meta(ge=0, le=_MAX_OWNER)] = 0
    size: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Bytes of a file."""
    digest: Annotated[str, Meta(pattern=r"\A(blake3:[0-9a-f]{64})?\Z")] = ""
    """`blake3:<hex>` of a file's content as the snapshot has it."""
    target: str = ""
    """Target of a symbolic link."""
    link: str = ""
    """For a hard link: the first path of the file. All other fields are repeated."""
    opaque: bool = False
    """Whether a directory hides the one below."""
    xattrs: Mapping[str, bytes] = field(default_factory=dict)
    modified: bool = False
    """Whether the path existed before."""
    before: Annotated[str, Meta(pattern=_BEFORE)] = ""
    """See `Change.before`."""


class Manifest(Struct, frozen=True):
    """All entries, sorted by the bytes of their paths."""

    entries: tuple[Entry, ...]

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of the snapshot's content, without previous states."""
        found = hashlib.sha256()
        for entry in self.entries:
            value = _fields(entry)
            found.update(_line({name: value[name] for name in value if name not in _CIRCUMSTANCES}))
        return f"sha256:{found.hexdigest()}"

    def encode(self) -> bytes:
        """The bytes for a store; the same manifest gives the same bytes. Raises `PermanentError` for too many."""
        if len(self.entries) > MAX_ENTRIES:
            raise PermanentError(f"{len(self.entries)} paths in an environment snapshot; {MAX_ENTRIES} are possible")
        compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
        parts = [compressor.compress(_line({"schema": SCHEMA, "entries": len(self.entries)}))]
        total = 0
        for entry in self.entries:
            line = _line(_fields(entry))
            total += len(line)
            parts.append(compressor.compress(line))
        parts.append(compressor.flush())
        data = b"".join(parts)
        if total > MAX_TEXT_BYTES - MAX_LINE_BYTES or len(data) > MAX_STORED_BYTES:
            raise PermanentError(f"the manifest of an environment snapshot takes {total} bytes, too many to be read")
        return data

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read a manifest. Raises `CorruptError`, or `PermanentError` for an unknown version."""
        lines = _lines(data)
        head = _object(next(lines, b""))
        schema = head.get("schema")
        if schema != SCHEMA:
            if isinstance(schema, str) and schema.startswith("bootseer.manifest/"):
                raise PermanentError(f"a manifest of the version {schema[:64]!r}; this BootSeer supports {SCHEMA}")
            raise CorruptError("this is not the manifest of an environment snapshot")
        some = islice(lines, MAX_ENTRIES + 1)
        entries = tuple(_checked(convert(_object(line), Entry, "manifest entry") for line in some))
        if head.get("entries") != len(entries) or len(entries) > MAX_ENTRIES:
            raise CorruptError(f"a manifest announces {head.get('entries')!r} entries and has {len(entries)}")
        return cls(entries)


def path_bytes(path: str) -> bytes:
    """A path in bytes, by which manifests are sorted."""
    return path.encode("utf-8", "surrogateescape")


_CIRCUMSTANCES = ("modified", "before")
"""Fields that the digest does not cover."""


def _fields(entry: Entry) -> dict[str, Any]:
    """The fields without default values, but always with the mode."""
    found: dict[str, Any] = {"path": entry.path, "kind": entry.kind, "mode": entry.mode}
    found.update(msgspec.to_builtins(entry))
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
        # In small steps: four bytes may decompress to 128 KiB.
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


def _checked(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries; raises `CorruptError` for one that is impossible, alone or after those before it."""
    last = b""
    leaves: list[bytes] = []  # paths that are not directories and that the current path begins with, the longest last
    first_names: dict[str, Entry] = {}
    for entry in entries:
        raw = _checked_path(entry.path)
        if raw <= last:
            raise _wrong(entry.path, "out of order, or twice")
        last = raw
        _check_fields(entry)
        # Whatever lies between a path and those below it begins with that path, too. Not by looking up each folder
        # above: a path may have two thousand.
        while leaves and not raw.startswith(leaves[-1]):
            leaves.pop()
        if leaves and raw.startswith(leaves[-1] + b"/"):
            raise _wrong(entry.path, "a place below something that is not a directory")
        if entry.kind != "directory":
            leaves.append(raw)
            if not entry.link:
                first_names[entry.path] = entry
        if entry.link:
            first = first_names.get(entry.link)
            if first is None or (first.kind, first.digest) != (entry.kind, entry.digest) or entry.kind == "deleted":
                raise _wrong(entry.path, "a hard link to a missing file")
        yield entry


def _check_fields(entry: Entry) -> None:
    file, symlink = entry.kind == "file", entry.kind == "symlink"
    if bool(entry.digest) != file or (entry.size and not file):
        raise _wrong(entry.path, "a size or digest that does not fit it")
    if bool(entry.target) != symlink or len(_name_bytes(entry.target, entry.path)) > MAX_PATH_BYTES:
        raise _wrong(entry.path, "a target that does not fit it")
    if entry.opaque and entry.kind != "directory":
        raise _wrong(entry.path, "the mark of a directory")
    _name_bytes(entry.before, entry.path)
    if any(len(_name_bytes(name, entry.path)) > _MAX_NAME_BYTES or name.startswith(_MARKS) for name in entry.xattrs):
        raise _wrong(entry.path, "malformed extended attributes")


def _checked_path(path: str) -> bytes:
    raw = _name_bytes(path, path)
    names = raw.split(b"/")
    # Each path must have only one spelling: escapes are only for bytes that are not UTF-8.
    good = names[0] == b"" and len(raw) <= MAX_PATH_BYTES and raw.decode("utf-8", "surrogateescape") == path
    if (
        not good
        or len(names) == 1
        or any(name in {b"", b".", b".."} or len(name) > _MAX_NAME_BYTES for name in names[1:])
    ):
        raise _wrong(path, "an invalid path")
    return raw


def _name_bytes(text: str, path: str) -> bytes:
    if "\0" in text:
        raise _wrong(path, "a zero byte")
    try:
        return path_bytes(text)
    except UnicodeEncodeError as error:
        raise _wrong(path, "characters that no name can have") from error


def _wrong(path: str, message: str) -> CorruptError:
    return CorruptError(f"a manifest gives {path[:200]!a} {message}")
