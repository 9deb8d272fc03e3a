"""HTTP for the registry client: pooled connections, one deadline for a whole request, safe redirects.

A thin layer over urllib3 that maps its errors to ours. It knows nothing about registries.

Connections are pooled per host and process: a forked child that used its parent's connections would mix up responses.
urllib3's pools are safe for many threads.

Why own socket classes: Python's timeout restarts with each `recv`, so a server that sends one byte per second, also in
the headers, could hold a reader forever. Here `settimeout(5)` limits everything until it is set again. urllib3 sets the
timeout once for sending and once for the whole response, which makes it a deadline for each.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urljoin

import urllib3
from msgspec import Struct
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    LocationParseError,
    NameResolutionError,
    NewConnectionError,
    ProxyError,
    ReadTimeoutError,
    SSLError,
)
from urllib3.util import parse_url
from urllib3.util.connection import allowed_gai_family

from bootseer.errors import BootseerError, PermanentError, TransientError
from bootseer.io.fork import in_each_process
from bootseer.logs import logger
from bootseer.store.open import is_loopback
from bootseer.store.store import PIECE_BYTES

_LOG = logger(__name__)
_PROXY = "the proxy (HTTP_PROXY, HTTPS_PROXY) for"


class _TotalTimeout(socket.socket):
    _until: float | None = None

    def settimeout(self, value: float | None) -> None:
        """Limit all following operations together to this many seconds."""
        self._until = None if value is None else time.monotonic() + value
        super().settimeout(value)

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        self._spend()
        return super().recv_into(*args, **kwargs)

    def sendall(self, data: Any, flags: int = 0) -> None:
        self._spend()
        super().sendall(data, flags)

    def send(self, data: Any, flags: int = 0) -> int:
        self._spend()
        return super().send(data, flags)

    def _spend(self) -> None:
        if self._until is not None:
            left_s = self._until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            super().settimeout(left_s)


class PlainSocket(_TotalTimeout):
    """A TCP socket with a total timeout. Bodies are received in pieces of a minimum size: waking up for each packet
    costs 10 ms of CPU per MiB instead of 2.6 on a link of 50 Mbit/s."""

    _woken_at = 1

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Reads of the default buffer size are for heads of unknown length; larger ones are for announced bodies."""
        size = nbytes or len(buffer)
        wake_at = min(size, _PIECE) if size > io.DEFAULT_BUFFER_SIZE else 1
        if wake_at != self._woken_at:
            self._woken_at = wake_at
            self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_at)
        return super().recv_into(buffer, nbytes, flags)

    @classmethod
    def take_over(cls, other: socket.socket, left_s: float | None) -> PlainSocket:
        """Wrap the same connection; `other` becomes unusable. `left_s` is the new timeout."""
        taken = cls(other.family, other.type, other.proto, fileno=other.detach())
        taken.settimeout(left_s)
        return taken


class TlsSocket(_TotalTimeout, ssl.SSLSocket):
    """A TLS socket with a total timeout, for `ssl.SSLContext.sslsocket_class`."""


_PIECE = 1 << 17
MAX_REDIRECTS = 5
MAX_RETRY_AFTER_S = 300.0
"""Upper limit of a Retry-After: no start of a job waits for hours."""
_MAX_CONNECTIONS = 64
"""Idle connections per host; twice the maximum of the fetcher."""
_CONNECT_S = 10.0
"""A host that accepts no connection within this time is down or unreachable, whatever the caller's timeout."""
_REDIRECTS = (301, 302, 303, 307, 308)
CERTIFICATES = Path("/etc/docker/certs.d")
"""Its subfolder `HOST[:PORT]` holds CA certificates of a registry (`*.crt`) and client certificates (`*.cert`, each
with its `*.key`), by docker's rules."""
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)")


