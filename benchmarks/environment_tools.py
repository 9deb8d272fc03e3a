"""Prerequisites of `environment`: the wheels of the lock file, and uv."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from link import THERE

LOCK = Path(__file__).with_name("environment.lock.txt")
PORT = 8080
"""Of the package index."""
INDEX = f"http://{THERE}:{PORT}/simple"


class Tools:
    """The tools in `folder`, which is kept."""

    def __init__(self, folder: Path) -> None:
        self.wheels = folder / "wheels"
        self.uv = folder / "uv" / "bin" / "uv"
        self.lines = LOCK.read_text().split()

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
        lock.write_text("".join(f"{line}{'+cpu' * line.startswith('torch==')}\n" for line in self.lines))
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*words, "--dest", self.wheels, "--requirement", lock], check=True)
        done.write_text(LOCK.read_text())

    def warm(self) -> None:
        """Load the wheels into memory: the index's disk is not measured."""
        for path in self.wheels.iterdir():
            with path.open("rb") as file:
                while file.read(1 << 20):
                    pass


def new_venv(folder: Path) -> None:
    """An interpreter with pip and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
