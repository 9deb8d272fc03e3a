"""A prefix of a bucket as the place of checkpoints: `s3://bucket/prefix`, `gs://…`, `az://…`.

Buckets have keys but no folders. The key of a file is its path, so objects of other tools are found under their names.
A checkpoint is published by renaming its folder, which must be atomic, so the objects cannot be copied. Instead, a
folder may have a *link*: a small object `.attempts-links/NAME` next to it with the prefix of the folder's objects.
Without a link, the prefix is the folder's own name. Renaming a folder creates a link for the new name and
removes that of the old one; an empty link hides objects under the old name (docs/adr/0049-checkpoints-in-buckets.md).

- Links are created by conditional writes (`If-None-Match`, `If-Match`), so only one process can claim a name.
- A folder whose rename was interrupted has two links. `.attempts-owner` among its objects names the valid one, and is
  changed first, by a conditional write. Through the other link the folder can be read, but not renamed or removed.
- Links contain keys of the whole bucket: objects of a place may be outside its root.
- Objects have no permissions, owners or times that can be set: those calls do nothing.
- Safe to use from many threads, but not in the child of a fork, where obstore's threads do not exist.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError as KeyExistsError
from obstore.exceptions import NotSupportedError, PreconditionError

from bootseer.errors import (
    AccessError,
    AlreadyExistsError,
    IsFolderError,
    NotEmptyError,
    NotFolderError,
    NotFoundError,
    PermanentError,
)
from bootseer.io.retry import pause_s
from bootseer.io.tasks import Tasks
from bootseer.places.bucket import MAX_COPY_BYTES, NOT_IN_KEYS, WRITE_S, Bucket, link_text, status_of, time_ns
from bootseer.places.object_data import FILE_MODE, FOLDER_MODE, ObjectFile, ObjectReads, entry_of, folder_entry
from bootseer.places.place import TEMPORARY_PREFIX, Entry, Place, folder_of, join, name_of, names_of
from bootseer.places.uploads import ObjectPart

_LINKS = f"{TEMPORARY_PREFIX}links"
_OWNER = f"{TEMPORARY_PREFIX}owner"
_DATA = f"{TEMPORARY_PREFIX}data"
"""For folders that were created while the objects of another folder were under their name."""
_OWN = (_LINKS, _OWNER, _DATA)
_CACHED_S, _MAX_CACHED = 2.0, 10_000
"""How long the location of a folder is cached, and how many are."""
_MANY_BYTES = 1 << 60  # a bucket is never full
_SMALL_BYTES = 8 << 20
_LINKS_AT_ONCE = 16
_CLAIMS = 5


@dataclass(frozen=True, slots=True)
class _Folder:
    """The location of a folder."""

    prefix: str
    """Of its objects' keys, ending in a slash; "" for the bucket itself."""
    link: str
    """The key of its link, whether it exists or not; "" for the bucket itself."""
    e_tag: str | None
    """Of its link; None without a link."""
    mtime_ns: int
    """When its link was created; 0 without a link."""
    is_visible: bool = False
    """Whether it is known that no file of the same name hides it."""
    is_forbidden: bool = False
    """Whether the credentials may permit only a folder below it, as with a policy for `bucket/jobs/*`."""
    ancestors: tuple[str, ...] = ()
    """The prefixes of the folders down to it, including its own."""


