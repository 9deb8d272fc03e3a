"""Try namespaces and mounts in a short-lived process.

Run as a script by `kernel`, never imported: `python -I -S sandbox.py userns|fuse|fuse-user`. All mounts are in
namespaces of this process and end with it. Prints one JSON object: `{"step": "", "errno": 0}` if the trial worked, else
the step that failed and its error number. Imports only the standard library: site-packages are not on the path.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from pathlib import Path

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUSER = 0x1000_0000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
PR_SET_DUMPABLE = 4
NOBODY = 65_534

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]


class StepError(Exception):
    """A step of the trial failed."""

    def __init__(self, step: str, number: int) -> None:
        super().__init__(step)
        self.step = step
        self.number = number


def check(step: str, result: int) -> None:
    if result < 0:
        raise StepError(step, ctypes.get_errno())


def enter_user_namespace() -> None:
    """Root first changes to an unprivileged user, because the trial is about ordinary users."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        # After a change of user, /proc/self/uid_map belongs to root unless the process is dumpable.
        check("prctl", _libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))
    uid, gid = os.geteuid(), os.getegid()
    check("unshare user namespace", _libc.unshare(CLONE_NEWUSER))
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/self/setgroups").write_text("deny")
    for name, value in (("uid_map", uid), ("gid_map", gid)):
        try:
            Path("/proc/self", name).write_text(f"0 {value} 1")
        except OSError as error:
            raise StepError(f"write {name}", error.errno or 0) from None


def try_fuse() -> None:
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        raise StepError("open /dev/fuse", error.errno or 0) from None
    target = next((name for name in ("/mnt", "/media", "/srv") if Path(name).is_dir()), "/dev")
    # mount(2) does not wait for a FUSE server.
    options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % device
    check("mount fuse", _libc.mount(b"bootseer", os.fsencode(target), b"fuse", 0, options))
    check("umount", _libc.umount2(os.fsencode(target), 2))


def main(trial: str) -> None:
    if trial != "fuse":
        enter_user_namespace()
    check("unshare mount namespace", _libc.unshare(CLONE_NEWNS))
    check("make mounts private", _libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    if trial != "userns":
        try_fuse()


if __name__ == "__main__":
    answer = {"step": "", "errno": 0}
    try:
        main(sys.argv[1])
    except StepError as failure:
        answer = {"step": failure.step, "errno": failure.number}
    except OSError as failure:
        answer = {"step": sys.argv[1], "errno": failure.errno or 0}
    json.dump(answer, sys.stdout)
