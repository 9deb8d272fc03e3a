"""The peers folder: shared state of the processes of one job on one node.

    secret              32 bytes, 0600: the key that signs requests
    tls                 exists if connections are encrypted
    members.json        {"own": NAME, "peers": [{"name", "addresses", "rack"}, ...], "limit": BYTES PER SECOND}
    files/IDENTITY.json {"kind": "blocks", ...}: how the service of this node opens a file that it serves to peers
    files/IDENTITY.ahead nodes that requested the file before any process here did, or have it from an earlier job
    state.json          statistics of the service, for `report` and `status`
    stage               the stage of this node's start, or `ready`: see `readiness`
    start.json          {"nodes": listed, "ready": ..., "others": ...}: the readiness of the job's nodes
    began               exists once training has begun: from then on the network belongs to it

The launcher creates the folder, owner-only, and passes its path in BOOTSEER_PEERS_DIR to the processes that it starts.
The service writes `members.json` and `state.json`; a process that reads a file registers it before its first request.
All files are replaced atomically.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from bootseer.blocks.index import is_identity
from bootseer.errors import NotFoundError, PermanentError
from bootseer.io.files import replace_file
from bootseer.peers.choice import Members, Peer
from bootseer.peers.readiness import Readiness

FOLDER: Final = "BOOTSEER_PEERS_DIR"
SWITCH: Final = "BOOTSEER_PEERS"
SECRET_BYTES: Final = 32
BLOCKS: Final = "blocks"
"""The kind of block files: an image's layer, an environment's snapshot."""
_LOOK_EVERY_S: Final = 0.5
_BURST_S: Final = 0.05
_MAX_WAIT_S: Final = 1.0
_MAX_BYTES: Final = 16 << 20
_MAX_AHEAD: Final = 16
_MAX_UNKNOWN: Final = 4096


class _Listed(Struct):
    """`members.json`."""

    own: str
    peers: list[Peer]
    limit: int | None = None


# Made at the import, because msgspec crashes the process if threads do so at the same time (`artifact.document`).
_LISTED, _READINESS = msgspec.json.Decoder(_Listed), msgspec.json.Decoder(Readiness)


class JobPeers:
    """The folder, as seen by one process. Safe for many threads."""

    def __init__(self, folder: Path, secret: bytes) -> None:
        self.folder = folder
        self.secret = secret
        self.tls = (folder / "tls").exists()
        self._lock = threading.RLock()
        self._looked_s = float("-inf")
        self._read: tuple[int, int] | None = None
        self._members = Members((), "")
        self._limit: int | None = None
        self._ahead: dict[str, tuple[float, frozenset[str]]] = {}
        """Per file: when to read it again, and the nodes."""
        self._paid_until_s = float("-inf")
        """When the bytes received so far would have arrived at the rate limit."""

    @classmethod
    def create(cls, folder: Path, secret: bytes, *, tls: bool = False) -> JobPeers:
        """Create the folder, for the launcher, unless it exists."""
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "files").mkdir(mode=0o700, exist_ok=True)
        if tls:
            (folder / "tls").touch(mode=0o600)
        replace_file(folder / "secret", secret)
        return cls(folder, secret)

    @classmethod
    def open(cls, folder: Path) -> JobPeers:
        """Raises `NotFoundError` if it is missing, `PermanentError` if other users can read it."""
        try:
            if folder.stat().st_mode & 0o077 or folder.stat().st_uid != os.geteuid():
                raise PermanentError(f"{folder} is not private to this user")
            secret = (folder / "secret").read_bytes()
        except OSError as error:
            raise NotFoundError(f"{folder}: no peers folder: {error}") from error
        if len(secret) != SECRET_BYTES:
            raise PermanentError(f"{folder / 'secret'}: {len(secret)} bytes, not {SECRET_BYTES}")
        return cls(folder, secret)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> JobPeers | None:
        """The folder of the job that this process belongs to; None without peers. Raises like `open`."""
        folder = environment.get(FOLDER)
        return cls.open(Path(folder)) if folder and environment.get(SWITCH) != "0" else None

    def members(self) -> Members:
        """The job's nodes as written by the service; the same object until it changes.

        Checks for a change at most twice a second. Empty until the service has written it; a damaged file counts as
        unchanged: a start works without peers.
        """
        with self._lock:
            now = time.monotonic()
            if now >= self._looked_s + _LOOK_EVERY_S:
                self._looked_s = now
                self._look()
            return self._members

    def pace(self, num_bytes: int) -> None:
        """Delay this process according to its download limit after it received `num_bytes` from peers."""
        self.members()
        with self._lock:
            if not self._limit:
                return
            now = time.monotonic()
            self._paid_until_s = max(self._paid_until_s, now - _BURST_S) + num_bytes / self._limit
            wait_s = self._paid_until_s - now
        if wait_s > 0:
            time.sleep(min(wait_s, _MAX_WAIT_S))

    def write_members(self, own: str, peers: Iterable[Peer], limit: int | None = None) -> None:
        """Publish the job's nodes to the local processes, and how many bytes per second each process may receive from
        them (None: unlimited)."""
        replace_file(self.folder / "members.json", msgspec.json.encode(_Listed(own, list(peers), limit)))

    def register(self, identity: str, kind: str, fields: Mapping[str, Any]) -> None:
        """Let the service serve a file to the job's nodes. `fields` depend on its `kind`, as JSON."""
        replace_file(self._file(identity, "json"), json.dumps({**fields, "kind": kind}).encode())

    def unregister(self, identity: str) -> None:
        self._file(identity, "json").unlink(missing_ok=True)

    def registered(self, identity: str) -> dict[str, Any] | None:
        """The registration: `kind` and its fields. None if the file is not registered, or its record is damaged."""
        fields = _object(self._file(identity, "json"))
        return fields if isinstance(fields.get("kind"), str) else None

    def note_ahead(self, identity: str, node: str) -> None:
        """Record that a node has blocks of a file that this one lacks. For the service."""
        with self._lock:  # also for the file: nodes that ask together are refused together, each by its own thread
            known = self.ahead(identity)
            if not node or node in known or len(known) >= _MAX_AHEAD or len(self._ahead) > _MAX_UNKNOWN:
                return
            self._ahead[identity] = float("inf"), known | {node}
            with contextlib.suppress(OSError):  # only costs more reads of the store
                replace_file(self._file(identity, "ahead"), json.dumps([*known, node]).encode())

    def ahead(self, identity: str) -> frozenset[str]:
        """Nodes that started to read a file before any process of this node, or have it from an earlier job."""
        with self._lock:
            now = time.monotonic()
            until, known = self._ahead.get(identity, (float("-inf"), frozenset()))
            if now >= until:
                with contextlib.suppress(OSError, ValueError, TypeError):
                    known = frozenset(json.loads(self._file(identity, "ahead").read_bytes()))
                self._ahead[identity] = now + _LOOK_EVERY_S, known
            return known

    def identities(self) -> set[str]:
        try:
            return {path.stem for path in (self.folder / "files").glob("[!.]*.json")}
        except OSError:
            return set()

    def register_blocks(self, identity: str, store: str, plain_http: bool, cache: Path) -> None:
        """`register` a block file that is open in the cache with this root. `store`: URI of the store that has it."""
        self.register(identity, BLOCKS, {"store": store, "plain_http": plain_http, "cache": str(cache)})

    def write_state(self, state: Mapping[str, Any]) -> None:
        replace_file(self.folder / "state.json", json.dumps(state).encode())

    def state(self) -> dict[str, Any]:
        """The service's statistics; empty if unknown."""
        return _object(self.folder / "state.json")

    def write_stage(self, stage: str) -> None:
        """Publish the stage of this node's start to the service."""
        replace_file(self.folder / "stage", stage.encode())

    @property
    def stage(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            return (self.folder / "stage").read_text()
        return "begin"

    def write_readiness(self, readiness: Readiness) -> None:
        """Publish the readiness of the job's nodes to the launcher."""
        replace_file(self.folder / "start.json", msgspec.json.encode(readiness))

    def readiness(self) -> Readiness:
        """The readiness of the job's nodes; none are ready if it is unknown."""
        try:
            return _READINESS.decode((self.folder / "start.json").read_bytes())
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
            return Readiness(0, {})

    @property
    def training(self) -> bool:
        return (self.folder / "began").exists()

    def training_began(self) -> None:
        """Notify the service and the local processes."""
        (self.folder / "began").touch(mode=0o600)

    def _file(self, identity: str, suffix: str) -> Path:
        if not is_identity(identity):
            raise ValueError(f"{identity[:80]!r} is not an identity of a file")
        return self.folder / "files" / f"{identity}.{suffix}"

    def _look(self) -> None:
        path = self.folder / "members.json"
        try:
            status = path.stat()
            read = (status.st_mtime_ns, status.st_ino)
            if read == self._read or status.st_size > _MAX_BYTES:
                return
            listed = _LISTED.decode(path.read_bytes())
            self._members, self._limit, self._read = Members(listed.peers, listed.own), listed.limit, read
        except (OSError, ValueError, msgspec.MsgspecError):
            return


def _object(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty if it is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
