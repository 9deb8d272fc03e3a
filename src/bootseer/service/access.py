"""Access control of the service: tokens with a scope and a team, users named by a trusted proxy, loopback.

A token is 32 random bytes, of which the database stores only the SHA-256 digest. Its scope is `ingest` (send lines),
`read` (read everything) or `admin` (both); a token with a team sends for that team. Browsers keep it
in a cookie. If no token was ever created and the service listens only on loopback, requests need none.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import re
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qs, quote

import anyio
import anyio.to_thread
import msgspec
from sqlalchemy import insert, select, update
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bootseer.errors import TransientError, UsageError
from bootseer.service.database import Database
from bootseer.service.schema import token as token_table
from bootseer.store.open import is_loopback
from bootseer.trace.event import BEGIN, TAG_STEM, VERSION, Malformed, decode, encode

if TYPE_CHECKING:
    from bootseer.service.app import Service

INGEST: Final = "ingest"
READ: Final = "read"
ADMIN: Final = "admin"
COOKIE: Final = "bootseer_token"
LOGIN: Final = "/login"

_PREFIX = "bst_"
_FRESH_S = 5.0
_WAIT_S = 1.0
_HUNG_S = 5.0
_MAX_FORM_BYTES = 4096
_USED_EVERY_NS = 60_000_000_000
_TAG = TAG_STEM + b"%d {" % VERSION
_MAY_NAME = re.compile(rb'"run"|"team"|[\\\x1b]')
"""What a line contains that begins a run or names a team, or has it escaped."""
_TAGS = re.compile(rb"(?=@bootseer\d{1,4} \{)")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
_HEADERS: Final = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "x-frame-options": "DENY",
}
"""Default headers of each response."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Grant:
    """What one request may do; in `request.state.grant`."""

    scope: str
    team: str = ""
    """Empty: not limited to a team."""

    def allows(self, scope: str) -> bool:
        return self.scope in (ADMIN, scope)


class Token(NamedTuple):
    """A token as listed, without its secret, which is not stored."""

    id: int
    scope: str
    team: str
    note: str
    created_ns: int
    last_used_ns: int
    revoked_ns: int | None


