"""What was found out about files of this node, kept so that the next start need not look again: digests of large files,
what an interpreter says of itself.

A fact holds as long as its stamp is the same: device, inode, size and times of what it was read from. One small file;
two starts that write it at once lose entries, nothing else. A file that somebody else could write is not believed: a
forged digest would bring the wrong environment. Called by `files` and `interpreter`.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NAME = "facts.json"
_MAX_BYTES = 8 << 20
_MAX_FACTS = 8192


class Facts:
    """Facts by kind and path. Without a folder nothing is remembered."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: dict[str, list[Any]] | None = None
        self._changed = False

    def get(self, kind: str, path: str, stamp: Sequence[object]) -> Any:
        """The fact, if it is known and its stamp is the same; else None."""
        known = self._load().get(f"{kind}:{path}")
        return known[1] if known is not None and known[0] == list(stamp) else None

    def put(self, kind: str, path: str, stamp: Sequence[object], value: Any) -> None:
        """Remember a fact until `save`."""
        facts = self._load()
        facts.pop(f"{kind}:{path}", None)  # the newest stand at the end
        facts[f"{kind}:{path}"] = [list(stamp), value]
        self._changed = True

    def save(self) -> None:
        """Write what is new. A folder that cannot be written only costs the next start some time."""
        if self._folder is None or not self._changed:
            return
        facts = dict(list(self._load().items())[-_MAX_FACTS:])
        with contextlib.suppress(OSError, ValueError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            number, name = tempfile.mkstemp(dir=self._folder, prefix=".facts-")
            try:
                with os.fdopen(number, "w") as file:
                    json.dump(facts, file)
                os.replace(name, self._folder / _NAME)  # noqa: PTH105 - a name, no path
            except BaseException:
                os.unlink(name)  # noqa: PTH108 - a name, no path
                raise
        self._changed = False

    def _load(self) -> dict[str, list[Any]]:
        if self._known is None:
            self._known = _read(self._folder / _NAME) if self._folder is not None else {}
        return self._known


def _read(path: Path) -> dict[str, list[Any]]:
    """The facts in a file; none when it is not ours alone to write, or damaged."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(number, "rb") as file:
            status = os.fstat(number)
            if status.st_uid != os.geteuid() or status.st_mode & 0o022 or status.st_size > _MAX_BYTES:
                return {}
            found = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: fact for name, fact in found.items() if isinstance(fact, list) and len(fact) == 2}
