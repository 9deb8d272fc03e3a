"""Mount /dev/fuse on a folder and unmount it: with mount(2) as root, otherwise through the set-uid program fusermount3.

fusermount3 opens the device, mounts it, and sends the descriptor back over a socket.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

from bootseer.errors import AccessError, PermanentError, TransientError, os_errors_as
from bootseer.fuse import syscalls
from bootseer.fuse.protocol import MAX_READ
from bootseer.logs import logger

_LOG = logger(__name__)
DEVICE = Path("/dev/fuse")
HELPER = "fusermount3"
_HELPER_DEADLINE_S = 10.0


def attach(target: Path, *, label: str, writable: bool = False, shared: bool = True) -> int:
    """Mount on `target`; returns the descriptor that requests arrive on. `label` is shown in the mount table.

    Unless `writable`, the kernel refuses all changes itself. A mount made by root is accessible to other users,
    according to mode bits, if it is `shared`; other mounts never are.
    """
    label = re.sub(r"[,\\\s]", "_", label)  # they would end it in the mount options
    return _by_helper(target, label, writable) if os.geteuid() else _by_kernel(target, label, writable, shared)


def _by_kernel(target: Path, label: str, writable: bool, shared: bool) -> int:
    with os_errors_as(AccessError, f"cannot open {DEVICE}"):
        device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    options = (
        f"fd={device},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},"
        f"{'allow_other,' if shared else ''}default_permissions,max_read={MAX_READ}"
    )
    flags = (0 if writable else syscalls.MS_RDONLY) | syscalls.MS_NOSUID | syscalls.MS_NODEV
    try:
        syscalls.mount("fuse.bootseer", label, target, flags=flags, options=options)
    except BaseException:
        os.close(device)
        raise
    return device


def _by_helper(target: Path, label: str, writable: bool) -> int:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    access = "rw" if writable else "ro"
    options = f"{access},nosuid,nodev,default_permissions,max_read={MAX_READ},fsname={label},subtype=bootseer"
    with ours, theirs:
        ours.settimeout(_HELPER_DEADLINE_S)
        problem = _run_helper(["-o", options], target, "mount", theirs.fileno())
        if problem:
            raise AccessError(f"cannot mount {target}: {problem}")
        nothing = f"{HELPER} handed over no descriptor for {target}"
        with os_errors_as(PermanentError, nothing):
            _, numbers, _, _ = socket.recv_fds(ours, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not numbers:
            raise PermanentError(nothing)
        return numbers[0]


def _run_helper(options: list[str], target: Path, action: str, *link: int) -> str:
    """Run fusermount3; returns "" or why it refused. Raises `AccessError` if it is missing, and `TransientError`."""
    helper = shutil.which(HELPER)
    if helper is None:
        raise AccessError(f"cannot {action} {target}: only root may without {HELPER}: apt-get install fuse3")
    try:
        ended = subprocess.run(
            [helper, *options, "--", str(target)],
            env={**os.environ, **({"_FUSE_COMMFD": str(link[0])} if link else {})},
            pass_fds=link,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_HELPER_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TransientError(f"{HELPER} did not {action} {target} in {_HELPER_DEADLINE_S:g} s") from error
    if ended.returncode == 0:
        return ""
    messages = ended.stderr.decode("utf-8", "replace").strip().splitlines()
    missing = f"; user {os.getuid()} needs a line in /etc/passwd" if b"determine username" in ended.stderr else ""
    return f"{messages[-1]}{missing}" if messages else f"{HELPER} failed"


def detach(target: Path, *, force: bool = False, lazy: bool = False) -> None:
    """Unmount. Raises `TransientError` while it is in use.

    With `lazy` or `force` the mount disappears at once; with `force`, as root, its readers also get errors.
    """
    if os.geteuid() == 0:
        # MNT_DETACH alone: a blocked reader would keep the connection alive. MNT_FORCE alone: an open file the mount.
        hidden = syscalls.MNT_DETACH if force or lazy else 0
        syscalls.unmount(target, flags=hidden | (syscalls.MNT_FORCE if force else 0))
        return
    problem = _run_helper(["-u", *(["-z"] if force or lazy else [])], target, "unmount")
    if problem:
        raise TransientError(f"cannot unmount {target}: {problem}")


def widen_read_ahead(target: Path, kib: int) -> None:
    """Set the kernel's read-ahead, as root; its default of 128 KiB makes eight requests of a full one. Blocks until the
    mount answers."""
    with contextlib.suppress(OSError):
        device = target.stat().st_dev
        Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").write_text(str(kib))
        _LOG.debug("%s: read-ahead %d KiB", target, kib)
