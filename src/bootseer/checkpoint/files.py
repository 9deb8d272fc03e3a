"""The visible tree of a place: striped files look like ordinary files, and their parts are hidden.

The mount, the command line and the Python adapters use this instead of the place for names and sizes; `reading` and
`writing` move the bytes. Everything that belongs to a striped file lies below its own folder, so that folders can be
renamed and removed without care. Moving a striped file into another folder is refused, as between file systems.

Safe to use from many threads, as the place is.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from bootseer.checkpoint.head import (
    MAX_HEAD_BYTES,
    PEEK_BYTES,
    STRIPES,
    Head,
    is_head_size,
    is_hidden,
    parse_head,
    part_path,
    parts_folder,
    peek,
    peek_id,
)
from bootseer.checkpoint.layout import MAX_POLICY_BYTES, Policy, encode_policy, parse_policy
from bootseer.errors import (
    AccessError,
    BootseerError,
    CorruptError,
    IsFolderError,
    NotEmptyError,
    NotFolderError,
    NotFoundError,
    PermanentError,
    TransientError,
)
from bootseer.io.tasks import Tasks
from bootseer.places import open_place
from bootseer.places.place import TEMPORARY_PREFIX, Entry, Place, folder_of, join, make_folder_like_parent, name_of

GONE = ".gone"
"""Suffix of hidden names that are being deleted: any process may continue the deletion."""
_AT_ONCE = 16
"""Concurrent small requests: enough to hide the round trips of 10,000 files."""
_MAX_PEEKED = 1 << 17
_POLICY_S = 5.0
"""How long a policy is cached, and another machine's change may go unnoticed."""
PolicyAndFolder = tuple[Policy, str | None]
"""A policy, and the address of the folder that sets it; None for the default."""


class OtherFolderError(PermanentError):
    """A file cannot be renamed to this name (EXDEV), but copied: it is striped, or the place copies it to rename it."""


class FileInfo(Struct, frozen=True):
    """A visible file or folder."""

    entry: Entry
    size_bytes: int
    """Length of the file's content; 0 for folders."""
    is_striped: bool

    @property
    def path(self) -> str:
        """Relative to the root of the place."""
        return self.entry.path

    @property
    def is_folder(self) -> bool:
        return self.entry.is_folder


def maybe_head(entry: Entry) -> bool:
    """Whether this may be the head of a striped file, by its length; its first bytes tell for certain."""
    return not entry.is_folder and is_head_size(entry.size_bytes)


