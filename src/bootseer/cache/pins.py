"""Pins: an entry that a kernel mount reads without any process of ours must not be evicted.

A lease falls with its process, and a file that is mounted directly has none. A pin is a small file in the entry that
names the boot: it holds until it is removed or the machine has started again, when the mount is gone too.
"""

from __future__ import annotations

import re
from pathlib import Path

from bootseer.cache import layout
from bootseer.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def add(entry: Path, name: str, boot: str) -> None:
    """Pin an entry that one holds a lease on. Raises `OSError`."""
    folder = entry / layout.PINS
    folder.mkdir(mode=0o700, exist_ok=True)
    layout.write_file(folder / _checked(name), boot.encode(), durable=False)


def remove(entry: Path, name: str) -> None:
    """Undo `add`. Nothing happens when there is no such pin. Raises `OSError`."""
    (entry / layout.PINS / _checked(name)).unlink(missing_ok=True)


def holding(entry: Path, boot: str) -> list[str]:
    """Names of the pins that hold. One that cannot be read holds: an unknown owner is an owner."""
    try:
        paths = sorted((entry / layout.PINS).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path.name for path in paths if _holds(path, boot)]


def _holds(path: Path, boot: str) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return True
    # Names of boots are of equal length: anything shorter was cut by a crash, after which no mount is left.
    return content == boot.encode()


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a pin", hint="use letters, digits, . _ and -")
    return name
