"""The service process: listening, its parts, and shutdown.

`Service` owns the database, the raw lines, the deriver and the routes; `serve` runs it under uvicorn until a signal.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from bootseer.errors import UsageError, os_errors_as
from bootseer.io.locks import claim
from bootseer.io.trusted_folder import state_folder, trusted_folder
from bootseer.logs import logger
from bootseer.service.access import LOGIN, READ, Gate, Network, Tokens, login
from bootseer.service.alerts import Alerts, Webhook
from bootseer.service.database import Database, default_url
from bootseer.service.derive import Derived, Patterns
from bootseer.service.deriver import Deriver
from bootseer.service.ingest import Ingest
from bootseer.service.over_time import OverTime
from bootseer.service.pages import Pages
from bootseer.service.raw import RawStore
from bootseer.service.shared_answers import Answers
from bootseer.service.upkeep import RAW_DAYS, Upkeep
from bootseer.store.open import is_loopback, open_store

_LOG = logger(__name__)
DEFAULT_LISTEN: Final = ("127.0.0.1", 8765)
_MAX_CONNECTIONS = 10_000  # 8 KiB each; each node that starts has one
_IDLE_S = 75
_END_S = 10
_MUST_END_S = 25.0
"""Below the usual 30 s after which Kubernetes kills."""
_ENDING = (signal.SIGTERM, signal.SIGINT)
_OTHERWISE = "give --data another folder"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a service."""

    data: Path
    """Folder for local data: the lock, the SQLite file, the raw lines."""
    database: str = ""
    """URL; empty: SQLite in `data`."""
    raw: str = ""
    """Store of the raw lines; empty: in `data`."""
    listen: tuple[str, int] = DEFAULT_LISTEN
    certificate: Path | None = None
    key: Path | None = None
    workers: int = 1
    """Number of processes that analyse starts."""
    proxies: tuple[Network, ...] = ()
    proxy_header: str = "x-forwarded-user"
    raw_days: int = RAW_DAYS
    alert_to: tuple[Webhook, ...] = ()
    patterns: Patterns = ()
    """Patterns of stages in logs of jobs without BootSeer."""
    price: float = 0.0
    """Of a GPU-hour, for the pages; 0: they show no money."""
    currency: str = "$"

    def made(self) -> Settings:
        """The same, with the data folder created if necessary. Raises `AccessError` if others can write to it,
        `UsageError` if it cannot be created."""
        with os_errors_as(UsageError, self.data, hint=_OTHERWISE):
            return replace(self, data=trusted_folder(self.data, otherwise=_OTHERWISE, private=True))

    @property
    def database_url(self) -> str:
        return self.database or default_url(self.data)

    @property
    def raw_uri(self) -> str:
        """URI of the store of raw lines."""
        return self.raw or str(self.data / "raw")


def default_data(env: dict[str, str] | os._Environ[str]) -> Path:
    """`$BOOTSEER_SERVICE_DATA`, else a system folder for root, and one in the user's state folder for others."""
    return Path(env.get("BOOTSEER_SERVICE_DATA") or state_folder(env, "service", otherwise=_OTHERWISE))


class Service:
    """The parts of a service process. `close` it at the end."""

    def __init__(self, settings: Settings) -> None:
        """Raises `BootseerError` if the database or the store cannot be opened."""
        self.settings = settings
        self.began = time.monotonic()
        self.raw = RawStore(open_store(settings.raw_uri))
        self.database = Database.open(settings.database_url)
        self.deriver = Deriver(
            self.database,
            settings.database_url,
            settings.raw_uri,
            workers=settings.workers,
            name=str(settings.data),
            patterns=settings.patterns,
            on_derived=self._derived,
        )
        self.upkeep = Upkeep(self.database, self.raw, settings.raw_days, self.deriver.wake)
        self.ingest = Ingest(self.raw, self.database, self.deriver.wake)
        self.tokens = Tokens(self.database)
        self.tokens.any()  # known from now on, also while the database is away
        self.answers = Answers()
        self.over_time = OverTime(self.database)
        self.alerts = Alerts(self.database, self.over_time, settings.alert_to, self.ingest.ask_stacks)
        self.pages = Pages(self)
        self._parts = (self.ingest, self.deriver, self.upkeep, self.alerts.thread)

    def _derived(self, derived: Derived) -> None:
        self.upkeep.changed(derived.days)
        self.pages.changed()

    def start(self) -> None:
        for part in self._parts:
            part.start()

    def close(self) -> None:
        """Stop the background threads and close the database and the store."""
        for part in self._parts:
            part.close()
        self.raw.store.close()
        self.database.close()

    def routes(self) -> list[Any]:
        from bootseer.service.otlp_in import LOGS, TRACES, answer  # protobuf, which verbs do not need

        return [
            Route("/healthz", self._healthz),
            Route(LOGIN, login, methods=["GET", "POST"]),
            Route("/v1/lines", self.ingest.answer, methods=["POST"]),
            *(Route(f"/v1/{kind}", partial(answer, self.ingest, kind), methods=["POST"]) for kind in (TRACES, LOGS)),
            *self.pages.routes(),
        ]

    def app(self) -> Starlette:
        """The application, for any ASGI server."""

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.start()
            yield

        host = self.settings.listen[0]
        gate = Middleware(
            Gate,
            tokens=self.tokens,
            loopback_only=is_loopback(_bracketed(host)),
            proxies=self.settings.proxies,
            proxy_header=self.settings.proxy_header.lower(),
        )
        app = Starlette(
            routes=self.routes(),
            lifespan=lifespan,
            middleware=[gate],
            exception_handlers={404: self.pages.not_found},
        )
        app.state.service = self
        return app

    async def _healthz(self, request: Request) -> Response:
        """200 while lines are accepted. Senders do not notice if the database is unreachable for a while."""
        from bootseer import __version__

        problem, grant = self.ingest.problem, request.state.grant
        if problem and (grant is None or not grant.allows(READ)):  # it names the store
            problem = "the lines cannot be stored now"
        health = {
            "version": __version__,
            "uptime_s": round(time.monotonic() - self.began, 1),
            "problem": problem,
            "ingest_lag_s": round(self.ingest.lag_s, 1),
        }
        return JSONResponse(health, 503 if self.ingest.problem else 200)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _bound(settings: Settings, stack: contextlib.ExitStack) -> socket.socket:
    host, port = settings.listen
    with os_errors_as(UsageError, f"cannot listen on {host} port {port}", hint="give --listen another HOST:PORT"):
        # A name may have an address of IPv6 only.
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = stack.enter_context(socket.socket(family, kind, protocol))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        return made


