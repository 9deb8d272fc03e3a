"""What a container's configuration looks like where root is that of a user namespace alone.

The kernel gives such a root no new views of processes, devices or the network, because these belong to the host's
namespaces: so the host's views are bound in their place. Device nodes cannot be made and are bound, too. Called by
`image.containers.container`. Touches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bootseer.image.containers.runtime_config import Bind
from bootseer.image.containers.users import User

_FROM_HOST = {"proc": [], "sysfs": ["ro", "rro"]}


def node_binds(nodes: Sequence[Mapping[str, Any]], devices: Sequence[str]) -> list[Bind]:
    """The device nodes of CDI files and of the host, as binds."""
    found = [(str(node.get("hostPath") or node.get("path") or ""), str(node.get("path") or "")) for node in nodes]
    return [Bind(source, target) for source, target in [*found, *((path, path) for path in devices)]]


def is_renamed(user: User, num_owners: int) -> bool:
    """Whether the user has an id that a namespace of so many owners has not: then root of it goes by that id."""
    return user.uid >= num_owners or user.gid >= num_owners


def without_root(config: Mapping[str, Any], num_owners: int, user: User) -> dict[str, Any]:
    """The configuration with what root of a namespace of so many owners can have."""
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
        return {"destination": place, "type": "bind", "source": place, "options": ["rbind", "rprivate", *more]}
    options = [word for word in mount["options"] if not _names_missing_group(word, num_owners)]
    if mount["type"] == "bind":
        # The kernel honours none of these there, and bound device nodes have to work.
        options = [word for word in options if word not in ("nosuid", "nodev")]
    return {**mount, "options": options}


def _names_missing_group(option: str, num_owners: int) -> bool:
    name, _, number = option.partition("=")
    return name == "gid" and int(number) >= num_owners
