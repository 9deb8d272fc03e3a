"""The `config.json` of a container, as the OCI runtime specification defines it; runc and crun read it.

A training job should run as it would without a container, but with other files. So it shares the host's network and, by
default, host name and limits. Mounts, System V IPC and process ids (which `shim` adds) are private: with the host's
process ids, `/proc/PID/root` of a host process would expose the host's files. This is no sandbox, but the container has
only the usual capabilities and devices. Device nodes work in `/dev` alone: images and host folders are mounted `nodev`.

Without root on the host, this process is root of a user namespace. The kernel lets it mount no new `/proc` or `/sys`,
because the PID and network namespaces belong to the host, and create no device nodes. So the host's are bind-mounted
instead (`without_root`, `node_binds`).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.errors import UsageError
from bootseer.image.containers.cdi import Edits
from bootseer.image.containers.limits import Limits, capabilities_of, rlimits_of
from bootseer.image.containers.process import Process
from bootseer.image.containers.rootfs import User

_MASKED = ("/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats",
           "/proc/sched_debug", "/proc/scsi", "/sys/firmware")  # fmt: skip
_READ_ONLY = ("/proc/asound", "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_CGROUPS = "/sys/fs/cgroup"
_DEVICE = "--device takes a device node or a folder with some, HOST[:CONTAINER[:rwm]], or VENDOR/CLASS=NAME"


class Bind(Struct, frozen=True):
    """A bind mount of a file or folder of the host."""

    source: str
    target: str
    read_only: bool = False


def parse_bind(text: str) -> Bind:
    """`SOURCE:TARGET[:ro]`. Raises `UsageError` for another form or a source that does not exist."""
    source, *rest = text.split(":")
    target, mode = rest[0] if rest else "", rest[1] if len(rest) > 1 else "rw"
    if not source or not target.startswith("/") or mode not in ("ro", "rw") or len(rest) > 2:
        raise UsageError(f"--mount {text!r} is not SOURCE:TARGET[:ro]", hint="for example --mount /data:/data:ro")
    path = Path(source).absolute()
    if not path.exists():
        raise UsageError(f"--mount {text!r}: there is no {path}", hint="name a file or folder of this machine")
    return Bind(str(path), target, mode == "ro")


def runtime_config(process: Process, root: Path, binds: Sequence[Bind], edits: Edits, limits: Limits) -> dict[str, Any]:
    """The whole document. Raises `UsageError` for a device that does not exist, an unknown capability and a malformed
    CDI mount."""
    capabilities = capabilities_of(limits)
    nodes = [_node(node) for node in edits.nodes]
    env = {**process.env, **dict(word.split("=", 1) for word in edits.env)}
    own = [_mount_on(place, "tmpfs", "tmpfs", [*words]) for place, words in limits.tmpfs] + [*map(_bind, binds)]
    # Parents first: a mount on /a after one on /a/b would hide it.
    own.sort(key=lambda mount: mount["destination"].rstrip("/").count("/"))
    return {
        "ociVersion": "1.0.2",
        **({"hostname": limits.hostname} if limits.hostname else {}),
        "process": {
            "terminal": False,  # the program inherits our standard streams, also a terminal
            "user": {
                "uid": process.user.uid,
                "gid": process.user.gid,
                "additionalGids": [*process.user.groups, *edits.groups],
            },
            "args": list(process.args),
            "env": [f"{name}={value}" for name, value in env.items()],
            "cwd": process.cwd,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "rlimits": rlimits_of(limits),
        },
        "root": {"path": str(root), "readonly": limits.read_only},
        "mounts": [*_system_mounts(limits), *(_device_mount(mount) for mount in edits.mounts), *own],
        "hooks": _hooks(edits),
        "linux": {
            "namespaces": [{"type": "mount"}, {"type": "ipc"}, *([{"type": "uts"}] if limits.hostname else [])],
            "devices": nodes,
            "resources": {"devices": [{"allow": False, "access": "rwm"}, *map(_rule, nodes)]},
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
        },
    }


def _system_mounts(limits: Limits) -> list[dict[str, Any]]:
    shm = ["nosuid", "noexec", "nodev", "mode=1777", *([f"size={limits.shm_bytes}"] if limits.shm_bytes else [])]
    pts = ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]
    mounts = [
        ("/proc", "proc", "proc", ["nosuid", "noexec", "nodev"]),
        ("/dev", "tmpfs", "tmpfs", ["nosuid", "strictatime", "mode=755", "size=65536k"]),
        ("/dev/pts", "devpts", "devpts", pts),
        ("/dev/shm", "tmpfs", "shm", shm),  # noqa: S108 - the container's own
        ("/dev/mqueue", "mqueue", "mqueue", ["nosuid", "noexec", "nodev"]),
        ("/sys", "sysfs", "sysfs", ["nosuid", "noexec", "nodev", "ro"]),
    ]
    if Path(_CGROUPS).is_dir():  # programs read their memory limit there
        mounts.append((_CGROUPS, "bind", _CGROUPS, ["rbind", "ro", "rro", "nosuid", "noexec", "nodev"]))
    return [_mount_on(*mount) for mount in mounts]


def _mount_on(place: str, kind: str, source: str, options: list[str]) -> dict[str, Any]:
    return {"destination": place, "type": kind, "source": source, "options": options}


def _bind(bind: Bind) -> dict[str, Any]:
    # `rro` makes submounts read-only too, where the runtime supports it. crun 1.8 fails with it for a file.
    read_only = ["ro", "rro"] if Path(bind.source).is_dir() else ["ro"]
    options = ["rbind", "rprivate", "nosuid", "nodev", *(read_only if bind.read_only else ["rw"])]
    return _mount_on(bind.target, "bind", bind.source, options)


def _device_mount(mount: Mapping[str, Any]) -> dict[str, Any]:
    source, target = mount.get("hostPath"), mount.get("containerPath")
    options = [word for word in mount.get("options") or () if isinstance(word, str)]
    if not isinstance(source, str) or not isinstance(target, str):
        raise UsageError("a CDI file has a mount without hostPath or containerPath", hint="generate the file again")
    if not {"bind", "rbind"}.intersection(options):
        options.append("rbind")
    return _mount_on(target, "bind", source, options)


def _node(node: Mapping[str, Any]) -> dict[str, Any]:
    """A device node with its numbers; attributes that CDI leaves out are the host node's."""
    path = str(node.get("path") or "")
    host = str(node.get("hostPath") or path)
    try:
        status = Path(host).stat()
    except (OSError, ValueError) as error:
        raise UsageError(f"device {host} does not exist", hint=f"is the driver loaded? {_DEVICE}") from error
    if not stat.S_ISCHR(status.st_mode) and not stat.S_ISBLK(status.st_mode):
        raise UsageError(f"{host} is not a device", hint=_DEVICE)
    found = {
        "path": path,
        "type": "b" if stat.S_ISBLK(status.st_mode) else "c",
        "major": os.major(status.st_rdev),
        "minor": os.minor(status.st_rdev),
        "fileMode": stat.S_IMODE(status.st_mode),
        "uid": status.st_uid,
        "gid": status.st_gid,
    }
    return {**found, **{name: node[name] for name in ("fileMode", "uid", "gid") if isinstance(node.get(name), int)}}


