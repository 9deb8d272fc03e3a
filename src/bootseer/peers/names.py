"""The names of a job's nodes without DNS: the /etc/hosts that the job's processes see.

PyTorch's TCPStore asks for the name of each client's address, for a log line. The address is IPv4 mapped to IPv6, which
an ordinary line of a hosts file does not answer, so that a resolver which is slow or dead holds the job up.
The peer service keeps the file `hosts` in the peers folder: the machine's own, then a line for each address of each
node, plain and mapped. It only appends, in the same inode, which the job has mounted on its /etc/hosts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from bootseer.io.deadline import within
from bootseer.peers.choice import Peer
from bootseer.peers.interfaces import interfaces
from bootseer.peers.job import FOLDER

HOSTS: Final = "hosts"
"""In the peers folder."""
SYSTEM: Final = Path("/etc/hosts")
SWITCH: Final = "BOOTSEER_NAMES"
RES_OPTIONS: Final = "timeout:1 attempts:1"
MAX_HOSTS: Final = 16
_REVERSE: Final = ".peer"
"""Ends names that only answer reverse look-ups: what a node's name leads to is left as it is."""


class HostsFile:
    """The file, for the service. `add` belongs to one thread."""

    def __init__(self, folder: Path, system: Path = SYSTEM) -> None:
        """Begin it with what the machine knows. Raises `OSError`."""
        try:
            known = system.read_bytes()
        except FileNotFoundError:
            known = b""
        lines = known.decode(errors="replace").splitlines()
        self._known = {word for line in lines for word in line.partition("#")[0].split()}
        self._file = os.open(folder / HOSTS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.fchmod(self._file, 0o644)  # another user of a container reads it
        os.write(self._file, known.rstrip(b"\n") + b"\n# by BootSeer: the nodes of this job\n")
        self._append("127.0.0.1", "localhost")

    def add(self, peers: Iterable[Peer]) -> None:
        """Append what is not there yet; what is there stays. Raises `OSError`."""
        for peer in peers:
            name = peer.name if peer.hosts else _host(peer.name)
            for address in peer.hosts or addresses_of(peer):
                # A name leads to one address, as it does without us: which interface a job uses is not ours to choose.
                self._append(address, name)

    def _append(self, address: str, name: str) -> None:
        word = re.sub(r"[^A-Za-z0-9-]" if name == address else r"[^A-Za-z0-9.-]", "-", name)
        lines, new = "", set()
        for each in (address, f"::ffff:{address}" if ":" not in address else address):
            if each not in self._known:
                is_first = each == address and word == name and word not in self._known
                lines += f"{each} {word}{'' if is_first else _REVERSE}\n"
                new |= {each, word}
        if lines:
            os.write(self._file, lines.encode())
            self._known |= new


def own_addresses() -> tuple[str, ...]:
    """This node's IPv4 addresses that lead to other nodes, first the one that it is known by."""
    found = [each.address for each in interfaces() if is_host(each.address)]
    with contextlib.suppress(OSError):
        found.insert(0, socket.gethostbyname(socket.gethostname()))
    return tuple(dict.fromkeys(address for address in found if is_host(address)))[:MAX_HOSTS]


def is_host(address: object) -> bool:
    """Whether this is the IPv4 address of one node, not a loopback's."""
    try:
        parsed = ipaddress.IPv4Address(str(address))
    except ValueError:
        return False
    return not (parsed.is_loopback or parsed.is_multicast or parsed.is_unspecified)


def addresses_of(peer: Peer) -> list[str]:
    """The addresses that a node of a list is reached at; a name is looked up."""
    found: list[str] = []
    for host in map(_host, peer.addresses):
        with contextlib.suppress(OSError):
            found += [str(address[0]) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    return [address for address in dict.fromkeys(found) if "%" not in address][:MAX_HOSTS]


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def hosts_for(env: Mapping[str, str]) -> Path | None:
    """The file for a job with this environment; None where it has no peers or they are switched off."""
    return Path(env[FOLDER], HOSTS) if env.get(FOLDER) and env.get(SWITCH) != "0" else None


def reverse_s(deadline_s: float) -> tuple[str, float]:
    """Seconds that a reverse look-up of this node's own address takes, as a TCPStore makes it, and the address.

    Raises `TransientError` after `deadline_s` seconds.
    """
    address = next(iter(own_addresses()), "127.0.0.1")

    def look_up() -> float:
        began_s = time.monotonic()
        with contextlib.suppress(OSError):  # that there is no name is an answer
            socket.getnameinfo((f"::ffff:{address}", 0, 0, 0), 0)
        return time.monotonic() - began_s

    return address, within(deadline_s, f"the name of {address}", look_up)
