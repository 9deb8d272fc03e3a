"""The folders of this node: its cache with the subfolders, and the runtime folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from bootseer.io import trusted_folder
from bootseer.io.trusted_folder import home_of

CACHE = "BOOTSEER_CACHE"
RUNTIME = "BOOTSEER_RUNTIME"
STORE = "BOOTSEER_STORE"


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


_names: list[str] = []


def _in_cache(name: str) -> Callable[[Path], Path]:
    """A function that returns this folder of a cache, given the cache's root."""
    _names.append(name)
    return lambda root: root / name


blocks_folder = _in_cache("blocks")
"""Cached blocks."""
metadata_folder = _in_cache("images")
"""Documents and indexes of images."""
environments_folder = _in_cache("environments")
"""Documents and indexes of environments."""
hotsets_folder = _in_cache("hotsets")
"""Hot sets and records of images."""
converted_folder = _in_cache("converted")
"""The store of images converted on this node."""
unpacked_folder = _in_cache("unpacked")
"""Images unpacked to files."""
containers_folder = _in_cache("containers")
"""Containers, and changes made in mounted images."""
warm_folder = _in_cache("warm")
"""What ranks import, for their warm parents."""
processes_folder = _in_cache("processes")
"""Process snapshots, which save ranks their imports."""
watch_folder = _in_cache("watch")
"""States of watched repositories."""
spool_folder = _in_cache("spool")
"""Files without names: parts of checkpoints that are being written."""
_STORED = ("environments", "hotsets", "image-trash", "images", "layers", "peers", "processes", "sha256", ".uploads")


def folders_of(*, cache: Path, stores: Iterable[str]) -> list[Path]:
    """All folders in a cache and in stores. What else lies there, on a disk that is used for other files, too, is not
    BootSeer's, except locks in the cache's root: empty files that are named `*.lock`."""
    return [*(cache / name for name in _names), *(Path(store, name) for store in stores for name in _STORED)]


def runtime_root(env: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """The state of mounts: `$BOOTSEER_RUNTIME`, else a folder that is emptied at boot."""
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
    return Path(f"/tmp/bootseer-{uid}")  # noqa: S108
