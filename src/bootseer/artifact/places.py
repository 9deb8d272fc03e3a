"""Where things that were brought to this machine lie."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from bootseer.errors import PermanentError
from bootseer.io.trusted_folder import home_of, trusted_folder

CACHE = "BOOTSEER_CACHE"
RUNTIME = "BOOTSEER_RUNTIME"
STORE = "BOOTSEER_STORE"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def cache_root(env: Mapping[str, str], uid: int) -> Path:
    """The node's cache: `$BOOTSEER_CACHE`, `/var/cache/bootseer` for root, else a folder of the user."""
    if env.get(CACHE):
        return Path(env[CACHE]).absolute()
    if uid == 0:
        return Path("/var/cache/bootseer")
    home = env.get("XDG_CACHE_HOME") or f"{home_of(env, uid, otherwise=f'set {CACHE}')}/.cache"
    return Path(home).absolute() / "bootseer"


def own_folder(
    folder: Path, *, make: bool = True, private: bool = False, otherwise: str = f"set {CACHE} to another folder"
) -> Path:
    """A folder of the cache, which only this user can change: see `trusted_folder`. Raises `PermanentError`."""
    try:
        return trusted_folder(folder, otherwise=otherwise, make=make, private=private)
    except OSError as error:
        raise PermanentError(f"{error.filename}: {error.strerror}; {otherwise}") from error


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


def containers_folder(root: Path) -> Path:
    """Where below the cache's root containers and what is changed in mounted images lie."""
    return root / "containers"


def runtime_root(env: Mapping[str, str], uid: int) -> Path:
    """Where the state of mounts lies: `$BOOTSEER_RUNTIME`, else a folder that is empty after a boot.

    Where another user has taken the name below `/tmp`, it is in the cache.
    """
    if env.get(RUNTIME):
        return Path(env[RUNTIME]).absolute()
    if uid == 0:
        return Path("/run/bootseer")
    folder = env.get("XDG_RUNTIME_DIR", "")
    if folder.startswith("/"):
        return Path(folder, "bootseer")
    # Nothing below /tmp but the folder itself: the owner of one above could exchange it.
    found = Path(f"/tmp/bootseer-{uid}")  # noqa: S108
    with contextlib.suppress(FileNotFoundError):
        if found.lstat().st_uid != uid:
            # Several nodes may share a home: each has a folder of its own.
            return cache_root(env, uid) / "runtime" / _BOOT.read_text().strip()
    return found
