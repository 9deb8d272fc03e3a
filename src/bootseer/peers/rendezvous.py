"""Where nodes meet that no list names: a folder of a file system or bucket shared by all of them.

    <place>/peers/<job>.<attempt>.u<uid>/secret               created by the first of them
                                        /<node>.<nonce>.json  a node's addresses: {"name", "addresses", "rack",
                                                               "hosts"}

In a file system only the job's user can access the folder. Announcements are verified by `members`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Sequence
from typing import Final

import msgspec

from bootseer.errors import AccessError, AlreadyExistsError, CorruptError, NotFoundError, PermanentError, UsageError
from bootseer.logs import logger
from bootseer.peers.choice import RACK, Peer
from bootseer.peers.interfaces import PORT, Interface, is_address, joined, listen_at
from bootseer.peers.job import SECRET_BYTES
from bootseer.peers.names import MAX_HOSTS, is_host, own_addresses
from bootseer.places import open_place
from bootseer.places.place import join, name_of

_LOG = logger(__name__)
MAX_PEERS: Final = 20_000
_NAME: Final = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,255}")
_RECORD: Final = re.compile(r".{1,100}\.[0-9a-f]{12}\.json")
_MAX_RECORD: Final = 4096
_MAX_ADDRESSES: Final = 16
_PEER: Final = msgspec.json.Decoder(Peer)


class Rendezvous:
    """Nodes that meet in a folder of a place."""

    def __init__(
        self, uri: str, attempt: str, name: str, rack: str, interfaces: Sequence[Interface], given: bytes | None
    ) -> None:
        """`attempt`: the folder's name, equal for all nodes of one start. `given`: a secret that they already share."""
        self.own: Peer | None = None
        self.link_bytes_s = sum(each.bytes_s for each in interfaces)
        if uri.startswith("oci://"):
            raise UsageError("nodes cannot meet in a registry", hint="name a folder, hdfs:// or s3://")
        self._files = _Folder(uri, attempt)
        self._name = name
        self._rack = rack
        self._interfaces = interfaces
        self._given = given
        self._secret = b""
        """The secret in the folder; empty if another one is given."""
        self._record = f"{name}.{secrets.token_hex(6)}.json"
        self._seen: dict[str, Peer | None] = {}

    def secret(self) -> bytes:
        """The first node creates it; of two concurrent ones, one succeeds."""
        if self._given is not None:
            return self._given
        self._secret = secrets.token_bytes(SECRET_BYTES)
        if not self._files.create("secret", self._secret):
            self._secret = self._files.read("secret")
            if len(self._secret) != SECRET_BYTES:
                raise CorruptError(f"{self._files.uri}/secret is not a secret of BootSeer; remove it")
        return self._secret

    def listen(self) -> list[socket.socket]:
        """Also announces the addresses."""
        if self.own is not None:
            return []
        listening = []
        for interface in self._interfaces:
            for port in (PORT, 0):
                with contextlib.suppress(OSError):
                    listening.append(listen_at(interface.address, port))
                    break
        if not listening:
            return []
        addresses = tuple(joined(*sock.getsockname()[:2]) for sock in listening)
        own = Peer(self._name, addresses, self._rack, own_addresses())
        try:
            for earlier in self._files.names():
                # Left by an earlier process of this node that was killed.
                if earlier.rpartition(".json")[0].rpartition(".")[0] == self._name:
                    self._files.delete(earlier)
            self._files.create(self._record, msgspec.json.encode(own))
            if self._secret:  # the last node of an earlier start may have removed it before it saw the record
                self._files.create("secret", self._secret)
        except BaseException:
            for sock in listening:
                sock.close()
            raise
        self.own = own
        return listening

    def poll(self) -> list[Peer]:
        """Each record is read once."""
        names = {name for name in self._files.names() if _RECORD.fullmatch(name)}
        self._seen = {name: peer for name, peer in self._seen.items() if name in names}
        for name in sorted(names - self._seen.keys())[:MAX_PEERS]:
            with contextlib.suppress(NotFoundError):
                try:
                    self._seen[name] = parse_record(self._files.read(name))
                except CorruptError as error:
                    _LOG.warning("%s/%s: %s", self._files.uri, name, error)
                    self._seen[name] = None
        return [peer for peer in self._seen.values() if peer is not None]

    def leave(self) -> None:
        """The last node removes the secret and the folder."""
        if self.own is None:
            return
        self._files.delete(self._record)
        if self._is_empty():
            self._files.delete("secret")
            if self._secret and not self._is_empty():  # the first node of the next start has read it meanwhile
                self._files.create("secret", self._secret)
            self._files.remove()

    def _is_empty(self) -> bool:
        return not any(_RECORD.fullmatch(name) for name in self._files.names())