def _rule(node: Mapping[str, Any]) -> dict[str, Any]:
    return {"allow": True, "access": "rwm", **{name: node[name] for name in ("type", "major", "minor")}}


def _hooks(edits: Edits) -> dict[str, list[dict[str, Any]]]:
    hooks: dict[str, list[dict[str, Any]]] = {}
    for hook in edits.hooks:
        name, path = hook.get("hookName"), hook.get("path")
        if isinstance(name, str) and isinstance(path, str):
            kept = {key: hook[key] for key in ("path", "args", "env", "timeout") if key in hook}
            hooks.setdefault(name, []).append(kept)
    return hooks


_FROM_HOST = {"proc": [], "sysfs": ["ro", "rro"]}


def device_nodes(text: str) -> list[dict[str, str]]:
    """The nodes of a device, or of all devices below a folder such as /dev/infiniband, in the form of CDI. As for
    docker, `text` is HOST[:CONTAINER][:rwm]."""
    named = re.fullmatch(r"(.+):(/[^:]*?)/?(?::rwm)?", text)
    host, place = named.groups() if named else [text.removesuffix(":rwm")] * 2
    files = [f"{folder}/{name}" for folder, _, names in os.walk(host) for name in names]
    found = sorted(file for file in files if Path(file).is_char_device() or Path(file).is_block_device()) or [host]
    return [{"hostPath": file, "path": place + file.removeprefix(host)} for file in found]


def node_binds(nodes: Sequence[Mapping[str, Any]]) -> list[Bind]:
    """Bind mounts for device nodes in the form of CDI."""
    return [Bind(str(node.get("hostPath") or node.get("path") or ""), str(node.get("path") or "")) for node in nodes]


def is_renamed(user: User, num_owners: int) -> bool:
    """Whether the user's ids are not mapped in a namespace of `num_owners` ids. The container then gets a user
    namespace of its own that maps root to these ids."""
    return user.uid >= num_owners or user.gid >= num_owners


def without_root(config: Mapping[str, Any], num_owners: int, user: User) -> dict[str, Any]:
    """The configuration, changed for root of a user namespace with `num_owners` mapped ids."""
    groups = [group for group in config["process"]["user"]["additionalGids"] if 0 < group < num_owners]
    process = {**config["process"], "user": {**config["process"]["user"], "additionalGids": groups}}
    linux = dict(config["linux"])
    if is_renamed(user, num_owners):
        linux["namespaces"] = [*linux["namespaces"], {"type": "user"}]
        linux["uidMappings"] = [{"containerID": user.uid, "hostID": 0, "size": 1}]
        linux["gidMappings"] = [{"containerID": user.gid, "hostID": 0, "size": 1}]
    mounts = [_mount(mount, num_owners) for mount in config["mounts"]]
    return {**config, "process": process, "mounts": mounts, "linux": linux}


def _mount(mount: Mapping[str, Any], num_owners: int) -> dict[str, Any]:
    more = _FROM_HOST.get(mount["type"])
    if more is not None:
        place = mount["destination"]
        return _mount_on(place, "bind", place, ["rbind", "rprivate", *more])
    options = [word for word in mount["options"] if not (word.startswith("gid=") and int(word[4:]) >= num_owners)]
    if mount["type"] == "bind":
        # Devices are bound one by one and must work, so `nodev` is dropped; `nosuid` has no effect here.
        options = [word for word in options if word not in ("nosuid", "nodev")]
    return {**mount, "options": options}
