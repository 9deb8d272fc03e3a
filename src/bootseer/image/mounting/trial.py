"""Mount a tiny image as a start does, for `bootseer doctor`: the method that works here, and why not a better one.

It runs as a program of its own (this module as a script), with which all its mounts end.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from bootseer.errors import BootseerError
from bootseer.machine import child
from bootseer.machine.check import Check
from bootseer.machine.kernel import AS_ROOT
from bootseer.mounts.layers import MountMethod

CHECK = "lazy images"
"""Name of the check in `bootseer doctor`."""
_DEADLINE_S = 20.0
_ENOUGH_BYTES = 64 << 20
_SAYS = "the image is mounted "


def check(cache: Path) -> Check:
    """The check that `bootseer doctor` shows. The image is below the cache, or its nearest parent that exists."""
    opens = ("image run", "run --image")
    place = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    try:
        if shutil.disk_usage(place).free < _ENOUGH_BYTES:
            todo = "bootseer cache prune --to SIZE, or set BOOTSEER_CACHE to another disk"
            return Check(CHECK, "limited", "", f"the disk of {place} is nearly full: blocks are not kept", todo, opens)
        with tempfile.TemporaryDirectory(prefix="bootseer-doctor-", dir=place, ignore_cleanup_errors=True) as folder:
            ended = child.run([sys.executable, "-P", "-m", __name__, folder], deadline_s=_DEADLINE_S)
    except OSError as error:
        todo = "set BOOTSEER_CACHE to another folder"
        return Check(CHECK, "broken", "", f"{error.filename or place}: {error.strerror}", todo, opens)
    if ended.code != 0:
        reason = ended.error or (ended.stderr.strip().splitlines() or [f"the trial ended with code {ended.code}"])[-1]
        return Check(CHECK, "missing" if ended.code == 1 else "broken", "", reason, AS_ROOT, opens)
    found = json.loads(ended.stdout)
    reason, fix = found["why"], ""
    if found["way"] == MountMethod.UNPACK.value:
        reason += ". The whole image is fetched and unpacked before the start"
    elif found["mode"] == "fallback":
        reason = "; ".join(filter(None, (reason, found["reason"])))
        fix = "modprobe fuse; in a container: --device /dev/fuse"
    return Check(CHECK, "limited" if reason else "ok", found["way"], reason, fix, opens)


def _main(folder: Path) -> dict[str, Any]:
    from bootseer.image.conversion.convert import convert
    from bootseer.image.mounting.mount import mount_image
    from bootseer.image.mounting.request import Request
    from bootseer.image.reference import parse_reference
    from bootseer.image.sources.source import open_source
    from bootseer.mounts import kernel, user_namespace
    from bootseer.store.open import open_store

    if user_namespace.may_mount():
        kernel.unshare_mounts()
    for name in ("tree", "store"):
        (folder / name).mkdir()
    (folder / "tree" / "file").write_text("content")
    with (
        closing(open_source(parse_reference(f"dir:{folder}/tree"))) as source,
        closing(open_store(f"{folder}/store")) as store,
    ):
        digest = convert(source, store).digest
    request = Request(
        reference=parse_reference(digest),
        store=f"{folder}/store",
        cache=folder / "cache",
        runtime=folder / "run",
        loading="lazy",
        fallback="none",
    )
    said: list[str] = []
    mounted = mount_image(request, folder / "at" / "root", writable=folder / "at", lifeline=True, say=said.append)
    if (mounted.root / "file").read_text() != "content":
        raise OSError(f"{mounted.root}/file has another content")
    mounted.close()
    why = [line.removeprefix(_SAYS) for line in said if line.startswith(_SAYS)]
    return {"why": why[-1] if why else "", **{name: mounted.facts[name] for name in ("way", "mode", "reason")}}


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(_main(Path(sys.argv[1]))))
    except (BootseerError, OSError) as error:
        sys.exit(str(error))
