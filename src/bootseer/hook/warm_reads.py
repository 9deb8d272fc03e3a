"""Record which environment variables and random bytes imports read in a warm parent, and their random generators."""

from __future__ import annotations

import os
import random
import socket
import sys
import weakref
from collections.abc import Callable
from typing import Any

_MAPPINGS = ("os", "_collections_abc", "collections.abc")
"""Modules whose frames lie between the environment and its reader."""
_READ_OWN_PREFIX = ("tqdm.utils", "networkx.utils.backends", "fsspec.config")
"""Modules that iterate over all variables to find those with their own prefix, which `programs.native` covers."""
_COPIES_ALL = "fsspec.config"
"""A module that copies all variables and uses those with its own prefix."""
_STANDARD = ("random", "secrets", "uuid")
_HARMLESS = ("multiprocessing.process", "transformers.utils.hub", "torch.distributed._composable.contract")
"""Modules whose random bytes need no check. The first two draw a key and a session id, which each copy renews
(`warm_child`), the last draws attribute names, which are only used within the process."""
_DROP_NAME = ("numpy._core._add_newdocs_scalars", "numpy.core._add_newdocs_scalars")
"""Modules that unpack `os.uname`'s result, and use no node name of it."""
_IGNORED = ("bootseer.", "importlib._bootstrap", "_frozen_importlib")
"""Our own span ids, and extension modules, which have no frame (each copy reseeds numpy's generator)."""


_FOLDER_HARMLESS = ("multiprocessing.process", "inspect", "tempfile")
"""Each copy renews what the first has read (`warm_child`); the second completes names such as `<string>`, which are no
files; for the third the folder is the last choice, for temporary files."""


def _caller(through: tuple[str, ...]) -> str:
    """The module that calls the function that calls this one, through frames of these modules."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in through:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")) if frame is not None else ""


class RecordingEnviron(type(os.environ)):  # type: ignore[misc]
    """The environment; records which variables are read, and by which module."""

    reads: dict[str, str] = {}  # noqa: RUF012 - there is only one environment

    def __getitem__(self, name: str) -> Any:
        if sys._getframe(1).f_code.co_name != "__iter__":  # `__iter__` records an iteration over all variables
            reader = _caller(_MAPPINGS)
            text = os.fsdecode(name)  # `os.environb` has bytes
            if reader != _COPIES_ALL or text.startswith("FSSPEC"):
                self.reads.setdefault(text, reader)
        return super().__getitem__(name)

    def __iter__(self) -> Any:
        name = _caller(_MAPPINGS)
        if name not in _READ_OWN_PREFIX:
            self.reads.setdefault("*", name)
        return super().__iter__()


def record_draws(drawn: list[str]) -> Callable[[], None]:
    """Append to `drawn` the modules that draw random bytes from the kernel, until the returned function is called.

    All copies would share what such a module made of them, such as a session id or a key. Extension modules are not
    detected.
    """
    urandom = os.urandom

    def record(size: int, /) -> bytes:
        name = _caller(_STANDARD)
        if name not in _HARMLESS and not name.startswith(_IGNORED):
            drawn.append(name)
        return urandom(size)

    def end() -> None:
        os.urandom = urandom
        setattr(random, "_urandom", urandom)  # noqa: B010 - mypy does not know it

    os.urandom = record
    setattr(random, "_urandom", record)  # noqa: B010 - mypy does not know it
    return end


def record_names(found: list[str]) -> Callable[[], None]:
    """Append to `found` the modules that read the node's name, which a process snapshot would carry to other nodes,
    until the returned function is called."""
    import platform

    gethostname, uname = socket.gethostname, os.uname

    def record() -> str:
        found.append(_caller(("socket",)))
        return gethostname()

    def record_uname() -> Any:
        # The two read the machine's other properties, for others.
        names = uname()
        return names if _caller(()) in ("platform", "sysconfig") else _Names(names, found)

    def record_node(names: Any) -> Any:
        found.append(_caller(("platform",)))
        return names[1]

    def end() -> None:
        socket.gethostname, os.uname = gethostname, uname
        del platform.uname_result.node

    socket.gethostname, os.uname = record, record_uname
    setattr(platform.uname_result, "node", property(record_node))  # noqa: B010 - mypy does not know it
    return end


class _Names(tuple[str, ...]):
    """The result of `os.uname` while it is observed who reads the node's name."""

    def __init__(self, names: Any, found: list[str]) -> None:
        self._found = found
        self.sysname, _, self.release, self.version, self.machine = names

    def __new__(cls, names: Any, found: list[str]) -> _Names:
        return super().__new__(cls, names)

    @property
    def nodename(self) -> str:
        return str(self[1])

    def __getitem__(self, index: Any) -> Any:
        if index not in (0, 2, 3, 4):
            self._found.append(_caller((__name__,)))
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        name = _caller(())
        if name not in _DROP_NAME:
            self._found.append(name)
        return super().__iter__()


def record_folder(found: list[str]) -> Callable[[], None]:
    """Append to `found` the modules that read the working folder, until the returned function is called."""
    getcwd = os.getcwd

    def record() -> str:
        name = _caller(("os", "posixpath", "pathlib", "pathlib._local"))
        if name not in _FOLDER_HARMLESS and not name.startswith(_IGNORED):
            found.append(name)
        return getcwd()

    def end() -> None:
        os.getcwd = getcwd

    os.getcwd = record
    return end


def record_generators(found: list[weakref.ref[random.Random]]) -> Callable[[], None]:
    """Collect the random generators that imports create without a seed, because each copy must reseed them, until the
    returned function is called."""
    seed = random.Random.seed

    def record(self: random.Random, a: Any = None, version: int = 2) -> None:
        found[:] = [one for one in found if one() is not self]
        if a is None:
            found.append(weakref.ref(self))
        seed(self, a, version)

    setattr(random.Random, "seed", record)  # noqa: B010 - mypy takes it for a mistake
    return lambda: setattr(random.Random, "seed", seed)
