"""A folder that nobody else may look into: snapshots hold files that only their owner may read, with their bytes in
objects that a file system would show to everybody. Called by `env.life.local` and `env.restoring.layer`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def make_private(folder: Path) -> Path:
    """Have the folder, closed to others; one that was made open is closed. Says nothing where that does not work: who
    writes there next hears of it."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
    return folder
