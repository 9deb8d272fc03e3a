"""Apply a plan of `loose` to the files of this machine.

Each file appears complete, by one rename or link: readers see the old one or the new one. After a kill at any point a
new plan does the rest. No symbolic link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from bootseer.artifact.unpacked import write_sparse
from bootseer.env.restoring.loose import Conflict, Plan, SourceOf, Step, plan
from bootseer.env.restoring.safe_tree import SafeTree, new_folder
from bootseer.env.snapshot.manifest import KINDS, Entry
from bootseer.errors import PermanentError

_NEW = ".bootseer-new-"
_STALE_S = 3600.0
_PIECE = 1 << 20
# Hard links are refused by file systems without them (EPERM, ENOTSUP: FAT, some of FUSE and of shared disks), across
# mounts (EXDEV), and beyond a file system's limit (EMLINK).
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK)


def apply_plan(planned: Plan, source_of: SourceOf) -> None:
    """Apply the plan; contents are read from `source_of`. What was written stays after an error.

    Raises `Conflict` if a file was created meanwhile, and `PermanentError`, as for a full disk.
    """
    try:
        _Writer(planned.root, source_of).run(planned.steps)
    except OSError as error:
        place = os.fsdecode(error.filename) if error.filename else planned.root
        raise PermanentError(f"{place}: {error.strerror}; the environment was not written") from error


class _Writer:
    def __init__(self, root: str, source_of: SourceOf) -> None:
        self._root = root
        self._tree = SafeTree(root)
        self._source_of = source_of
        self._is_root = os.geteuid() == 0

    def run(self, steps: Sequence[Step]) -> None:
        for _, together in groupby(steps, key=_parent):
            self._apply_in_folder(list(together))
        # Attributes of folders last: they may forbid writing into the folder.
        for step in reversed(steps):
            if step.entry.kind == "directory":
                with self._tree.folder(_parent(step)) as folder:
                    self._set_attributes_of(folder, _name(step), step.entry)

    def _apply_in_folder(self, steps: Sequence[Step]) -> None:
        with self._tree.folder(_parent(steps[0])) as folder:
            if any(step.operation in ("make", "replace") for step in steps):
                _delete_stale(folder)
            for step in steps:
                try:
                    self._apply(folder, step)
                except FileExistsError:
                    # Another node may restore the same files in a shared folder: equal files are accepted.
                    again = plan([step.entry], self._source_of, root=self._root)
                    if any(other.operation == "make" for other in again.steps):
                        raise

    def _apply(self, folder: int, step: Step) -> None:
        entry, name = step.entry, _name(step)
        if step.operation == "delete":
            _delete(folder, name)
        elif step.operation == "set_attributes":
            if entry.kind != "directory":
                self._set_attributes_of(folder, name, entry)
        elif entry.kind == "directory":
            if step.operation == "replace":
                _delete(folder, name)
            with new_folder(folder, name, entry.mode | 0o700) as made:
                self._set_attributes(made, entry, also=0o700)
        else:
            self._write(folder, name, step)

    def _write(self, folder: int, name: str, step: Step) -> None:
        """Create the file under a temporary name, then link or rename it to its own."""
        new = f"{_NEW}{secrets.token_hex(8)}"
        try:
            if not (step.entry.link and self._link(folder, new, step.entry.link)):
                self._create(folder, new, step.entry)
            if step.operation == "replace":
                if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    _delete(folder, name)
                os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
                return
            try:
                os.link(new, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NO_LINKS or self._tree.status(step.entry.path) is not None:
                    raise
                os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new, dir_fd=folder)

    def _link(self, folder: int, new: str, first: str) -> bool:
        """Create a hard link; False if the first file lies in another file system or in a mount."""
        above, _, name = first.rpartition("/")
        try:
            with self._tree.folder(above) as other:
                os.link(name, new, src_dir_fd=other, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
        return True

    def _create(self, folder: int, name: str, entry: Entry) -> None:
        source = self._source_of(entry.path)
        status = source.stat(follow_symlinks=False)
        times = (status.st_atime_ns, status.st_mtime_ns)
        if entry.kind == "file":
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            opened = os.open(name, flags, 0o600, dir_fd=folder)
            with os.fdopen(opened, "wb", buffering=0) as file:
                with source.open("rb") as content:
                    write_sparse(file, iter(partial(content.read, _PIECE), b""))
                self._set_attributes(opened, entry)
                os.utime(opened, ns=times)
            return
        if entry.kind == "symlink":
            os.symlink(entry.target, name, dir_fd=folder)
        else:
            os.mkfifo(name, 0o600, dir_fd=folder)
        with _opened_path(folder, name) as opened_path:
            found = Path(opened_path).stat()
            ours = found.st_nlink == 1 and (found.st_uid == 0 or not self._is_root)
            if KINDS.get(stat.S_IFMT(found.st_mode)) != entry.kind or not ours:
                raise _replaced_meanwhile(entry)
            self._set_attributes(opened_path, entry)
            if entry.kind == "symlink":
                os.utime(opened_path, ns=times)

    def _set_attributes_of(self, folder: int, name: str, entry: Entry) -> None:
        with _opened_path(folder, name) as opened_path:
            found = Path(opened_path).stat()
            # A hard link may have been placed here by another user, to have root change the owner of a foreign file.
            linked = stat.S_ISREG(found.st_mode) and found.st_nlink > 1
            if KINDS.get(stat.S_IFMT(found.st_mode)) != entry.kind or (linked and self._is_root):
                raise _replaced_meanwhile(entry)
            self._set_attributes(opened_path, entry)

    def _set_attributes(self, opened: int | str, entry: Entry, *, also: int = 0) -> None:
        """`opened` is a descriptor, or its path in /proc: never a name, which may lead to another file by now.

        In this order, as chown clears set-user bits and capabilities.
        """
        if self._is_root:
            os.chown(opened, entry.uid, entry.gid)
        if entry.kind == "symlink":
            return
        for attribute, value in entry.xattrs.items():
            if also and attribute == "system.posix_acl_default":
                continue  # last: files that are written into the folder would inherit it
            try:
                os.setxattr(opened, attribute, value)
            except OSError as error:
                is_forbidden = isinstance(error, PermissionError) and not self._is_root
                if error.errno != errno.ENOTSUP and not is_forbidden:
                    raise
        os.chmod(opened, entry.mode | also)  # noqa: PTH101


@contextlib.contextmanager
def _opened_path(folder: int, name: str) -> Iterator[str]:
    """Open a file of any kind by name; yields a path in /proc that always leads to this file."""
    opened = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield f"/proc/self/fd/{opened}"
    finally:
        os.close(opened)


def _replaced_meanwhile(entry: Entry) -> Conflict:
    return Conflict([f"{entry.path}: it was replaced by another file meanwhile"])


def _parent(step: Step) -> str:
    return step.entry.path.rpartition("/")[0]


def _name(step: Step) -> str:
    return step.entry.path.rpartition("/")[2]


def _delete(folder: int, name: str) -> None:
    """Delete a file, or a folder with its entries, as `plan` has allowed. Links are not followed."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass


def _delete_stale(folder: int) -> None:
    opened = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        for name in os.listdir(opened):  # noqa: PTH208 - names
            if name.startswith(_NEW):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=opened, follow_symlinks=False)
                    if time.time() - status.st_ctime > _STALE_S:
                        os.unlink(name, dir_fd=opened)
    finally:
        os.close(opened)
