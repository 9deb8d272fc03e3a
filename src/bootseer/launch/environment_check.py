"""The doctor's line about snapshots of environments: what can be done here, tried for real. Called by `cli.doctor`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bootseer.env.capturing.capture import open_capture
from bootseer.errors import BootseerError
from bootseer.launch.environment_view import private_ways
from bootseer.machine.check import Check

CHECK = "environments"
_WORDS = {
    "overlay": "captured by an overlay over /, restored by a mount",
    "user": "captured and restored in a user namespace",
}


def check(cache: Path) -> Check:
    """Make a capture below the cache in each way, the best first, and take it away again. Nothing runs in it."""
    opens = ("run --setup, --requirements: one mount instead of an installation",)
    refused: list[str] = []
    try:
        # One that is not there yet is judged by the folder that it would be made in.
        place = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
        with tempfile.TemporaryDirectory(prefix="bootseer-doctor-", dir=place) as folder:
            for way in private_ways():
                try:
                    open_capture(Path(folder), way=way, own=[cache]).close()
                except BootseerError as error:
                    refused.append(str(error))
                    continue
                why = "without root only folders of this user can be in a snapshot" if way == "user" else ""
                return Check(CHECK, "limited" if why else "ok", _WORDS[way], why, "run as root" if why else "", opens)
    except OSError as error:
        todo = "set BOOTSEER_CACHE to another folder"
        return Check(CHECK, "broken", "", f"{error.filename or cache}: {error.strerror}", todo, opens)
    lacks = "; ".join(refused) or "root without the right to mount"
    why = f"nothing can be mounted ({lacks}): setups are captured by two walks over the disks"
    return Check(CHECK, "limited", "files are copied", why, "run as root, or allow user namespaces", opens)
