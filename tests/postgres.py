"""A real PostgreSQL for the tests of the service: one server for each worker, a new database for each test."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psutil
import pytest

from once import copy, once
from registry import free_port

_BIN = max(Path("/usr/lib/postgresql").glob("*/bin"), default=None, key=lambda path: int(path.parent.name))
_numbers = count()


class Postgres:
    """A server on loopback with its files in `folder`. `stop` and `start` are for tests of faults."""

    def __init__(self, folder: Path) -> None:
        assert _BIN is not None
        self.port = free_port()
        self._data = folder / "data"
        self._log = folder / "log"
        # PostgreSQL refuses to run as root.
        self._as_user = (
            ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"] if os.geteuid() == 0 else []
        )
        if self._as_user:
            shutil.chown(folder, "postgres", "postgres")
        copy(once("postgres", self._create), self._data)
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write(f"port = {self.port}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = ''\n")
            settings.write("shared_buffers = 64MB\nfsync = off\n")  # tests kill the server, but not the kernel
        self.start()

    def _create(self, data: Path) -> None:
        # In the folder of `once`, the user could not create it.
        options = ["--auth=trust", "--username=bootseer", "--no-sync", "--wal-segsize=1", "-E", "UTF8"]
        self._run("initdb", "--pgdata", str(self._data), *options)
        shutil.move(self._data, data)

    def start(self) -> None:
        """Start the server; returns when it accepts connections."""
        self._run("pg_ctl", "start", "--wait", "--pgdata", str(self._data), "--log", str(self._log))

    def stop(self, how: str = "immediate") -> None:
        """Stop the server. `immediate` is like a crash for clients: the server recovers at the next start."""
        self._run("pg_ctl", "stop", "--mode", how, "--pgdata", str(self._data))

    def kill(self) -> None:
        """Kill all its processes with SIGKILL, as when memory runs out. The server recovers at the next `start`."""
        everyone = self._processes()
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(everyone, 60)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Meanwhile its processes are stopped: the kernel accepts connections and data, and nothing answers."""
        everyone = self._processes()
        for process in everyone:
            process.suspend()
        try:
            yield
        finally:
            for process in everyone:
                process.resume()

    def _processes(self) -> list[psutil.Process]:
        main = psutil.Process(self.pid)
        return [main, *main.children(recursive=True)]

    @property
    def pid(self) -> int:
        return int((self._data / "postmaster.pid").read_text().splitlines()[0])

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"test_{os.getpid()}_{next(_numbers)}"
        self._run("createdb", "--host=127.0.0.1", f"--port={self.port}", "--username=bootseer", name)
        return f"postgresql://bootseer@127.0.0.1:{self.port}/{name}"

    def _run(self, program: str, *words: str) -> None:
        assert _BIN is not None
        command = [*self._as_user, str(_BIN / program), *words]
        # pg_ctl's server inherits its output: a pipe would never end.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, check=False, cwd="/")
            output.seek(0)
            assert done.returncode == 0, (command, output.read().decode())


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """A separate server, for tests that break it. Skips the test if PostgreSQL is not installed."""
    if _BIN is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt install postgresql)")
    with tempfile.TemporaryDirectory(prefix="bootseer-postgres-", dir="/tmp") as name:
        server = Postgres(Path(name))
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One server for all tests of this worker."""
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, of each engine in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'derived.sqlite'}"
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()
