"""A small real root file system: busybox and some users; and the configuration of its image."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from bootseer.image.containers.container import Runtime
from bootseer.mounts import kernel
from waiting import processes

_PROGRAMS = ("sh", "cat", "echo", "env", "id", "kill", "ls", "mkdir", "mount", "pwd", "sleep", "stat", "touch", "true",
             "tty", "wc", "grep", "dd", "sha256sum")  # fmt: skip
PEOPLE = "root:x:0:0:root:/root:/bin/sh\nworker:x:1000:1001:Worker:/home/worker:/bin/sh\n"
GROUP = "root:x:0:\nworker:x:1001:\nrender:x:44:worker,other\nstaff:x:50:\n"
CONFIG = {"Env": ["PATH=/bin", "GREETING=hello"], "Cmd": ["sh"], "WorkingDir": "/work"}


@functools.cache
def _static_busybox() -> str:
    program = shutil.which("busybox")
    if program is None:
        return ""
    said = subprocess.run(["ldd", program], capture_output=True, check=False).stderr
    return program if b"not a dynamic" in said else ""


def make_tree(root: Path) -> Path:
    """Create the tree below `root`. Skips the test if no static busybox is installed."""
    program = _static_busybox()
    if not program:
        pytest.skip("needs a static busybox (apt-get install busybox-static)")
    for name in ("bin", "etc", "work", "tmp", "home/worker"):
        (root / name).mkdir(parents=True)
    shutil.copy(program, root / "bin" / "busybox")
    for name in _PROGRAMS:
        (root / "bin" / name).symlink_to("busybox")
    (root / "etc" / "passwd").write_text(PEOPLE)
    (root / "etc" / "group").write_text(GROUP)
    return root


def runtime_or_skip(name: Runtime) -> Runtime:
    """The name of a container runtime. Skips the test if it is not installed."""
    if shutil.which(name) is None:
        pytest.skip(f"needs {name}")
    return name


def running(command: str) -> list[int]:
    """Processes of this machine with this command line, including those in containers."""
    return [pid for pid, words in processes() if words.rstrip(b"\0").replace(b"\0", b" ") == command.encode()]


def without_mixed_cgroups() -> None:
    """For `preexec_fn`: unmount cgroup2 next to cgroup v1: crun fails if both have controllers."""
    kernel.unshare_mounts()
    kernel.unmount(Path("/sys/fs/cgroup/unified"))