class Tokens:
    """The tokens of a database. While the database is unreachable, those read last are used. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._by_hash: dict[str, Token] = {}
        self._is_known = False
        """Whether the tokens were ever read."""
        self._read_at = -_FRESH_S
        self._used: dict[int, int] = {}

    def add(self, scope: str, team: str = "", note: str = "", secret: str = "") -> tuple[int, str]:
        """Create a token, with the given `secret` or a new one. Returns its number and its secret, which is not stored.

        A token with the same secret is kept unchanged, even if it is revoked.
        """
        if secret:
            with self._database.read() as connection:
                known = connection.scalar(select(token_table.c.id).where(token_table.c.hash == _hash(secret)))
            if known is not None:
                return int(known), secret
        secret = secret or _PREFIX + secrets.token_urlsafe(32)
        row = {"hash": _hash(secret), "scope": scope, "team": team, "note": note, "created_ns": time.time_ns()}
        with self._database.write() as connection:
            made = connection.execute(insert(token_table).values(row)).inserted_primary_key
        self._read_at = -_FRESH_S  # those of other processes are known within seconds
        return int(made[0]) if made else 0, secret

    def all(self) -> list[Token]:
        """All tokens ever created, oldest first."""
        with self._database.read() as connection:
            columns = [token_table.c[name] for name in Token._fields]
            return [Token(*row) for row in connection.execute(select(*columns).order_by(token_table.c.id))]

    def revoke(self, number: int) -> bool:
        """Revoke a token. Returns whether it exists."""
        with self._database.write() as connection:
            done = connection.execute(update(token_table).where(token_table.c.id == number)
                                      .values(revoked_ns=time.time_ns()))  # fmt: skip
            return done.rowcount > 0

    def any(self) -> bool:
        """Whether a token was ever created; also if the database has not answered yet, so that nothing is open."""
        self._refresh()
        return bool(self._by_hash) or not self._is_known

    def grant(self, secret: str) -> Grant | None:
        """What a secret allows; None if it is unknown or revoked."""
        self._refresh()
        if (found := self._by_hash.get(_hash(secret))) is None:
            self._refresh(_WAIT_S)
            found = self._by_hash.get(_hash(secret))
        if found is None or found.revoked_ns is not None:
            return None
        self._used[found.id] = time.time_ns()
        return Grant(found.scope, found.team)

    def _refresh(self, wait_s: float = 0.0) -> None:
        """Read the tokens again if they are old. Another thread that does is waited for no longer than `wait_s`: a
        database that does not answer holds up one request, and others use the known tokens."""
        if not self._lock.acquire(timeout=wait_s):
            return
        try:
            if time.monotonic() - self._read_at < _FRESH_S:
                return
            with contextlib.suppress(TransientError):  # keep using the known tokens
                with self._database.read() as connection:
                    columns = [token_table.c[name] for name in ("hash", *Token._fields)]
                    rows = connection.execute(select(*columns))
                    self._by_hash = {row[0]: Token(*row[1:]) for row in rows}
                self._is_known = True
                self._note_use()  # last: a full disk can only be read
            self._read_at = time.monotonic()
        finally:
            self._lock.release()

    def _note_use(self) -> None:
        known = {one.id: one.last_used_ns for one in self._by_hash.values()}
        late = {number: at for number, at in list(self._used.items()) if at - known.get(number, 0) > _USED_EVERY_NS}
        self._used.clear()
        if late:
            with self._database.write() as connection:
                for number, at in late.items():
                    connection.execute(update(token_table).where(token_table.c.id == number).values(last_used_ns=at))


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()  # 256 random bits need no salt


def networks(words: Sequence[str]) -> tuple[Network, ...]:
    """The addresses of proxies, as `10.0.0.7` or `10.0.0.0/24`. Raises `UsageError`."""
    try:
        return tuple(ipaddress.ip_network(word) for word in words)
    except ValueError as error:
        raise UsageError(f"--proxy-from: {error}", hint="for example 10.0.0.7 or 10.0.0.0/24") from None


def needed(method: str, path: str) -> str:
    """The scope that a request needs; "" if none. Unknown methods need the highest scope."""
    if path in ("/healthz", LOGIN) or path.startswith("/static/"):
        return ""
    if path.startswith("/v1/"):
        return INGEST
    return READ if method in _SAFE_METHODS else ADMIN


class Gate:
    """ASGI middleware for all routes: rejects requests without permission, and stores the `Grant` of the others."""

    def __init__(
        self, app: ASGIApp, tokens: Tokens, *, loopback_only: bool, proxies: Sequence[Network], proxy_header: str
    ) -> None:
        """loopback_only: the service listens only on loopback.
        proxies: addresses of proxies that are trusted to name the user in `proxy_header`.
        """
        self._app = app
        self._tokens = tokens
        self._loopback_only, self._proxies, self._proxy_header = loopback_only, proxies, proxy_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        with anyio.move_on_after(_HUNG_S) as deadline:
            rejection = await anyio.to_thread.run_sync(self._check, scope, abandon_on_cancel=True)
        if deadline.cancelled_caught:  # the first check still reads the tokens: this one uses the known ones
            rejection = await run_in_threadpool(self._check, scope)
        await (rejection or self._app)(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> Response | None:
        """The response to a request without permission; None for one with permission, whose grant is stored."""
        connection = HTTPConnection(scope)
        try:
            grant, is_sent = self._grant(connection)
        except PermissionError as error:
            return refusal(403, str(error))
        scope.setdefault("state", {})["grant"] = grant
        wanted = needed(scope["method"], scope["path"])
        if not wanted:
            return None
        if grant is None:
            return _ask_for_token(connection)
        if not grant.allows(wanted):
            return refusal(403, f"this needs the scope {wanted}, but the token has {grant.scope}")
        if not is_sent and scope["method"] not in _SAFE_METHODS and not same_origin(connection.headers):
            return refusal(403, "the request comes from another site")
        return None

    def _grant(self, connection: HTTPConnection) -> tuple[Grant | None, bool]:
        """What the request may do, and whether it sent its token explicitly: browsers add cookies to any request.

        Raises `PermissionError` if it may do nothing at all.
        """
        headers = connection.headers
        if self._proxies and headers.get(self._proxy_header, "").strip():
            if not self._from_proxy(connection):
                raise PermissionError(f"{self._proxy_header} from an address that is not a trusted proxy")
            return Grant(READ), False
        word, _, secret = headers.get("authorization", "").partition(" ")
        if word.lower() == "bearer":
            return self._tokens.grant(secret.strip()), True
        if secret := connection.cookies.get(COOKIE, ""):
            return self._tokens.grant(secret), False
        if not self._loopback_only or self._proxies or self._tokens.any():
            return None, False
        # DNS rebinding: a foreign name that resolves to 127.0.0.1 reaches us through the user's browser; and a proxy on
        # this machine forwards requests from anywhere.
        if any(name in headers for name in _FORWARDED) or not is_loopback(headers.get("host", "")):
            raise PermissionError("without tokens, only requests to localhost are served")
        return Grant(ADMIN), False

    def _from_proxy(self, connection: HTTPConnection) -> bool:
        try:
            address = ipaddress.ip_address(connection.client.host if connection.client else "")
        except ValueError:
            return False
        # A socket for both protocols shows an IPv4 address as ::ffff:10.0.0.7.
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self._proxies)


def _ask_for_token(connection: HTTPConnection) -> Response:
    if "text/html" in connection.headers.get("accept", "") and connection.scope["method"] == "GET":
        query = connection.scope["query_string"].decode("latin-1")
        return RedirectResponse(f"{LOGIN}?next={quote(connection.url.path + ('?' + query if query else ''))}", 303)
    has_token = connection.headers.get("authorization", "").lower().startswith("bearer ")
    why = "this token is unknown or revoked" if has_token else "a token is required: Authorization: Bearer TOKEN"
    return refusal(401, why, {"www-authenticate": "Bearer"})


def same_origin(headers: Headers) -> bool:
    """Whether the request does not come from another site's page. Other programs than browsers send no such headers."""
    origin = headers.get("origin")
    if origin is not None:
        return origin.partition("://")[2] == headers.get("host", "")
    return headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")