def parse_record(data: bytes) -> Peer:
    """Parse a node's announcement. Raises `CorruptError`."""
    try:
        peer = _PEER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptError("not the announcement of a node") from error
    good = (
        _NAME.fullmatch(peer.name)
        and RACK.fullmatch(peer.rack)
        and 0 < len(peer.addresses) <= _MAX_ADDRESSES
        and all(_is_nodes(address) for address in peer.addresses)
        and len(peer.hosts) <= MAX_HOSTS
        and all(is_host(address) for address in peer.hosts)
    )
    if not good:
        raise CorruptError("not the announcement of a node")
    return peer


def _is_nodes(address: object) -> bool:
    """Whether this may be announced as a node's address: no name, which others may resolve differently, and neither
    multicast nor link-local, where clouds serve credentials of a machine."""
    try:
        host = ipaddress.ip_address(str(address).rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return is_address(str(address)) and not (host.is_multicast or host.is_unspecified or host.is_link_local)


def rendezvous_name(job: str, attempt: int | None) -> str:
    """The name of the folder in which the nodes of one start meet."""
    return f"{job.lstrip('-._') or 'job'}.{attempt or 0}.u{os.getuid()}"


class _Folder:
    """Small files in a folder shared by the job's nodes: in a file system only the job's user can read them, in a
    bucket all its users."""

    def __init__(self, uri: str, attempt: str) -> None:
        self._place = open_place(uri)
        self._folder = join("peers", attempt)
        self.uri = f"{self._place.uri}/{self._folder}"

    def create(self, name: str, data: bytes) -> bool:
        path = join(self._folder, name)
        try:
            made = self._place.create_bytes(path, data, mode=0o600)
        except NotFoundError:
            self._make()
            made = self._place.create_bytes(path, data, mode=0o600)
        self._check(path)
        return made

    def read(self, name: str) -> bytes:
        return self._place.read_bytes(join(self._folder, name), _MAX_RECORD)

    def names(self) -> list[str]:
        with contextlib.suppress(NotFoundError):
            return [name_of(entry.path) for entry in self._place.list(self._folder) if not entry.is_folder]
        return []

    def delete(self, name: str) -> None:
        with contextlib.suppress(NotFoundError):
            self._place.delete(join(self._folder, name))

    def remove(self) -> None:
        with contextlib.suppress(PermanentError):  # another node has joined meanwhile
            self._place.delete(self._folder)

    def _make(self) -> None:
        self._place.make_folder("", parents=True)
        with contextlib.suppress(AlreadyExistsError):
            self._place.make_folder("peers")
            self._place.set_mode("peers", 0o1777)  # jobs of several users share a store
        with contextlib.suppress(AlreadyExistsError):
            self._place.make_folder(self._folder, mode=0o700)

    def _check(self, path: str) -> None:
        """Raise `AccessError` if another user could have created the folder or its files. Objects have no owners."""
        folder, file = self._place.stat(self._folder), self._place.stat(path)
        if not file.owner:
            return
        if folder.mode & 0o077 or file.mode & 0o077 or folder.owner != file.owner:
            raise AccessError(f"{self.uri} can be read or changed by other users; remove it, or give --peers-secret")
