"""Names of a job's nodes without DNS: the /etc/hosts of the job's processes.

PyTorch's TCPStore resolves the name of each client's address for a log line. The address is IPv4 mapped to IPv6, which
ordinary lines of a hosts file do not match, so a slow or dead resolver would delay the job. The peer service maintains
the file `hosts` in the peers folder: the machine's own lines, then one for each address of each node, plain and mapped.
It only appends, to the same inode, which is mounted over the job's /etc/hosts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from bootseer.errors import TransientError
from bootseer.io.deadline import within
from bootseer.io.tasks import Tasks
from bootseer.peers.choice import Peer
from bootseer.peers.interfaces import interfaces
from bootseer.peers.job import FOLDER

HOSTS: Final = "hosts"
"""In the peers folder."""
SYSTEM: Final = Path("/etc/hosts")
SWITCH: Final = "BOOTSEER_NAMES"
RES_OPTIONS: Final = "timeout:1 attempts:1"
MAX_HOSTS: Final = 16
_LOOKUPS: Final = 64
_OWN_NAME_S: Final = 1.0
_REVERSE: Final = ".peer"
"""Suffix of names that exist only for reverse lookups: the resolution of a node's real name is not changed."""


class HostsFile:
    """The file, for the service. Two threads in `add` may both append a line, which has no other effect."""

    def __init__(self, folder: Path, system: Path = SYSTEM) -> None:
        """Start with the machine's own entries. Raises `OSError`."""
        try:
            known = system.read_bytes()
        except FileNotFoundError:
            known = b""
        lines = known.decode(errors="replace").splitlines()
        self._added: set[Peer] = set()
        self._known = {word for line in lines for word in line.partition("#")[0].split()}
        self._file = os.open(folder / HOSTS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.fchmod(self._file, 0o644)  # other users in a container read it
        os.write(self._file, known.rstrip(b"\n") + b"\n# by BootSeer: the nodes of this job\n")
        self._append("127.0.0.1", "localhost")

    def add(self, peers: Iterable[Peer]) -> None:
        """Append missing entries. Raises `OSError`."""
        new = [peer for peer in peers if peer not in self._added]  # the names of a list are looked up once
        with Tasks("bootseer-names", _LOOKUPS) as tasks:  # a resolver may take seconds for each
            for peer, addresses in zip(new, tasks.map(addresses_of, new), strict=True):
                name = _host(peer.name) if peer.name in peer.addresses else peer.name
                for address in addresses:
                    # A node's name resolves to one address, as without us: the choice of the interface is not ours.
                    self._append(address, name)
                if addresses:
                    self._added.add(peer)

    def _append(self, address: str, name: str) -> None:
        word = re.sub(r"[^A-Za-z0-9-]" if name == address else r"[^A-Za-z0-9.-]", "-", name)
        lines, new = "", set()
        for each in (address,) if ":" in address else (address, f"::ffff:{address}"):
            if each not in self._known:
                is_first = each == address and word == name and word not in self._known
                lines += f"{each} {word}{'' if is_first else _REVERSE}\n"
                new |= {each, word}
        if lines:
            os.write(self._file, lines.encode())
            self._known |= new


def own_addresses() -> tuple[str, ...]:
    """This node's IPv4 addresses to other nodes, the primary one first."""
    found = [each.address for each in interfaces() if is_host(each.address)]
    with contextlib.suppress(OSError, TransientError):  # a resolver may not answer, and the other nodes wait
        name = socket.gethostname()
        found.insert(0, within(_OWN_NAME_S, name, lambda: socket.gethostbyname(name)))
    return tuple(dict.fromkeys(address for address in found if is_host(address)))[:MAX_HOSTS]


def is_host(address: object) -> bool:
    """Whether this is a unicast IPv4 address, not loopback."""
    try:
        parsed = ipaddress.IPv4Address(str(address))
    except ValueError:
        return False
    return not (parsed.is_loopback or parsed.is_multicast or parsed.is_unspecified)


def addresses_of(peer: Peer) -> Sequence[str]:
    """The addresses that a node announced; names in a list are resolved."""
    if peer.hosts:
        return peer.hosts
    found: list[str] = []
    for host in map(_host, peer.addresses):
        with contextlib.suppress(OSError):
            found += [str(address[0]) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    return [address for address in dict.fromkeys(found) if "%" not in address][:MAX_HOSTS]


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def hosts_for(env: Mapping[str, str]) -> Path | None:
    """The file for a job with this environment; None without peers, or if it is switched off."""
    return Path(env[FOLDER], HOSTS) if env.get(FOLDER) and env.get(SWITCH) != "0" else None


def reverse_s(deadline_s: float) -> tuple[str, float]:
    """The address of this node, and the seconds of a reverse lookup of it as made by TCPStore.

    Raises `TransientError` after `deadline_s` seconds.
    """
    address = next(iter(own_addresses()), "127.0.0.1")

    def look_up() -> float:
        began_s = time.monotonic()
        with contextlib.suppress(OSError):  # "no name" is a valid answer
            socket.getnameinfo((f"::ffff:{address}", 0, 0, 0), 0)
        return time.monotonic() - began_s

    return address, within(deadline_s, f"the name of {address}", look_up)
