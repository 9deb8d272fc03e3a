"""Run programs as a user without any rights, in a mount namespace where that user finds an interpreter and, if wanted,
a device for FUSE that everybody may open, as most machines have it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import warm
from bootseer.fuse.syscalls import MS_RDONLY
from bootseer.mounts import kernel
from busybox import without_mixed_cgroups

UID = 64321
_FUSE, _PEOPLE = Path("/dev/fuse"), Path("/etc/passwd")


def as_plain_user(folder: Path, *, fuse: bool, covered: bool = False) -> Callable[[], None]:
    """For `preexec_fn`: become that user. `folder` is scratch space. With `covered` a part of /proc is, as in
    containers."""
    node, people = folder / "fuse", folder / "passwd"
    people.write_text(f"{_PEOPLE.read_text()}plain:x:{UID}:{UID}::/:/bin/sh\n")  # fusermount3 looks for a name
    if fuse and not node.exists():
        os.mknod(node, stat.S_IFCHR | 0o666, _FUSE.stat().st_rdev)
        node.chmod(0o666)

    return partial(_become, people, node if fuse else None, covered)


def _become(people: Path, fuse: Path | None, covered: bool) -> None:
    without_mixed_cgroups()
    open_way_to(Path(sys.base_prefix))
    kernel.attach(kernel.clone_mount(people), _PEOPLE)
    if fuse is not None:
        kernel.attach(kernel.clone_mount(fuse), _FUSE)
    if covered:
        kernel.attach(kernel.create_mount("tmpfs", [("source", "test")], attributes=MS_RDONLY), Path("/proc/irq"))
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)


def open_way_to(path: Path) -> None:
    """Make a folder reachable that lies below one which only root may enter."""
    closed = next((above for above in reversed(path.parents) if not above.stat().st_mode & stat.S_IXOTH), None)
    if closed is not None:
        aside = kernel.clone_mount(path)
        kernel.attach(kernel.create_mount("tmpfs", [("source", "test"), ("mode", "755")]), closed)
        path.mkdir(parents=True)
        kernel.attach(aside, path)


def home_of(folder: Path) -> Path:
    """A home for that user below a folder of the test, which everybody can enter."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    os.chown(home, UID, UID)
    return home


def run_as_plain_user(
    folder: Path,
    *words: str,
    fuse: bool,
    env: Mapping[str, str],
    covered: bool = False,
    input: str = "",  # noqa: A002 - as in `subprocess.run`
) -> subprocess.CompletedProcess[str]:
    """`bootseer WORDS` as that user, to its end, by the copy of a process that has imported what it takes."""
    home = home_of(folder)
    return warm.bootseer(
        words,
        env={**env, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=home,
        input=input,
        become=as_plain_user(folder, fuse=fuse, covered=covered),
    )
