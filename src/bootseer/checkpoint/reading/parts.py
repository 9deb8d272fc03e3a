"""The parts of a striped file, opened when they are first read: a file of a terabyte has tens of thousands of them.

Opening is a question to a server, so it is done by a few threads of its own, and whoever wants to read waits without
holding one. Called by `segments`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial

from bootseer.checkpoint.head import Part
from bootseer.checkpoint.places.place import OpenFile, Place
from bootseer.errors import BootseerError, CorruptError, NotFoundError, TransientError
from bootseer.io.executor import Executor, report_exception, run_reported

Opened = Callable[["OpenFile | None", "BootseerError | None"], None]
"""Called with the open file, or with the reason why there is none."""


class LazyPart:
    """A part that is open, or will be when somebody asks."""

    def __init__(self, place: Place, path: str, part: Part, workers: Executor) -> None:
        self.path = path
        self._place = place
        self._part = part
        self._workers = workers
        self._lock = threading.Lock()
        self._file: OpenFile | None = None
        self._waiting: list[Opened] = []

    def then(self, call: Opened) -> None:
        """Call it with the open file: at once when it is open, else from another thread."""
        with self._lock:
            file = self._file
            if file is None:
                self._waiting.append(call)
                if len(self._waiting) > 1:
                    return
        if file is not None:
            call(file, None)
        else:
            try:
                self._workers.submit(self._open)
            except TransientError as error:
                self._opened(None, error)

    def nodes(self, offset: int) -> tuple[str, ...]:
        """Who has the byte at `offset`, as far as is known."""
        file = self._file
        return self._part.nodes if file is None else file.nodes(offset)

    def delay_s(self, offset: int, length: int) -> float:
        """See `OpenFile.delay_s`."""
        file = self._file
        return self._place.delay_s(self._part.nodes, length) if file is None else file.delay_s(offset, length)

    def close(self) -> None:
        """Not read any more."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        file: OpenFile | None = None
        problem: BootseerError | None = None
        try:
            file = self._place.open(self.path)
            if file.size_bytes != self._part.size_bytes:
                problem = CorruptError(
                    f"{self.path}, a part of a striped file, has {file.size_bytes} bytes instead of "
                    f"{self._part.size_bytes}"
                )
        except NotFoundError:
            problem = TransientError(f"{self.path}: this part is gone; the file was replaced or removed: open it again")
        except BootseerError as error:
            problem = error
        except Exception as error:  # readers wait for this part: they must hear of what was not foreseen, too
            problem = TransientError(f"{self.path}: {type(error).__name__}: {error}")
            report_exception()
        if file is not None and problem is not None:
            with contextlib.suppress(BootseerError):
                file.close()
            file = None
        self._opened(file, problem)

    def _opened(self, file: OpenFile | None, problem: BootseerError | None) -> None:
        with self._lock:
            self._file = file
            waiting, self._waiting = self._waiting, []
        for call in waiting:
            run_reported(partial(call, file, problem))
