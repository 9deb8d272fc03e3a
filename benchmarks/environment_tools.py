"""Prerequisites of `environment`: the wheels of the lock file, uv, an index that serves the wheels."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import urllib3
from link import THERE, Link

LOCK = Path(__file__).with_name("environment.lock.txt")
_PORT = 8080
INDEX = f"http://{THERE}:{_PORT}/simple"
_START_S = 120.0


class Tools:
    """The tools in `folder`, which is kept."""

    def __init__(self, folder: Path) -> None:
        self.wheels = folder / "wheels"
        self.uv = folder / "uv" / "bin" / "uv"
        self.num_packages = len(LOCK.read_text().split())

    def bring(self) -> None:
        """Download what is missing from the index for which pip is configured. Takes a minute the first time."""
        if not self.uv.exists():
            subprocess.run([sys.executable, "-m", "venv", self.uv.parents[1]], check=True)
            subprocess.run([self.uv.with_name("pip"), "install", "--quiet", "uv"], check=True)
        done = self.wheels.with_name("done")
        if done.exists() and done.read_text() == LOCK.read_text():
            return
        self.wheels.mkdir(parents=True, exist_ok=True)
        # The default build of PyTorch includes gigabytes of CUDA libraries.
        lock = self.wheels.with_name("lock.txt")
        lock.write_text("".join(f"{line}+cpu\n" if line.startswith("torch==") else f"{line}\n" for line in _lines()))
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*words, "--dest", self.wheels, "--requirement", lock], check=True)
        done.write_text(LOCK.read_text())

    @contextmanager
    def index(self, link: Link) -> Iterator[int]:
        """Serve the wheels at the remote end of the link, from memory; yields the server's pid."""
        command = [sys.executable, str(Path(__file__).with_name("package_index.py")), self.wheels, THERE, str(_PORT)]
        with subprocess.Popen(link.inside([str(word) for word in command])) as server:
            try:
                _wait(server)
                yield server.pid
            finally:
                server.terminate()

    def warm(self) -> None:
        """Load the wheels into memory: the index's disk is not measured."""
        for path in self.wheels.iterdir():
            with path.open("rb") as file:
                while file.read(1 << 20):
                    pass


def _lines() -> list[str]:
    return LOCK.read_text().split()


def _wait(server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _START_S
    while True:
        try:
            urllib3.request("GET", f"{INDEX}/torch/", timeout=1, retries=False)
            return
        except urllib3.exceptions.HTTPError as error:
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the package index did not start: {error}") from error
        time.sleep(0.1)


def new_venv(folder: Path) -> None:
    """An interpreter with pip and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