class Files:
    """The visible tree of a place.

    `within`: a hidden folder whose content counts as visible, for a writer in it.
    """

    def __init__(self, place: Place, *, within: str = "") -> None:
        self.place = place
        self._within = f"{within}/" if within else ""
        self._lock = threading.Lock()
        self._peeked: OrderedDict[tuple[str, str], tuple[int | None, str | None]] = OrderedDict()
        """Sizes and ids from heads, by path and version; None for files that only have a head's length."""
        self._policies: dict[str, tuple[float, PolicyAndFolder]] = {}
        """By folder, with the time of reading. `set_policy` replaces it, because other threads use it."""

    def stat(self, path: str) -> FileInfo:
        self._check_visible(path)
        return self._info(self.place.stat(path))

    def list(self, path: str) -> Iterator[FileInfo]:
        """The entries of a folder, in any order. Files that vanish meanwhile are left out."""
        entries = list(self.names(path))
        self._peek_all(entry for entry in entries if maybe_head(entry))
        for entry in entries:
            with contextlib.suppress(NotFoundError):
                yield self._info(entry)

    def names(self, path: str) -> Iterator[Entry]:
        """The entries of a folder as the place reports them: sizes may be those of heads."""
        self._check_visible(path)
        return (entry for entry in self.place.list(path) if not is_hidden(name_of(entry.path)))

    def head(self, path: str) -> Head | None:
        """The head of a striped file; None for an ordinary file."""
        return self._head(self._file(path))

    def id_of(self, path: str, entry: Entry | None = None) -> str | None:
        """The id of a striped file; None for an ordinary file. Raises `CorruptError`. `entry`: as of `remove`."""
        # Always read: in HDFS, a program that sets the time of a file can give two versions of it the same.
        return peek_id(self.place.read_first(path, PEEK_BYTES)) if maybe_head(self._file(path, entry)) else None

    def replaced_id(self, path: str) -> str | None:
        """The id of the striped file that a new version is about to replace; None also if its head cannot be read,
        which may be why it is replaced: then its parts are left to `collect`. Raises `IsFolderError`."""
        try:
            return self.id_of(path)
        except IsFolderError:
            raise
        except BootseerError:
            return None

    def remove(self, path: str, entry: Entry | None = None) -> None:
        """Remove a file: its visible part first, then its parts. `entry`: its attributes, if known."""
        head_id = self._id_of(self._file(path, entry))
        self.place.delete(path, is_file=True)
        self.drop_parts(path, head_id)

    def remove_folder(self, path: str, *, recursive: bool = False) -> None:
        """Remove a folder that shows nothing, or `recursive`ly. Others see all of it or nothing."""
        self._check_visible(path)
        if not path:
            raise PermanentError(f"{self.place.uri} is the root and cannot be removed")
        if not self.place.stat(path).is_folder:
            raise NotFolderError(f"{self.place.uri_of(path)} is not a folder")
        if not recursive and not self._has_only_hidden(path):
            self.place.delete(path)
            return
        hidden = join(folder_of(path), f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}{GONE if recursive else ''}")
        self.place.rename(path, hidden)
        # Checked again where no writer can add to it: a file that was added meanwhile must not be lost.
        if not recursive and any(not is_hidden(name_of(entry.path)) for entry in self.place.list(hidden)):
            self.place.rename(hidden, path)
            raise NotEmptyError(f"{self.place.uri_of(path)} is not empty")
        try:
            # A collector may be deleting it too, and NFS keeps what this machine has open until that is closed.
            with contextlib.suppress(NotFoundError, NotEmptyError):
                self.place.delete(hidden, recursive=True)
        except AccessError:
            # The right to rename it is not that to delete what is in it: before its owner's collector deletes it, it
            # gets its name back.
            with contextlib.suppress(BootseerError):
                self.place.rename(hidden, path, replace=False)
            raise

    def rename(self, source: str, target: str) -> None:
        """Rename a file or folder. A file replaces a file, a folder one that shows nothing.

        Raises `OtherFolderError` for a striped file and a target in another folder, and for a file that is too large
        for the place to rename it.
        """
        self._check_visible(source)
        self._check_name(target)
        if source == target:
            self.place.stat(source)
            return
        entry = self.place.stat(source)
        if not entry.is_folder and folder_of(source) != folder_of(target) and self._info(entry).is_striped:
            raise OtherFolderError(
                f"{self.place.uri_of(source)} is striped: its parts stay in its folder; copy it to {target}, remove it"
            )
        most = self.place.max_rename_bytes(replace=True)
        if not entry.is_folder and most is not None and entry.size_bytes > most:
            raise OtherFolderError(f"{self.place.uri_of(source)} is too large to be renamed there; copy it to {target}")
        replaced: str | None = None
        with contextlib.suppress(NotFoundError):
            existing = self.place.stat(target)
            if not existing.is_folder and not entry.is_folder:
                replaced = self._id_of(existing)
            elif existing.is_folder and entry.is_folder and self._has_only_hidden(target):
                self.remove_folder(target)
        self.place.rename(source, target)
        self.drop_parts(target, replaced)

    def make_folder(self, path: str, *, mode: int = 0o755, parents: bool = False) -> None:
        self._check_name(path)
        self.place.make_folder(path, mode=mode, parents=parents)

    def set_mode(self, path: str, mode: int) -> None:
        """Set the permission bits of a file and its parts: a user who cannot read the file must not read its parts."""
        self._apply_to_parts(path, lambda one: self.place.set_mode(one, mode))

    def set_owner(self, path: str, owner: str | None, group: str | None) -> None:
        head = self._apply_to_parts(path, lambda one: self.place.set_owner(one, owner, group))
        if head is not None:  # the file's owner must be able to remove its parts
            self.place.set_owner(parts_folder(path, head.id), owner, group)

    def set_mtime(self, path: str, mtime_ns: int) -> None:
        self._check_visible(path)
        self.place.set_mtime(path, mtime_ns)

    def policy(self, path: str) -> Policy:
        """The policy for new files in a folder."""
        return self.policy_and_folder(path)[0]

    def policy_and_folder(self, path: str) -> PolicyAndFolder:
        """The policy for new files in a folder, and the folder that sets it. Raises `PermanentError` if one cannot be
        read.

        Folders above the root of the place count too: a policy does not depend on what was mounted.
        """
        self._check_visible(path)
        return self._policy(path, time.monotonic())[1]

    def set_policy(self, path: str, policy: Policy | None) -> None:
        """Set the policy for new files in a folder and below; None removes the folder's own policy."""
        self._check_visible(path)
        if not self.place.stat(path).is_folder:
            raise NotFolderError(f"{self.place.uri_of(path)} is not a folder")
        if policy is None:
            with contextlib.suppress(NotFoundError):
                self.place.delete(_policy_path(path))
        else:
            make_folder_like_parent(self.place, join(path, STRIPES))
            self.place.write_bytes(_policy_path(path), encode_policy(policy))
        self._policies = {}

    def drop_parts(self, path: str, head_id: str | None) -> None:
        """Remove the parts of a striped file that was removed or replaced, if they exist. They stay while another head
        in the folder names them: other programs copy a file as its head alone (`cp`, `hdfs dfs -cp`), or link to it."""
        if head_id is None:
            return
        with contextlib.suppress(NotFoundError):
            others = [entry for entry in self.place.list(folder_of(path)) if maybe_head(entry)]
            self._peek_all(others)
            try:
                if not any(self._has_id(entry, head_id) for entry in others):
                    self.place.delete(parts_folder(path, head_id), recursive=True)
            except (AccessError, CorruptError, NotEmptyError):
                # A head that cannot be read could name them, only their owner can delete them, or NFS keeps open ones.
                return

    def lost_parts(self, path: str, head: Head) -> Sequence[str]:
        """Names of a striped file's parts that are missing or of the wrong length."""
        sizes = {}
        with contextlib.suppress(NotFoundError):
            sizes = {name_of(entry.path): entry.size_bytes for entry in self.place.list(parts_folder(path, head.id))}
        return [part.name for part in head.parts if sizes.get(part.name) != part.size_bytes]

    def _check_visible(self, path: str) -> None:
        check_visible(f"{path}/".removeprefix(self._within))

    def _check_name(self, path: str) -> None:
        check_name(f"{path}/".removeprefix(self._within))

    def _info(self, entry: Entry) -> FileInfo:
        try:
            size_bytes = self._size(entry) if maybe_head(entry) else None
        except CorruptError:  # shown with its head's length; reading it is an error
            size_bytes = entry.size_bytes
        if size_bytes is None:
            return FileInfo(entry, entry.size_bytes, is_striped=False)
        return FileInfo(entry, size_bytes, is_striped=True)

    def _size(self, entry: Entry) -> int | None:
        try:
            return self._peek(entry)[0]
        except AccessError:
            return None  # a folder with an unreadable file can still be listed

    def _has_id(self, entry: Entry, head_id: str) -> bool:
        with contextlib.suppress(NotFoundError):  # removed meanwhile
            return self._peek(entry)[1] == head_id
        return False

    def _peek(self, entry: Entry) -> tuple[int | None, str | None]:
        key = (entry.path, entry.version)
        with self._lock:
            if key in self._peeked:
                self._peeked.move_to_end(key)
                return self._peeked[key]
        first = self.place.read_first(entry.path, PEEK_BYTES)
        peeked = peek(first), peek_id(first)
        with self._lock:
            self._peeked[key] = peeked
            if len(self._peeked) > _MAX_PEEKED:
                self._peeked.popitem(last=False)
        return peeked

    def _peek_all(self, entries: Iterable[Entry]) -> None:
        """Peek into many heads concurrently; failed ones are read again one by one. In a storage that does not answer,
        each would wait for its deadline: then the rest is left."""
        with self._lock:
            unknown = [entry for entry in entries if (entry.path, entry.version) not in self._peeked]
        if len(unknown) > 1:
            with Tasks("bootseer-peek", min(_AT_ONCE, len(unknown))) as threads:
                for future in [threads.submit(self._peek, entry) for entry in unknown]:
                    if isinstance(future.exception(), TransientError):
                        break

    def _head(self, entry: Entry) -> Head | None:
        if not maybe_head(entry) or self._size(entry) is None:
            return None
        try:
            return parse_head(self.place.read_bytes(entry.path, MAX_HEAD_BYTES))
        except CorruptError as error:
            raise CorruptError(f"{self.place.uri_of(entry.path)}: {error}") from error

    def _file(self, path: str, entry: Entry | None = None) -> Entry:
        """The attributes of a visible file. Raises `IsFolderError`."""
        self._check_visible(path)
        entry = entry or self.place.stat(path)
        if entry.is_folder:
            raise IsFolderError(f"{self.place.uri_of(path)} is a folder")
        return entry

    def _id_of(self, entry: Entry) -> str | None:
        """As `id_of`, for `drop_parts`; None also for a file whose head does not say it: then its parts stay."""
        with contextlib.suppress(AccessError, CorruptError):
            return self.id_of(entry.path, entry)
        return None

    def _has_only_hidden(self, path: str) -> bool:
        """Whether a folder has hidden entries only. Raises `NotEmptyError` if it has visible ones."""
        names = [name_of(entry.path) for entry in self.place.list(path)]
        if not all(map(is_hidden, names)):
            raise NotEmptyError(f"{self.place.uri_of(path)} is not empty")
        return bool(names)

    def _apply_to_parts(self, path: str, change: Callable[[str], None]) -> Head | None:
        """Apply a change to the parts of a striped file and then to the file."""
        self._check_visible(path)
        entry = self.place.stat(path)
        head = None if entry.is_folder else self._head(entry)
        if head is not None:
            parts = [part_path(path, head.id, part.name) for part in head.parts]
            with Tasks("bootseer-parts", min(_AT_ONCE, len(parts))) as threads:
                for _ in threads.map(change, parts):
                    pass
        change(path)
        return head

    def _policy(self, folder: str, now_s: float) -> tuple[float, PolicyAndFolder]:
        cache = self._policies
        found = cache.get(folder)
        if found is None or now_s - found[0] >= _POLICY_S:
            own = self._own_policy(folder)
            if own is not None:
                found = now_s, (own, self.place.uri_of(folder))
            elif folder:
                found = self._policy(folder_of(folder), now_s)
            else:
                found = now_s, self._policy_above()
            cache[folder] = found
        return found

    def _own_policy(self, folder: str) -> Policy | None:
        try:
            return parse_policy(self.place.read_bytes(_policy_path(folder), MAX_POLICY_BYTES))
        except (NotFoundError, AccessError):
            return None
        except PermanentError as error:
            raise type(error)(
                f"{self.place.uri_of(_policy_path(folder))}: {error}; "
                f"`bootseer ckpt policy {self.place.uri_of(folder)} --inherit` removes it"
            ) from error

    def _policy_above(self) -> PolicyAndFolder:
        scheme, _, rest = self.place.uri.partition("://")
        authority, _, root = rest.partition("/")
        if not root:
            return Policy(), None
        with contextlib.closing(open_place(f"{scheme}://{authority}/")) as top:
            return Files(top).policy_and_folder(folder_of(root))


def check_visible(path: str) -> None:
    """Raise `NotFoundError` for a hidden path."""
    if any(is_hidden(name) for name in path.split("/")):
        raise NotFoundError(f"there is no {path.rstrip('/')}")


def check_name(path: str) -> None:
    """Raise `PermanentError` for a path that users cannot create."""
    if any(is_hidden(name) for name in path.split("/")):
        raise PermanentError(f"{path}: names that begin with .stripes or .attempts are BootSeer's own; choose another")


def _policy_path(folder: str) -> str:
    return join(folder, f"{STRIPES}/policy.json")
