"""A temporary folder on the node's disk owned by a process: of a run, or of a capture.

    <parent>/<prefix><host>@<boot>-<letters>/lock    flocked by the owner, and by children that inherit the descriptor
                                            /...     the owner's files

The owner deletes it; if the owner was killed, the next process that creates such a folder does. A folder with mounted
content is never deleted: processes left running by a setup or command may still use it. Nor is one of another machine:
machines may share a cache, on a file system whose locks are known to each of them alone. A machine knows its folders by
its kernel's boot id, which its pods share, and after a boot by its host name.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bootseer.artifact.places import CACHE, own_folder
from bootseer.artifact.progress import Say
from bootseer.cache.disk import boot_id
from bootseer.errors import PermanentError, os_errors_as
from bootseer.io.files import delete_tree, write_all
from bootseer.io.locks import flocked, try_flock
from bootseer.logs import logger
from bootseer.mounts.kernel import is_mounted_anywhere
from bootseer.trace.sinks import safe_name

_LOCK, _NEW = "lock", "new-"
_LEFT_OVER_S = 3600.0
_WORK_S = 1800.0
_log = logger(__name__)


class OwnedFolder:
    """The folder at `path`. Children may inherit the descriptor `lock`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock

    @classmethod
    def made(cls, parent: Path, prefix: str, release: Callable[[Path], None] = lambda path: None) -> OwnedFolder:
        """Create a folder below `parent`. `release` is called with each abandoned one before it is deleted. Raises
        `PermanentError` when that fails, or others could change it."""
        with os_errors_as(PermanentError, parent, then=f"; set {CACHE} to another folder"):
            parent = own_folder(parent)
            delete_abandoned(parent, prefix, release)
            new = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
            lock = _open_lock(new)
            try_flock(lock)
            # Abandoned folders are recognized by this name, and it is locked before it gets the name.
            name = f"{prefix}{machine()}-{new.name.removeprefix(_NEW)}"
            return cls(new.rename(parent / name), lock)

    def remove(self) -> None:
        """Delete the folder. What cannot be deleted is retried by a later owner."""
        try:
            _delete(self.path)
        finally:
            os.close(self.lock)


def delete_abandoned(parent: Path, prefix: str, release: Callable[[Path], None] = lambda path: None) -> None:
    """Delete this machine's folders without an owner, after `release`. What cannot be deleted is retried by the next
    owner."""
    for path in parent.glob(f"{prefix}*"):
        owner = path.name.removeprefix(prefix).rpartition("-")[0]
        if "@" in owner and not is_ours(owner):
            continue
        with contextlib.suppress(OSError):
            lock = _open_lock(path)
            try:
                if try_flock(lock):
                    _log.info("%s: its owner has ended without deleting it; deleting it", path)
                    release(path)
                    _delete(path)
            finally:
                os.close(lock)
    for path in parent.glob(f"{_NEW}*"):  # its creator was killed before it was named and locked
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFT_OVER_S:
                delete_tree(path)


@contextlib.contextmanager
def one_at_a_time(path: Path, work: str, say: Say) -> Iterator[None]:
    """Lock a file during work that takes minutes, for all processes, also those of other machines that share the cache.

    They wait half an hour for it at most, and `say` why: `work` is what the holder does ("been converting X"). Raises
    `TransientError` then, and `OSError`. The file's content are the machines that have used it, the last one at the
    end; its mtime is the time of the last use.
    """

    def explain(pids: list[int]) -> None:
        with contextlib.suppress(OSError):  # its holder has deleted it
            who = f"process {pids[0]}" if pids else "a process"
            node = path.read_text().split()[-1:] or ["another machine"]
            since = time.strftime("%H:%M:%S", time.localtime(path.stat().st_mtime))
            say(
                f"{who} on {node[0].partition('@')[0]} has {work} since {since}; waiting until it has finished or is"
                " killed, half an hour at most"
            )

    with flocked(path, deadline_s=_WORK_S, on_wait=explain) as lock:
        with contextlib.suppress(OSError):  # a full disk prevents no start
            machines = [*(name for name in path.read_text().split() if name != machine()), machine(), ""]
            write_all(lock, "\n".join(machines).encode(), 0)
        os.utime(lock)  # also on a full disk; on NFS, other machines see then what is written
        yield


def machine() -> str:
    """The name of this machine in a cache that machines may share."""
    return f"{safe_name(os.uname().nodename)}@{boot_id()[:8]}"


def is_ours(name: str) -> bool:
    """Whether this is a name of this machine, now or before a boot."""
    return not {*name.split("@")}.isdisjoint(machine().split("@"))


def _open_lock(folder: Path) -> int:
    return os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):  # what cannot be deleted, such as an immutable file, must not fail a job
        if not is_mounted_anywhere(f"/{path.name}/"):
            delete_tree(path)
