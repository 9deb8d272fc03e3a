"""What listings of folders said, for a moment: a program that lists 10,000 files asks for each of them next.

What is remembered may be some seconds old, which is what the kernel's own memory of attributes allows too. That a name
is not in a listing says nothing: it may have come since. A name that was not there is remembered between the two
requests of one open(2) that creates it. Called by `filesystem`; safe to use from many threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from bootseer.checkpoint.files import FileInfo

REMEMBERED_S = 5.0
_MAX_FOLDERS = 64
_MISSING_S = 0.1
"""The kernel asks for a name that is to be created right before it creates it."""
_MAX_MISSING = 1024


class Listings:
    """Remembers the latest listings."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` in seconds, from anywhere."""
        self._clock = clock
        self._lock = threading.Lock()
        self._folders: OrderedDict[str, tuple[float, dict[str, FileInfo]]] = OrderedDict()
        self._missing: dict[str, float] = {}
        """When these paths were not there."""
        self.num_changes = 0
        """How often something has changed. To be asked before a listing begins."""

    def remember(self, folder: str, infos: Iterable[FileInfo], *, since: int) -> None:
        """What a listing said that has just come to its end; `since`: `num_changes` at its beginning. It may not have
        seen what has changed meanwhile."""
        by_path = {info.path: info for info in infos}
        with self._lock:
            if self.num_changes != since:
                return
            self._folders[folder] = (self._clock(), by_path)
            self._folders.move_to_end(folder)
            if len(self._folders) > _MAX_FOLDERS:
                self._folders.popitem(last=False)

    def recall(self, path: str) -> FileInfo | None:
        """What the latest listing of its folder said of a path; None when there is none that is fresh."""
        folder = path.rpartition("/")[0]
        with self._lock:
            listed_s, by_path = self._folders.get(folder, (0.0, {}))
            if not by_path or not path:
                return None
            if self._clock() - listed_s > REMEMBERED_S:
                del self._folders[folder]
                return None
            return by_path.get(path)

    def forget(self, *folders: str) -> None:
        """Something in these folders has changed."""
        with self._lock:
            self.num_changes += 1
            for folder in folders:
                self._folders.pop(folder, None)

    def forget_all(self) -> None:
        """A folder has another name, and what lies below it."""
        with self._lock:
            self.num_changes += 1
            self._folders.clear()

    def looked_up(self, path: str, *, is_there: bool) -> None:
        """The place was asked for a path."""
        with self._lock:
            self._missing.pop(path, None)
            if not is_there:
                if len(self._missing) >= _MAX_MISSING:
                    self._missing.clear()
                self._missing[path] = self._clock()

    def was_missing(self, path: str) -> bool:
        """Whether a path was not there when it was looked up a moment ago. Forgets that."""
        with self._lock:
            return self._clock() - self._missing.pop(path, -_MISSING_S) < _MISSING_S
