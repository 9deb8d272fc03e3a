"""What the entries of a manifest must be, before anybody joins their paths with a folder's.

Decides and touches nothing. Called by `manifest`.
"""

from __future__ import annotations

import re

from bootseer.env.snapshot.entry import Entry, path_bytes
from bootseer.errors import CorruptError

MAX_PATH_BYTES = 4095
_MAX_NAME_BYTES = 255
_DIGEST = re.compile(r"blake3:[0-9a-f]{64}")
_MARKS = ("trusted.overlay.", "user.overlay.")  # overlayfs would obey them
_BEFORE = re.compile(r"(file:sha256:[0-9a-f]{64}|symlink:.{1,4095}|directory|other)?", re.DOTALL)


class Checks:
    """What entries must be, each for itself and all together."""

    def __init__(self) -> None:
        self._last = b""
        self._leaves: set[str] = set()  # what nothing can lie below
        self._first: dict[str, Entry] = {}

    def checked(self, entry: Entry) -> Entry:
        """The next entry, if it can be one. Raises `CorruptError`."""
        raw = _checked_path(entry.path)
        if raw <= self._last:
            raise wrong(entry.path, "a place where it does not belong, or twice")
        self._last = raw
        self._check_fields(entry)
        parent = entry.path.rpartition("/")[0]
        while parent:
            if parent in self._leaves:
                raise wrong(entry.path, "a place below something that is no directory")
            parent = parent.rpartition("/")[0]
        if entry.kind != "directory":
            self._leaves.add(entry.path)
            if not entry.link:
                self._first[entry.path] = entry
        if entry.link:
            first = self._first.get(entry.link)
            if first is None or (first.kind, first.digest) != (entry.kind, entry.digest) or entry.kind == "deleted":
                raise wrong(entry.path, "a hard link to what is not there")
        return entry

    def _check_fields(self, entry: Entry) -> None:
        file, symlink = entry.kind == "file", entry.kind == "symlink"
        if bool(entry.digest) != file or (file and not _DIGEST.fullmatch(entry.digest)) or (entry.size and not file):
            raise wrong(entry.path, "a size or digest that does not fit it")
        if bool(entry.target) != symlink or len(_raw(entry.target, entry.path)) > MAX_PATH_BYTES:
            raise wrong(entry.path, "a target that does not fit it")
        if entry.opaque and entry.kind != "directory":
            raise wrong(entry.path, "the mark of a directory")
        _raw(entry.before, entry.path)
        if not _BEFORE.fullmatch(entry.before):
            raise wrong(entry.path, "something before it that cannot have been")
        if any(len(_raw(name, entry.path)) > _MAX_NAME_BYTES or name.startswith(_MARKS) for name in entry.xattrs):
            raise wrong(entry.path, "extended attributes that are none")


def _checked_path(path: str) -> bytes:
    raw = _raw(path, path)
    names = raw.split(b"/")
    # One path must have one spelling: escapes are for bytes that are no UTF-8 alone.
    good = names[0] == b"" and len(raw) <= MAX_PATH_BYTES and raw.decode("utf-8", "surrogateescape") == path
    if (
        not good
        or len(names) == 1
        or any(name in {b"", b".", b".."} or len(name) > _MAX_NAME_BYTES for name in names[1:])
    ):
        raise wrong(path, "a path that is none")
    return raw


def _raw(text: str, path: str) -> bytes:
    if "\0" in text:
        raise wrong(path, "a zero byte")
    try:
        return path_bytes(text)
    except UnicodeEncodeError as error:
        raise wrong(path, "characters that no name can have") from error


def wrong(path: str, what: str) -> CorruptError:
    """The error for an entry that says what cannot be."""
    return CorruptError(f"a manifest gives {path[:200]!a} {what}")
