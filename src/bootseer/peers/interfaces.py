"""The network interfaces of this node: speeds and addresses.

A training node has several fast interfaces (RoCE, InfiniBand with IPoIB) that support TCP and are idle until the first
collective. Peers use all of the fastest class concurrently, and stop using them when training begins.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from bootseer.errors import UsageError
from bootseer.io.files import lines_of

PORT: Final = 17_507
"""Default port of listed nodes; other nodes use it if it is free."""
_LABEL: Final = "[A-Za-z0-9_-]{1,63}"
_ADDRESS: Final = re.compile(rf"((?=[^:]{{1,253}}:){_LABEL}(?:\.{_LABEL})*\.?|\[[0-9a-fA-F:.]{{2,45}}\]):(\d{{1,5}})")
"""`socket` raises UnicodeError for a name with an empty or too long label."""
_NET: Final = Path("/sys/class/net")
_SIOCGIFADDR: Final = 0x8915
_VIRTUAL: Final = (
    "lo", "docker", "br-", "virbr", "cni", "veth", "flannel", "cali", "vxlan", "cilium", "antrea", "ovn-k8s", "weave",
    "tunl", "kube", "dummy", "podman", "nerdctl", "lxc", "lxd",
)  # fmt: skip
"""Interfaces to containers, not to other nodes: some report the speed of a fast link."""
_SLOWER: Final = 2
"""An interface slower than the fastest by this factor is not used: it would delay its share of the requests."""
_UNKNOWN: Final = 125_000_000
"""Assumed speed for interfaces that do not report theirs, such as those of virtual machines: 1 Gbit/s in bytes."""


@dataclass(frozen=True, slots=True)
class Interface:
    """An interface that is up and has an address."""

    name: str
    address: str
    bytes_s: int
    """Its speed; 1 Gbit/s if unknown."""
    is_main: bool = False
    """Whether it has the default route and an unknown speed."""


def interfaces() -> list[Interface]:
    """All interfaces to other nodes, the fastest first; none where /sys is not mounted, as in some sandboxes."""
    found = []
    default = _default_route()
    for folder in sorted(_NET.iterdir()) if _NET.is_dir() else ():
        name = folder.name
        with contextlib.suppress(OSError):
            if (folder / "operstate").read_text().strip() not in ("up", "unknown") or name.startswith(_VIRTUAL):
                continue
            if address := _address(name):
                speed = _speed(folder)
                found.append(Interface(name, address, speed or _UNKNOWN, not speed and name == default))
    return sorted(found, key=lambda each: (-each.bytes_s, each.name != default, each.name))


def chosen(names: Sequence[str]) -> list[Interface]:
    """The named interfaces, or else the fastest ones; the loopback interface if there is no other.

    Raises `UsageError` for a name without a usable interface.
    """
    found = interfaces()
    if names:
        by_name = {each.name: each for each in found}
        if "lo" in names:
            by_name["lo"] = _LOOPBACK
        for name in names:
            if name not in by_name:
                known = ", ".join(by_name) or "none"
                raise UsageError(f"--peers-interface {name}: not up, or without an address", hint=f"there are: {known}")
        return [by_name[name] for name in dict.fromkeys(names)]
    fast = [each for each in found if each.is_main or each.bytes_s * _SLOWER > found[0].bytes_s]
    return fast or [_LOOPBACK]


def link_bytes_s(addresses: Iterable[str]) -> int:
    """The total speed of the interfaces with these addresses."""
    known = {each.address: each.bytes_s for each in interfaces()}
    return sum(known.get(address, _UNKNOWN) for address in set(addresses))


@lru_cache
def name_of(address: str) -> str:
    """The name of the interface with this address; the address itself if there is none."""
    names = {each.address: each.name for each in (*interfaces(), _LOOPBACK)}
    return names.get(address.removeprefix("::ffff:"), address)


def listen_at(host: str, port: int) -> socket.socket:
    """Listen at an address of this machine; port 0: any port. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def listen_at_own(addresses: Sequence[str]) -> tuple[list[socket.socket], list[str]]:
    """Listen at those addresses that belong to this machine; returns also those whose ports are taken."""
    listening, taken = [], []
    for address in addresses:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][4][0]
            if ipaddress.ip_address(found).is_loopback and ":" not in host and host not in (found, "localhost"):
                found = "0.0.0.0"  # noqa: S104 - Debian maps a host's own name to a loopback address
            listening.append(listen_at(str(found), int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                taken.append(address)
    return listening, taken


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found[2]) < 1 << 16


def _speed(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        if (speed := int((folder / "speed").read_text())) > 0:
            return speed * 125_000
    return 0


def _address(name: str) -> str:
    """Its IPv4 address, else its global IPv6 address, else "". A link-local one is no address for other nodes: those of
    management controllers (IPMI over USB) and of NodeLocal DNSCache are the same on all nodes."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        address = ipaddress.IPv4Address(answer[20:24])
        if not address.is_link_local:
            return str(address)
    for line in lines_of("/proc/net/if_inet6"):
        digits, _, _, scope, _, device = line.split()
        if device == name and scope == "00":
            return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return ""


def _default_route() -> str:
    for words in map(str.split, lines_of("/proc/net/route")[1:]):
        if words[1] == "00000000":
            return words[0]
    return ""


_LOOPBACK: Final = Interface("lo", "127.0.0.1", _UNKNOWN)