class Origin(Struct, frozen=True):
    """Scheme, host and port: the scope of a secret."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
        """The origin of an absolute URL. Raises `PermanentError` unless it is http or https with a host."""
        shown = url.partition("?")[0][:200]  # signed addresses grant access
        try:
            # The parser of the library that connects: a different one may read some addresses (`http://a\@b/`) as
            # another host, and a check of one host would permit a request to the other.
            parts = parse_url(url)
        except LocationParseError as error:
            raise PermanentError(f"{shown!r} is not an address") from error
        port = {"http": 80, "https": 443}.get(parts.scheme or "", 0)
        if not port or not parts.host:
            raise PermanentError(f"{shown!r} is not an address of http or https")
        return cls(str(parts.scheme), parts.host, parts.port or port)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Answer:
    """An HTTP response whose body is not read yet. Must be read to its end or closed."""

    def __init__(self, response: urllib3.BaseHTTPResponse, url: str, timeout_s: float) -> None:
        self._response = response
        self._timeout_s = timeout_s
        self.status = response.status
        self.headers = response.headers
        self.url = url
        """The address after redirects; may contain a signature, so it must not be shown."""
        self.origin = Origin.of(url)

    @property
    def length(self) -> int | None:
        """The announced length of the body, if any."""
        text = self.headers.get("Content-Length", "")
        return int(text) if text.isdecimal() and len(text) < 20 else None

    @property
    def content_range(self) -> tuple[int, int, int | None] | None:
        """First byte, one after the last byte, and size of the whole object; None without a valid header."""
        match = _CONTENT_RANGE.fullmatch(self.headers.get("Content-Range", "").strip())
        if match is None:
            return None
        first, last, size = match.groups()
        total = None if size == "*" else int(size)
        return (0, 0, total) if first is None else (int(first), int(last) + 1, total)

    @property
    def retry_after_s(self) -> float | None:
        """The bounded `Retry-After` in seconds; None without one, or if it is a date."""
        text = self.headers.get("Retry-After", "").strip()
        return min(float(text), MAX_RETRY_AFTER_S) if re.fullmatch(r"\d{1,9}", text) else None

    def pieces(self) -> Generator[bytes, None, None]:
        """The body as it arrives. Raises `TransientError` if it ends early."""
        try:
            with _mapped(self.origin, self._timeout_s):
                while piece := self._response.read1(PIECE_BYTES):
                    yield piece
        finally:
            self.close()

    def body(self, max_bytes: int) -> bytes:
        """The whole body. Raises `PermanentError` if it is larger than `max_bytes`."""
        data = bytearray()
        with contextlib.closing(self.pieces()) as pieces:
            for piece in pieces:
                data += piece
                if len(data) > max_bytes:
                    raise PermanentError(f"{self.origin} sent more than {max_bytes} bytes where few are due")
        return bytes(data)

    def finish(self, max_bytes: int = 64 * 1024) -> bytes:
        """The beginning of an unimportant body; keeps the connection if that was all of it."""
        data = b""
        # The status is known already: a broken body makes no difference.
        with contextlib.suppress(BootseerError), contextlib.closing(self.pieces()) as pieces:
            for piece in pieces:
                data += piece
                if len(data) > max_bytes:
                    break
        return data[:max_bytes]

    def close(self) -> None:
        """Abandon the rest of the response. The connection is kept if nothing was left."""
        self._response.close()


class Transport:
    """Sends requests. Safe for many threads. `secure` changes whom TLS trusts."""

    def __init__(self, secure: Callable[[ssl.SSLContext], None] = lambda context: None) -> None:
        self._secure = secure
        in_each_process(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, urllib3.PoolManager] = {}

    def send(
        self,
        method: str,
        url: str,
        *,
        until: float,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        authorization: str | None = None,
    ) -> Answer:
        """Send a request; `until` (of `time.monotonic`) limits it, including the body of the response.

        `authorization` is sent to the origin of `url` only. Redirects of GET and HEAD are followed, but never from
        https to http. Raises `TransientError` without a response in time. Name resolution cannot be interrupted and may
        take longer.
        """
        own = Origin.of(url)
        for _ in range(MAX_REDIRECTS + 1):
            origin = Origin.of(url)
            sent = {"Accept-Encoding": "identity", "User-Agent": "bootseer", **(headers or {})}
            if authorization is not None and origin == own:
                sent["Authorization"] = authorization
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TransientError(f"{origin}: no time is left for a request")
            with _mapped(origin, left_s, tls_hint(origin)):
                response = self._pool(origin).request(
                    method,
                    url,
                    headers=sent,
                    body=body,
                    timeout=urllib3.Timeout(total=left_s),
                    retries=False,
                    redirect=False,
                    preload_content=False,
                    decode_content=False,
                )
            answer = Answer(response, url, left_s)
            # Without the query: signed addresses grant access.
            _LOG.debug("%s %s %s: %d", method, url.partition("?")[0], sent.get("Range", ""), answer.status)
            if answer.status not in _REDIRECTS or method not in ("GET", "HEAD"):
                return answer
            answer.finish()
            target = join(url, answer.headers.get("Location", ""))
            if origin.scheme == "https" and Origin.of(target).scheme != "https":
                raise PermanentError(f"{origin} redirects to http, which is not encrypted")
            url = target
        raise PermanentError(f"{own} redirects more than {MAX_REDIRECTS} times")

    def close(self) -> None:
        with self._lock:
            pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.clear()

    def _pool(self, origin: Origin) -> urllib3.PoolManager:
        """The connection pool with the TLS settings of this origin."""
        folder = certificates(origin.host, origin.port) if origin.scheme == "https" else None
        proxy = proxy_of(origin, os.environ)
        written: list[int] = []  # a mount may outlast its certificates
        with contextlib.suppress(OSError):  # they are being replaced: the next request sees it
            written += [path.lstat().st_mtime_ns for path in folder.glob("*")] if folder is not None else []
            authorities = ssl.get_default_verify_paths().cafile if origin.scheme == "https" else None
            written += [Path(authorities).stat().st_mtime_ns] if authorities else []
        name = f"{origin.scheme} {folder or ''} {proxy} {written}"
        with self._lock:
            pool = self._pools.get(name)
            if pool is None:
                context = None
                if origin.scheme == "https":
                    context = ssl.create_default_context()
                    context.sslsocket_class = TlsSocket
                    if folder is not None:
                        _load(context, folder)
                    self._secure(context)
                settings: dict[str, Any] = {"num_pools": 16, "maxsize": _MAX_CONNECTIONS, "ssl_context": context}
                if proxy:
                    try:
                        login = unquote(parse_url(proxy).auth or "")
                        headers = urllib3.make_headers(proxy_basic_auth=login or None)
                        pool = urllib3.ProxyManager(proxy, proxy_headers=headers, **settings)
                    except HTTPError as error:  # its text may contain a password
                        raise PermanentError(f"{_PROXY} {origin} is not an http or https address") from error
                else:
                    pool = urllib3.PoolManager(**settings)
                pool.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}
                self._pools[name] = pool
            return pool


def proxy_of(origin: Origin, env: Mapping[str, str]) -> str:
    """The address of the proxy for an origin, by HTTP_PROXY, HTTPS_PROXY and NO_PROXY as docker reads them; empty for
    none, and for this machine."""
    proxy, exempt = (env.get(name) or env.get(name.upper(), "") for name in (f"{origin.scheme}_proxy", "no_proxy"))
    host = origin.host.strip("[]")
    if not proxy or is_loopback(origin.host):
        return ""
    for item in exempt.lower().replace(",", " ").split():
        domain = f".{item.lstrip('*.')}"
        if item == "*" or f".{origin.host}".endswith(domain) or f".{origin}".endswith(domain):
            return ""
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host) in ipaddress.ip_network(item, strict=False):
                return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def certificates(host: str, port: int) -> Path | None:
    """The certificate folder of a host; None if there is none, or it is not accessible."""
    for name in (f"{host}:{port}", *([host] if port == 443 else [])):
        with contextlib.suppress(OSError):
            if (CERTIFICATES / name).is_dir():
                return CERTIFICATES / name
    return None


def _load(context: ssl.SSLContext, folder: Path) -> None:
    """Trust the CA certificates of a folder too, and use its client certificate. Raises `PermanentError`."""
    path = folder
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix == ".crt":
                context.load_verify_locations(path)
            elif path.suffix == ".cert":
                context.load_cert_chain(path, path.with_suffix(".key"), password="")  # never prompt for a password
    except FileNotFoundError as error:
        raise PermanentError(f"{path}: there is no {path.stem}.key beside it; authorities end in .crt") from error
    except OSError as error:  # `ssl.SSLError` is one
        raise PermanentError(f"{path} cannot be used: {error.strerror or error}") from error


def tls_hint(origin: Origin) -> str:
    """What to do if a server that refuses plain HTTP speaks TLS; "" where it is used already."""
    if origin.scheme != "http":
        return ""
    return (
        f"; if it requires TLS, leave out --plain-http and BOOTSEER_PLAIN_HTTP; for an address of this machine put the "
        f"authority's file into {CERTIFICATES}/{origin}/ca.crt"
    )


def join(base: str, location: str) -> str:
    """The absolute address of a location. Raises `PermanentError` if it is invalid."""
    try:
        return urljoin(base, location)
    except ValueError as error:
        raise PermanentError(f"{location.partition('?')[0][:200]!r} is not an address: {error}") from error


class _HttpConnection(HTTPConnection):
    _failed: ClassVar[set[str]] = set()
    """Addresses tried last from now on: names often list those of a dead IPv6 first. Each gets a share of the time."""

    def _new_conn(self) -> PlainSocket:
        total_s, name, began_s = self.timeout, self._dns_host, time.monotonic()
        addresses = [name]
        with contextlib.suppress(OSError, UnicodeError):  # raised by urllib3, below
            found = socket.getaddrinfo(name.strip("[]"), self.port, allowed_gai_family(), socket.SOCK_STREAM)
            addresses = sorted((str(address[0]) for *_, address in found), key=self._failed.__contains__)
        until_s = time.monotonic() + min(total_s or _CONNECT_S, _CONNECT_S)
        try:
            for left in range(len(addresses), 0, -1):
                self._dns_host, self.timeout = addresses[-left], max((until_s - time.monotonic()) / left, 0.001)
                try:
                    connected = super()._new_conn()
                    break
                except (ConnectTimeoutError, NewConnectionError):
                    self._failed.add(self._dns_host)
                    if left == 1:
                        raise
        finally:
            self.timeout, self._dns_host = total_s, name
        left_s = None if total_s is None else max(total_s - (time.monotonic() - began_s), 0.001)
        return PlainSocket.take_over(connected, left_s)


class _HttpsConnection(_HttpConnection, HTTPSConnection):
    pass


class _HttpPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _HttpConnection


class _HttpsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _HttpsConnection


@contextlib.contextmanager
def _mapped(origin: Origin, timeout_s: float, hint: str = "") -> Iterator[None]:
    """`hint`: what to say of a connection that breaks."""
    try:
        yield
    except NameResolutionError as error:
        raise TransientError(f"cannot find the host {origin.host}; check its name") from error
    except NewConnectionError as error:
        reason = getattr(error.__cause__, "strerror", None) or "no connection"
        raise TransientError(f"cannot connect to {origin}: {reason}") from error
    except ConnectTimeoutError as error:
        raise TransientError(f"cannot connect to {origin}: no answer") from error
    except ProxyError as error:
        cause = error.original_error.__cause__ or error.original_error
        reason = getattr(cause, "strerror", None) or (str(cause) if isinstance(cause, OSError) else "no answer")
        raise TransientError(f"{_PROXY} {origin}: {reason}") from error
    except (ReadTimeoutError, TimeoutError) as error:
        raise TransientError(f"{origin} did not answer completely within {timeout_s:.1f} s") from error
    except (HTTPError, OSError) as error:  # `SSLError` is one
        raise _broken(origin, error, hint) from error


def _broken(origin: Origin, error: Exception, hint: str) -> BootseerError:
    message, folder = str(error), f"{CERTIFICATES}/{origin}"
    first = error.args[0] if error.args else None
    if isinstance(first, ssl.SSLCertVerificationError):
        reason = f"the certificate of {origin} is not trusted: {first.verify_message}"
        return PermanentError(f"{reason}; put the authority's file into {folder}/ca.crt, or name it in SSL_CERT_FILE")
    if re.search(r"ALERT_\w*(CERTIFICATE|UNKNOWN_CA)", message):
        return PermanentError(f"{origin} requires a client certificate: put client.cert and client.key into {folder}")
    if re.search("WRONG_VERSION_NUMBER|HTTP_REQUEST|RECORD_LAYER_FAILURE", message):
        name = str(origin).removesuffix(":443")
        return PermanentError(f"{origin} does not use TLS: --plain-http, or BOOTSEER_PLAIN_HTTP={name}")
    if isinstance(error, SSLError):
        return TransientError(f"{origin}: TLS failed: {error}")
    cause = error.__cause__ or error.__context__ or error
    return TransientError(f"{origin}: the connection broke: {(str(cause) or type(cause).__name__)[:200]}{hint}")
