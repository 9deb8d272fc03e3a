"""A place that calls a function before each of its steps, so that a test can fail, wait or kill the process there.

    place = StepwisePlace(FolderPlace(folder))
    place.before = lambda step, path: ...

All steps are done by a real place, `inner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bootseer.places.place import PartWriter, Place

_STEPS = ("begin_parts", "write_bytes", "create_bytes", "rename", "delete", "make_folder", "list", "open", "stat")


class StepwisePlace:
    """A wrapper of a `Place`."""

    def __init__(self, inner: Place) -> None:
        self.inner = inner
        self.before: Callable[[str, str], None] = lambda step, path: None
        self.nodes_of: Callable[[str], tuple[str, ...]] = lambda path: ()
        """The nodes to report for a part; if empty, the real ones."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in _STEPS:
            return found

        def step(path: str, *args: Any, **options: Any) -> Any:
            self.before(name, path)
            return found(path, *args, **options)

        return step

    def begin_parts(self, paths: Sequence[str], **options: Any) -> list[StepwiseWriter]:
        for path in paths:
            self.before("begin", path)
        return [StepwiseWriter(self, writer) for writer in self.inner.begin_parts(paths, **options)]


class StepwiseWriter:
    """A wrapper of a `PartWriter`."""

    def __init__(self, place: StepwisePlace, inner: PartWriter) -> None:
        self._place = place
        self._inner = inner
        self.path = inner.path
        self.nodes = place.nodes_of(inner.path) or inner.nodes

    def write(self, data: bytes) -> None:
        self._place.before("write", self.path)
        self._inner.write(data)

    def close(self) -> tuple[str, ...]:
        self._place.before("close", self.path)
        return self._inner.close() or self.nodes

    def abort(self) -> None:
        self._place.before("abort", self.path)
        self._inner.abort()