class ObjectPlace(Place):
    """A `Place` in a bucket."""

    shows_unfinished = False
    queue_bytes = 512 << 20

    def __init__(self, uri: str) -> None:
        scheme, _, rest = uri.partition("://")
        bucket, _, root = rest.partition("/")
        self._root = "/".join(names_of(root.strip("/")))
        self._bucket = Bucket(f"{scheme}://{bucket}")
        self.uri = f"{self._bucket.uri}/{self._root}".rstrip("/")
        self._reads = ObjectReads(self._bucket)
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, _Folder]] = {}
        self._is_conditional = False
        """Whether the server is known to support conditional writes."""

    def name_problem(self, name: str) -> str:
        if name in _OWN:
            return "it is reserved by BootSeer"
        if NOT_IN_KEYS.search(name):
            return "names of objects are UTF-8 without control characters"
        return "" if len(name.encode()) <= 255 else "it has more than 255 bytes"

    # Names

    def stat(self, path: str) -> Entry:
        whole = join(self._root, path) if path else self._root
        known = self._recall(whole)
        if known is not None and known.is_visible:
            return folder_entry(path, known.mtime_ns)
        if path:
            with suppress(NotFoundError):
                return entry_of(path, self._bucket.head(self._key(path)))
        folder = self._folder(path, is_file=False)
        if not path:  # only this shows whether the bucket exists and may be read
            if not self._bucket.has_any(folder.prefix) and self._is_file(folder.prefix.rstrip("/")):
                raise NotFolderError(f"{self.uri} is not a folder")
            return folder_entry(path, folder.mtime_ns)
        with self._lock:
            until_s, found = self._known.get(whole, (0.0, None))
            if found is folder:  # the kernel asks for a folder after each change in it
                self._known[whole] = (until_s, replace(folder, is_visible=True))
        return folder_entry(path, folder.mtime_ns)

    def list(self, path: str) -> Iterator[Entry]:
        folder = self._folder(path)
        found = self._bucket.listed(folder.prefix)
        links = {name_of(link["path"]): link for link in self._bucket.listed(f"{folder.prefix}{_LINKS}/")["objects"]}
        plain = {name_of(prefix.rstrip("/")) for prefix in found["common_prefixes"]}.difference(links, _OWN)
        # Consoles create an object with the folder's own key as its marker.
        marker = folder.prefix.rstrip("/")
        files = {name_of(one["path"]): one for one in found["objects"] if one["path"] != marker}
        return iter([
            *(folder_entry(join(path, name), 0) for name in plain),
            *(folder_entry(join(path, name), time_ns(link)) for name, link in links.items() if link["size"]),
            *(entry_of(join(path, name), one) for name, one in files.items() if name not in _OWN),
        ])  # fmt: skip

    def open(self, path: str, *, deadline_s: float = 60.0) -> ObjectFile:
        key = self._key(path)
        try:
            return ObjectFile(self._reads, key, f"{self.uri}/{path}", self._bucket.head(key))
        except NotFoundError:
            with suppress(NotFoundError):
                self._folder(path, is_file=False)
                raise IsFolderError(f"{self.uri_of(path)} is a folder") from None
            raise NotFoundError(f"{self.uri_of(path)} does not exist") from None

    def write_bytes(self, path: str, data: bytes, *, mode: int = FILE_MODE) -> Entry:
        self._put(self._key(path), data)
        return self.stat(path)

    def create_bytes(self, path: str, data: bytes, *, mode: int = FILE_MODE) -> bool:
        return self._put(self._key(path), data, create=True) is not None

    def begin_parts(
        self, paths: Sequence[str], *, part_bytes: int, mode: int = FILE_MODE, replication: int | None = None,
        avoid: frozenset[str] = frozenset(), last_resort: Sequence[str] = (),
    ) -> Sequence[ObjectPart]:  # fmt: skip
        """See `Place.begin_parts`. A part is visible only when it is complete."""
        for folder in {folder_of(path) for path in paths}:
            self.make_folder(folder, parents=True)
        return [ObjectPart(self._bucket, path, self._key(path), part_bytes) for path in paths]

    def rename(self, source: str, target: str, *, replace: bool = True) -> None:
        entry = self.stat(source)
        _check_path(target)
        if not source or f"{target}/".startswith(f"{source}/"):
            raise PermanentError(f"{self.uri_of(source)} cannot be renamed to {target}, which is inside it")
        there: Entry | None = None
        with suppress(NotFoundError):
            there = self.stat(target)
        if there is not None and not replace:
            raise AlreadyExistsError(f"{self.uri_of(target)} already exists")
        if there is not None and there.is_folder != entry.is_folder:
            kind = IsFolderError if there.is_folder else NotFolderError
            raise kind(f"{self.uri_of(target)} is {'a' if there.is_folder else 'not a'} folder")
        if not entry.is_folder:
            self._rename_file(source, entry, target, replace=replace)
            return
        if there is not None:
            self.delete(target)
        self._rename_folder(source, target)

    def max_rename_bytes(self, *, replace: bool) -> int | None:
        """See `Place.max_rename_bytes`. A name is claimed by a conditional write of the whole object."""
        return MAX_COPY_BYTES.get(self._bucket.scheme) if replace else _SMALL_BYTES

    def delete(self, path: str, *, recursive: bool = False, is_file: bool = False) -> None:
        if not path:
            raise PermanentError(f"{self.uri} is the root and cannot be removed")
        if is_file or not self.stat(path).is_folder:
            self._make_permanent(folder_of(path))
            self._bucket.remove([self._key(path)])
            return
        folder = self._folder(path, fresh=True)
        self._forget(path)
        if self._owner(folder) is None:
            self._remove_link(folder.link)
            return
        if not recursive and next(self.list(path), None) is not None:
            raise NotEmptyError(f"{self.uri_of(path)} is not empty")
        self._erase(folder.prefix, whole=recursive)
        if folder.link != _plain_link(folder.prefix):
            self._remove_link(folder.link)

    def make_folder(self, path: str, *, mode: int = FOLDER_MODE, parents: bool = False) -> None:
        _check_path(path)
        if not path:
            return
        with suppress(NotFoundError):
            if self.stat(path).is_folder and parents:
                return
            raise AlreadyExistsError(f"{self.uri_of(path)} already exists")
        try:
            parent = self._folder(folder_of(path))
        except NotFoundError:
            if not parents:
                raise
            self.make_folder(folder_of(path), parents=True)
            parent = self._folder(folder_of(path))
        link, prefix = f"{parent.prefix}{_LINKS}/{name_of(path)}", f"{parent.prefix}{name_of(path)}/"
        if self._put(link, link_text(prefix), create=True) is not None:
            return
        data, e_tag, _ = self._bucket.read_link(link)
        if not data and e_tag is not None:  # a folder of this name was renamed, and its objects still have this prefix
            prefix = f"{self._folder('').prefix}{_DATA}/{secrets.token_hex(16)}/"
            self._put(f"{prefix}{_OWNER}", link_text(link))
            if self._put(link, link_text(prefix), e_tag=e_tag) is not None:
                return
        if not parents:
            raise AlreadyExistsError(f"{self.uri_of(path)} already exists")

    def set_mode(self, path: str, mode: int) -> None:
        self.stat(path)

    def set_owner(self, path: str, owner: str | None, group: str | None) -> None:
        self.stat(path)

    def set_mtime(self, path: str, mtime_ns: int) -> None:
        self.stat(path)

    def _measure_s(self, folder: str) -> float:
        # In whole seconds. Unlike `delete`, this gives a folder of another tool no link.
        key = f"{self._folder(folder).prefix}{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        self._put(key, b"")
        now_s: float = self._bucket.head(key)["last_modified"].timestamp()
        self._bucket.remove([key])
        return now_s

    def space(self) -> tuple[int, int]:
        return _MANY_BYTES, _MANY_BYTES

    def facts(self) -> Mapping[str, object]:
        return self._reads.facts()

    def close(self) -> None:
        self._reads.close()

    # Folders

    def _folder(self, path: str, *, fresh: bool = False, is_file: bool = True) -> _Folder:
        """The location of a folder, cached unless `fresh`. Raises `NotFoundError`, and with `is_file` `NotFolderError`
        for a file. The root and the folders above it, which this user may not read, always exist."""
        _check_path(path)
        return self._find(join(self._root, path) if path else self._root, fresh=fresh, is_file=is_file)

    def _find(self, path: str, *, fresh: bool = False, is_file: bool = True) -> _Folder:
        """Like `_folder`, for a path from the root of the bucket."""
        if not path:
            return _Folder("", "", None, 0, is_forbidden=True)
        known = self._recall(path)
        if known is not None and not fresh:
            return known
        parent, name = self._find(folder_of(path)), name_of(path)
        link, plain = f"{parent.prefix}{_LINKS}/{name}", f"{parent.prefix}{name}/"
        is_above, is_forbidden = f"{self._root}/".startswith(f"{path}/"), False
        try:
            data, e_tag, mtime_ns = self._bucket.read_link(link)
        except AccessError:
            if not (is_above or parent.is_forbidden):
                raise
            data, e_tag, mtime_ns, is_forbidden = "", None, 0, True
        if e_tag is not None and not data:
            raise NotFoundError(f"{self._bucket.uri}/{path} does not exist")
        if data in parent.ancestors:  # a tool has copied a folder into itself
            raise PermanentError(f"{self._bucket.uri}/{path} contains itself: remove the object {link}")
        prefix = data or plain
        folder = _Folder(prefix, link, e_tag, mtime_ns, False, is_forbidden, (*parent.ancestors, prefix))
        if e_tag is None and not (is_above or is_forbidden) and not self._bucket.has_any(plain):
            if is_file and self._is_file(plain.rstrip("/")):
                raise NotFolderError(f"{self._bucket.uri}/{path} is not a folder")
            raise NotFoundError(f"{self._bucket.uri}/{path} does not exist")
        with self._lock:
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[path] = (time.monotonic() + _CACHED_S, folder)
        return folder

    def _is_file(self, key: str) -> bool:
        with suppress(NotFoundError, AccessError):  # see `_Folder.is_forbidden`
            return bool(key) and bool(self._bucket.head(key))
        return False

    def _recall(self, path: str) -> _Folder | None:
        with self._lock:
            until_s, known = self._known.get(path, (0.0, None))
        return known if time.monotonic() < until_s else None

    def _forget(self, *paths: str) -> None:
        """The cached locations of these folders, and of those below them, are no longer valid."""
        with self._lock:
            for known in list(self._known):
                if any(f"{known}/".startswith(f"{join(self._root, path)}/") for path in paths):
                    del self._known[known]

    def _key(self, path: str) -> str:
        """The key of a file. Raises `NotFoundError` if its folder does not exist."""
        _check_path(path)
        return f"{self._folder(folder_of(path)).prefix}{name_of(path)}"

    def _rename_folder(self, source: str, target: str) -> None:
        """Claim the folder, create the link of its new name, and remove that of the old one.

        Repeated when another process claims the folder at the same time."""
        parent = self._folder(folder_of(target))
        new = f"{parent.prefix}{_LINKS}/{name_of(target)}"
        for number in range(_CLAIMS):
            folder = self._folder(source, fresh=True)
            claim = self._owner(folder)
            if claim is None:  # renamed before, by a process that ended before it removed this name
                self._remove_link(folder.link)
                break
            claim = self._claim(folder.prefix, new, claim)
            if claim is None:
                break
            made = self._put(new, link_text(folder.prefix), create=True)
            if made is None:
                data, e_tag, _ = self._bucket.read_link(new)
                if e_tag is not None and not data:
                    made = self._put(new, link_text(folder.prefix), e_tag=e_tag)
            if made is None:
                self._claim(folder.prefix, folder.link, claim)
                raise AlreadyExistsError(f"{self.uri_of(target)} already exists")
            self._forget(source, target)
            if self._read_owner(folder.prefix)[0] == new:
                self._remove_link(folder.link)
                return
            self._remove_link(new)  # another process claimed the folder before the link was created
            time.sleep(pause_s(number + 1))
        raise NotFoundError(f"{self.uri_of(source)} does not exist")

    def _make_permanent(self, path: str) -> None:
        """Give a folder of another tool, which exists only by its objects, a link: it exists when empty."""
        folder = self._folder(path)
        if path and folder.e_tag is None:
            self._forget(path)
            with suppress(AccessError, PermanentError):
                self._put(folder.link, link_text(folder.prefix), create=True)

    def _remove_link(self, link: str) -> None:
        """Remove a name. Objects that still have this prefix are hidden by an empty link: they belong to another name,
        or are Hadoop's folder markers, whose keys end in a slash, which obstore does not accept."""
        if self._bucket.has_any(f"{join(folder_of(folder_of(link)), name_of(link))}/"):
            self._put(link, b"")
        else:
            self._bucket.remove([link])

    def _owner(self, folder: _Folder) -> str | None:
        """The entity tag of the owner's object if this name owns the folder's objects, "" without such an object; None
        if another name owns them.

        If the owner's link does not exist, it was never created, or its process is about to create it: the folder is
        claimed, and the link is read again.
        """
        owner, e_tag = self._read_owner(folder.prefix)
        if owner == folder.link:
            return e_tag
        if self._bucket.read_link(owner)[0] == folder.prefix:
            return None
        claim = self._claim(folder.prefix, folder.link, e_tag)
        if claim is not None and self._bucket.read_link(owner)[0] == folder.prefix:
            self._claim(folder.prefix, owner, claim)
            return None
        return claim

    def _claim(self, prefix: str, link: str, e_tag: str) -> str | None:
        return self._put(f"{prefix}{_OWNER}", link_text(link), e_tag=e_tag or None, create=not e_tag)

    def _read_owner(self, prefix: str) -> tuple[str, str]:
        """The link that owns the objects under a prefix, and the entity tag of the object that names it, or ""."""
        data, e_tag, _ = self._bucket.read_link(f"{prefix}{_OWNER}", is_folder=False)
        return data or _plain_link(prefix), e_tag or ""

    def _erase(self, prefix: str, *, whole: bool = True) -> None:
        """Remove a folder's objects, including those of linked folders below it, but not of folders that were moved out
        of it; and the folder's own link. Without `whole`, raises `NotEmptyError` if it is no longer empty."""
        found, claim = [one["path"] for one in self._bucket.objects(prefix)], f"{prefix}{_OWNER}"

        def owner(key: str) -> tuple[str, str]:
            link = self._read_owner(here := key.removesuffix(_OWNER))[0]
            return here, link if self._bucket.read_link(link)[0] == here else prefix

        def look(link: str) -> None:
            below = self._bucket.read_link(link)[0]
            if below and not below.startswith(prefix) and self._owner(_Folder(below, link, "", 0)) is not None:
                self._erase(below)

        with Tasks("bootseer-links", min(_LINKS_AT_ONCE, len(found)) or 1) as threads:
            owners = list(threads.map(owner, [key for key in found if name_of(key) == _OWNER and key != claim]))
            moved = [here for here, link in owners if not link.startswith(prefix)]
            for folder in moved:  # with what was moved into it
                moved += [here for here, link in owners if link.startswith(folder) and here not in moved]
            keys = [key for key in found if not key.startswith(tuple(moved))]
            if not whole and any({*key[len(prefix) :].split("/")}.isdisjoint({"", *_OWN}) for key in keys):
                raise NotEmptyError(f"{self._bucket.uri}/{prefix} is not empty")
            list(threads.map(look, [key for key in keys if name_of(folder_of(key)) == _LINKS]))
        # The owner's object last: an interrupted removal can be repeated by the same owner.
        self._bucket.remove(sorted(keys, key=lambda key: key == claim))
        plain = _plain_link(prefix)
        # By now the name may belong to another folder, or another process may have written objects under it.
        is_own = self._bucket.read_link(plain)[0] in ("", prefix)
        if is_own and {*found}.issuperset(one["path"] for one in self._bucket.objects(prefix)):
            self._remove_link(plain)

    def _put(self, key: str, data: bytes, *, create: bool = False, e_tag: str | None = None) -> str | None:
        """Put an object; with `create` only if none exists, with `e_tag` only over that version. Returns its entity
        tag, or None if that condition does not hold."""
        mode: Any = {"e_tag": e_tag, "version": e_tag} if e_tag else "create" if create else "overwrite"
        attempts: list[str] = []

        def put(key: str) -> str | None:
            attempts.append(key)
            try:
                return self._bucket.tag(obstore.put(self._bucket.reader, key, data, mode=mode, use_multipart=False))
            except (KeyExistsError, PreconditionError) as error:
                if "<Code>ConditionalRequestConflict<" in str(error):
                    raise  # S3: another write of this key is in progress, which may fail: ask again
                return None
            except Exception as error:
                if mode == "overwrite" or (not isinstance(error, NotSupportedError) and status_of(error) != 501):
                    raise
                raise self._unconditional() from error

        if mode == "create" and not self._is_conditional:
            # Some servers ignore conditions instead of refusing them.
            for folder in (self._folder("").prefix, key.removesuffix(name_of(key)).removesuffix(f"{_LINKS}/")):
                probe = f"{folder}{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
                with suppress(AccessError):  # see `_Folder.is_forbidden`
                    made = [self._bucket.retry(probe, partial(put, probe), WRITE_S) for _ in range(2)]
                    self._bucket.remove([probe])
                    if made[1] is not None:
                        raise self._unconditional()
                    self._is_conditional = True
                    break
        found: str | None = self._bucket.retry(key, partial(put, key), WRITE_S)
        if found is None and attempts.count(key) > 1:  # a response was lost: the object may be our own
            there, tag, _ = self._bucket.read_small(key)
            found = tag if there == data.decode("utf-8", "replace") else None
        return found

    def _unconditional(self) -> PermanentError:
        return PermanentError(
            f"{self.uri}: the server does not support conditional writes (If-None-Match, If-Match), "
            "without which no checkpoint can be published; reading works"
        )

    def _rename_file(self, source: str, entry: Entry, target: str, *, replace: bool) -> None:
        key, new = self._key(source), self._key(target)
        most = self.max_rename_bytes(replace=replace)
        if most is not None and entry.size_bytes > most:
            raise PermanentError(f"{self.uri_of(source)}: the server cannot rename an object of this size; copy it")
        if entry.size_bytes <= _SMALL_BYTES:
            data = self.read_bytes(source, _SMALL_BYTES)
            if self._put(new, data, create=not replace) is None:
                raise AlreadyExistsError(f"{self.uri_of(target)} already exists")
        else:
            self._bucket.copy(key, new)
        self._make_permanent(folder_of(source))
        self._bucket.remove([key])


def _check_path(path: str) -> None:
    if any(name in _OWN for name in names_of(path)) or NOT_IN_KEYS.search(path):
        raise NotFoundError(f"{path!r} is not a valid path")


def _plain_link(prefix: str) -> str:
    """The key of the link of the folder whose name is this prefix."""
    above, _, name = prefix.rstrip("/").rpartition("/")
    return f"{join(above, _LINKS)}/{name}"
