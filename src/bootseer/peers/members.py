"""Which nodes a job has, and which of them respond.

A list names them: the command line, a file that may change, Slurm's host list, or the addresses of a DNS name (a
headless service). Otherwise they meet in a shared folder (`rendezvous`).

Lists are not trusted: a node counts once it responds at an address, proves knowledge of the job's secret, and has the
name that the list gives for this address. An unreachable node is only a client of the others.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Final

from bootseer.errors import AccessError, BootseerError, CorruptError, NotFoundError, UsageError, os_errors_as
from bootseer.io.tasks import Tasks
from bootseer.io.trusted_folder import is_secret
from bootseer.logs import logger
from bootseer.peers.choice import RACK, Peer
from bootseer.peers.interfaces import PORT, chosen, is_address, joined, link_bytes_s, listen_at_own
from bootseer.peers.job import SECRET_BYTES
from bootseer.peers.rendezvous import Rendezvous
from bootseer.trace.identity import expand_hosts

_LOG = logger(__name__)
_MAX_SECRET: Final = 4096
_FAST_S, _FAST_FOR_S = 0.2, 5.0
_SLOW_S, _PER_PEER_S = 2.0, 0.02
"""Polling interval of the list at first, and later: 2 s, with 1,000 nodes 20 s."""
_RETRY_S: Final = 2.0
_AGAIN_S, _AGAIN_PER_PEER_S = 15.0, 0.05
"""A responding node is probed again after a while, as it may have died."""
_PROBES: Final = 64
_ROUND_S: Final = 1.0
"""Probes not started by then wait for the next round: what is known so far is published first."""
_SLURM_LIST: Final = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")


class Listed:
    """Nodes named by a list. A node recognizes itself by the first listed address that it can listen at."""

    def __init__(self, secret: bytes, read: Callable[[], list[Peer]]) -> None:
        self.own: Peer | None = None
        """This node, once it listens; None: it is only a client."""
        self.link_bytes_s = sum(each.bytes_s for each in chosen(()))
        """The speed of the links on which this node serves; of a client: of all its links."""
        self.before_listening: Callable[[list[str]], None] = lambda addresses: None
        """Called with all listed addresses before this node listens at some of them."""
        self.say: Callable[[str], None] = lambda line: None
        """Gets a line, once, if all ports of this node are taken."""
        self._told = False
        self._secret = secret
        self._read = read
        self._announced: list[str] = []

    def secret(self) -> bytes:
        return self._secret

    def listen(self) -> list[socket.socket]:
        """Listen where the others expect this node; empty if it does not serve (yet)."""
        peers = self._read()
        addresses = [address for peer in peers for address in peer.addresses]
        if addresses != self._announced:
            self._announced = addresses
            self.before_listening(addresses)
        # The one with this node's name first: looking up a thousand others may take seconds.
        own, taken = _short(socket.gethostname()), list[str]()
        for peer in sorted(peers, key=lambda peer: _short(peer.addresses[0]) != own):
            listening, in_use = listen_at_own(peer.addresses)
            taken += in_use
            if listening:
                self.own = peer
                self.link_bytes_s = link_bytes_s(sock.getsockname()[0] for sock in listening)
                return listening
        if taken and not self._told:
            self._told = True
            line = f"{taken[0]} is taken by another program: this node sends no blocks to others until it is free"
            _LOG.warning("%s", line)
            self.say(line)
        return []

    def poll(self) -> list[Peer]:
        """The nodes listed now. Raises `BootseerError`."""
        return self._read()

    def leave(self) -> None:
        """Nothing to do: the list is not ours."""


def _short(host: str) -> str:
    """A host name without its domain and port."""
    return re.split("[.:]", host, maxsplit=1)[0]


Source = Listed | Rendezvous
"""Where the job's nodes are listed."""


