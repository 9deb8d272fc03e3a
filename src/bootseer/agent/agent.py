"""The agent of a node: keeps the cache within its limit, cleans up after killed processes, and reports the node's
state.

Jobs do not depend on it: mounts have their own daemons, which `mounts.recovery` restarts, and `bootseer run` uses cache
and mounts directly. So the agent may be killed at any time.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final

from bootseer import __version__
from bootseer.agent.ended_jobs import EndedJobs
from bootseer.artifact.cache_space import CacheSpace
from bootseer.artifact.places import blocks_folder
from bootseer.artifact.unpacked import delete_idle_trees
from bootseer.cache.cache import Cache
from bootseer.errors import BootseerError, NotFoundError, PermanentError, TransientError, UsageError, os_errors_as
from bootseer.io.locks import claim
from bootseer.logs import logger
from bootseer.mounts import control
from bootseer.mounts.control import send_request, socket_path
from bootseer.mounts.shared_layers import unmount_idle
from bootseer.mounts.state import MountState, Runtime
from bootseer.trace.ship import Link, Spools, pause_s, target
from bootseer.units import PROMETHEUS, Figures

_LOG = logger(__name__)
SOCKET: Final = "agent"
_LOCK: Final = "agent.lock"
_FIRST_FD: Final = 3  # the first descriptor that systemd passes
STATUS: Final = "/v1/status"
PEERS: Final = "/v1/peers"
"""Request to serve the files of an ended job to its other nodes."""
PEERS_BEGIN: Final = "/v1/peers/begin"
"""Request to release the addresses of a starting job."""
_MAX_BODY: Final = 1 << 20
_MAX_REQUESTS: Final = 8
"""Concurrent requests: one scraper and some users. Others are refused rather than queued."""
_TIMEOUT_S: Final = 5.0
_REQUEST_S: Final = 10.0
"""Limit of a request from its first byte to the last of its response, however slowly they come."""
_DAEMON_S, _DAEMONS_S = 1.0, 3.0
"""How long to wait for one daemon, and for all together: Prometheus waits about ten seconds for all figures."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The settings of an agent."""

    cache: Path
    runtime: Path
    max_bytes: int | None = None
    """Limit of the cache's disk usage; None: a share of the disk's free space."""
    every_s: float = 60.0
    """Interval of cleanups."""
    service: str = ""
    """Address of the service to send this node's spools to; empty: they are not sent."""
    spools: tuple[str, ...] = ()
    """Roots of spools."""
    idle_s: float = 7 * 86_400.0
    """How long unused layers stay mounted and unpacked images on the disk."""
    peers_s: float = 3600.0
    """How long files read by ended jobs are served to their other nodes; 0: not at all."""


