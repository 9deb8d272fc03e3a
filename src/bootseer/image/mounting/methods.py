"""Choose the mount method for images: probe what works in this process on this machine, choose, describe the choice.

Root's usual method is not probed, but tried; if it fails, the next one is used. For other users, and for root after a
failure, each facility is probed by a real mount in a short-lived process.
"""

from __future__ import annotations

import errno
import os
import shutil

from msgspec.structs import replace

from bootseer.errors import UsageError
from bootseer.machine import kernel
from bootseer.machine.check import Check
from bootseer.machine.kernel import FILE_BACKED_EROFS, kernel_version, loop_problem
from bootseer.mounts import user_namespace
from bootseer.mounts.method import Choice, Facts, MountMethod, choose

CHECK = "lazy images"
"""Name of the check in `bootseer doctor`."""
NO_ROOT = "it needs root with CAP_SYS_ADMIN"
_IN_NAMESPACE = "root of a user namespace may not mount EROFS"
_OLD_KERNEL = "before Linux 6.12, the kernel mounts EROFS from block devices only"
_NO_EROFS = "the kernel has no EROFS"
_FAILED = {MountMethod.EROFS_FILE: "erofs_file", MountMethod.EROFS_LOOP: "loop", MountMethod.FUSE_TREE: "fuse"}


def initial_facts(*, private: bool) -> Facts:
    """The facts that are known without probing, if this process is root; else `probe`. `private`: only this process
    and its children will see the mount."""
    if not user_namespace.may_mount() or not user_namespace.is_host():
        return probe(private=private)
    version = kernel_version(os.uname().release)
    return Facts(erofs_file=_OLD_KERNEL if version is not None and version < FILE_BACKED_EROFS else "")


def probe(*, private: bool) -> Facts:
    if not user_namespace.may_mount():
        facts = Facts(mount=NO_ROOT)
        if not private:
            return replace(facts, fuse=_no_helper(), user_overlay="")
        facts = replace(facts, fuse=_refused("fuse-user"), user_overlay=_refused("overlay-user"))
        return replace(facts, namespace=_refused("userns")) if facts.fuse and facts.user_overlay else facts
    overlay, fuse = _refused("overlay"), _refused("fuse")
    if not user_namespace.is_host():
        return Facts(mount=_IN_NAMESPACE, fuse=fuse, overlay=overlay, user_overlay=overlay)
    erofs_file, loop = _try_erofs()
    return Facts(fuse=fuse, erofs_file=erofs_file, loop=loop, overlay=overlay, user_overlay=overlay)


def _refused(trial: str) -> str:
    found = kernel.attempt(trial)
    return "" if found.worked else found.reason


def _no_helper() -> str:
    from bootseer.fuse.attach import DEVICE, HELPER

    if shutil.which(HELPER) is None:
        return f"there is no {HELPER}, and only root mounts without it"
    # The helper opens the device with its caller's permissions.
    return "" if kernel.may_open_fuse() else f"{DEVICE} cannot be opened"


def _try_erofs() -> tuple[str, str]:
    """Why EROFS cannot be mounted from files, and why not from loop devices; empty if it can."""
    trial = kernel.try_erofs()
    if trial.errno == errno.ENODEV:
        return _NO_EROFS, _NO_EROFS
    reason = _OLD_KERNEL if trial.errno == errno.ENOTBLK else "" if trial.worked else trial.reason
    return reason, loop_problem()


def after_failure(facts: Facts, method: MountMethod, reason: str, *, private: bool) -> Facts:
    """The facts after this method failed, for any reason, so that it is not chosen again."""
    failed = _FAILED[method]
    found = replace(facts, **{failed: getattr(facts, failed) or reason})
    if not facts.mount:  # root: `initial_facts` has not probed
        probed = probe(private=private)
        found = Facts(*(getattr(found, name) or getattr(probed, name) for name in Facts.__struct_fields__))
    return found


def choose_method(facts: Facts, *, private: bool, writable: bool) -> Choice:
    """The best method that works here. Raises `UsageError` if there is none."""
    choice = choose(facts)
    if facts.mount != NO_ROOT or (private and not facts.namespace):
        return choice
    if private:
        raise UsageError(
            f"without root a container needs a user namespace: {facts.namespace}",
            hint="run as root, or allow user namespaces; see bootseer doctor",
        )
    if writable:
        raise UsageError("a writable mount needs root", hint="leave out --rw, or use bootseer image run")
    if choice.method is MountMethod.UNPACK:
        raise UsageError(
            f"the image cannot be mounted without root: {facts.fuse}",
            hint="apt-get install fuse3 and make /dev/fuse accessible, or use bootseer image run, or mount it as root",
        )
    return choice


def describe_fallback(choice: Choice) -> str:
    """One line with the method and why better ones cannot be used; empty for the best method."""
    if not choice.refused:
        return ""
    reasons: dict[str, list[str]] = {}
    for method, reason in choice.refused:
        reasons.setdefault(reason, []).append(method.value)
    refused = "; ".join(f"{' or '.join(names)}: {reason}" for reason, names in reasons.items())
    return f"by {choice.method.value}; not by {refused}"


def check() -> Check:
    """The check that `bootseer doctor` shows."""
    name, opens = CHECK, ("image run", "run --image")
    facts = probe(private=True)
    if facts.namespace:
        return Check(name, "missing", "", f"neither root nor user namespaces: {facts.namespace}", "run as root", opens)
    choice = choose_method(facts, private=True, writable=True)
    reason = describe_fallback(choice)
    if choice.method is MountMethod.UNPACK:
        reason += ". The whole image is fetched and unpacked before the start"
        return Check(name, "limited", choice.method.value, reason, "", opens)
    if facts.fuse:
        reason = f"without FUSE the whole image is fetched before the start: {facts.fuse}"
        fix = "modprobe fuse; in a container: --device /dev/fuse"
        return Check(name, "limited", choice.method.value, reason, fix, opens)
    return Check(name, "limited" if reason else "ok", choice.method.value, reason, "", opens)
