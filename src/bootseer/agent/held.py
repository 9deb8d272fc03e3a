"""What ended jobs have read on this node, served on to their other nodes: from the cache alone, nothing is fetched.

A job's own process serves while the job runs, with its credentials. When it ends, it leaves the agent the job's secret
and the names of the files, where a list says that this node is one of the job's: later starts find it there. The agent
sends what is left after training began, since another job may be training here by then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from bootseer.errors import BootseerError, PermanentError, UsageError
from bootseer.logs import logger
from bootseer.peers.interfaces import is_address, listen_at
from bootseer.peers.job import SECRET_BYTES
from bootseer.peers.protocol import is_identity
from bootseer.peers.readers import CachedContent, CachedFiles
from bootseer.peers.server import Server

_LOG = logger(__name__)
_MAX_JOBS: Final = 16
_MAX_FILES: Final = 4096


@dataclass(slots=True)
class _Held:
    """The files of all ended jobs that have one secret."""

    until_s: float
    files: dict[str, Path]
    """The root of the cache that has each, by its identity."""
    cached: CachedFiles = field(default_factory=partial(CachedFiles, idle_limit_s=0.0))
    server: Server | None = None
    addresses: tuple[str, ...] = ()
    requests: int = 0
    """As many had been answered at the last look."""


class HeldJobs:
    """Safe to use from many threads."""

    def __init__(self, keep_s: float) -> None:
        """`keep_s`: for how long after its end a job's files are served; 0: not at all."""
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._held: dict[bytes, _Held] = {}

    def take(self, request: Mapping[str, Any]) -> None:
        """Serve the files of a job that ends now. Raises `UsageError` for what is malformed, `PermanentError` where
        nothing is served, or it cannot listen there."""
        try:
            secret, name, rate = bytes.fromhex(request["secret"]), str(request["name"]), int(request["rate"])
            addresses = tuple(str(address) for address in request["addresses"])
            files = {str(identity): Path(root) for identity, root in request["files"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError("a job must say its secret, name, rate, addresses and files") from error
        if len(secret) != SECRET_BYTES or rate <= 0 or not addresses or not all(map(is_address, addresses)):
            raise UsageError("a job's secret, rate or addresses are malformed")
        if not all(is_identity(identity) for identity in files) or len(files) > _MAX_FILES:
            raise UsageError("a job's files are malformed, or too many")
        if not self._keep_s:
            raise PermanentError("this agent serves nothing of ended jobs")
        with self._lock:
            self._serve(secret, name, rate, addresses, files, tls=request.get("tls") is True)

    def _serve(
        self, secret: bytes, name: str, rate: int, addresses: tuple[str, ...], files: dict[str, Path], *, tls: bool
    ) -> None:
        held = self._held.setdefault(secret, _Held(0.0, {}))
        _stop(held)
        held.until_s = time.monotonic() + self._keep_s
        held.files |= files
        listening = []
        try:
            for address in addresses:
                host, _, port = address.rpartition(":")
                listening.append(listen_at(host.strip("[]"), int(port)))
        except OSError as error:
            for sock in listening:
                sock.close()
            raise PermanentError(f"cannot listen at {', '.join(addresses)}: {error.strerror or error}") from error
        held.addresses = addresses
        held.server = Server(listening, secret, self._finder(held), name=name, max_rate=rate, soon=False, tls=tls)
        for other in sorted(self._held, key=lambda each: self._held[each].until_s)[:-_MAX_JOBS]:
            self._drop(other)
        _LOG.info("serves %d files of ended jobs at %s", len(held.files), ", ".join(addresses))

    def release(self, request: Mapping[str, Any]) -> None:
        """A job begins that listens at these addresses: it serves there itself, until it ends."""
        wanted = request.get("addresses")
        with self._lock:
            for held in self._held.values():
                if isinstance(wanted, list) and not set(held.addresses).isdisjoint(map(str, wanted)):
                    _stop(held)

    def tidy(self) -> None:
        """Forget what is over, and let go of files that no node asks for, so that the cache may drop them."""
        now = time.monotonic()
        with self._lock:
            for secret, held in list(self._held.items()):
                requests = held.server.served.requests if held.server is not None else 0
                if now >= held.until_s:
                    self._drop(secret)
                elif requests == held.requests:
                    held.cached.release_all()
                held.requests = requests

    def status(self) -> list[dict[str, Any]]:
        """What is served, where, for how long, and what was sent."""
        now = time.monotonic()
        with self._lock:
            served = [(held, held.server.served) for held in self._held.values() if held.server is not None]
        return [
            {
                "addresses": held.addresses,
                "files": len(held.files),
                "left_s": round(max(held.until_s - now, 0.0), 1),
                "sent_bytes": counters.bytes_sent,
                "requests": counters.requests,
            }
            for held, counters in served
        ]

    def close(self) -> None:
        """Serve nothing any more."""
        with self._lock:
            for secret in list(self._held):
                self._drop(secret)

    @staticmethod
    def _finder(held: _Held) -> Callable[[str], CachedContent | None]:
        def find(identity: str) -> CachedContent | None:
            root = held.files.get(identity)
            try:
                return None if root is None else CachedContent(held.cached, root, identity)
            except (BootseerError, OSError) as error:  # the cache has dropped it
                _LOG.debug("%s is not served: %s", identity, error)
                return None

        return find

    def _drop(self, secret: bytes) -> None:
        held = self._held.pop(secret)
        _stop(held)
        held.cached.close()


def _stop(held: _Held) -> None:
    if held.server is not None:
        held.server.close()
        held.server = None