class Membership:
    """The listed nodes that respond. `refresh` belongs to one thread, everything else to any."""

    def __init__(self, source: Source, probe: Callable[[str], str]) -> None:
        """`probe` returns the name of the node at an address, and raises `BootseerError` if none responds."""
        self._source = source
        self._probe = probe
        self._began_s = time.monotonic()
        self._probed: dict[Peer, tuple[Peer | None, float]] = {}
        """Each listed node with only the addresses at which it responded, None if it did not; and when it is due
        again."""
        self.peers: tuple[Peer, ...] = (source.own,) if source.own else ()

    @property
    def unreachable(self) -> list[str]:
        """Listed nodes that do not respond."""
        return sorted(listed.name for listed, (found, _) in list(self._probed.items()) if found is None)

    @property
    def listed(self) -> list[str]:
        """The names of all listed nodes, including this one."""
        own = [self._source.own.name] if self._source.own else []
        return own + [peer.name for peer in list(self._probed)]

    def refresh(self) -> bool:
        """Probe the listed nodes; returns whether the set of responding ones has changed. Raises `BootseerError`."""
        own = self._source.own
        listed = {peer for peer in self._source.poll() if own is None or peer.name != own.name}
        now, good_s = time.monotonic(), _AGAIN_S + _AGAIN_PER_PEER_S * len(listed)
        # Silent nodes last: a list with hundreds of dead nodes must not delay the others.
        due = [peer for peer in listed if peer not in self._probed or now >= self._probed[peer][1]]
        due.sort(key=lambda peer: peer in self._probed and self._probed[peer][0] is None)
        found: dict[Peer, tuple[Peer | None, float]] = {}

        def ask(peer: Peer) -> None:
            if len(found) < _PROBES or time.monotonic() < now + _ROUND_S:
                answer = self._reached(peer)
                found[peer] = answer, time.monotonic() + (good_s if answer else _RETRY_S)

        with Tasks("bootseer-probes", _PROBES) as tasks:
            list(tasks.map(ask, due))
        self._probed = {peer: one for peer, one in (self._probed | found).items() if peer in listed}
        by_name = {answer.name: answer for answer, _ in self._probed.values() if answer is not None}
        if own is not None:
            by_name[own.name] = own
        peers = tuple(sorted(by_name.values()))
        changed, self.peers = peers != self.peers, peers
        if changed:
            _LOG.info("%d of %d other nodes answer", len(peers) - (own is not None), len(listed))
        return changed

    def pause_s(self) -> float:
        if time.monotonic() - self._began_s < _FAST_FOR_S:
            return _FAST_S
        return max(_SLOW_S, _PER_PEER_S * len(self._probed))

    def _reached(self, peer: Peer) -> Peer | None:
        """The node with the addresses at which it responds under its own name; None if there are none."""
        good = []
        for address in peer.addresses:
            try:
                name = self._probe(address)
            except BootseerError as error:
                # Once: a list of a whole fleet may name many nodes of other jobs.
                is_new = isinstance(error, AccessError) and peer not in self._probed
                (_LOG.warning if is_new else _LOG.debug)("%s: %s", peer.name, error)
                continue
            if name == peer.name:
                good.append(address)
            else:
                _LOG.warning("%s is listed for %s, but %s answers there", address, peer.name, name)
        return Peer(peer.name, tuple(good), peer.rack, peer.hosts) if good else None


def parse_list(lines: Iterable[str], source: str) -> list[Peer]:
    """Parse lines of `HOST[:PORT][,HOST[:PORT]...] [RACK]`, one node and its interfaces each. Raises `UsageError`."""
    peers = []
    for line in lines:
        words = line.partition("#")[0].split()
        if not words:
            continue
        addresses = tuple(_with_port(word, source) for word in words[0].split(","))
        rack = words[1] if len(words) > 1 else ""
        if len(words) > 2 or not RACK.fullmatch(rack):
            raise UsageError(f"{source}: {line.strip()!r} names no node", hint="HOST[:PORT] and, if known, its rack")
        peers.append(Peer(addresses[0], addresses, rack))
    return peers


