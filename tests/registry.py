"""A real registry for tests: Debian's `docker-registry` on a free loopback port.

    with Registry(tmp_path) as registry:
        store = open_store(f"oci://{registry.host}/some/repository")

Options: `basic=True` requires the login USER / PASSWORD, `tokens=TokenServer(...)` requires that server's tokens,
`tls=True` serves https with the certificate `registry.certificate`, and with `clients=FILE` requires a client
certificate of this authority.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import secrets
import shutil
import socket
import ssl
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import pytest

from waiting import until

if TYPE_CHECKING:
    from token_server import TokenServer

USER, PASSWORD = "reader", "secret"
# bcrypt, the only hash that the registry accepts, at its lowest cost.
_HTPASSWD = f"{USER}:$2b$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW\n"
_LOG = re.compile(
    r'"(?P<method>[A-Z]+) (?P<path>\S+) HTTP/[\d.]+" (?P<status>\d+) (?P<size>\d+)(?: "[^"]*" "(?P<agent>[^"]*)")?'
)
_START_S = 120.0
_given_ports: set[int] = set()
_RANGES, _PORTS = 16, 1_423

needs_registry = pytest.mark.skipif(shutil.which("docker-registry") is None, reason="docker-registry is not installed")


@dataclass(frozen=True)
class Logged:
    """One line of the registry's access log."""

    method: str
    path: str
    status: int
    size_bytes: int
    agent: str = ""
    """The client's User-Agent."""


class Registry:
    """A registry for a `with` block, with its data in `folder`, which may have data already."""

    def __init__(
        self,
        folder: Path,
        *,
        basic: bool = False,
        tokens: TokenServer | None = None,
        tls: bool = False,
        clients: Path | None = None,
    ) -> None:
        self.folder = folder / "registry"
        self.certificate = self.folder / "certificate.pem"
        self.host = ""
        self._basic, self._tokens, self._tls, self._clients = basic, tokens, tls, clients
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Registry:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._tls:
            make_certificate(self.folder / "key.pem", self.certificate)
        for _ in range(5):
            # Another process may take the port before the registry starts.
            self.host = f"127.0.0.1:{free_port()}"
            self._start()
            if self._answers():
                return self
        raise RuntimeError(f"docker-registry does not start: {self._log()[-2000:]}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def requests(self) -> list[Logged]:
        """The requests that were answered so far, in the order in which the responses ended."""
        until(self._is_idle, "the registry logs what it has answered")
        found = [_LOG.search(line) for line in self._log().splitlines()]
        return [
            Logged(m["method"], m["path"], int(m["status"]), int(m["size"]), m["agent"] or "")
            for m in found
            if m is not None
        ]

    def _start(self) -> None:
        config = [
            "version: 0.1",
            "log: {level: info, accesslog: {disabled: false}}",
            "storage:",
            f"  filesystem: {{rootdirectory: {self.folder / 'data'}}}",
            "  delete: {enabled: true}",
            f"http:\n  addr: {self.host}",
        ]
        if self._tls:
            config += ["  tls:", f"    certificate: {self.certificate}", f"    key: {self.folder / 'key.pem'}"]
        if self._clients is not None:
            config.append(f"    clientcas: [{self._clients}]")
        if self._basic:
            (self.folder / "htpasswd").write_text(_HTPASSWD)
            config.append(f"auth: {{htpasswd: {{realm: tests, path: {self.folder / 'htpasswd'}}}}}")
        if self._tokens is not None:
            config += ["auth:", "  token:"] + [f"    {key}: {value}" for key, value in self._tokens.settings().items()]
        (self.folder / "config.yml").write_text("\n".join(config) + "\n")
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["docker-registry", "serve", str(self.folder / "config.yml")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # By default it collects garbage after each 4 MiB, a third of its processor time.
                env={**os.environ, "GOGC": "1000"},
            )

    def _answers(self) -> bool:
        assert self._process is not None
        end = time.monotonic() + _START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if self._tls:
                    connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                        self.host, timeout=2, context=ssl.create_default_context(cafile=str(self.certificate))
                    )
                else:
                    connection = http.client.HTTPConnection(self.host, timeout=2)
                with contextlib.closing(connection):
                    connection.request("GET", "/v2/")
                    connection.getresponse().read()
            except ssl.SSLError:  # it requires a client certificate
                return True
            except OSError:
                time.sleep(0.02)
            else:
                return True
        self._process.kill()
        self._process.wait()
        return False

    def _is_idle(self) -> bool:
        """Whether none of its threads runs, waits for a core or writes: a request is logged after its response was
        sent, on a busy machine much later."""
        assert self._process is not None
        for path in Path(f"/proc/{self._process.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # the thread has ended
                if path.read_text().rpartition(") ")[2][0] in "RD":
                    return False
        return True

    def _log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


def free_port() -> int:
    """A free TCP port of the loopback address, a different one at each call.

    Not one of the ephemeral ports, which a connection could take before the server starts. Each worker has a separate
    range for the same reason.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 10_000 + worker % _RANGES * _PORTS + secrets.randbelow(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given_ports:
                _given_ports.add(port)
                return port


def make_certificate(key: Path, certificate: Path, algorithm: str = "ed25519") -> None:
    """Create a key and a self-signed certificate for 127.0.0.1 and registry.test."""
    command = f"openssl req -x509 -newkey {algorithm} -nodes -days 2 -subj /CN=127.0.0.1"
    names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:registry.test"]
    files = [*names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
