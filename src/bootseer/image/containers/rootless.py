"""What a container's configuration looks like where root is that of a user namespace alone.

The kernel gives such a root no new views of processes, devices or the network, because these belong to the host's
namespaces: so the host's views are bound in their place. Device nodes cannot be made and are bound, too. Called by
`image.containers.container`. Touches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bootseer.image.containers.runtime_config import Bind

_FROM_HOST = {"proc": [], "sysfs": ["ro", "rro"]}


def node_binds(nodes: Sequence[Mapping[str, Any]], devices: Sequence[str]) -> list[Bind]:
    """The device nodes of CDI files and of the host, as binds."""
    found = [(str(node.get("hostPath") or node.get("path") or ""), str(node.get("path") or "")) for node in nodes]
    return [Bind(source, target) for source, target in [*found, *((path, path) for path in devices)]]


def without_root(config: Mapping[str, Any], num_owners: int) -> dict[str, Any]:
    """The configuration with what root of a namespace of so many owners can have."""
    return {**config, "mounts": [_mount(mount, num_owners) for mount in config["mounts"]]}


def _mount(mount: Mapping[str, Any], num_owners: int) -> dict[str, Any]:
    more = _FROM_HOST.get(mount["type"])
    if more is not None:
        place = mount["destination"]
        return {"destination": place, "type": "bind", "source": place, "options": ["rbind", "rprivate", *more]}
    options = [word for word in mount["options"] if not _names_missing_group(word, num_owners)]
    return {**mount, "options": options}


def _names_missing_group(option: str, num_owners: int) -> bool:
    name, _, number = option.partition("=")
    return name == "gid" and int(number) >= num_owners
