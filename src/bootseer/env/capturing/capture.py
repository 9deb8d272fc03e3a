"""Run a setup so that everything it changes in the file system is known afterwards.

Three ways, the best one that works here is taken:

- `overlay`: with the right to mount. The setup sees the machine's own tree under an overlay; its changes stay in the
  upper layer and the machine is not changed.
- `user`: without that right, in a user namespace, for the folders of the user.
- `scan`: where neither is possible. The setup changes the machine itself, and two walks tell what. What a changed file
  held before is lost, so that a restore cannot tell it from somebody else's change.

A capture belongs to the process that opened it, which must have one thread then. If it is killed, nothing stays
mounted, and the next capture deletes its files. Who calls: `launch`, and whoever validates or verifies in the view.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args

from bootseer.env.capturing.any_capture import Capture, Way
from bootseer.env.capturing.exclude import Exclusions, caches_of, credentials_of
from bootseer.env.capturing.overlay_capture import open_overlay
from bootseer.env.capturing.scan import ScanCapture
from bootseer.env.capturing.walk import Layer, LeftOut, Walk
from bootseer.env.changes import Change
from bootseer.errors import BootseerError, PermanentError, UsageError

__all__ = ["Capture", "container_changes", "open_capture"]

Say = Callable[[str], None]
_BETTER: tuple[Way, ...] = ("overlay", "user")


def open_capture(
    folder: Path,
    *,
    say: Say = lambda line: None,
    way: Literal["auto"] | Way = "auto",
    env: Mapping[str, str] | None = None,
    own: Iterable[Path | str] = (),
    folders: Iterable[Path | str] = (),
    leave_out: Iterable[str] = (),
    keep: Iterable[str] = (),
) -> Capture:
    """Begin to capture; run the setup with `enter` next, then ask for `changes`.

    `folder` is where captures keep upper layers, on a disk with room. `env` is the setup's environment, which names the
    user's home and the caches of installers. `own` are BootSeer's own folders (cache, spool, runtime): real in the
    setup's view and never captured. `folders` are further ones that are worth capturing without root, besides home,
    working folder and environments. `leave_out` and `keep` are patterns of the owner (`Exclusions`). `way` forces one
    way; `auto` says in a line why a better one was not taken.
    Raises `BootseerError` when no way is left.
    """
    if way not in ("auto", *get_args(Way)):
        raise UsageError(f"{way} is no way to capture", hint="auto, overlay, user or scan")
    settings = os.environ if env is None else env
    homes = _homes(settings)
    exclusions = Exclusions(
        homes=[*homes, settings.get("HOME", "")],
        own=[os.path.realpath(path) for path in (*own, folder)],
        caches=caches_of(settings),
        credentials=credentials_of(settings),
        leave_out=leave_out,
        keep=keep,
    )
    refused: dict[str, str] = {}
    for one in (better for better in _BETTER if way in ("auto", better)):
        try:
            capture: Capture = open_overlay(one, folder, exclusions, settings, homes, folders)
        except BootseerError as error:
            refused[one] = str(error)
            continue
        break
    else:
        if way in _BETTER:
            raise PermanentError(f"the setup cannot be captured by {way}: {refused[way]}")
        capture = ScanCapture(exclusions)
    capture.refused = refused
    for refused_way, why in refused.items():
        say(f"the setup cannot be captured by {refused_way}: {why}")
    for note in capture.notes:
        say(note)
    return capture


def container_changes(
    upper: Path,
    tree: Path | None = None,
    *,
    exclusions: Exclusions | None = None,
    mounted: Collection[str] = (),
) -> tuple[list[Change], LeftOut]:
    """What a setup changed in a container, from the upper layer of the container's own overlay; see `Capture.changes`.

    `tree` shows the image's files as they are below that layer, not the container's root. Without it, folders and files
    that are what they were are taken for changed: the snapshot is larger, and shows the same. `mounted` are the places
    of mounts in the container, for which the runtime makes files and folders.
    """
    walk = Walk(exclusions or Exclusions(), wants_before=lambda path: False, mounted=mounted)
    walk.layer(Layer("/", str(upper), str(tree) if tree is not None else None))
    return walk.changes(), walk.left_out


def _homes(env: Mapping[str, str]) -> list[str]:
    found = [env.get("HOME", "")]
    with contextlib.suppress(KeyError):
        found.append(pwd.getpwuid(os.geteuid()).pw_dir)
    return list(dict.fromkeys(home.rstrip("/") for home in found if home.startswith("/") and home.strip("/")))
