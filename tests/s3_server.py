"""An S3 server for tests: moto's, in a process of its own on a free loopback port, stopped by its pid.

    with S3Server(tmp_path) as server:
        server.make_bucket("name")
        os.environ.update(server.environment)

It keeps everything in its memory and verifies no signatures. Starting one takes 3 s of processor time: tests that do
not end it share the fixture `s3_server`, and make buckets of their own.
"""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import TracebackType

import pytest

from registry import free_port

_START_S = 120.0
SHARES_S3 = frozenset(
    (
        "tests/checkpoint/dcp/test_on_s3.py",
        "tests/checkpoint/mount/test_buckets.py",
        "tests/places/test_large_objects.py",
        "tests/places/test_objects.py",
        "tests/store/test_object_store.py",
    )
)
"""Of tests that run side by side, one worker runs these."""


class S3Server:
    """A server that lives as long as the `with` block."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "s3.log"
        self.host = ""

    def __enter__(self) -> S3Server:
        self.host = f"127.0.0.1:{free_port()}"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", self.host.partition(":")[2]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + _START_S
        while True:
            try:
                self.ask("GET", "/")
            except OSError:
                if time.monotonic() > until or self.process.poll() is not None:
                    self.__exit__(None, None, None)
                    raise RuntimeError(f"moto does not start: {self._log.read_text()[-2000:]}") from None
                time.sleep(0.05)
            else:
                return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def environment(self) -> dict[str, str]:
        """What a client has to know."""
        return environment_for(self.host)

    def ask(self, method: str, path: str) -> tuple[int, bytes]:
        """One request by hand: status and body."""
        with closing(http.client.HTTPConnection(self.host, timeout=300)) as connection:
            # Objects are private; that somebody says who asks is all that moto wants.
            who = "AWS4-HMAC-SHA256 Credential=tests/20260101/us-east-1/s3/aws4_request"
            connection.request(method, path, headers={"Authorization": who})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def make_bucket(self, name: str) -> None:
        assert self.ask("PUT", f"/{name}")[0] == 200

    def keys(self, bucket: str) -> list[str]:
        """The names of all objects."""
        return re.findall(r"<Key>([^<]*)</Key>", self.ask("GET", f"/{bucket}")[1].decode())

    def uploads(self, bucket: str) -> list[str]:
        """The multipart uploads that were neither completed nor ended."""
        return re.findall(r"<UploadId>([^<]*)</UploadId>", self.ask("GET", f"/{bucket}?uploads")[1].decode())


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server for all tests of this worker."""
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


def environment_for(host: str) -> dict[str, str]:
    """What makes S3 clients speak with the server at `host`, or with a proxy before it."""
    return {
        "AWS_ENDPOINT": f"http://{host}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_REGION": "us-east-1",
    }
