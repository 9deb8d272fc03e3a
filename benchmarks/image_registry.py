"""A real OCI registry (Debian's docker-registry) for a benchmark, which counts its requests."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import urllib3

_ACCESS = re.compile(rb'"(GET|HEAD) /v2/[^ "]* HTTP/[^"]*" \d{3} \d+ ')
_START_S = 20.0
_STOP_S = 10.0


class Registry:
    """The registry process. A context manager that stops it; its folder is kept."""

    def __init__(
        self,
        folder: Path,
        address: str = "127.0.0.1",
        port: int = 5000,
        inside: Callable[[Sequence[str]], list[str]] = list,
    ) -> None:
        """`inside` makes a command run where the address is, for an address in another network namespace."""
        self.host = f"{address}:{port}"
        self._data = folder / "data"
        self._log = folder / "log"
        self._config = folder / "config.yml"
        self._inside = inside
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Registry:
        self._data.mkdir(parents=True, exist_ok=True)
        # JSON is valid YAML.
        config = {
            "version": 0.1,
            "log": {"level": "info"},
            "storage": {"filesystem": {"rootdirectory": str(self._data)}},
            "http": {"addr": self.host},
        }
        self._config.write_text(json.dumps(config))
        command = self._inside(["docker-registry", "serve", str(self._config)])
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self._wait()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while True:
            try:
                urllib3.request("GET", f"http://{self.host}/v2/", timeout=1, retries=False)
                return
            except urllib3.exceptions.HTTPError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"docker-registry at {self.host}: {error}; see {self._log}") from error
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def push(self, image: str, name: str) -> str:
        """Push an image, named as for skopeo ("oci:FOLDER:TAG"); returns its reference for clients."""
        reference = f"{self.host}/{name}"
        command = ["skopeo", "copy", "--quiet", "--dest-tls-verify=false", image, f"docker://{reference}"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        return reference

    def warm(self) -> None:
        """Read all blobs into memory: the registry's disk is not measured."""
        buffer = memoryview(bytearray(1 << 20))
        for path in self._data.rglob("data"):
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def mark(self) -> int:
        """The current position, for `requests_since`."""
        return self._log.stat().st_size

    def requests_since(self, mark: int) -> int:
        """The number of requests completed since the mark."""
        with self._log.open("rb") as log:
            log.seek(mark)
            return len(_ACCESS.findall(log.read()))
