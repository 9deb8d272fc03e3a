"""Where things that were brought to this machine lie.

Called by whoever mounts images and snapshots, and by the verbs that look at what was left. Touches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

CACHE = "BOOTSEER_CACHE"
RUNTIME = "BOOTSEER_RUNTIME"
STORE = "BOOTSEER_STORE"


def cache_root(env: Mapping[str, str], uid: int) -> Path:
    """The node's cache: `$BOOTSEER_CACHE`, `/var/cache/bootseer` for root, else a folder of the user."""
    if env.get(CACHE):
        return Path(env[CACHE]).absolute()
    if uid == 0:
        return Path("/var/cache/bootseer")
    home = env.get("XDG_CACHE_HOME") or f"{env.get('HOME') or '/var/tmp'}/.cache"  # noqa: S108 - no HOME: a daemon
    return Path(home) / "bootseer"


def blocks_folder(root: Path) -> Path:
    """Where below the cache's root blocks are kept."""
    return root / "blocks"


def metadata_folder(root: Path) -> Path:
    """Where below the cache's root documents and indexes are kept."""
    return root / "images"


def environments_folder(root: Path) -> Path:
    """Where below the cache's root documents and indexes of environments are kept."""
    return root / "environments"


def converted_folder(root: Path) -> Path:
    """The store below the cache's root for images that were converted on this node."""
    return root / "converted"


def unpacked_folder(root: Path) -> Path:
    """Where below the cache's root images are written out as files."""
    return root / "unpacked"


def runtime_root(env: Mapping[str, str], uid: int) -> Path:
    """Where the state of mounts lies: `$BOOTSEER_RUNTIME`, else a folder that is empty after a boot."""
    if env.get(RUNTIME):
        return Path(env[RUNTIME]).absolute()
    if uid == 0:
        return Path("/run/bootseer")
    folder = env.get("XDG_RUNTIME_DIR", "")
    # Nothing below /tmp but the folder itself, whose owner `Runtime` checks: who owns one above could exchange it.
    return Path(folder, "bootseer") if folder.startswith("/") else Path(f"/tmp/bootseer-{uid}")  # noqa: S108
