"""Run programs as an unprivileged user, in a mount namespace where that user can access the Python interpreter and
optionally a FUSE device that everyone may open, as on most machines."""

from __future__ import annotations

import os
import resource
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


def as_plain_user(folder: Path, *, fuse: bool, covered: bool = False, named: bool = True) -> Callable[[], None]:
    """For `preexec_fn`: become that user. `folder` is scratch space. `covered`: a part of /proc is overmounted, as in
    containers. `named`: /etc/passwd has the user."""
    node, people = folder / "fuse", folder / "passwd"
    line = f"plain:x:{UID}:{UID}::/:/bin/sh\n" if named else ""  # fusermount3 looks up the user's name
    people.write_text(f"{_PEOPLE.read_text()}{line}")
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


def alone(folder: Path) -> Callable[[], None]:
    """For `preexec_fn`: become that user, who may start no more processes or threads."""
    become = as_plain_user(folder, fuse=False)

    def call() -> None:
        become()
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))

    return call


def protect_disks() -> None:
    """For `become`: the machine's folders are read-only but for those of tests, so captures do not look into them.
    Where nothing can be mounted, a capture reads every file's attributes twice: 17 s of processor time for a million
    files."""
    kernel.unshare_mounts()
    for path in Path("/").iterdir():
        if path.is_dir() and not path.is_symlink() and path.name not in ("dev", "proc", "run", "srv", "sys", "tmp"):
            kernel.attach(kernel.clone_mount(path, recursive=True), path)
            kernel.restrict(path, MS_RDONLY)


def open_way_to(path: Path) -> None:
    """Make a folder accessible that is below one that only root may enter."""
    closed = next((above for above in reversed(path.parents) if not above.stat().st_mode & stat.S_IXOTH), None)
    if closed is not None:
        aside = kernel.clone_mount(path)
        kernel.attach(kernel.create_mount("tmpfs", [("source", "test"), ("mode", "755")]), closed)
        path.mkdir(parents=True)
        kernel.attach(aside, path)


def home_of(folder: Path) -> Path:
    """Create that user's home in a folder of the test that everyone can enter."""
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
    """Run `bootseer WORDS` as that user and wait for its end, in a fork of a process with its imports (`warm`)."""
    home = home_of(folder)
    return warm.bootseer(
        words,
        env={**env, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=home,
        input=input,
        become=as_plain_user(folder, fuse=fuse, covered=covered),
    )
