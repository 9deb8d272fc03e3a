"""Paths that files of a snapshot lead to: targets of links, and folders that Python is told to import from.

An editable installation from a scratch folder is the case in point: the snapshot holds the pointer and the folder is
gone. Who calls: whoever runs a setup in a capture, to tell `Effects.after` what is used later.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from bootseer.env.capturing.leftovers import SCRATCH
from bootseer.env.changes import Change

_MAX_BYTES = 65_536


def mentions(changes: Iterable[Change]) -> list[str]:
    """Texts that name such paths, for `leftovers`; files that cannot be read say nothing."""
    found = []
    for change in changes:
        if not change.source:
            continue
        with contextlib.suppress(OSError):
            if _points_python(change.path):
                with Path(change.source).open("rb") as file:
                    found.append(file.read(_MAX_BYTES).decode("utf-8", "replace"))
            elif (target := _link(change.source)).startswith(SCRATCH):
                found.append(target)
    return found


def _points_python(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.endswith((".pth", ".egg-link")) or (name.startswith("__editable__") and name.endswith(".py"))


def _link(path: str) -> str:
    """Its target; empty for what is no link. Half of the cost of `Path.readlink`, for each file of a snapshot."""
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return ""
