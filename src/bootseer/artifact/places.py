"""The folders of this node: its cache with the subfolders, and the runtime folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from bootseer.io import trusted_folder
from bootseer.io.trusted_folder import home_of

CACHE = "BOOTSEER_CACHE"
RUNTIME = "BOOTSEER_RUNTIME"
STORE = "BOOTSEER_STORE"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def cache_root(env: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """The node's cache: `$BOOTSEER_CACHE`, `/var/cache/bootseer` for root, else a folder of the user (by default the
    process's own)."""
    uid = os.getuid() if uid is None else uid
    if env.get(CACHE):
        return Path(env[CACHE]).absolute()
    if uid == 0:
        return Path("/var/cache/bootseer")
    home = env.get("XDG_CACHE_HOME") or f"{home_of(env, uid, otherwise=f'set {CACHE}')}/.cache"
    return Path(home).absolute() / "bootseer"


own_folder = partial(trusted_folder.own_folder, otherwise=f"set {CACHE} to another folder")
"""For folders in the cache, unless another remedy is named."""


def blocks_folder(root: Path) -> Path:
    """Cached blocks."""
    return root / "blocks"


def metadata_folder(root: Path) -> Path:
    """Documents and indexes of images."""
    return root / "images"


def environments_folder(root: Path) -> Path:
    """Documents and indexes of environments."""
    return root / "environments"


def converted_folder(root: Path) -> Path:
    """The store of images converted on this node."""
    return root / "converted"


def unpacked_folder(root: Path) -> Path:
    """Images unpacked to files."""
    return root / "unpacked"


def containers_folder(root: Path) -> Path:
    """Containers, and changes made in mounted images."""
    return root / "containers"


def runtime_root(env: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """The state of mounts: `$BOOTSEER_RUNTIME`, else a folder that is emptied at boot.

    If another user has taken the name below `/tmp`, a folder in the cache is used.
    """
    uid = os.getuid() if uid is None else uid
    if env.get(RUNTIME):
        return Path(env[RUNTIME]).absolute()
    if uid == 0:
        return Path("/run/bootseer")
    folder = Path(env.get("XDG_RUNTIME_DIR", ""))
    # Slurm passes the login node's to jobs on nodes without it, and `su` that of another user.
    with contextlib.suppress(OSError):
        if folder.is_absolute() and folder.stat().st_uid == uid:
            return folder / "bootseer"
    # Directly below /tmp only: the owner of an intermediate folder could replace it.
    found = Path(f"/tmp/bootseer-{uid}")  # noqa: S108
    with contextlib.suppress(FileNotFoundError):
        if found.lstat().st_uid != uid:
            # A home may be shared by several nodes: separate them by boot id.
            return cache_root(env, uid) / "runtime" / _BOOT.read_text().strip()
    return found