def _check_access(settings: Settings, service: Service) -> None:
    if not is_loopback(_bracketed(settings.listen[0])) and not settings.proxies and not service.tokens.any():
        raise UsageError(
            f"without tokens, listening on {settings.listen[0]} would give access to every host that reaches it",
            hint="create a token with `bootseer serve token add --scope read`, or listen on 127.0.0.1",
        )


def serve(settings: Settings, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. `ready` is called with the service's URL once it accepts requests.

    Raises `UsageError` if it cannot listen, if another service uses the folder, or if other hosts could access it
    without a token; `BootseerError` for the database and the store.
    """
    settings = settings.made()
    # Each sender keeps a connection open; the usual soft limit of 1024 is for programs that use select().
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(settings))
        listener = _bound(settings, stack)
        service = stack.enter_context(contextlib.closing(Service(settings)))
        _check_access(settings, service)
        server = _Server(_configured(settings, service))
        scheme, port = "https" if settings.certificate else "http", listener.getsockname()[1]
        server.on_ready = lambda: ready(f"{scheme}://{_bracketed(settings.listen[0])}:{port}/")

        def end(*_: object) -> None:
            server.end()
            last = threading.Timer(_MUST_END_S, _end_anyway)
            last.daemon = True
            last.start()

        for number in _ENDING:
            stack.callback(signal.signal, number, signal.signal(number, end))
        server.run(sockets=[listener])


def _end_anyway() -> None:
    """A thread that waits for a hanging database cannot be ended. What was accepted is stored, so a kill is safe."""
    _LOG.warning("ended while a database or store did not answer")
    os._exit(1)


@contextlib.contextmanager
def locked(settings: Settings) -> Iterator[None]:
    """Lock the data folder. Raises `UsageError` if another process has locked it, or if it cannot be written."""
    path = settings.data / "lock"
    with os_errors_as(UsageError, path, hint=_OTHERWISE):
        lock = claim(path, f"another service uses {settings.data}", f"stop it first, or {_OTHERWISE}")
    try:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def opened(settings: Settings) -> Iterator[tuple[Database, RawStore]]:
    """The database and the raw lines of a service, for a verb."""
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(contextlib.closing(Database.open(settings.database_url)))
        yield database, RawStore(stack.enter_context(contextlib.closing(open_store(settings.raw_uri))))


def _configured(settings: Settings, service: Service) -> uvicorn.Config:
    if settings.certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.certificate, settings.key)
        except (OSError, ssl.SSLError) as error:
            why = error.strerror or error
            raise UsageError(f"--tls-cert {settings.certificate}: not a certificate with its key: {why}") from None
    return uvicorn.Config(
        service.app(),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # `access` decides which proxies to trust
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_END_S,
        timeout_keep_alive=_IDLE_S,
        http=_Protocol,
        h11_max_incomplete_event_size=64 << 10,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key,
        ws="none",
    )


class _Protocol(H11Protocol):
    """Closes a connection without a request for some time, also before the first one, for which uvicorn waits for ever:
    `_MAX_CONNECTIONS` of such clients would shut all others out."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._close_if_idle(self)

    def _close_if_idle(self, before: object) -> None:
        if self.conn.their_state is h11.IDLE and self.cycle is before:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(_IDLE_S, self._close_if_idle, self.cycle)


class _Server(uvicorn.Server):
    """uvicorn's server with our signal handlers: its own raise the signal again, which ends the process early."""

    on_ready: Callable[[], None]

    def end(self) -> None:
        self.force_exit = self.should_exit  # on the second signal
        self.config.app.state.ending = True  # type: ignore[union-attr]  # ends streams of events
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves the application's task to be cancelled, which logs a traceback
            await self.lifespan.shutdown()
