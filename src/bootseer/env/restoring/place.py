"""Write what `loose` has planned to the files of this machine, as the setup itself would have.

Each file appears whole, under its name, by one rename or link: a reader meanwhile sees the old one or the new one,
and after a kill at any point the same plan made anew does the rest. No symbolic link is followed on the way.
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
from io import FileIO
from itertools import groupby
from pathlib import Path

from bootseer.env.restoring.inside import Inside, new_folder
from bootseer.env.restoring.loose import Conflict, Plan, Step, Where, plan
from bootseer.env.snapshot.manifest import Entry
from bootseer.errors import PermanentError
from bootseer.io.tasks import Tasks

_NEW = ".bootseer-new-"
_LEFT_OVER_S = 3600.0
_PIECE = 1 << 20
_ZEROS = bytes(_PIECE)
_KINDS = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "symlink": stat.S_IFLNK, "fifo": stat.S_IFIFO}
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK, errno.ENOENT)


def apply(planned: Plan, where: Where, *, threads: int = 1) -> None:
    """Do it; contents come from `where`. Raises `Conflict` when another was faster, `PermanentError` for a full disk.

    What was written stays after an error.
    """
    try:
        _Placing(planned.root, where).run(planned.steps, threads)
    except OSError as error:
        place = os.fsdecode(error.filename) if error.filename else planned.root
        raise PermanentError(f"{place}: {error.strerror}; the environment was not written") from error


class _Placing:
    def __init__(self, root: str, where: Where) -> None:
        self._root = root
        self._inside = Inside(root)
        self._where = where
        self._is_root = os.geteuid() == 0

    def run(self, steps: Sequence[Step], threads: int) -> None:
        folders: list[Step] = []
        files: list[Step] = []
        links: list[Step] = []
        for step in steps:
            if step.deed == "delete":
                self._in_its_folder([step])
            else:
                entry = step.entry
                (folders if entry.kind == "directory" else links if entry.link else files).append(step)
        for step in folders:
            self._in_its_folder([step])
        together = [list(some) for _, some in groupby(files, key=_above)]
        if threads == 1:  # a caller that forks next must not have had another thread a moment ago
            for some in together:
                self._in_its_folder(some)
        else:
            with Tasks("bootseer-place", threads) as pool:
                for _ in pool.map(self._in_its_folder, together):
                    pass
        for step in links:
            self._in_its_folder([step])
        # A folder may forbid what has to be written into it.
        for step in reversed(folders):
            with self._inside.folder(_above(step)) as folder:
                self._dress_found(folder, _name(step), step.entry)

    def _in_its_folder(self, steps: Sequence[Step]) -> None:
        """Steps in one folder."""
        with self._inside.folder(_above(steps[0])) as folder:
            if any(step.deed in ("make", "replace") for step in steps):
                _clean(folder)
            for step in steps:
                try:
                    self._do(folder, step)
                except FileExistsError:
                    # Another node may restore the same files in a shared folder: equal ones are as good.
                    again = plan([step.entry], self._where, root=self._root)
                    if any(other.deed == "make" for other in again.steps):
                        raise

    def _do(self, folder: int, step: Step) -> None:
        entry, name = step.entry, _name(step)
        if step.deed == "delete":
            _delete(folder, name)
        elif step.deed == "dress":
            if entry.kind != "directory":
                self._dress_found(folder, name, entry)
        elif entry.kind == "directory":
            if step.deed == "replace":
                _delete(folder, name)
            with new_folder(folder, name, entry.mode | 0o700) as made:
                self._dress(made, entry, also=0o700)
        else:
            self._write(folder, name, step)

    def _write(self, folder: int, name: str, step: Step) -> None:
        """Under a name of our own first; then it gets its own name, if that is still free or to be replaced."""
        new = f"{_NEW}{secrets.token_hex(8)}"
        try:
            if not (step.entry.link and self._link(folder, new, step.entry.link)):
                self._create(folder, new, step.entry)
            if step.deed == "replace":
                if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    _delete(folder, name)
                os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
                return
            try:
                os.link(new, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NO_LINKS or _is_there(folder, name):
                    raise
                os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new, dir_fd=folder)

    def _link(self, folder: int, new: str, first: str) -> bool:
        """One more name for a file; false where that is in another file system, or comes from a mount."""
        above, _, name = first.rpartition("/")
        try:
            with self._inside.folder(above) as other:
                os.link(name, new, src_dir_fd=other, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
        return True

    def _create(self, folder: int, name: str, entry: Entry) -> None:
        source = self._where(entry.path)
        status = source.stat(follow_symlinks=False)
        times = (status.st_atime_ns, status.st_mtime_ns)
        if entry.kind == "file":
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            opened = os.open(name, flags, 0o600, dir_fd=folder)
            with os.fdopen(opened, "wb", buffering=0) as file:
                _copy(source, file)
                self._dress(opened, entry)
                os.utime(opened, ns=times)
            return
        if entry.kind == "symlink":
            os.symlink(entry.target, name, dir_fd=folder)
        else:
            os.mkfifo(name, 0o600, dir_fd=folder)
        with _held(folder, name) as held:
            found = Path(held).stat()
            ours = found.st_nlink == 1 and (found.st_uid == 0 or not self._is_root)
            if stat.S_IFMT(found.st_mode) != _KINDS[entry.kind] or not ours:
                raise _swapped(entry)
            self._dress(held, entry)
            if entry.kind == "symlink":
                os.utime(held, ns=times)

    def _dress_found(self, folder: int, name: str, entry: Entry) -> None:
        """Give attributes to what was there before, or was made some steps ago."""
        with _held(folder, name) as held:
            found = Path(held).stat()
            # A file with another name may be any user's file, put here to be given away.
            linked = stat.S_ISREG(found.st_mode) and found.st_nlink > 1
            if stat.S_IFMT(found.st_mode) != _KINDS[entry.kind] or (linked and self._is_root):
                raise _swapped(entry)
            self._dress(held, entry)

    def _dress(self, opened: int | str, entry: Entry, *, also: int = 0) -> None:
        """`opened` is a descriptor, or the path in /proc of one: never a name that may lead elsewhere by now.

        In this order: a new owner takes away set-user bits and capabilities.
        """
        if self._is_root:
            os.chown(opened, entry.uid, entry.gid)
        if entry.kind == "symlink":
            return
        for attribute, value in entry.xattrs.items():
            with contextlib.ExitStack() as forbidden:
                if not self._is_root:
                    forbidden.enter_context(contextlib.suppress(PermissionError))
                _set_xattr(opened, attribute, value)
        os.chmod(opened, entry.mode | also)  # noqa: PTH101


@contextlib.contextmanager
def _held(folder: int, name: str) -> Iterator[str]:
    """What has this name now, of any kind, as a path that leads there and nowhere else: a link in /proc."""
    opened = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield f"/proc/self/fd/{opened}"
    finally:
        os.close(opened)


def _swapped(entry: Entry) -> Conflict:
    return Conflict([f"{entry.path}: something else was put in its place meanwhile"])


def _copy(source: Path, file: FileIO) -> None:
    with source.open("rb") as content:
        size = 0
        while piece := content.read(_PIECE):
            size += len(piece)
            if piece == _ZEROS:
                file.seek(len(piece), os.SEEK_CUR)  # holes stay holes
                continue
            rest = memoryview(piece)
            while rest:
                rest = rest[file.write(rest) :]
        file.truncate(size)


def _set_xattr(path: int | str, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise


def _above(step: Step) -> str:
    return step.entry.path.rpartition("/")[0]


def _name(step: Step) -> str:
    return step.entry.path.rpartition("/")[2]


def _is_there(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _delete(folder: int, name: str) -> None:
    """Folders with what is in them, which `plan` has allowed. Links in them are not followed."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass


def _clean(folder: int) -> None:
    """Delete what a killed restore left half-written."""
    opened = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        for name in os.listdir(opened):  # noqa: PTH208 - names
            if name.startswith(_NEW):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=opened, follow_symlinks=False)
                    if time.time() - status.st_ctime > _LEFT_OVER_S:
                        os.unlink(name, dir_fd=opened)
    finally:
        os.close(opened)
