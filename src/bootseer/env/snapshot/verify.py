"""Compare files with a manifest.

Two tiers: `quick` compares attributes, `full` reads all files, too. The tree is a snapshot's mounted layer, or a job's
view: mounted roots, or copied files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

from bootseer.env.restoring.safe_tree import is_opaque
from bootseer.env.snapshot.contents import digest_of_file, xattrs_of
from bootseer.env.snapshot.manifest import KINDS, Entry, path_bytes
from bootseer.errors import PermanentError

Tier = Literal["quick", "full"]
MAX_DIFFERENCES = 1000
_SHOWN_EVERY = 128


class Difference(NamedTuple):
    """A path that differs from the manifest."""

    path: str
    words: str
    """The difference as text: `mode 0644, not 0755`."""


class Comparison(NamedTuple):
    """The result of a comparison."""

    differences: tuple[Difference, ...]
    """Sorted by path, at most `MAX_DIFFERENCES`."""
    num_paths: int
    """Number of compared paths."""

    def as_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"paths": self.num_paths, "differences": [one._asdict() for one in self.differences]}


def verify(
    tree: str,
    entries: Sequence[Entry],
    tier: Tier,
    *,
    layer: bool,
    owners: bool = True,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    same_content: Callable[[str], bool] | None = None,
) -> list[Difference]:
    """The differences between the tree below `tree` and the entries, sorted by path, at most `MAX_DIFFERENCES`.

    With `layer` it is a snapshot's own tree: it has no other files, deletions are whiteouts, and hard links are
    checked. Otherwise deleted paths must not exist, and there may be other files. Without `owners` user and group are
    not compared, as mounts of a user without root show their own. `progress` gets the number of done and all paths.
    `same_content`, if given, judges the content of a file instead of its size and digest.

    Unreadable files are differences; nothing is raised for them.
    """
    run = _Comparison(os.fsencode(tree).rstrip(b"/"), layer, owners, tier == "full", same_content)
    found = list(islice(run.compare(entries, progress), MAX_DIFFERENCES))
    if layer:
        found += islice(run.unknown(entries), MAX_DIFFERENCES)
    return sorted(found, key=lambda difference: path_bytes(difference.path))[:MAX_DIFFERENCES]


class _Comparison(NamedTuple):
    tree: bytes
    layer: bool
    owners: bool
    full: bool
    same_content: Callable[[str], bool] | None

    def compare(self, entries: Sequence[Entry], progress: Callable[[int, int], None]) -> Iterator[Difference]:
        for done, entry in enumerate(entries, 1):
            if words := self._describe(entry):
                yield Difference(entry.path, words)
            if done % _SHOWN_EVERY == 0 or done == len(entries):
                progress(done, len(entries))

    def unknown(self, entries: Sequence[Entry]) -> Iterator[Difference]:
        """Paths of the layer that are neither entries nor their parent directories."""
        known = set()
        for entry in entries:
            path = path_bytes(entry.path)
            while path and path not in known:
                known.add(path)
                path = path.rpartition(b"/")[0]
        for folder, folders, files in os.walk(self.tree):  # unreadable directories were reported before
            for path in (folder[len(self.tree) :] + b"/" + name for name in (*folders, *files)):
                if path not in known:
                    yield Difference(os.fsdecode(path), "in no manifest")

    def _describe(self, entry: Entry) -> str:
        path = self.tree + path_bytes(entry.path)
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            is_hidden = entry.kind == "deleted" and (not self.layer or is_opaque(path.rpartition(b"/")[0]))
            return "" if is_hidden else "missing"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        try:
            return "; ".join(self._differences(entry, path, status))
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        except PermanentError as error:
            return str(error)

    def _differences(self, entry: Entry, path: bytes, status: os.stat_result) -> Iterator[str]:
        if entry.kind == "deleted":
            if not self.layer:
                yield "there, although the setup deleted it"
            elif not (stat.S_ISCHR(status.st_mode) and status.st_rdev == 0):
                yield "not marked as deleted"
            return
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "device or socket")
        if kind != entry.kind:
            yield f"a {kind}, not a {entry.kind}"
            return
        if kind != "symlink" and stat.S_IMODE(status.st_mode) != entry.mode:
            yield f"mode {stat.S_IMODE(status.st_mode):04o}, not {entry.mode:04o}"
        if self.owners and (status.st_uid, status.st_gid) != (entry.uid, entry.gid):
            yield f"owner {status.st_uid}:{status.st_gid}, not {entry.uid}:{entry.gid}"
        if kind == "symlink" and (target := os.readlink(path)) != path_bytes(entry.target):  # noqa: PTH115
            yield f"points to {os.fsdecode(target)!r}, not {entry.target!r}"
        yield from self._xattrs(entry, path)
        if self.layer:
            yield from self._layer_differences(entry, path, status)
        if kind == "file" and (words := self._content_differs(entry, path, status)):
            yield words

    def _content_differs(self, entry: Entry, path: bytes, status: os.stat_result) -> str:
        if self.same_content is not None:
            return "" if self.same_content(entry.path) else "other content"
        if status.st_size != entry.size:
            return f"{status.st_size} bytes, not {entry.size}"
        differs = self.full and not (entry.link and self.layer) and _digest(path) != entry.digest
        return "other content" if differs else ""

    def _xattrs(self, entry: Entry, path: bytes) -> Iterator[str]:
        found = {os.fsdecode(name): value for name, value in xattrs_of(os.fsdecode(path)).items()}
        for name in sorted(found.keys() | entry.xattrs.keys()):
            # Readable only by root.
            hidden = name.startswith("trusted.") and name not in found
            if not hidden and found.get(name) != entry.xattrs.get(name):
                yield f"extended attribute {name} is not what it was"

    def _layer_differences(self, entry: Entry, path: bytes, status: os.stat_result) -> Iterator[str]:
        if entry.link:
            first = os.lstat(self.tree + path_bytes(entry.link))
            if (first.st_dev, first.st_ino) != (status.st_dev, status.st_ino):
                yield f"no hard link to {entry.link}"
        if stat.S_ISDIR(status.st_mode) and is_opaque(path) != entry.opaque:
            yield "shows what lies below" if entry.opaque else "hides what lies below"


def _digest(path: bytes) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        return digest_of_file(file)
