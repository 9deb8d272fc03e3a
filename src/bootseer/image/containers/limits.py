"""Container options as in docker: capabilities, limits, variables from a file, tmpfs mounts.

They are parsed before anything is fetched; `runtime_config` applies them. The runtimes run without cgroups, because
most users may not change them, so there are no limits of memory or processor time: those of the job apply.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Collection
from pathlib import Path

from msgspec import Struct

from bootseer.errors import UsageError
from bootseer.io import proc

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "SETGID", "SETUID", "SETFCAP", "SETPCAP",
                "NET_BIND_SERVICE", "SYS_CHROOT", "KILL")  # fmt: skip
"""Podman's default. Docker's MKNOD, NET_RAW and AUDIT_WRITE are unsafe here: the network is the host's, and device
rules depend on cgroups, which often cannot be changed."""
_ALL = ("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
        "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
        "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
        "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
        "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
        "CHECKPOINT_RESTORE")  # fmt: skip
"""In the kernel's order: the index is the capability's number."""
_RLIMITS = {name.removeprefix("RLIMIT_").lower(): getattr(resource, name)
            for name in vars(resource) if re.fullmatch("RLIMIT_(?!OFILE)[A-Z]+", name)}  # fmt: skip
_TMPFS_OPTION = re.compile(
    r"ro|rw|exec|noexec|suid|nosuid|nodev|size=\d{1,15}[kmgKMG%]?|mode=[0-7]{3,4}|(?:uid|gid|nr_inodes)=\d{1,10}"
)
_MAX_ENV_BYTES = 1 << 20


class Limits(Struct, frozen=True):
    """The user's options for the container, apart from those for its process."""

    read_only: bool = False
    shm_bytes: int | None = None
    """Size of /dev/shm; None is the kernel's default, half of the memory."""
    capabilities: tuple[str, ...] = ()
    """Added to the default ones."""
    dropped: tuple[str, ...] = ()
    """Removed from the default ones; ALL: only those of `capabilities` are left."""
    rlimits: tuple[tuple[str, int, int], ...] = ()
    """Replace our own: name (`nofile`), soft and hard limit; the largest 64-bit number is unlimited."""
    tmpfs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Mount point and mount options of each tmpfs."""
    hostname: str = ""
    """Empty: the host's."""


def capabilities_of(limits: Limits) -> list[str]:
    """The container's capabilities. Raises `UsageError` for unknown ones and for those that this process lacks."""
    added = _names("--cap-add", limits.capabilities)
    dropped = _names("--cap-drop", limits.dropped)
    ours = int(proc.status().get("CapBnd", "-1"), 16)
    for name in added - {"ALL"}:
        if not ours >> _ALL.index(name) & 1:
            raise UsageError(f"--cap-add {name}: bootseer does not have it itself", hint="start it with that right")
    usual: Collection[str] = _ALL if "ALL" in added else () if "ALL" in dropped else CAPABILITIES
    wanted = {*usual, *added} - dropped
    # Those that this process lacks would make the runtime fail, as where a pod's security context drops all but some.
    return [f"CAP_{name}" for number, name in enumerate(_ALL) if name in wanted and ours >> number & 1]


def _names(option: str, words: Collection[str]) -> set[str]:
    names = {word.upper().removeprefix("CAP_") for word in words}
    for name in sorted(names - {"ALL", *_ALL}):
        raise UsageError(f"{option} {name!r} is not a capability", hint=f"for example {option} SYS_PTRACE, or ALL")
    return names


def rlimits_of(limits: Limits) -> list[dict[str, object]]:
    """All limits: the user's, else our own, which must be explicit: runc raises its own limit of open files."""
    named = {name: (soft, hard) for name, soft, hard in limits.rlimits}
    found = []
    for name, number in sorted(_RLIMITS.items()):
        soft, hard = named.get(name) or (value % (1 << 64) for value in resource.getrlimit(number))
        found.append({"type": f"RLIMIT_{name.upper()}", "soft": soft, "hard": hard})
    return found


def parse_ulimit(text: str) -> tuple[str, int, int]:
    """`NAME=SOFT[:HARD]`. Raises `UsageError` also for a limit that this process may not set."""
    match = re.fullmatch(r"([a-z]+)=(-1|unlimited|\d{1,19})(?::(-1|unlimited|\d{1,19}))?", text)
    if match is None or match[1] not in _RLIMITS:
        known = ", ".join(sorted(_RLIMITS))
        raise UsageError(f"--ulimit {text!r} is not NAME=SOFT[:HARD]", hint=f"nofile=65536:65536; names: {known}")
    soft, hard = (
        -1 if limit in ("-1", "unlimited") else min(int(limit), (1 << 63) - 1)
        for limit in (match[2], match[3] or match[2])
    )
    if hard != -1 and (soft == -1 or soft > hard):
        raise UsageError(f"--ulimit {text!r}: the soft limit is above the hard one", hint="give SOFT:HARD")
    number = _RLIMITS[match[1]]
    now = resource.getrlimit(number)
    if now[1] != -1 and (hard == -1 or hard > now[1]):
        try:
            resource.setrlimit(number, (now[0], hard))
            resource.setrlimit(number, now)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--ulimit {text!r}: the hard limit here is {now[1]}, and this user may not raise it",
                hint=f"--ulimit {match[1]}={now[1]}, or raise it where bootseer is started",
            ) from error
    return match[1], soft % (1 << 64), hard % (1 << 64)


def parse_tmpfs(text: str) -> tuple[str, tuple[str, ...]]:
    target, _, rest = text.partition(":")
    options = tuple(rest.split(",")) if rest else ()
    if not target.startswith("/") or not target.strip("/") or ".." in target.split("/"):
        raise UsageError(f"--tmpfs {text!r} is not an absolute path", hint="for example --tmpfs /scratch:size=8g")
    for option in options:
        if not _TMPFS_OPTION.fullmatch(option):
            known = "size=8g, mode=1777, uid=N, gid=N, nr_inodes=N, ro, exec, suid"
            raise UsageError(f"--tmpfs {text!r}: unknown option {option!r}", hint=f"options: {known}")
    usual = ("nosuid", "nodev", "noexec")
    return target, (*(word for word in usual if word.removeprefix("no") not in options), *options)


def parse_hostname(name: str) -> str:
    """Return the name. Raises `UsageError` if it is not a valid host name."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?", name):
        raise UsageError(f"--hostname {name!r} is not a host name", hint="use letters, digits, - and ., at most 63")
    return name


def read_env_file(path: str) -> tuple[str, ...]:
    """The lines `NAME=VALUE` or `NAME` of a file, parsed as by docker: quotes are kept, and `#` begins a comment only
    at the start of a line. Raises `UsageError`."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_ENV_BYTES + 1)
        lines = data.decode("utf-8-sig").split("\n")  # values may have the other line ends of `splitlines`
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"--env-file {path}: {reason}", hint="name a file with lines NAME=VALUE") from error
    if len(data) > _MAX_ENV_BYTES:
        raise UsageError(f"--env-file {path}: more than 1 MiB", hint="name a file with lines NAME=VALUE")
    found = []
    for number, text in enumerate(lines, 1):
        line = text.lstrip().removesuffix("\r")
        name = line.partition("=")[0]
        if not line or line.startswith("#"):
            continue
        if not name or re.search(r"[\s\0]", name) or "\0" in line:
            # The line itself may hold a secret.
            raise UsageError(f"--env-file {path}: line {number} is not NAME=VALUE", hint="one variable in each line")
        found.append(line)
    return tuple(found)
