"""The peer service of one job on one node: serves what the job reads here to the job's other nodes, and knows these.

One process, which `bootseer run` starts before anything is mounted and which ends with it. It shares a folder with the
local processes of the job, which only their user can read:

    secret              known to all nodes of the job, and to no other process
    members.json        the nodes that serve, as far as they answer
    files/IDENTITY.json how a file is served: written by the process that reads it here, before it asks for any of it;
                        of a block file, its index lies beside it
    began               made when training begins: from now on the network belongs to it
    state.json          what the service did so far

What it serves lies in the node's cache. What is missing there it fetches from the origin, into the same cache: claims
keep it and the local readers from fetching a block twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bootseer.blocks.index import Index
from bootseer.cache.cache import Cache
from bootseer.cache.file import CachedFile
from bootseer.errors import BootseerError, CorruptError, TransientError
from bootseer.fetch.fetcher import Fetcher
from bootseer.io.trusted_folder import NEW
from bootseer.logs import logger
from bootseer.peers.choice import Level
from bootseer.peers.client import Client
from bootseer.peers.members import Membership, Source
from bootseer.peers.server import Content, Server
from bootseer.store.open import open_store
from bootseer.store.store import Store

_LOG = logger(__name__)
FOLDER: Final = "BOOTSEER_PEERS_DIR"
"""Environment variable: the folder that the local processes of a job share with its peer service."""
SECRET, MEMBERS, FILES, BEGAN, STATE = "secret", "members.json", "files", "began", "state.json"
_IDENTITY: Final = re.compile(r"[0-9a-f]{64}")
_MAX_DESCRIPTION: Final = 1 << 16
_LOOK_EVERY_S: Final = 0.25
_STATE_EVERY_S: Final = 1.0
_TRAINING_SHARE: Final = 0.05

Opener = Callable[[str, Mapping[str, Any]], Content]
"""Makes the content of a file from its identity and its description. Raises `BootseerError`, and `OSError`, `KeyError`
and `TypeError` for a malformed one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes per second that this node sends; None: as many as there are."""

    before: int | None = 1 << 30
    """Until training begins."""
    after: int | None = None
    """From then on; None: a twentieth of the links' speed; 0: nothing is served any more."""


class BlockFiles:
    """Opens block files, of images and environments: kind `blocks`."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the one that the local processes of the job share."""
        self._folder = folder
        self._fetcher = Fetcher(on_problem=lambda problem: _LOG.warning("%s", problem))
        self._stores: dict[tuple[str, bool], Store] = {}
        self._cached: list[CachedFile] = []

    def open(self, identity: str, described: Mapping[str, Any]) -> Content:
        """An `Opener`."""
        index = Index.parse((self._folder / FILES / f"{identity}.index").read_bytes())
        if index.identity != identity:
            raise CorruptError(f"{identity}.index is the index of another file")
        place = (str(described["store"]), bool(described.get("plain_http")))
        if place not in self._stores:
            self._stores[place] = open_store(place[0], plain_http=place[1])
        cached = Cache(Path(described["cache"])).open(index)
        self._cached.append(cached)
        return _BlockFile(cached, self._fetcher, self._fetcher.add(index, self._stores[place], cached))

    @property
    def origin_bytes(self) -> int:
        """What was fetched from stores for other nodes."""
        return sum(self._fetcher.stats().bytes_by_purpose.values())

    def close(self) -> None:
        """End all fetching."""
        self._fetcher.close(1.0)
        for cached in self._cached:
            cached.close()
        for store in self._stores.values():
            store.close()


class _BlockFile:
    def __init__(self, cached: CachedFile, fetcher: Fetcher, number: int) -> None:
        self.size_bytes = cached.index.size_bytes
        self._cached = cached
        self._fetcher = fetcher
        self._number = number

    def open(self) -> int:
        return self._cached.descriptor()

    def want(self, start: int, length: int, level: Level, done: Callable[[BootseerError | None], None]) -> bool:
        if not self._cached.missing(start, length):
            return True

        def fetched(answer: object) -> None:
            problem = answer if isinstance(answer, BootseerError) else None
            if problem is None and self._cached.missing(start, length):
                problem = TransientError("it does not fit into the cache of this node")
            done(problem)

        self._fetcher.read(self._number, start, length, fetched)
        return False


