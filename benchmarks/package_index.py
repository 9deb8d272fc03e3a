"""A package index of the wheels in one folder for pip and uv: `package_index.py FOLDER ADDRESS PORT`.

Serves names, files, digests and the wheels' metadata (PEP 503, 658), like a public index. Runs until it is terminated.
"""

from __future__ import annotations

import hashlib
import html
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

import urllib3

_START_S = 120.0


@contextmanager
def serving(
    wheels: Path, address: str, port: int, inside: Callable[[Sequence[str]], list[str]] = list
) -> Iterator[int]:
    """Run the index; yields the server's process id. `inside` as in `Registry`."""
    with subprocess.Popen(inside([sys.executable, __file__, str(wheels), address, str(port)])) as server:
        try:
            until = time.monotonic() + _START_S
            while True:
                try:
                    urllib3.request("GET", f"http://{address}:{port}/", timeout=1, retries=False)
                    break
                except urllib3.exceptions.HTTPError as error:
                    if server.poll() is not None or time.monotonic() > until:
                        raise RuntimeError(f"the package index did not start: {error}") from error
                time.sleep(0.1)
            yield server.pid
        finally:
            server.terminate()


class Wheel:
    """One file of the index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.project = re.sub(r"[-_.]+", "-", path.name.partition("-")[0]).lower()

    @cached_property
    def digest(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @cached_property
    def metadata(self) -> bytes:
        with zipfile.ZipFile(self.path) as archive:
            name = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
            return archive.read(name)

    @property
    def link(self) -> str:
        file = f"/files/{quote(self.path.name)}#sha256={self.digest}"
        known = hashlib.sha256(self.metadata).hexdigest()
        return f'<a href="{file}" data-core-metadata="sha256={known}">{html.escape(self.path.name)}</a>'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wheels: tuple[Wheel, ...] = ()

    def do_GET(self) -> None:
        part, _, name = unquote(self.path).strip("/").partition("/")
        if part == "simple" and (pages := [wheel.link for wheel in self.wheels if wheel.project == name]):
            self._answer(f"<!DOCTYPE html><html><body>{''.join(pages)}</body></html>".encode(), "text/html")
            return
        for wheel in self.wheels if part == "files" else ():
            if name == wheel.path.name:
                self._answer_file(wheel.path)
                return
            if name == f"{wheel.path.name}.metadata":
                self._answer(wheel.metadata, "text/plain")
                return
        self.send_error(404)

    def _answer(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer_file(self, path: Path) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(path.stat().st_size))
        self.end_headers()
        with path.open("rb") as file:
            shutil.copyfileobj(file, self.wfile, 1 << 20)

    def log_message(self, *words: object) -> None:
        """Say nothing."""


def main() -> None:
    folder, address, port = sys.argv[1:]
    _Handler.wheels = tuple(Wheel(path) for path in sorted(Path(folder).glob("*.whl")))
    for wheel in _Handler.wheels:  # computed before the first request
        assert wheel.link
    ThreadingHTTPServer((address, int(port)), _Handler).serve_forever()


if __name__ == "__main__":
    main()
