"""The `Authorization` header of requests to one registry.

A registry that requires a login responds 401 with the method: `Basic`, or a `Bearer` token that another address issues
for a scope (which actions on which repository). Tokens live for minutes; they are cached by scope, and fetched again
shortly before they expire or when the registry rejects them.

The registry names the token address, and could name any host. So a login is only sent to the registry's own host, to
hosts known to belong to it and to those that the user allows, and never unencrypted over a network.

One lock guards everything and is held while a token is fetched: of many concurrent readers one fetches it and the
others wait. Bursts of token requests are how registries begin to respond 429.

Logins come from `docker login` and similar programs: in `config.json` in `$DOCKER_CONFIG` or `~/.docker`, `auths` hold
the secret itself, `credHelpers` and `credsStore` name a program that provides it; then from enroot's `.credentials` in
`$ENROOT_CONFIG_PATH` or `~/.config/enroot`, in netrc format; then from kubelet's plugins (`credential_providers`). They
are read when a registry requires a login, not before: helpers may be slow. A refused login is looked up again: those of
clouds are valid for hours, mounts live for weeks, and helpers and cron jobs renew them.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from msgspec import Struct

from bootseer.errors import AccessError, PermanentError, TransientError
from bootseer.store.credential_providers import DOCKER_HUB, Credentials, find_login
from bootseer.store.open import is_loopback
from bootseer.store.transport import Answer, Origin, Transport

_HELPER_S = 20.0
_MAX_CONFIG_BYTES = 1024 * 1024
_HELPER = re.compile(r"[A-Za-z0-9._-]+")
_NETRC = re.compile(r"\s*machine\s+(\S+)\s+login\s+(\S+)\s+password\s+(\S.*)")


def find_credentials(host: str, repository: str = "") -> Credentials:
    """The login for a repository of `host[:port]`, empty if there is none, valid until its `until`.

    Raises `AccessError` when one exists but is unusable.
    """
    return _of_docker(host, repository) or _of_enroot(host) or find_login(host, repository, os.environ)


def _of_docker(host: str, repository: str) -> Credentials | None:
    # `Path.home` raises for a user without a name or a home; such a user has no logins.
    folder = os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")  # noqa: PTH111
    path = Path(folder) / "config.json"
    try:
        config = json.loads(_read(path) or "{}")
    except ValueError as error:
        raise AccessError(f"cannot read the logins in {path}: {error}") from error
    config = config if isinstance(config, dict) else {}
    helper = _lookup(_table(config, "credHelpers"), host, repository) or config.get("credsStore")
    if isinstance(helper, str) and helper:
        found = _ask(helper, host)
        if found is not None:
            return found
    entry = _lookup(_table(config, "auths"), host, repository)
    return _decode(entry, path, host) if isinstance(entry, dict) else None


def _of_enroot(host: str) -> Credentials | None:
    folder = os.environ.get("ENROOT_CONFIG_PATH") or os.path.join(  # noqa: PTH118
        os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"),  # noqa: PTH111
        "enroot",
    )
    path = Path(folder) / ".credentials"
    names = {host, re.sub(r":\d+$", "", host)}  # enroot omits the port
    for match in filter(None, map(_NETRC.fullmatch, _read(path).splitlines())):
        if match[1] in names:
            password = match[3].strip()
            if password.startswith("$"):  # enroot would have a shell evaluate it
                return Credentials(why=f"the password for {match[1]} in {path} is a command, which is not run")
            return Credentials(match[2], password)
    return None


def _read(path: Path) -> str:
    """The beginning of a file; empty if it is missing."""
    try:
        with path.open(errors="surrogateescape") as file:
            return file.read(_MAX_CONFIG_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise AccessError(f"cannot read the logins in {path}: {error}") from error


def _table(config: dict[str, Any], key: str) -> dict[str, Any]:
    table = config.get(key)
    return table if isinstance(table, dict) else {}


def _lookup(table: dict[str, Any], host: str, repository: str) -> Any:
    """The entry of a repository: of several with paths, as podman writes them, the longest that it is below. Older
    programs wrote whole URLs in place of the host name, and all of them do for Docker Hub: their path says nothing."""
    names = DOCKER_HUB if host in DOCKER_HUB else (host,)
    best, found = (-2, False), None
    for key, value in table.items():
        server, _, path = key.rpartition("://")[2].partition("/")
        path = path.strip("/")
        is_old = "://" in key or path in ("v1", "v2")
        length = len(path) if not path or f"{repository}/".startswith(f"{path}/") else -1
        if server in names and (length >= 0 or is_old) and (rank := (length, "://" not in key)) > best:
            best, found = rank, value
    return found


def _decode(entry: dict[str, Any], path: Path, host: str) -> Credentials | None:
    user, password = str(entry.get("username") or ""), str(entry.get("password") or "")
    if auth := entry.get("auth"):
        try:
            user, _, password = base64.b64decode(str(auth), validate=True).decode().partition(":")
        except ValueError as error:  # not base64, or not text
            raise AccessError(f"the login for {host} in {path} is damaged; log in again") from error
    token = str(entry.get("identitytoken") or "")
    # An empty entry only means that a credential store knows this host.
    return Credentials(user, password.rstrip("\0"), token) if user or token else None


def _ask(helper: str, host: str) -> Credentials | None:
    if not _HELPER.fullmatch(helper):
        raise AccessError(f"{helper!r} is not the name of a credential helper")
    program = f"docker-credential-{helper}"
    server = "https://index.docker.io/v1/" if host in DOCKER_HUB else host
    try:
        ended = subprocess.run(
            [program, "get"], input=server.encode(), capture_output=True, timeout=_HELPER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AccessError(f"{program}, the credential helper for {host}, does not work: {error}") from error
    if ended.returncode != 0:
        # Helpers report a missing login on standard output.
        if b"not found" in ended.stdout[:1000]:
            return None
        words = (ended.stdout + ended.stderr)[:200].decode(errors="replace").strip()
        raise AccessError(f"{program} has no login for {host}: {words!r}")
    try:
        answer = json.loads(ended.stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError) as error:
        raise AccessError(f"{program} answered for {host} with something that is not a credential") from error
    return Credentials(identity_token=secret) if user == "<token>" else Credentials(user, secret)


AUTH_HOSTS = "BOOTSEER_AUTH_HOSTS"
"""Environment variable: comma-separated `registry=host`: hosts that may receive the login of a registry."""
_KNOWN_PAIRS = frozenset(
    {
        ("registry-1.docker.io", "auth.docker.io"),
        ("index.docker.io", "auth.docker.io"),
        ("registry.gitlab.com", "gitlab.com"),
    }
)
_MAX_TOKEN_BYTES = 256 * 1024
_NO_TOKEN = (400, 401, 403, 404)
_DEFAULT_LIFE_S = 60.0
"""The protocol's default for a token without a lifetime."""
_FRESH = 0.8
"""The share of its lifetime for which a token is used, in view of transmission times and clock differences."""
_CHALLENGES = re.compile(r",\s*(?=[A-Za-z]+\s+[A-Za-z_]+\s*=)")
_PARAMETER = re.compile(r'\b([A-Za-z_]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^",\s]+))')


