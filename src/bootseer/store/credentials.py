"""Who we are at a registry: the logins that `docker login` and its kin left behind.

Reads `config.json` in `$DOCKER_CONFIG` or `~/.docker`: `auths` hold the secret itself, `credHelpers` and `credsStore`
name a program that knows it. Asked by `tokens` when a registry wants to know, not before: helpers may be slow.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bootseer.errors import AccessError

_HELPER_S = 20.0
_MAX_CONFIG_BYTES = 1024 * 1024
_HELPER = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Credentials:
    """A login: a user with a password, or an identity token that is exchanged for access tokens."""

    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        """The value of an `Authorization` header that shows user and password."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def find_credentials(host: str) -> Credentials | None:
    """The login for `host[:port]`, None when there is none. Raises `AccessError` when one is there but unusable."""
    # `Path.home` raises for a user without a name or a home, who has no logins.
    folder = os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")  # noqa: PTH111
    path = Path(folder) / "config.json"
    config = _read(path)
    helper = _lookup(_table(config, "credHelpers"), host) or config.get("credsStore")
    if isinstance(helper, str) and helper:
        found = _ask(helper, host)
        if found is not None:
            return found
    entry = _lookup(_table(config, "auths"), host)
    return _decode(entry, path, host) if isinstance(entry, dict) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CONFIG_BYTES)
        config = json.loads(data)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise AccessError(f"cannot read the logins in {path}: {error}") from error
    return config if isinstance(config, dict) else {}


def _table(config: dict[str, Any], key: str) -> dict[str, Any]:
    table = config.get(key)
    return table if isinstance(table, dict) else {}


def _lookup(table: dict[str, Any], host: str) -> Any:
    """Older programs wrote whole URLs where the name of the host belongs."""
    if host in table:
        return table[host]
    for key, value in table.items():
        if key.partition("://")[2].partition("/")[0] == host or key.partition("/")[0] == host:
            return value
    return None


def _decode(entry: dict[str, Any], path: Path, host: str) -> Credentials | None:
    user, password = str(entry.get("username") or ""), str(entry.get("password") or "")
    if auth := entry.get("auth"):
        try:
            user, _, password = base64.b64decode(str(auth), validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError) as error:
            raise AccessError(f"the login for {host} in {path} is damaged; log in again") from error
    token = str(entry.get("identitytoken") or "")
    # An empty entry only says that a store of credentials knows this host.
    return Credentials(user, password.rstrip("\0"), token) if user or token else None


def _ask(helper: str, host: str) -> Credentials | None:
    if not _HELPER.fullmatch(helper):
        raise AccessError(f"{helper!r} is not the name of a credential helper")
    program = f"docker-credential-{helper}"
    try:
        ended = subprocess.run(
            [program, "get"], input=host.encode(), capture_output=True, timeout=_HELPER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AccessError(f"{program}, which knows the login for {host}, does not work: {error}") from error
    if ended.returncode != 0:
        # Helpers say so on standard output when they simply have no login for the host.
        if b"not found" in ended.stdout[:1000]:
            return None
        words = (ended.stdout + ended.stderr)[:200].decode(errors="replace").strip()
        raise AccessError(f"{program} has no login for {host}: {words!r}")
    try:
        answer = json.loads(ended.stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError) as error:
        raise AccessError(f"{program} answered for {host} with something that is no login") from error
    return Credentials(identity_token=secret) if user == "<token>" else Credentials(user, secret)
