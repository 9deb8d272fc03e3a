"""Tracks the locks that BootSeer's modules create during a test, and fails the test if they are misused.

It detects these errors independently of the timing, even where the code hangs only with an unlucky timing:

- a thread waits for a non-reentrant lock that it holds: `LockMisuseError` is raised in that thread, which would hang;
- locks are acquired in two orders, even in different tests: a cycle, in which two threads can deadlock. Locks are
  identified by the line that creates them, as all locks of one line are used alike; the order of two locks of the same
  line is not checked;
- a function that calls foreign code, or may take long, is entered with a lock held (`ENTRANCES`).

In the modules, `threading.Lock`, `RLock` and `Condition` are replaced, and nothing else. Locks that were created before
the test began, such as those of modules and of session fixtures, are not tracked.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any

import pytest

FOLDERS = ("checkpoint", "fetch", "hdfs", "io", "mounts")
"""The folders of tests that run with the tracker."""
ENTRANCES: dict[str, str] = {
    "bootseer.io.timer": "Timer.after",
    "bootseer.hdfs.read_threads": "ReadThreads.schedule _call_back",
    "bootseer.cache.cache": "Cache.open",
}
"""Functions that must not be entered with a lock held; for `Timer.after`, the functions that the timer calls."""
CHECKED = tuple(ENTRANCES)
"""The modules of `ENTRANCES` that are checked."""
_Lock, _RLock, _Condition = threading.Lock, threading.RLock, threading.Condition


class LockMisuseError(AssertionError):
    """A lock is used in a way that can hang."""


class Tracker:
    """The order of locks so far, and the errors that were found."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._own = threading.local()
        self._lock = _Lock()
        self._edges: dict[str, dict[str, str]] = {}
        """For each line that creates locks: lines of the locks acquired while one of its locks was held, and stacks."""

    def held(self) -> list[TrackedLock]:
        """The locks that this thread holds, in the order of acquisition."""
        try:
            return self._own.held  # type: ignore[no-any-return]
        except AttributeError:
            self._own.held = []
            return self._own.held  # type: ignore[no-any-return]

    def fail(self, message: str) -> LockMisuseError:
        """Record an error for the end of the test, as the code under test may catch the exception."""
        message = f"{message}\n{''.join(traceback.format_stack(sys._getframe(2), 12))}"
        self.failures.append(message)
        return LockMisuseError(message)

    def takes(self, held: list[TrackedLock], lock: TrackedLock) -> None:
        """Record that a thread with these locks is about to wait for another one."""
        for before in held:
            if before.site != lock.site and lock.site not in self._edges.get(before.site, ()):
                self._add(before.site, lock.site)

    def check_none_held(self, where: str) -> None:
        """Raise if this thread holds a lock."""
        if held := self.held():
            raise self.fail(f"{where} is entered with these locks held: {', '.join(lock.site for lock in held)}")

    def _add(self, before: str, after: str) -> None:
        where = "".join(traceback.format_stack(sys._getframe(3), 6))
        with self._lock:
            self._edges.setdefault(before, {}).setdefault(after, where)
            path = self._path(after, before)
            if path is not None:
                steps = [
                    f"{one} held, {other} taken:\n{self._edges[one][other]}"
                    for one, other in zip([before, *path], path, strict=False)
                ]
                self.failures.append("locks are taken in two orders:\n" + "".join(steps))

    def _path(self, start: str, end: str, seen: frozenset[str] = frozenset()) -> list[str] | None:
        if start == end:
            return [start]
        for after in self._edges.get(start, ()):
            if after not in seen and (rest := self._path(after, end, seen | {start})) is not None:
                return [start, *rest]
        return None


class TrackedLock:
    """A `Lock`, or an `RLock` if `reentrant`, that reports to the tracker. `site` is the line that creates it."""

    def __init__(self, tracker: Tracker, site: str, *, reentrant: bool) -> None:
        self.site = site
        self._tracker = tracker
        self._reentrant = reentrant
        self._lock: Any = _RLock() if reentrant else _Lock()
        self._holder: list[TrackedLock] | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        held = self._tracker.held()
        if self._holder is held and blocking:
            if not self._reentrant:
                raise self._tracker.fail(f"{self.site} is waited for by the thread that holds it")
        elif held and blocking:
            self._tracker.takes(held, self)
        if not self._lock.acquire(blocking, timeout):
            return False
        self._depth += 1
        if self._depth == 1:
            self._holder = held
            held.append(self)
        return True

    def release(self) -> None:
        holder = self._holder
        if self._depth == 1 and holder is not None:  # by any thread: a plain lock may be handed over
            self._holder = None
            holder.remove(self)
        self._depth -= 1
        self._lock.release()

    def locked(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # Methods that `Condition` calls.

    def _is_owned(self) -> bool:
        return self._holder is self._tracker.held()

    def _release_save(self) -> int:
        depth = self._depth
        for _ in range(depth):
            self.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        for _ in range(depth):
            self.acquire()


class _Threading:
    """The module `threading` with tracked locks."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    def Lock(self) -> TrackedLock:
        return TrackedLock(self._tracker, _site(), reentrant=False)

    def RLock(self) -> TrackedLock:
        return TrackedLock(self._tracker, _site(), reentrant=True)

    def Condition(self, lock: Any = None) -> threading.Condition:
        return _Condition(lock or TrackedLock(self._tracker, _site(), reentrant=True))


def _site() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_globals['__name__']}:{frame.f_lineno}"


@contextmanager
def tracked(tracker: Tracker, checked: tuple[str, ...] = CHECKED) -> Iterator[None]:
    """Track the locks that BootSeer's modules create in the `with` block. Raises `LockMisuseError` for errors."""
    proxy, undo = _Threading(tracker), []
    for name in _own_modules(len(sys.modules), next(reversed(sys.modules))):
        module = sys.modules.get(name)
        if module is not None and vars(module).get("threading") is threading:
            undo.append((module, "threading", threading))
            module.threading = proxy  # type: ignore[attr-defined]
    for name in checked:
        if (module := sys.modules.get(name)) is not None:
            for entrance in ENTRANCES[name].split():
                owner, _, function = entrance.rpartition(".")
                place = getattr(module, owner) if owner else module
                real = getattr(place, function)
                undo.append((place, function, real))
                setattr(place, function, _checked(tracker, entrance, real))
    try:
        yield
    finally:
        for place, attribute, before in reversed(undo):
            setattr(place, attribute, before)
    failures, tracker.failures = tracker.failures, []
    if failures:
        raise LockMisuseError("\n".join(failures))


@lru_cache(maxsize=1)
def _own_modules(number: int, last: str) -> list[str]:
    """BootSeer's modules, cached by the number of all modules and the newest one: going through thousands of modules
    for each test took a millisecond."""
    return [name for name in sys.modules if name.startswith("bootseer.")]


def _checked(tracker: Tracker, entrance: str, real: Callable[..., Any]) -> Callable[..., Any]:
    if entrance == "Timer.after":

        def after(self: object, delay_s: float, call: Callable[[], object]) -> None:
            real(self, delay_s, _checked(tracker, "a timer's call", call))

        return after

    @wraps(real)
    def entered(*args: Any, **options: Any) -> Any:
        tracker.check_none_held(entrance)
        return real(*args, **options)

    return entered


_of_all_tests = Tracker()


@pytest.fixture(autouse=True)
def _locks_are_tracked(request: pytest.FixtureRequest) -> Iterator[None]:
    folder = request.path.relative_to(request.config.rootpath / "tests").parts[0]
    if folder not in FOLDERS:
        yield
        return
    with tracked(_of_all_tests):
        yield