class Agent:
    """`clean_up` belongs to one thread, everything else to any."""

    def __init__(self, settings: AgentSettings) -> None:
        """Raises `PermanentError` if a folder cannot be created or belongs to another user, `UsageError` for an invalid
        address or token of the service."""
        self.settings = settings
        self._cache = Cache(blocks_folder(settings.cache), max_bytes=settings.max_bytes)
        self._runtime = Runtime(settings.runtime)
        self._began = time.monotonic()
        self._cleaned_up: float | None = None
        self._error = ""
        self._counts: Counter[str] = Counter()
        self.ended_jobs = EndedJobs(settings.peers_s)
        self._link = Link(target(settings.service, os.environ)) if settings.service else None

    def ship(self, stop: threading.Event) -> None:
        """Send the spools to the service, if there is one, until `stop`. Never raises."""
        if self._link is None:
            return
        sender = Spools(list(self.settings.spools), self._link)
        while not stop.wait(pause_s(self._link)):
            sender.step()
        sender.close()

    def clean_up(self) -> None:
        """Evict down to the cache's limit, and remove stale mounts. What is in use stays. If a step fails, the others
        still run."""
        idle_s, problems = self.settings.idle_s, list[str]()
        for step in (
            self.ended_jobs.clean_up,
            partial(unmount_idle, self._runtime, idle_s=idle_s),
            partial(delete_idle_trees, self.settings.cache, self._runtime, idle_s=idle_s),
            self._delete_idle_images,
            self._evict,
        ):
            try:
                step()
            except (BootseerError, OSError) as error:
                _LOG.warning("cleaning up failed: %s", error)
                problems.append(str(error))
        self._counts["failures"] += bool(problems)
        self._error = "; ".join(problems)
        self._cleaned_up = time.monotonic()

    def _delete_idle_images(self) -> None:
        from bootseer.image.catalog import delete_idle  # programs that only ask an agent import this module, too

        space = CacheSpace(self._cache, _LOG.warning)
        delete_idle(self.settings.cache, self._cache, idle_s=min(self.settings.idle_s, space.idle_s))

    def _evict(self) -> None:
        freed = self._cache.prune().freed_bytes
        self._counts["freed_bytes"] += freed
        if freed:
            _LOG.info("freed %d bytes", freed)

    def problem(self) -> str:
        """Why the node is not cleaned up; "" if it is."""
        overdue_s = time.monotonic() - (self._cleaned_up or self._began) - 3 * self.settings.every_s
        return self._error or (f"the cache was not cleaned up for {overdue_s:.0f} s" if overdue_s > 0 else "")

    def status(self) -> dict[str, Any]:
        """The state of this node. Sizes in bytes."""
        entries = self._cache.entries()
        until = time.monotonic() + _DAEMONS_S
        with os_errors_as(PermanentError, self._runtime.mounts):
            mounts = [self._mount(state, until) for state in self._runtime.all()]
        return {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._began, 3),
            "problem": self.problem(),
            "cache": {
                "folder": str(self._cache.root),
                "max_bytes": self.settings.max_bytes,
                "files": len(entries),
                "disk_bytes": sum(entry.disk_bytes for entry in entries),
                "in_use": sum(entry.in_use for entry in entries),
                "damaged": sum(entry.damaged for entry in entries),
            },
            "mounts": mounts,
            "peers": self.ended_jobs.status(),
            "freed_bytes": self._counts["freed_bytes"],
            "failures": self._counts["failures"],
            **({"service": {"batches": self._link.batches, "problem": self._link.problem}} if self._link else {}),
        }

    def _mount(self, state: MountState, until: float) -> dict[str, Any]:
        found: dict[str, Any] = {"target": state.target, "what": state.what, "health": self._runtime.health(state)}
        if state.daemon is not None and found["health"] == "mounted" and time.monotonic() < until:
            with contextlib.suppress(BootseerError, OSError):
                status: dict[str, Any] = send_request(self._runtime.folder(state), "status", timeout_s=_DAEMON_S)
                fetch = status.get("fetch", {})
                found |= {
                    "restarts": status.get("restarts", 0),
                    "waiting": status.get("waiting", 0),
                    "read_bytes": status.get("read_bytes", 0),
                    "fetched_bytes": sum(fetch.get("bytes_by_purpose", {}).values()),
                    "peer_bytes": fetch.get("peer_bytes", 0),
                    "corrupt_blocks": fetch.get("corrupt_blocks", 0),
                }
        return found

    def metrics(self) -> str:
        """The state of this node in Prometheus's text format."""
        status = self.status()
        cache, mounts = status["cache"], status["mounts"]
        health = Counter(mount["health"] for mount in mounts)
        rows: list[tuple[str, str, str, dict[str, float]]] = [
            ("up", "gauge", "Whether cleanups work.", {"": float(not status["problem"])}),
            ("uptime_seconds", "gauge", "Uptime of the agent.", {"": status["uptime_s"]}),
            ("cache_bytes", "gauge", "Disk usage of the cache.", {"": cache["disk_bytes"]}),
            ("cache_files", "gauge", "Files in the cache.", {"": cache["files"]}),
            ("cache_files_in_use", "gauge", "Cache files in use by a process.", {"": cache["in_use"]}),
            ("cache_files_damaged", "gauge", "Cache files that the next use replaces.", {"": cache["damaged"]}),
            ("cache_freed_bytes_total", "counter", "Bytes evicted by the agent.", {"": status["freed_bytes"]}),
            ("failures_total", "counter", "Failed cleanups.", {"": status["failures"]}),
            ("peer_jobs", "gauge", "Ended jobs whose files are served.", {"": float(len(status["peers"]))}),
            ("mounts", "gauge", "Mounts by health.",
             {name: float(health[name]) for name in ("mounted", "daemon dead", "gone")}),
            *(
                [("shipped_batches_total", "counter", "Batches of events accepted by the service.",
                  {"": status["service"]["batches"]}),
                 ("ship_up", "gauge", "Whether the service accepted the last batch.",
                  {"": float(not status["service"]["problem"])})]
                if "service" in status else []
            ),
            *(
                (f"mounts_{name}", "gauge", f"{what} of the existing mounts.",
                 {"": float(sum(mount.get(name, 0) for mount in mounts))})
                for name, what in (
                    ("restarts", "Daemon restarts"), ("waiting", "Waiting reads"),
                    ("read_bytes", "Bytes read"), ("fetched_bytes", "Bytes fetched"),
                    ("peer_bytes", "Bytes received from other nodes"), ("corrupt_blocks", "Damaged blocks received"),
                )
            ),
        ]  # fmt: skip
        figures = Figures()
        for name, kind, what, values in rows:
            figures.family(f"bootseer_{name}", kind, what)
            for label, value in values.items():
                figures.value(f"bootseer_{name}", value, **({"health": label} if label else {}))
        return figures.text()


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S
    server_version = "bootseer-agent"
    server: _Server

    def do_GET(self) -> None:
        agent = self.server.agent
        try:
            match self.path:
                case "/metrics":
                    self._answer(200, PROMETHEUS, agent.metrics())
                case "/healthz":
                    problem = agent.problem()
                    self._answer(503 if problem else 200, "text/plain", f"{problem or 'ok'}\n")
                case path if path == STATUS and self.server.is_private:  # private: it has paths of users
                    self._answer(200, "application/json", json.dumps(agent.status()) + "\n")
                case _:
                    self._answer(404, "text/plain", "/metrics or /healthz\n")
        except BootseerError as error:  # the cache or the runtime folder cannot be read
            self._answer(503, "application/json", json.dumps({"error": str(error)}) + "\n")
        except OSError as error:
            _LOG.info("%s was not answered: %s", self.path[:64], error)

    def do_POST(self) -> None:
        ended_jobs = self.server.agent.ended_jobs
        handle = {PEERS: ended_jobs.take_over, PEERS_BEGIN: ended_jobs.release}.get(self.path)
        length = self.headers.get("Content-Length", "")
        try:
            if handle is None or not self.server.is_private:
                self._answer(404, "text/plain", "not found\n")
            elif not (length.isascii() and length.isdecimal() and int(length) <= _MAX_BODY):
                self._answer(413, "text/plain", f"at most {_MAX_BODY} bytes\n")
            else:
                request = json.loads(self.rfile.read(int(length)))
                handle(request if isinstance(request, dict) else {})
                self._answer(200, "application/json", "{}\n")
        except (BootseerError, ValueError) as error:
            self._answer(400, "application/json", json.dumps({"error": str(error)}) + "\n")
        except OSError as error:
            _LOG.info("%s was not answered: %s", self.path[:64], error)

    def _answer(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def address_string(self) -> str:
        return "unix" if isinstance(self.client_address, str | bytes) else str(self.client_address[0])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class calls it so
        _LOG.debug("%s: " + format, self.address_string(), *args)


class _Server(ThreadingMixIn, TCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, agent: Agent, listening: socket.socket) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.agent = agent
        self.is_private = listening.family == socket.AF_UNIX
        self.slots = threading.BoundedSemaphore(_MAX_REQUESTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # the system refuses a thread
            self.slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        late = threading.Timer(_REQUEST_S, _shut_down, (request,))
        late.daemon = True
        try:
            late.start()
            super().process_request_thread(request, client_address)
        finally:
            late.cancel()
            self.slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _LOG.debug("a request failed", exc_info=True)


def _shut_down(link: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may be closed already
        link.shutdown(socket.SHUT_RDWR)


def _listening(runtime: Path, listen: tuple[str, int] | None) -> Iterator[socket.socket]:
    """The sockets of an agent: its Unix socket, or the one opened by systemd, and that of an address."""
    if is_activated():
        yield activated_socket()
    else:
        with os_errors_as(PermanentError, f"{runtime / SOCKET}: cannot create the socket"):
            unix = control.listen(runtime, SOCKET)
        yield unix
    if listen is not None:
        is_ipv6 = ":" in listen[0]
        with os_errors_as(UsageError, f"cannot listen on {listen[0]} port {listen[1]}"):
            tcp = socket.create_server(
                listen,
                family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
                dualstack_ipv6=is_ipv6 and socket.has_dualstack_ipv6(),
            )
        yield tcp


def run_agent(settings: AgentSettings, stop: threading.Event, *, listen: tuple[str, int] | None = None) -> None:
    """Run the agent until `stop`. `listen`: an address for `/metrics` and `/healthz` in addition to the Unix socket.

    Raises `UsageError` if another agent runs, `PermanentError` for unusable folders.
    """
    agent = Agent(settings)
    servers: list[_Server] = []
    locks: list[int] = []
    try:
        locks.append(claim(settings.runtime / _LOCK, "an agent runs already", "bootseer agent status"))
        # An agent with another runtime folder does not know our mounts and would delete what they use. The lock has the
        # host's name, because hosts may share the cache.
        shared = settings.cache / f"agent.{socket.gethostname()}.lock"
        hint = "stop it, or use another cache (BOOTSEER_CACHE)"
        locks.append(claim(shared, f"an agent with another runtime folder cleans up {settings.cache}", hint))
        for listening in _listening(settings.runtime, listen):
            server = _Server(agent, listening)
            threading.Thread(target=server.serve_forever, name="bootseer-agent-http", daemon=True).start()
            servers.append(server)  # now: `shutdown` waits for ever for a thread that was not started
        _LOG.info("cleaning up %s every %g s", settings.cache, settings.every_s)
        notify("READY=1")
        threading.Thread(target=agent.ship, args=(stop,), name="bootseer-agent-ship", daemon=True).start()
        while not stop.is_set():
            agent.clean_up()
            stop.wait(settings.every_s)
    finally:
        notify("STOPPING=1")
        agent.ended_jobs.close()
        for server in servers:
            server.shutdown()
            server.server_close()
        if servers and not is_activated():
            (settings.runtime / SOCKET).unlink(missing_ok=True)
        for lock in locks:
            os.close(lock)


def request(runtime: Path, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send a request to this node's agent: GET, or POST with `body`.

    Raises `NotFoundError` when none runs, `TransientError` when it does not respond, `PermanentError` when it refuses.
    """
    link = http.client.HTTPConnection("agent", timeout=_TIMEOUT_S)
    link.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.sock.settimeout(_TIMEOUT_S)
    with contextlib.closing(link):
        try:
            with socket_path(runtime, SOCKET) as short:
                link.sock.connect(short)
            link.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
            document = json.loads(link.getresponse().read())
        except TimeoutError as error:
            raise TransientError(f"the agent did not answer in {_TIMEOUT_S:g} s") from error
        except PermissionError as error:
            raise NotFoundError(f"no agent is accessible to this user: {runtime / SOCKET}: {error.strerror}") from error
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NotFoundError("no agent runs on this node") from error
        except OSError as error:  # it closed the connection, or its queue is full
            raise TransientError(f"the agent is busy with {_MAX_REQUESTS} requests; try again") from error
        except (http.client.HTTPException, ValueError) as error:
            raise PermanentError("the agent sent a malformed response") from error
    if not isinstance(document, dict):
        raise PermanentError("the agent sent a malformed response")
    if "error" in document:
        raise PermanentError(f"the agent refused: {document['error']}")
    return document


def is_activated() -> bool:
    """Whether systemd passed sockets to this process (sd_listen_fds(3))."""
    return os.environ.get("LISTEN_PID") == str(os.getpid())


def activated_socket() -> socket.socket:
    """The socket passed by systemd. Raises `UsageError` unless it is the only one, and a listening Unix socket."""
    number = os.environ.get("LISTEN_FDS", "")
    with os_errors_as(UsageError, f"LISTEN_FDS=1, but descriptor {_FIRST_FD} is not a socket"):
        if number != "1":
            raise UsageError(f"LISTEN_FDS={number}", hint="one ListenStream= in the .socket unit")
        passed = socket.socket(fileno=_FIRST_FD)
        if passed.family != socket.AF_UNIX or not passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise UsageError("systemd passed no Unix socket", hint="ListenStream=/run/... in the .socket unit")
    passed.set_inheritable(False)
    return passed


def notify(state: str) -> None:
    """Notify systemd, if it started this process (sd_notify(3))."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link, contextlib.suppress(OSError):
            link.sendto(state.encode(), f"\0{path[1:]}" if path.startswith("@") else path)
