"""A real token server for registry authentication: signs tokens that `docker-registry` verifies with our key.

    with TokenServer(tmp_path) as tokens, Registry(tmp_path, tokens=tokens) as registry: ...

`tokens.lives` sets the lifetimes of the next tokens. With `tokens.lives = [-120]` the next one has already expired,
although its `expires_in` is five minutes: like a token that expires while a reader uses it.
"""

from __future__ import annotations

import base64
import json
import subprocess
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from registry import PASSWORD, USER, make_certificate

IDENTITY_TOKEN = "an-identity-token"  # noqa: S105 - only for these tests
_SERVICE, _ISSUER = "registry of the tests", "token server of the tests"


class TokenServer:
    """Issues tokens for the login USER / PASSWORD and for IDENTITY_TOKEN, and, unless `strict`, for everyone.

    `name` is its host in the address that registries send to clients.
    """

    def __init__(self, folder: Path, *, strict: bool = True, name: str = "127.0.0.1") -> None:
        self._folder = folder / "tokens"
        self._strict = strict
        self._name = name
        self.lives: list[float] = []
        """The real lifetimes of the next tokens in seconds; afterwards 300."""
        self.status = 200
        """The status of responses to authorized requests; if it is not 200, they have no token."""
        self.asked: list[dict[str, list[str]]] = []
        """The parameters of every request so far."""

    def __enter__(self) -> TokenServer:
        self._folder.mkdir(parents=True)
        make_certificate(self._folder / "key.pem", self._folder / "certificate.pem", "rsa:2048")
        tokens = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                basic = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
                self._answer(parse_qs(urlsplit(self.path).query), self.headers.get("Authorization") == basic)

            def do_POST(self) -> None:
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                self._answer(form, form.get("refresh_token") == [IDENTITY_TOKEN])

            def _answer(self, asked: dict[str, list[str]], known: bool) -> None:
                tokens.asked.append(asked)
                status = tokens.status if known or not tokens._strict else 401
                body = json.dumps(tokens._token(asked) if status == 200 else {}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def settings(self) -> dict[str, str]:
        """The registry's configuration for this server."""
        return {
            "realm": f"http://{self._name}:{self._server.server_port}/token",
            "service": _SERVICE,
            "issuer": _ISSUER,
            "rootcertbundle": str(self._folder / "certificate.pem"),
        }

    def _token(self, asked: dict[str, list[str]]) -> dict[str, Any]:
        now = time.time()
        life_s = self.lives.pop(0) if self.lives else 300.0
        access = []
        for scope in " ".join(asked.get("scope", [])).split():
            kind, name, actions = scope.split(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        claims = {
            "iss": _ISSUER,
            "sub": USER,
            "aud": _SERVICE,
            "iat": int(now - 1000),
            "nbf": int(now - 1000),
            "exp": int(now + life_s),
            "jti": uuid.uuid4().hex,
            "access": access,
        }
        lines = (self._folder / "certificate.pem").read_text().splitlines()
        header = {"typ": "JWT", "alg": "RS256", "x5c": ["".join(lines[1:-1])]}
        signed = f"{_encoded(json.dumps(header).encode())}.{_encoded(json.dumps(claims).encode())}"
        signature = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", str(self._folder / "key.pem")],
            input=signed.encode(),
            capture_output=True,
            check=True,
        ).stdout
        return {"token": f"{signed}.{_encoded(signature)}", "expires_in": 300}


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
