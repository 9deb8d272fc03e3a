"""What imports take from outside while a warm parent runs them: variables of the environment, and random bytes."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any

_MAPPINGS = ("os", "_collections_abc", "collections.abc")
"""Through which modules a variable is read."""
_LOOK_FOR_THEIR_OWN = ("tqdm.utils", "networkx.utils.backends", "fsspec.config")
"""They walk over all variables for those that begin with their own name, which `programs.native` knows."""
_DRAW_FOR_OTHERS = ("random", "secrets", "uuid")
_MAY_DRAW = ("multiprocessing.process", "torch.distributed._composable.contract")
"""Of the first, each copy gets another key; the other makes names of attributes, which stay in a process."""
_NOT_NOTED = ("bootseer.", "importlib._bootstrap", "_frozen_importlib")
"""Numbers of our own spans; modules in C, which have no frame (numpy's generator is seeded anew in each copy)."""


class Watched(type(os.environ)):  # type: ignore[misc]
    """The environment, with a note of which variables were read."""

    reads: dict[str, str] = {}  # noqa: RUF012 - of the one environment there is

    def __getitem__(self, name: str) -> Any:
        frame: Any = sys._getframe(1)
        if frame.f_code.co_name != "__iter__":  # a walk over all of them has been noted
            while frame is not None and frame.f_globals.get("__name__") in _MAPPINGS:
                frame = frame.f_back
            self.reads.setdefault(name, frame.f_globals.get("__name__", "") if frame is not None else "")
        return super().__getitem__(name)

    def __iter__(self) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") in _MAPPINGS:
            frame = frame.f_back
        name = frame.f_globals.get("__name__", "") if frame is not None else ""
        if name not in _LOOK_FOR_THEIR_OWN:
            self.reads.setdefault("*", name)
        return super().__iter__()


def note_draws(drawn: list[str]) -> Callable[[], None]:
    """Have `drawn` name the modules that take random bytes from the kernel, until what this returns is called.

    All copies would share what such a module has made: an id of the session, a key. Extensions in C are not seen.
    """
    urandom = os.urandom

    def noting(size: int, /) -> bytes:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") in _DRAW_FOR_OTHERS:
            frame = frame.f_back
        name = str(frame.f_globals.get("__name__", "")) if frame is not None else ""
        if name not in _MAY_DRAW and not name.startswith(_NOT_NOTED):
            drawn.append(name)
        return urandom(size)

    def end() -> None:
        os.urandom = urandom
        setattr(random, "_urandom", urandom)  # noqa: B010 - mypy does not know it

    os.urandom = noting
    setattr(random, "_urandom", noting)  # noqa: B010 - mypy does not know it
    return end