def refusal(status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": why}, status, headers)


_whole = msgspec.json.Decoder(msgspec.Raw)


def of_team(line: bytes, team: str) -> bytes:
    """The line, with the team of the sender's token in each event that begins a run or names a team: an end of the
    run's span could replace it. The team in the line itself is not trusted.

    If the line is not just one event, only its events are kept, each in a line of its own: readers also unwrap lines of
    collectors and remove colours, and must not find other events than are seen here.
    """
    if line.startswith(_TAG) and line.count(TAG_STEM) == 1 and not _MAY_NAME.search(line):
        with contextlib.suppress(msgspec.DecodeError):
            _whole.decode(memoryview(line)[len(_TAG) - 1 :])
            return line
    events = []
    for piece in _TAGS.split(line) if TAG_STEM in line else ():
        with contextlib.suppress(Malformed):
            event = decode(piece)
            if "team" in event.attrs or (event.stage, event.phase) == ("run", BEGIN):
                # First, because `encode` drops attributes after the 24th of a long event.
                event = event._replace(attrs={"team": team} | dict(event.attrs) | {"team": team})
            events.append(encode(event))
    return b"".join(events).rstrip(b"\n")


async def login(request: Request) -> Response:
    """`/login`: a form for a token, stored in a cookie. SameSite=lax: links from elsewhere send it, other requests do
    not."""
    service: Service = request.app.state.service
    if request.method == "GET":
        return service.pages.login(request, "Enter a token with the scope read.")
    if not same_origin(request.headers):
        return refusal(403, "the request comes from another site")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_FORM_BYTES:
            return refusal(413, "the form is too large")
    secret = parse_qs(body.decode("latin-1")).get("token", [""])[0].strip()
    grant = await run_in_threadpool(service.tokens.grant, secret)
    if grant is None or not grant.allows(READ):
        return service.pages.login(request, "This token is unknown, revoked or without the scope read.", 403)
    target = request.query_params.get("next", "/")
    # Only a local path: `//host` and `/\host` lead to another host.
    safe = target if target.startswith("/") and target[1:2] not in ("/", "\\") and target.isprintable() else "/"
    response = RedirectResponse(safe, 303)
    # The browser's own word, because a proxy in front may have ended TLS.
    is_secure = "https" in (request.url.scheme, request.headers.get("origin", "").partition("://")[0])
    response.set_cookie(COOKIE, secret, httponly=True, samesite="lax", secure=is_secure, max_age=30 * 86_400)
    return response
