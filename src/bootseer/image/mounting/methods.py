"""Choose the mount method for images: the best one that works in this process on this machine.

Methods are tried, the best first. Without a trial are refused only those that cannot work for this user or kernel, so
that a user who cannot mount anything gets the error before anything is fetched.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from itertools import takewhile

from bootseer.errors import BootseerError, UsageError
from bootseer.fuse.syscalls import number_of
from bootseer.machine import kernel
from bootseer.mounts import user_namespace
from bootseer.mounts.layers import MountMethod

_NO_ROOT = "it needs root with CAP_SYS_ADMIN"
_IN_NAMESPACE = "root of a user namespace may not mount EROFS"
_OLD_KERNEL = "before Linux 6.12, the kernel mounts EROFS from block devices only"
_NO_EROFS = "the kernel has no EROFS"
_EROFS = (MountMethod.EROFS_FILE, MountMethod.EROFS_LOOP)
Refused = dict[MountMethod, str]
"""Methods that do not work here, each with the reason."""


def refused_untried(*, private: bool, writable: bool) -> Refused:
    """The methods that need no trial. `private`: only this process and its children will see the mount. Raises
    `UsageError` for what this user cannot mount by any method."""
    refused: Refused = {}
    if not user_namespace.may_mount():
        refused = dict.fromkeys(_EROFS, _NO_ROOT)
        if private:
            namespace = kernel.attempt("userns")
            if not namespace.worked:
                raise UsageError(
                    f"without the right to mount, a container needs a user namespace: {namespace.reason}",
                    hint=f"{kernel.AS_ROOT}, or allow user namespaces; see bootseer doctor",
                )
        elif writable:
            raise UsageError("a writable mount needs root", hint="leave out --rw, or use bootseer image run")
        else:
            from bootseer.fuse.attach import HELPER

            if shutil.which(HELPER) is None:
                refused[MountMethod.FUSE_TREE] = f"there is no {HELPER}, and only root mounts without it"
    elif not user_namespace.is_host():
        refused = dict.fromkeys(_EROFS, _IN_NAMESPACE)
    elif (kernel.kernel_version(os.uname().release) or kernel.FILE_BACKED_EROFS) < kernel.FILE_BACKED_EROFS:
        refused = {MountMethod.EROFS_FILE: _OLD_KERNEL}
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        refused.setdefault(MountMethod.FUSE_TREE, f"/dev/fuse cannot be opened: {error.strerror}")
    return refused


def refuse(refused: Refused, method: MountMethod, error: BootseerError | OSError) -> None:
    """Add a method that has failed, for any reason, so that it is not chosen again."""
    if method in _EROFS and (reason := why_no_erofs(error)):
        refused |= {each: refused.get(each, reason) for each in _EROFS}
    else:
        refused[method] = str(error)


def why_no_erofs(error: BootseerError | OSError) -> str:
    """Why a mount failed, if this kernel has no EROFS, or no overlays of so many layers; else empty."""
    number = number_of(error) if isinstance(error, BootseerError) else 0
    is_missing = number == errno.ENODEV and "mount erofs" in str(error)
    return _NO_EROFS if is_missing else str(error) if number == errno.E2BIG else ""


def choose_method(refused: Mapping[MountMethod, str], *, private: bool) -> MountMethod:
    """The best method that is left. Raises `UsageError` if this user cannot mount with it."""
    method = next(each for each in MountMethod if each not in refused)
    if method is MountMethod.UNPACK and not private and refused[MountMethod.EROFS_FILE] == _NO_ROOT:
        raise UsageError(
            f"the image cannot be mounted without root: {refused[MountMethod.FUSE_TREE]}",
            hint="apt-get install fuse3 and make /dev/fuse accessible, or use bootseer image run, or mount it as root",
        )
    return method


def better_ones(refused: Mapping[MountMethod, str], method: MountMethod) -> Refused:
    """The methods better than this one, with the reasons why they do not work."""
    return {each: refused[each] for each in takewhile(lambda each: each is not method, MountMethod)}


def describe_fallback(refused: Mapping[MountMethod, str], method: MountMethod) -> str:
    """One line with the method and why better ones cannot be used; empty for the best method."""
    reasons: dict[str, list[str]] = {}
    for each, reason in better_ones(refused, method).items():
        reasons.setdefault(reason, []).append(each.value)
    if not reasons:
        return ""
    listed = "; ".join(f"{' or '.join(names)}: {reason}" for reason, names in reasons.items())
    return f"by {method.value}; not by {listed}"