class _Token(Struct, frozen=True):
    header: str
    until: float


class Authorizer:
    """Authorization for one registry. `host` is its name in logins and messages, `origin` that of its server."""

    def __init__(
        self, transport: Transport, host: str, origin: Origin, find_credentials: Callable[[str], Credentials]
    ) -> None:
        self._transport = transport
        self._host = host
        self._origin = origin
        self._find = find_credentials
        self._lock = threading.Lock()
        self._credentials = Credentials(until=-math.inf)
        self._basic: str | None = None
        self._challenges: dict[str, dict[str, str]] = {}  # the registry's requirements by action
        self._tokens: dict[str, _Token] = {}  # by scope

    def header(self, action: str, until: float) -> str | None:
        """The header for a request of this kind (`pull`, `push`, `delete`); None before the registry required one."""
        with self._locked(until):
            if self._basic is not None:
                return self._basic
            challenge = self._challenges.get(action)
            if challenge is None:
                return None
            token = self._tokens.get(challenge.get("scope", ""))
            if token is None or token.until <= time.monotonic():
                token = self._fetch(challenge, until)
            return token.header

    def renewed(self, action: str, challenges: list[str], refused: str | None, until: float) -> str:
        """The header to replace `refused`, which the registry rejected with 401 and these `WWW-Authenticate` values.

        Raises `AccessError` if there is no better one.
        """
        with self._locked(until):
            each = _CHALLENGES.split(", ".join(challenges))  # of several headers, or of one that a proxy has joined
            schemes = {name.lower(): text for name, _, text in (item.strip().partition(" ") for item in each)}
            if "bearer" in schemes:
                challenge = {
                    key.lower(): re.sub(r"\\(.)", r"\1", quoted) or plain
                    for key, quoted, plain in _PARAMETER.findall(schemes["bearer"])
                }
                scope = challenge.get("scope", "")
                self._challenges[action] = challenge
                known = self._tokens.get(scope)
                if known is not None and known.header != refused and known.until > time.monotonic():
                    return known.header  # another thread has fetched it meanwhile
                return self._fetch(challenge, until).header
            credentials = self._login(self._origin)
            if credentials is not None and credentials.basic == refused and self._login_changed():
                credentials = self._login(self._origin)
            if "basic" not in schemes or credentials is None or credentials.basic == refused or not credentials.user:
                reason = "not logged in" if credentials is None else "the login is refused"
                raise self.denied(f"{self._host}: {reason}")
            self._basic = credentials.basic
            return self._basic

    def changed(self, refused: str | None, until: float) -> str | None:
        """The header to replace `refused`, a login that the registry rejected with 403, as Amazon's does with expired
        ones; None without a new login, and for tokens."""
        with self._locked(until):
            if self._basic is not None and self._basic == refused and self._login_changed():
                login = self._login(self._origin)
                self._basic = login.basic if login is not None else refused
            return self._basic if self._basic != refused else None

    def denied(self, reason: str) -> AccessError:
        """The error for a refusal of the registry, with advice."""
        if self._credentials.why:
            return AccessError(f"{reason}: {self._credentials.why}")
        return AccessError(f"{reason}; log in with: docker login {self._host}")

    def _fetch(self, challenge: dict[str, str], until: float) -> _Token:
        realm, scope = challenge.get("realm", ""), challenge.get("scope", "")
        target = Origin.of(realm)
        if target.scheme != "https" and self._origin.scheme == "https":
            raise PermanentError(f"{self._host} requests credentials over unencrypted http; refused")
        asked = {key: challenge[key] for key in ("service", "scope") if challenge.get(key)}
        answer = self._request_token(realm, asked, self._login(target), until)
        if answer.status in _NO_TOKEN and self._login_changed():
            answer.finish()
            answer = self._request_token(realm, asked, self._login(target), until)
        token = self._token_of(answer)
        self._tokens[scope] = token
        return token

    def _request_token(self, realm: str, asked: dict[str, str], login: Credentials | None, until: float) -> Answer:
        if login is not None and login.identity_token:
            form = {"grant_type": "refresh_token", "client_id": "bootseer", **asked}
            return self._transport.send(
                "POST",
                realm,
                until=until,
                headers={"Content-Type": "application/x-www-form-urlencoded"},
                body=urlencode({**form, "refresh_token": login.identity_token}).encode(),
            )
        return self._transport.send(
            "GET",
            f"{realm}{'&' if urlsplit(realm).query else '?'}{urlencode(asked)}",
            until=until,
            authorization=login.basic if login is not None else None,
        )

    def _token_of(self, answer: Answer) -> _Token:
        if answer.status != 200:
            answer.finish()
            if answer.status in _NO_TOKEN:
                raise self.denied(f"{self._host}: {answer.origin} gives us no token (status {answer.status})")
            raise TransientError(
                f"{answer.origin}, the token server of {self._host}, answers with status {answer.status}",
                retry_after_s=answer.retry_after_s,
            )
        try:
            document = json.loads(answer.body(_MAX_TOKEN_BYTES))
            text = document.get("token") or document["access_token"]
            life_s = float(document.get("expires_in") or _DEFAULT_LIFE_S)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise TransientError(f"{answer.origin} sent something that is not a token") from error
        if not isinstance(text, str) or not re.fullmatch(r"[\x21-\x7e]+", text):
            raise TransientError(f"{answer.origin} sent something that is not a token")
        return _Token(f"Bearer {text}", time.monotonic() + _FRESH * min(max(1.0, life_s), 86400.0))

    def _login(self, target: Origin) -> Credentials | None:
        """The login to send to `target`; None without one. Raises `AccessError` if it must not be sent there."""
        if self._credentials.until <= time.monotonic():
            self._credentials = self._find(self._host)
        if not self._credentials.user and not self._credentials.identity_token:
            return None
        # The token from `target` is sent to the registry, and is as good as the login for a while: check both.
        for receiver in (self._origin, target):
            _check_receiver(self._origin.host, receiver, os.environ.get(AUTH_HOSTS, ""))
        return self._credentials

    def _login_changed(self) -> bool:
        """Look the refused login up again; returns whether there is another one now."""
        refused, self._credentials = self._credentials, self._find(self._host)
        return self._credentials != refused

    @contextmanager
    def _locked(self, until: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=max(until - time.monotonic(), 0.0)):
            raise TransientError(f"{self._host}: no token in time")
        try:
            yield
        finally:
            self._lock.release()


def _check_receiver(registry: str, receiver: Origin, allowed: str) -> None:
    """Raise `AccessError` unless `receiver` may get the login for the host `registry`; `allowed` as in `AUTH_HOSTS`."""
    if receiver.scheme != "https" and not is_loopback(receiver.host):
        raise AccessError(f"{registry}: the login would be sent to {receiver} unencrypted; serve it with https")
    pair = (registry, receiver.host)
    pairs = {tuple(item.strip().lower().split("=")) for item in allowed.split(",")}
    if registry != receiver.host and pair not in _KNOWN_PAIRS and pair not in pairs:
        raise AccessError(
            f"{registry} requests that credentials are sent to {receiver.host}; if that host belongs to it, set "
            f"{AUTH_HOSTS}={registry}={receiver.host}"
        )
