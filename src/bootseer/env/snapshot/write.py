"""Write a setup's changes as a snapshot: one EROFS block file and one manifest, both canonical.

The same files give the same two objects, independent of time, place and order of writing. Files are read, checked and
stored by the caller's thread, and compressed in others. Nothing is buffered on disk, and in memory only what is in
flight.

The tree has overlayfs' form: a deletion becomes a whiteout, a directory that replaces one is marked opaque for both
kinds of overlay mounts. Unchanged parent directories are in the tree, too, with the attributes of the real ones: an
overlay shows the attributes of the uppermost directory.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from bootseer.artifact.objects import put_once
from bootseer.blocks.block_file import BlockFile
from bootseer.blocks.writer import BlockWriter
from bootseer.env.capturing.exclude import Kind as PathKind
from bootseer.env.changes import Change
from bootseer.env.restoring.roots import is_checked
from bootseer.env.restoring.safe_tree import OPAQUE
from bootseer.env.snapshot.bytecode import Source, Times, settle_header
from bootseer.env.snapshot.contents import (
    SMALL_BYTES,
    Item,
    digest_of,
    inspect_changes,
    path_errors,
    read_pieces,
    read_whole,
    xattrs_of,
)
from bootseer.env.snapshot.manifest import MAX_ENTRIES, Entry, Manifest, path_bytes
from bootseer.env.snapshot.secret_check import SecretCheck, raise_if_secret
from bootseer.erofs.format import BLOCK, Attributes
from bootseer.erofs.writer import ROOT, ErofsWriter, Extent
from bootseer.errors import PermanentError
from bootseer.io.retry import retrying
from bootseer.logs import logger
from bootseer.store.store import Store, Stored
from bootseer.units import format_bytes

_MANIFEST_DEADLINE_S = 300.0


def store_manifest(store: Store, manifest: Manifest) -> Stored:
    """Put a manifest into a store, with retries. Raises what the store raises."""
    data = manifest.encode()
    return retrying(lambda left_s: put_once(store, None, data), deadline_s=_MANIFEST_DEADLINE_S)


MAX_BYTES = 256 << 30
"""Including holes: digesting a sparse file of a terabyte takes minutes."""
_ALONE = (0, 0)
_log = logger(__name__)
_ATTEMPTS = 3
_DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Written:
    """A snapshot that was written to a store, without a document yet."""

    file: BlockFile
    manifest: Stored
    digest: str
    """Of the content (`Manifest.digest`)."""
    entries: tuple[Entry, ...]
    num_files: int
    size_bytes: int
    """Of all files, counting hard links once."""
    left_out: tuple[str, ...]
    """Paths of unsupported kinds, each with the reason."""
    loose: Stored | None = None
    """Manifest of the paths that a restore must check; None if there are none."""


def write_snapshot(
    store: Store,
    changes: Iterable[Change],
    *,
    began_s: float,
    check: SecretCheck,
    ended_s: float | None = None,
    root: str = "/",
    is_loose: Callable[[str], bool] = lambda _: False,
    threads: int | None = None,
) -> Written:
    """Write the snapshot of these changes to a store.

    `began_s` and `ended_s` are the times of the setup, in seconds since 1970: a file that was changed later is an
    error. `root` is a folder with the whole tree as the setup left it, for unchanged directories and Python sources.
    `is_loose` returns whether a path is copied on a host instead of mounted. `check` checks everything before it is
    stored, so that no secret leaves this process.

    Raises `PermanentError` for files that are unreadable, changed, secret or too large, and what the store raises.
    After an error there is nothing in the store that could be taken for a snapshot.
    """
    began = time.monotonic()
    items, left_out = inspect_changes(changes, ended_s)
    for line in left_out:
        _log.info("not in the snapshot: %s", line)
    items = [item for item in items if not (item.python_source and is_loose(item.path))]
    size_bytes = sum(item.entry.size for item in items)
    if size_bytes > MAX_BYTES or len(items) > MAX_ENTRIES:
        raise PermanentError(
            f"the setup left {format_bytes(size_bytes)} in {len(items)} paths; a snapshot holds at most "
            f"{format_bytes(MAX_BYTES)} in {MAX_ENTRIES}"
        )
    _check_names(items, check)
    threads = threads or min(len(os.sched_getaffinity(0)), 8)

    def once(_left_s: float) -> tuple[BlockFile, _SnapshotWriter]:
        with BlockWriter(store, head_bytes=BLOCK, threads=threads) as blocks:
            run = _SnapshotWriter(ErofsWriter(blocks), items, began_s, root, check)
            return blocks.finish(run.write()), run

    # A failed upload cannot be resumed, only repeated as a whole.
    file, run = retrying(once, attempts=_ATTEMPTS, deadline_s=_DEADLINE_S)
    manifest = Manifest(tuple(run.entries))
    loose = _loose_part(manifest.entries, is_loose)
    size = format_bytes(run.size_bytes)
    _log.info("snapshot written in %.1f s: %d files, %s", time.monotonic() - began, run.num_files, size)
    return Written(
        file,
        store_manifest(store, manifest),
        manifest.digest,
        manifest.entries,
        run.num_files,
        run.size_bytes,
        tuple(left_out),
        store_manifest(store, loose) if loose.entries else None,
    )


def _check_names(items: Sequence[Item], check: SecretCheck) -> None:
    """Check paths, links and attributes, before any file is read. Raises `PermanentError`."""
    here = {item.path: item.source for item in items if item.kind == "file"}
    rows: list[tuple[str, PathKind, int, bytes]] = []
    for item in items:
        if item.kind != "deleted":
            target, xattrs = item.entry.target, item.entry.xattrs
            attributes = b"\n".join((os.fsencode(target), *map(os.fsencode, xattrs), *xattrs.values()))
            rows.append((item.path, item.kind, item.entry.size, attributes))

    def read(path: str) -> bytes:
        with path_errors(path):
            return _read(here[path])

    raise_if_secret(check.check_paths(rows, read))


def _loose_part(entries: Sequence[Entry], is_loose: Callable[[str], bool]) -> Manifest:
    """The manifest of paths that a restore must check: loose paths, and those whose mount might hide a user's file.
    A hard link to a file that is not among them becomes a file of its own."""
    part = [entry for entry in entries if is_loose(entry.path) or is_checked(entry.path, entry.before)]
    paths = {entry.path for entry in part}
    return Manifest(tuple(entry if entry.link in paths else replace(entry, link="") for entry in part))


class _SnapshotWriter:
    def __init__(
        self,
        writer: ErofsWriter,
        items: list[Item],
        began_s: float,
        root: str,
        check: SecretCheck,
    ) -> None:
        self.entries: list[Entry] = []
        self.num_files = 0
        self.size_bytes = 0
        self._writer = writer
        self._items = items
        self._root = root.rstrip("/")
        self._check = check
        self._secrets: list[str] = []
        """Secrets that were found: from the first one on files are only checked, and no longer written."""
        self._files = {item.raw: item for item in items}
        self._times = Times(began_s, ((item.raw, item.mtime_ns) for item in items if item.kind == "file"))
        self._directories = {b"": ROOT}
        self._whiteout: int | None = None  # one inode with many names
        self._tree = writer.tree
        self._tree.update(ROOT, self._directory_attributes(b""))
        self._first: dict[tuple[int, int], tuple[int, Entry]] = {}  # inode and entry of files with several names

    def write(self) -> bytes:
        """Write everything; returns block 0 of the image."""
        for item in self._items:
            self._add(item)
        raise_if_secret(self._secrets)
        return self._writer.finish()

    def _add(self, item: Item) -> None:
        if item.kind == "deleted":
            self._add_whiteout(item)
            self.entries.append(item.entry)
            return
        known = self._first.get(item.inode) if item.inode != _ALONE else None
        if known is not None:
            inode, first = known
            self._link(item, inode)
            self._keep(item, size=first.size, digest=first.digest, link=first.path)
            return
        extent, digest = Extent(0, 0), ""
        if item.kind == "file":
            if item.entry.size <= SMALL_BYTES or item.python_source:
                with path_errors(item.path):
                    data = self._content(item)
                if data is None:
                    self._drop(item)
                    return
                self._write(data, "" if item.python_source else self._check.check_content(item.path, data))
                digest = digest_of(data)
            elif not self._secrets:
                judge = self._check.check_large(item.path, item.entry.size)
                with path_errors(item.path):
                    digest = read_pieces(item, lambda piece: self._write(piece, judge(piece)), self._writer.write_zeros)
            extent = self._writer.end_file()
            self.num_files += 1
            self.size_bytes += extent.size
        inode = self._add_inode(item, extent)
        entry = self._keep(item, size=extent.size, digest=digest)
        if item.inode != _ALONE:
            self._first[item.inode] = inode, entry

    def _content(self, item: Item) -> bytes | None:
        """The content of a small file in the snapshot; None for bytecode that Python would reject."""
        data = read_whole(item)
        return settle_header(data, self._source_of(item)) if item.python_source else data

    def _write(self, data: bytes, secret: str) -> None:
        if secret:
            self._secrets.append(secret)
        if not self._secrets:
            self._writer.write(data)

    def _drop(self, item: Item) -> None:
        """Drop invalid bytecode. A file that it replaced is hidden by a whiteout, as Python might accept that one."""
        if item.entry.modified:
            self._add_whiteout(item)
            self.entries.append(Entry(item.path, "deleted", before=item.entry.before))

    def _keep(self, item: Item, *, size: int, digest: str, link: str = "") -> Entry:
        entry = replace(item.entry, size=size, digest=digest, link=link)
        self.entries.append(entry)
        return entry

    def _add_inode(self, item: Item, extent: Extent) -> int:
        """Add a path whose data, if any, was written to `extent`; its inode. Directories come before their entries."""
        entry = item.entry
        xattrs = {os.fsencode(name): value for name, value in entry.xattrs.items()}
        if entry.opaque:
            xattrs |= dict.fromkeys(map(os.fsencode, OPAQUE), b"y")
        mtime_ns = self._times.shown_ns(item.raw, item.mtime_ns)
        attributes = Attributes(item.mode, entry.uid, entry.gid, mtime_ns, xattrs=xattrs)
        target = os.fsencode(entry.target)
        inode = self._tree.add(attributes, size=extent.size, first_block=extent.block, target=target)
        self._link(item, inode)
        if item.kind == "directory":
            self._directories[item.raw] = inode
        return inode

    def _add_whiteout(self, item: Item) -> None:
        """Add a whiteout at the item's path; not in an opaque directory, where overlayfs would list its name."""
        above = self._files.get(item.raw.rpartition(b"/")[0])
        if above is not None and above.entry.opaque:
            return
        if self._whiteout is None:
            self._whiteout = self._tree.add(Attributes(stat.S_IFCHR))
        self._link(item, self._whiteout)

    def _link(self, item: Item, inode: int) -> None:
        """Link an inode at the item's path."""
        parent, _, name = item.raw.rpartition(b"/")
        self._tree.link(self._directory(parent), name, inode)

    def _directory(self, path: bytes) -> int:
        found = self._directories.get(path)
        if found is None:
            parent, _, name = path.rpartition(b"/")
            holder = self._directory(parent)
            if self._tree.child(holder, name) is not None:
                raise PermanentError(f"{os.fsdecode(path)} holds changes of the setup and is not a directory")
            found = self._directories[path] = self._tree.add(self._directory_attributes(path))
            self._tree.link(holder, name, found)
        return found

    def _directory_attributes(self, path: bytes) -> Attributes:
        """The attributes of a directory, as the setup left it."""
        where = self._root + (os.fsdecode(path) or "/.")  # the root itself may be named through a link in /proc
        shown = os.fsdecode(path) or "/"
        with path_errors(shown):
            status, xattrs = os.lstat(where), xattrs_of(where)
        if not stat.S_ISDIR(status.st_mode):
            raise PermanentError(f"{shown} holds changes of the setup and is not a directory")
        mtime_ns = self._times.shown_ns(path, status.st_mtime_ns)
        return Attributes(status.st_mode, status.st_uid, status.st_gid, mtime_ns, xattrs=xattrs)

    def _source_of(self, item: Item) -> Source | None:
        """The source of a file in `__pycache__`, in the snapshot or below it."""
        known = self._files.get(path_bytes(item.python_source))
        if known is None:
            return _source_below(self._root + item.python_source)
        if known.kind != "file":
            return None
        shown_ns = self._times.shown_ns(known.raw, known.mtime_ns)
        return Source(known.mtime_ns, known.entry.size, shown_ns, lambda: _read(known.source))


def _source_below(path: str) -> Source | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    # Not through a link, which may lead elsewhere on another node, or outside of `root` here.
    if not stat.S_ISREG(status.st_mode):
        return None
    return Source(status.st_mtime_ns, status.st_size, None, lambda: _read(path))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - a name of any bytes, thousands of times
        return file.read()