class Service:
    """All that one node does for its job's other nodes. `run` is called in the process's main thread."""

    def __init__(self, folder: Path, source: Source, openers: Mapping[str, Opener], limits: Limits) -> None:
        """`openers`: for each kind of file, by the word in its description, what opens it."""
        self._folder = folder
        self._source = source
        self._openers = openers
        self._limits = limits
        self._began_s = time.time()
        self._secret = source.secret()
        self._client = Client(self._secret)
        self._contents: dict[str, Content] = {}
        self._opening = threading.Lock()
        self._server: Server | None = None
        self._membership = Membership(source, self._client.probe)
        self._training = False
        self._stopped = threading.Event()
        self._written: dict[str, Any] = {}
        (folder / FILES).mkdir(mode=0o700, exist_ok=True)
        self._serve()
        self._write_members()
        write_whole(folder / SECRET, self._secret)

    def run(self, ready: Callable[[], None], *, wait_for: int = 0, wait_s: float = 0.0) -> None:
        """Serve until a signal raises something. `ready` is called once, when `wait_for` nodes are known, this one
        among them, or `wait_s` have passed."""
        until = time.monotonic() + wait_s
        threading.Thread(target=self._follow_members, name="bootseer-members", daemon=True).start()
        is_ready, state_at = False, 0.0
        while True:
            now = time.monotonic()
            if not is_ready and (len(self._membership.peers) >= wait_for or now >= until):
                is_ready = True
                ready()
            if not self._training and (self._folder / BEGAN).exists():
                self._training_began()
            if now >= state_at:
                state_at = now + _STATE_EVERY_S
                self._write_state()
            time.sleep(_LOOK_EVERY_S if is_ready else 0.02)

    def close(self) -> None:
        """Leave the job's other nodes, and write the last figures."""
        self._stopped.set()
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(BootseerError):
            self._source.leave()
        self._client.close()
        with contextlib.suppress(OSError):  # the folder may be gone already
            self._write_state()

    def _serve(self) -> None:
        """Begin to serve, unless this node is (not yet) one of those that do."""
        listening = self._source.listen()
        if listening:
            own = self._source.own
            self._server = Server(
                listening, self._secret, self._find, name=own.name if own else "", max_rate=self._limits.before
            )

    def _follow_members(self) -> None:
        while not self._stopped.is_set():
            try:
                if self._server is None and not self._training:
                    self._serve()
                if self._membership.refresh():
                    self._write_members()
            except BootseerError as error:
                _LOG.warning("the job's nodes cannot be looked for: %s", error)
            except OSError as error:
                _LOG.warning("%s: %s", self._folder, error)
            self._stopped.wait(self._membership.pause_s())

    def _find(self, identity: str) -> Content | None:
        content = self._contents.get(identity)
        if content is not None or not _IDENTITY.fullmatch(identity):
            return content
        with self._opening:
            if identity not in self._contents:
                opened = self._opened(identity)
                if opened is None:
                    return None
                self._contents[identity] = opened
            return self._contents[identity]

    def _opened(self, identity: str) -> Content | None:
        path = self._folder / FILES / f"{identity}.json"
        try:
            with path.open("rb") as file:
                described = json.loads(file.read(_MAX_DESCRIPTION))
            return self._openers[described["kind"]](identity, described)
        except FileNotFoundError:
            return None
        except (BootseerError, OSError, ValueError, KeyError, TypeError) as error:
            _LOG.warning("%s is not served: %s: %s", identity, type(error).__name__, error)
            return None

    def _training_began(self) -> None:
        self._training = True
        rate = self._limits.after
        if rate is None:
            rate = int(self._source.link_bytes_s * _TRAINING_SHARE)
        _LOG.info("training began: at most %d bytes/s are served from now on", rate)
        if self._server is not None and rate:
            self._server.limit(rate)
        elif self._server is not None:
            self._server.close()
            with contextlib.suppress(BootseerError):
                self._source.leave()

    def _write_members(self) -> None:
        own, peers = self._source.own, self._membership.peers
        listed = [{"name": peer.name, "addresses": peer.addresses, "rack": peer.rack} for peer in peers]
        text = json.dumps({"own": own.name if own else "", "peers": listed})
        write_whole(self._folder / MEMBERS, text.encode())

    def _write_state(self) -> None:
        own, served = self._source.own, self._server.served if self._server is not None else None
        state: dict[str, Any] = {
            "pid": os.getpid(),
            "began_s": self._began_s,
            "name": own.name if own else "",
            "addresses": own.addresses if own else (),
            "peers": [peer.name for peer in self._membership.peers],
            "unreachable": self._membership.unreachable,
            "training": self._training,
            "sent_bytes": served.bytes_sent if served else 0,
            "requests": served.requests if served else 0,
            "refused": served.refused if served else 0,
            "by_interface": dict(served.by_interface) if served else {},
        }
        if state != self._written:
            self._written = state
            write_whole(self._folder / STATE, json.dumps(state).encode())


def write_whole(path: Path, data: bytes) -> None:
    """Replace a small file in one step; only this user can read it. Raises `OSError`."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(new, NEW, 0o600), "wb") as file:
            file.write(data)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
