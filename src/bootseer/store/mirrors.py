"""Registries read through the mirrors that containerd's configuration names: `FOLDER/HOST/hosts.toml`.

Nodes that pull through mirrors often cannot reach the registry itself. Keys other than those read here are ignored.
"""

from __future__ import annotations

import os
import re
import ssl
import time
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

import urllib3

from bootseer.errors import BootseerError, NotFoundError, PermanentError, TransientError, os_errors_as
from bootseer.logs import logger
from bootseer.store.registry import Manifest, Registry
from bootseer.store.store import is_content_name
from bootseer.store.transport import Transport

_LOG = logger(__name__)
REGISTRY_HOSTS = "BOOTSEER_REGISTRY_HOSTS"
"""Environment variable: the folder, which containerd calls `config_path`."""
_OTHERS_S = 20.0
T = TypeVar("T")


class MirroredRegistry(Registry):
    """A registry whose manifests and blobs come from the first server that has them, a mirror or the registry itself.
    For programs that only read: a mirror may have what was there before a write."""

    def __init__(self, host: str, repository: str, servers: list[tuple[Registry, bool]], *, plain_http: bool) -> None:
        """`servers`: as `find_servers` returns them, at least one."""
        super().__init__(host, repository, plain_http=plain_http)
        self._servers = servers
        self._last = servers[-1][0]

    def manifest(self, reference: str, *, timeout_s: float = 60.0) -> Manifest:
        return self._first(reference, timeout_s, lambda each, left_s: each.manifest(reference, timeout_s=left_s))

    def manifest_digest(self, reference: str, *, timeout_s: float = 60.0) -> str:
        return self._first(reference, timeout_s, lambda each, left_s: each.manifest_digest(reference, timeout_s=left_s))

    def blob_size(self, digest: str, *, timeout_s: float = 60.0) -> int:
        return self._first(digest, timeout_s, lambda each, left_s: each.blob_size(digest, timeout_s=left_s))

    def blob(
        self, digest: str, start: int = 0, length: int | None = None, *, timeout_s: float = 60.0
    ) -> Generator[bytes, None, None]:
        def begun(each: Registry, left_s: float) -> tuple[Registry, bytes, Generator[bytes, None, None]]:
            pieces = each.blob(digest, start, length, timeout_s=left_s)
            return each, next(pieces, b""), pieces

        each, first, pieces = self._first(digest, timeout_s, begun)
        with closing(pieces):
            yield first
            try:
                yield from pieces
            except BootseerError:
                self._ask_last(each)
                raise

    def close(self) -> None:
        for each, _ in self._servers:
            each.close()
        super().close()

    def _first(self, name: str, timeout_s: float, ask: Callable[[Registry, float], T]) -> T:
        """The answer of the first server that has `name`, a tag or digest.

        One that failed, or does not have a blob, is asked last from then on. If none has it, the error gives the reason
        for each. If the registry itself does not have it, no further server is asked. The time for one server is
        limited, so that one that hangs leaves some for the others.
        """
        until, errors, servers = time.monotonic() + timeout_s, list[BootseerError](), self._servers
        for left, (each, resolves) in zip(range(len(servers), 0, -1), servers, strict=True):
            if not resolves and not is_content_name(name) and each is not self._last:
                continue
            try:
                left_s = max(until - time.monotonic(), 0.0)
                return ask(each, max(left_s / left, left_s - _OTHERS_S * (left - 1)))
            except BootseerError as error:
                lacks_it = isinstance(error, NotFoundError)
                if not lacks_it or is_content_name(name):
                    self._ask_last(each)
                if time.monotonic() >= until or (lacks_it and each is self._last):
                    raise
                _LOG.info("%s is not read at %s: %s", name, each.address, error)
                errors.append(error)
        raised = next((error for error in errors if isinstance(error, TransientError)), errors[-1])
        raised.args = ("; ".join(map(str, errors)),)
        raise raised

    def _ask_last(self, failed: Registry) -> None:
        self._servers = sorted(self._servers, key=lambda server: server[0] is failed)


def find_servers(registry: Registry) -> list[tuple[Registry, bool]]:
    """The servers in the order in which containerd asks them, the registry's own the last, and whether each is trusted
    to resolve tags. Empty without a file, or with one that cannot be used."""
    path = root = Path(os.environ.get(REGISTRY_HOSTS) or "/etc/containerd/certs.d")
    host = registry.host
    found: list[tuple[Registry, bool]] = []
    try:
        names = (re.sub(r":(\d+)$", r"_\1_", host), host, "_default")
        path = next((root / name for name in names if (root / name).is_dir()), root / host) / "hosts.toml"
        text = path.read_text()
        import tomllib  # takes 5 ms, and few nodes have the file

        file = tomllib.loads(text)
        for url, table in [*file.get("host", {}).items(), (file.get("server") or registry.address, file)]:
            parts = urlsplit(url if "://" in url else f"https://{url}")
            name, top = parts.netloc.rpartition("@")[2], parts.path.rstrip("/")
            address = f"{parts.scheme}://{name}{top}"
            if not table.get("override_path") and not top.endswith("/v2"):
                address += "/v2"
            if name in (host, urlsplit(registry.address).netloc):
                name = host  # of docker.io, whose server has another name, too: logins are kept by it
            else:  # a mirror may have images of several registries
                address += f"?ns={quote(host, safe='')}"
            can, ca = table.get("capabilities") or ("pull", "resolve"), table.get("ca") or []
            authorities = [path.parent / each for each in ([ca] if isinstance(ca, str) else ca)]
            via = Transport(partial(_secure, authorities, not table.get("skip_verify")))
            if "pull" in can:
                found.append((Registry(name, registry.repository, address=address, via=via), "resolve" in can))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, AttributeError, BootseerError) as error:
        _LOG.warning("%s cannot be used, so no mirror of %s is asked: %s", path, host, error)
        return []
    return found


def _secure(authorities: list[Path], verify: bool, context: ssl.SSLContext) -> None:
    """Trust these authorities too, or everyone. Raises `PermanentError`."""
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # one for each request
    for path in authorities:
        with os_errors_as(PermanentError, path):
            context.load_verify_locations(path)
