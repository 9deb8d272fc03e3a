"""A cgroup for a container with `--memory` or `--cpus`: below our own, so that the job stays within what its scheduler
has allotted.

The runtimes are told to leave cgroups alone, because most users may not change them; a limit is set here, for runc and
crun and in both versions of cgroups, or refused with the reason. Called by `container`, and by
`cli.image_options` to find out before anything is fetched.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from bootseer.errors import UsageError
from bootseer.image.containers.limits import Limits

_PERIOD_US = 100_000
_END_S = 2.0
_HINT = "limit the whole command instead: by the scheduler, or systemd-run --scope -p MemoryMax=8G -p CPUQuota=150%"


def make_cgroups(name: str, limits: Limits) -> list[Path]:
    """Make what the limits need; nothing without any. Raises `UsageError` where this machine or user cannot."""
    wanted = {"memory": ("--memory", limits.memory_bytes), "cpu": ("--cpus", limits.cpus)}
    made: list[Path] = []
    for controller, (option, value) in wanted.items():
        if value is None:
            continue
        try:
            folder, version = _place(controller)
            folder /= name
            if folder not in made:
                folder.mkdir()
                made.append(folder)
            for file, text in _settings(controller, version, value).items():
                (folder / file).write_text(text)
        except (OSError, ValueError) as error:
            remove_cgroups(made)
            why = f"{error.filename or 'its cgroup'}: {error.strerror}" if isinstance(error, OSError) else error
            raise UsageError(f"{option} cannot be had here: {why}", hint=_HINT) from error
    return made


def remove_cgroups(folders: list[Path]) -> None:
    """Remove cgroups whose processes have ended, or are just ending."""
    until = time.monotonic() + _END_S
    for folder in folders:
        while folder.is_dir():
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            if time.monotonic() > until:
                break  # a process that left the container on purpose is in it
            time.sleep(0.01)


def _settings(controller: str, version: int, value: float) -> dict[str, str]:
    if controller == "memory":
        return {"memory.max" if version == 2 else "memory.limit_in_bytes": str(int(value))}
    quota = int(value * _PERIOD_US)
    if version == 2:
        return {"cpu.max": f"{quota} {_PERIOD_US}"}
    return {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota)}


def _place(controller: str) -> tuple[Path, int]:
    """The folder of our own cgroup, ready for one below it, and the version. Raises `OSError` and `ValueError`."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        for root, mounted in _mounted(controller, version):
            below = os.path.relpath(path, root)
            if below.startswith(".."):
                continue  # ours cannot be seen, and another one is not bound by the job's limits
            folder = mounted / below
            if version == 1:
                return folder, version
            if controller in (folder / "cgroup.controllers").read_text().split():
                if controller not in (folder / "cgroup.subtree_control").read_text().split():
                    # Refused while processes are in it, as at the end of each branch: only the root may have both.
                    (folder / "cgroup.subtree_control").write_text(f"+{controller}")
                return folder, version
    raise ValueError(f"no cgroup with the controller {controller!r} is mounted")


def _mounted(controller: str, version: int) -> Iterator[tuple[str, Path]]:
    """Which part of the hierarchy is mounted, and where."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        root, point = fields.split()[3:5]
        words = kind.split()
        if words[0] == ("cgroup2" if version == 2 else "cgroup") and (
            version == 2 or controller in words[-1].split(",")
        ):
            yield root, Path(point)
