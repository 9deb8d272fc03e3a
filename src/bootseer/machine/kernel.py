"""Probes of kernel features: version, FUSE, user namespaces.

Each feature is really used, in a child (`sandbox`), because its name in /proc/filesystems does not say whether a
container's seccomp filter and the user's permissions allow it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from bootseer.logs import logger
from bootseer.machine import child
from bootseer.machine.check import KERNEL, Check

OLDEST = (5, 14)
"""On older kernels measuring works, and little else: /proc does not tell the inode numbers of open files."""
FILE_BACKED_EROFS = (6, 12)
"""The first kernel that mounts EROFS from a file without a loop device."""
RESENDS = (6, 9)
"""The first kernel that can resend FUSE requests to a restarted daemon."""

_LOG = logger(__name__)
_SCRIPT = Path(__file__).with_name("sandbox.py")
DEADLINE_S = 5.0
AS_ROOT = "run as root, or give the container CAP_SYS_ADMIN"


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a trial: `worked`, or the step that failed. `errno` is 0 if no system call failed."""

    worked: bool
    step: str = ""
    errno: int = 0
    error: str = ""

    @property
    def forbidden(self) -> bool:
        """Whether this user or container lacks the permission."""
        return self.errno in (errno.EPERM, errno.EACCES)

    @property
    def reason(self) -> str:
        """The step and the error, for users."""
        if self.error:
            return self.error
        return f"{self.step}: {os.strerror(self.errno)}" if self.errno else f"{self.step} did not work"


def attempt(trial: str) -> Trial:
    """Run one trial of `sandbox`. A child that hangs or crashes counts as a failed trial."""
    ended = child.run([sys.executable, "-I", "-S", str(_SCRIPT), trial], deadline_s=DEADLINE_S)
    if ended.code is None:
        return Trial(False, error=ended.error)
    _LOG.debug("trial %s: %s", trial, ended.output or ended.error)
    try:
        answer = json.loads(ended.output)
        step, number = str(answer["step"]), int(answer["errno"])
    except (ValueError, KeyError, TypeError):
        return Trial(False, error=f"the trial ended with code {ended.code}")
    return Trial(not step, step, number)


def kernel_version(release: str) -> tuple[int, int] | None:
    """Major and minor version from `uname -r`; None if it cannot be parsed."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else None


def check_kernel() -> Check:
    name = os.uname()
    version = kernel_version(name.release)
    opens = ("everything",)
    if name.sysname != "Linux" or version is None:
        return Check(KERNEL, "broken", f"{name.sysname} {name.release}", "BootSeer runs on Linux only", "", opens)
    if version < OLDEST:
        reason = f"older than {OLDEST[0]}.{OLDEST[1]}: measuring works, mounts may not"
        return Check(KERNEL, "limited", name.release, reason, "apt-get install linux-image-amd64", opens)
    return Check(KERNEL, "ok", name.release, opens=opens)


def check_fuse() -> Check:
    opens = ("lazy image mount", "checkpoint mount")
    if not Path("/dev/fuse").exists():
        reason = "there is no /dev/fuse"
        return Check("FUSE", "missing", "", reason, "modprobe fuse; in a container: --device /dev/fuse", opens)
    helper = shutil.which("fusermount3") or shutil.which("fusermount")
    trial = attempt("fuse")
    if trial.worked:
        is_new = (kernel_version(os.uname().release) or (0, 0)) >= RESENDS
        note = "" if is_new else "; before Linux 6.9, readers get errors when a daemon is killed"
        return Check("FUSE", "ok", f"mount works{note}", opens=opens)
    if trial.forbidden and not may_open_fuse():
        todo = "as root: chmod 666 /dev/fuse, its usual mode"
        return Check("FUSE", "broken", "/dev/fuse exists", "this user may not open it", todo, opens)
    if attempt("fuse-user").worked:
        return Check("FUSE", "limited", "in user namespaces only", trial.reason, AS_ROOT, opens)
    if trial.forbidden and helper:
        reason = f"{trial.reason}; mounts go through {Path(helper).name}"
        return Check("FUSE", "limited", Path(helper).name, reason, "", opens)
    install = f"apt-get install fuse3, or {AS_ROOT}" if trial.forbidden else "modprobe fuse"
    return Check("FUSE", "broken", "/dev/fuse exists", trial.reason, install, opens)


def may_open_fuse() -> bool:
    """Whether the modes of /dev/fuse allow this user to open it."""
    return os.access("/dev/fuse", os.R_OK | os.W_OK)


def check_user_namespaces() -> Check:
    opens = ("capture and mounts without root",)
    trial = attempt("userns")
    if trial.worked:
        return Check("user namespaces", "ok", "ordinary users can create them", opens=opens)
    for switch, off, on in (
        ("kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
        ("user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=15000"),
    ):
        path = Path("/proc/sys", switch)
        if path.is_file() and path.read_text().strip() == off:
            reason = f"{trial.reason}; {switch.replace('/', '.')} is {off}"
            return Check("user namespaces", "missing", "", reason, on, opens)
    return Check("user namespaces", "missing", "", trial.reason, "a container or host that allows unshare", opens)
