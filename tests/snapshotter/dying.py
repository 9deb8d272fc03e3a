"""`bootseer` with a snapshotter that kills processes when a call reaches a point: `dying.py TRAP WORDS...`.

The file TRAP specifies the point and the process IDs (0: this process). It is deleted when the point is reached.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from bootseer.cli.main import main
from bootseer.snapshotter.lazy import LazyImages
from bootseer.snapshotter.records import COMMITTED, VIEW, Records
from bootseer.snapshotter.snapshots import Snapshots

TRAP = Path(sys.argv[1])
_inside = threading.local()


def at(point: str) -> None:
    try:
        wanted = json.loads(TRAP.read_text())
    except FileNotFoundError:
        return
    if wanted["point"] == point:
        TRAP.unlink()
        for number in wanted["kill"]:
            os.kill(number or os.getpid(), signal.SIGKILL)


def behind(owner: Any, name: str, point: str) -> None:
    """Trigger after the method has returned: the change is made and recorded, the answer is lost."""
    original = getattr(owner, name)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        found = original(self, *arguments, **named)
        at(point)
        return found

    setattr(owner, name, call)


def patch() -> None:
    make, prepare, mounts = Snapshots._make, Snapshots.prepare, Snapshots.mounts
    release, add = LazyImages.release_unknown, Records.add

    def recorded_only(self: Any, folder: Path, record: Any) -> None:
        at("View" if record.kind == VIEW else "Prepare")
        make(self, folder, record)

    def preparing(self: Any, *arguments: Any, **named: Any) -> Any:
        _inside.prepare = True
        try:
            return prepare(self, *arguments, **named)
        finally:
            _inside.prepare = False

    def asked_for(self: Any, key: str) -> Any:
        if not getattr(_inside, "prepare", False):
            at("Mounts")
        return mounts(self, key)

    def half_cleaned(self: Any, used: Any) -> None:
        at("Cleanup")
        release(self, used)

    def mounted_only(self: Any, *arguments: Any) -> Any:
        if arguments[2] == COMMITTED:
            at("Prepare of a layer")
        return add(self, *arguments)

    Snapshots._make = recorded_only  # type: ignore[method-assign]
    Snapshots.prepare = preparing  # type: ignore[method-assign]
    Snapshots.mounts = asked_for  # type: ignore[method-assign]
    LazyImages.release_unknown = half_cleaned  # type: ignore[method-assign]
    Records.add = mounted_only  # type: ignore[method-assign]
    behind(Records, "commit", "Commit")
    behind(Records, "remove", "Remove")
    behind(Records, "relabel", "Update")


patch()
sys.argv = ["bootseer", *sys.argv[2:]]
sys.exit(main())