def slurm_hosts(env: Mapping[str, str]) -> list[str]:
    """The hosts of this job step. Raises `UsageError` outside of Slurm."""
    text = next((env[name] for name in _SLURM_LIST if env.get(name)), "")
    if not text:
        raise UsageError("--peers slurm: this is not a Slurm job", hint="name the nodes, or a folder that they share")
    hosts = expand_hosts(text)
    if not hosts:
        raise UsageError(f"{text[:80]!r} is not a list of hosts", hint="as Slurm writes it: gpu[001-003,007]")
    return hosts


def hosts_of(name: str, port: int) -> list[Peer]:
    """One node per address of a DNS name. Raises `NotFoundError` while it has none."""
    with os_errors_as(NotFoundError, name):
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    # With addresses of both versions (a dual-stack service), each pod has one of each: IPv4 is used.
    version = min(family for family, *_ in found)
    addresses = sorted({joined(str(address[0]), port) for family, *_, address in found if family == version})
    return [Peer(address, (address,)) for address in addresses]


def _with_port(word: str, source: str) -> str:
    try:
        address = joined(str(ipaddress.IPv6Address(word.strip("[]"))), PORT)
    except ValueError:
        address = word if re.search(r":\d+$", word) else f"{word}:{PORT}"
    if not is_address(address):
        raise UsageError(f"{source}: {word!r} is not a host with a port", hint="HOST, HOST:PORT or [IPV6]:PORT")
    return address


def open_source(
    text: str,
    env: Mapping[str, str],
    *,
    attempt: str,
    name: str,
    rack: str = "",
    interface_names: Sequence[str] = (),
    secret_file: Path | None = None,
    store: str = "",
) -> Source:
    """The source named by `--peers`: `auto`, `slurm[:PORT]`, `dns:NAME[:PORT]`, `@FILE`, a folder's address, or hosts
    separated by commas. `attempt` is the name of this start in a folder; `store`: where nodes meet with `auto`.

    Raises `UsageError`.
    """
    given = None if secret_file is None else read_secret(secret_file)
    read: Callable[[], list[Peer]]
    if text == "auto":
        text = "slurm" if given and any(env.get(name) for name in _SLURM_LIST) else store
        if not text:
            raise UsageError(
                "--peers auto: no store is set that the nodes share",
                hint="give --peers FOLDER, or BOOTSEER_STORE",
            )
    kind, colon, value = text.partition(":")
    if kind == "slurm":
        read = partial(list, parse_list([f"{host}:{value or PORT}" for host in slurm_hosts(env)], "--peers slurm"))
    elif kind == "dns" and colon:
        host, _, port = _with_port(value, "--peers").rpartition(":")
        read = partial(hosts_of, host, int(port))
    elif text.startswith("@"):
        read = partial(read_list, Path(text[1:]))
        read()
    elif "/" in text:
        return Rendezvous(text, attempt, name, rack, chosen(interface_names), given)
    else:
        read = partial(list, parse_list(text.split(","), "--peers"))
    if given is None:
        raise UsageError(
            f"--peers {text}: the nodes need a shared secret",
            hint="give all the same --peers-secret FILE: (umask 077; head -c 32 /dev/urandom > FILE)",
        )
    return Listed(given, read)


def read_secret(path: Path) -> bytes:
    """Read the secret from a file that must be readable only by this user.

    Raises `AccessError`, `CorruptError` and `NotFoundError`.
    """
    with os_errors_as(NotFoundError, path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not is_secret(status) or status.st_uid not in (0, os.geteuid()):
                raise AccessError(f"{path} can be read by others: chmod 600 {path}")
            secret = file.read(_MAX_SECRET + 1)
    if not SECRET_BYTES <= len(secret) <= _MAX_SECRET:
        raise CorruptError(f"{path}: a secret has {SECRET_BYTES} to {_MAX_SECRET} bytes")
    return sha256(secret).digest()


def read_list(path: Path) -> list[Peer]:
    """The nodes listed in a file now. Raises `NotFoundError` and `UsageError`."""
    try:
        return parse_list(path.read_text(encoding="utf-8").splitlines(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise NotFoundError(f"{path}: {getattr(error, 'strerror', '') or 'not a text'}") from error
