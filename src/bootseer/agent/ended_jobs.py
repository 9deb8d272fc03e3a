"""Serve the files of ended jobs to the jobs' other nodes, from the cache only: nothing is fetched.

While a job runs, its own process serves, with the job's credentials. At its end, it passes the job's secret and the
files' identities to the agent, if this node is in a list of nodes, by which later starts find it. The agent uses the
rate limit for the time after training began, because another job may be training on this node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from bootseer.blocks.index import is_identity
from bootseer.errors import BootseerError, PermanentError, UsageError
from bootseer.logs import logger
from bootseer.peers.interfaces import is_address, listen_at_own
from bootseer.peers.job import SECRET_BYTES
from bootseer.peers.readers import CachedContent, CachedFiles
from bootseer.peers.server import Server

_LOG = logger(__name__)
_MAX_JOBS: Final = 16
_MAX_FILES: Final = 4096


@dataclass(slots=True)
class _EndedJob:
    """The files of all ended jobs with the same secret."""

    until_s: float
    files: dict[str, Path]
    """Cache root of each file, by identity: the last `_MAX_FILES` that jobs have read."""
    cached: CachedFiles = field(default_factory=partial(CachedFiles, idle_limit_s=0.0))
    server: Server | None = None
    addresses: tuple[str, ...] = ()
    requests: int = 0
    """Requests answered until the last `clean_up`."""

    def find(self, identity: str) -> CachedContent | None:
        root = self.files.get(identity)
        try:
            return None if root is None else CachedContent(self.cached, root, identity)
        except (BootseerError, OSError) as error:  # evicted from the cache
            _LOG.debug("%s is not served: %s", identity, error)
            return None

    def stop(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None


class EndedJobs:
    """The ended jobs whose files are served. Thread-safe."""

    def __init__(self, keep_s: float) -> None:
        """`keep_s`: how long a job's files are served after its end; 0: not at all."""
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._jobs: dict[bytes, _EndedJob] = {}

    def take_over(self, request: Mapping[str, Any]) -> None:
        """Serve the files of an ending job. Raises `UsageError` for a malformed request, `PermanentError` if serving is
        disabled or an address cannot be used."""
        try:
            secret, name, rate = bytes.fromhex(request["secret"]), str(request["name"]), int(request["rate"])
            addresses = tuple(str(address) for address in request["addresses"])
            files = {str(identity): Path(root) for identity, root in request["files"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError("a request needs a job's secret, name, rate, addresses and files") from error
        if len(secret) != SECRET_BYTES or rate <= 0 or not addresses or not all(map(is_address, addresses)):
            raise UsageError("a job's secret, rate or addresses are malformed")
        if not all(is_identity(identity) for identity in files) or len(files) > _MAX_FILES:
            raise UsageError("a job's files are malformed, or too many")
        if not self._keep_s:
            raise PermanentError("this agent serves no files of ended jobs")
        with self._lock:
            self._serve(secret, name, rate, addresses, files, tls=request.get("tls") is True)

    def _serve(
        self, secret: bytes, name: str, rate: int, addresses: tuple[str, ...], files: dict[str, Path], *, tls: bool
    ) -> None:
        job = self._jobs.setdefault(secret, _EndedJob(0.0, {}))
        job.stop()
        job.until_s = time.monotonic() + self._keep_s
        older = {identity: root for identity, root in job.files.items() if identity not in files}
        job.files = dict([*older.items(), *files.items()][-_MAX_FILES:])
        for other in sorted(self._jobs, key=lambda each: self._jobs[each].until_s)[:-_MAX_JOBS]:
            self._drop(other)
        listening, _ = listen_at_own(addresses)
        if not listening:
            raise PermanentError(f"cannot listen at {', '.join(addresses)}")
        job.addresses = addresses
        job.server = Server(listening, secret, job.find, name=name, max_rate=rate, soon=False, tls=tls)
        _LOG.info("serves %d files of ended jobs at %s", len(job.files), ", ".join(addresses))

    def release(self, request: Mapping[str, Any]) -> None:
        """Stop serving at the ports of these addresses, because a starting job will listen there: other lists may have
        other names for this node."""
        wanted = request.get("addresses")
        ports = {_port(str(address)) for address in wanted} if isinstance(wanted, list) else set()
        with self._lock:
            for job in self._jobs.values():
                if not ports.isdisjoint(map(_port, job.addresses)):
                    job.stop()

    def clean_up(self) -> None:
        """Drop expired jobs. Close files of jobs without requests since the last call, so that they can be evicted."""
        now = time.monotonic()
        with self._lock:
            for secret, job in list(self._jobs.items()):
                requests = job.server.served.requests if job.server is not None else 0
                if now >= job.until_s:
                    self._drop(secret)
                elif requests == job.requests:
                    job.cached.release_all()
                job.requests = requests

    def status(self) -> list[dict[str, Any]]:
        """Addresses, files, remaining time and counters of each served job."""
        now = time.monotonic()
        with self._lock:
            served = [(job, job.server.served) for job in self._jobs.values() if job.server is not None]
        return [
            {
                "addresses": job.addresses,
                "files": len(job.files),
                "left_s": round(max(job.until_s - now, 0.0), 1),
                "sent_bytes": counters.bytes_sent,
                "requests": counters.requests,
            }
            for job, counters in served
        ]

    def close(self) -> None:
        with self._lock:
            for secret in list(self._jobs):
                self._drop(secret)

    def _drop(self, secret: bytes) -> None:
        job = self._jobs.pop(secret)
        job.stop()
        job.cached.release_all()


def _port(address: str) -> str:
    return address.rpartition(":")[2]
