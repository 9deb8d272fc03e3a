"""A node without the environment, and the ways to provide it. Used by `environment`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environment_tools import INDEX, LOCK, Tools, new_venv

BOOTSEER = str(Path(sys.executable).parent / "bootseer")
_DEADLINE_S = 900.0
WORK = "import torch, transformers, datasets, pandas, sklearn, accelerate"
_JOB = f"import time\nbegan = time.monotonic()\n{WORK}\nprint('imported', began, time.monotonic(), flush=True)\n"


@dataclass(frozen=True, slots=True)
class Sample:
    """One start: seconds until the job's Python runs, and for two runs of the imports in it."""

    usable_s: float
    first_s: float
    second_s: float
    link_bytes: int
    """Received over the link until the end of the first run."""
    disk_bytes: int
    """Disk usage added by the start."""
    said: Mapping[str, Any] = field(default_factory=dict)
    """The environment in BootSeer's report."""

    @property
    def imported_s(self) -> float:
        """Until the end of the first run."""
        return self.usable_s + self.first_s


class Node:
    """A folder with a node's whole disk: interpreter, home, caches."""

    def __init__(self, folder: Path, tools: Tools, registry: str) -> None:
        self._folder = folder
        self._template = folder.with_name("template")
        self.tools = tools
        self.venv = folder / "venv"
        self.job = folder / "job.py"
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "PYTHON"))}
        self.env: Mapping[str, str] = {
            **environ,
            "HOME": str(folder / "home"),
            "PATH": f"{self.venv}/bin:{os.environ['PATH']}",
            # The user's own configuration could name other indexes.
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": INDEX,
            "PIP_TRUSTED_HOST": INDEX.split("/")[2].partition(":")[0],
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "BOOTSEER_CACHE": str(folder / "cache"),
            "BOOTSEER_RUNTIME": str(folder / "runtime"),
            "BOOTSEER_PLAIN_HTTP": registry,
        }
        # A venv contains its own path, so it is created in its place.
        new_venv(self.venv)
        shutil.copytree(self.venv, self._template, symlinks=True)
        shutil.rmtree(folder)

    def prepare(self) -> None:
        """A new node."""
        shutil.copytree(self._template, self.venv, symlinks=True)
        (self._folder / "home").mkdir()
        self.job.write_text(_JOB)

    def install(self) -> None:
        """Install the whole environment with its bytecode, as pip would, in less time."""
        self._run([*self.uv(), "--compile-bytecode"])

    def fill_uv_cache(self) -> None:
        """Fill uv's cache, as an earlier installation would."""
        target = self._folder / "elsewhere"
        subprocess.run([sys.executable, "-m", "venv", target], check=True)
        python = f"{target}/bin/python"
        self._run(self.uv(python))
        shutil.rmtree(target)

    def uv(self, python: str = "") -> list[str]:
        """The command of uv's installation into the venv, or into that of another interpreter."""
        install = [str(self.tools.uv), "pip", "install", "--quiet", "--python", python or f"{self.venv}/bin/python"]
        return [*install, "--cache-dir", str(self._folder / "uv-cache"), "--default-index", INDEX, "-r", str(LOCK)]

    def warm(self, store: Path) -> None:
        """Load the tools' own code into memory. `store` gets a snapshot of one package the first time."""
        small = self._folder / "small.txt"
        small.write_text(next(line for line in LOCK.read_text().splitlines(True) if line.startswith("idna==")))
        spool = ["--quiet", "--spool", str(self._folder / "small")]
        self._run([BOOTSEER, "run", *spool, "--store", str(store), "--requirements", str(small), "--", "true"])
        self._run([f"{self.venv}/bin/pip", "--version"])
        self._run([str(self.tools.uv), "--version"])

    def clean(self) -> None:
        """Remove the node."""
        if (self._folder / "cache").exists():
            self._run([BOOTSEER, "cache", "prune", "--to", "0"])
        shutil.rmtree(self._folder)

    def start(self, steps: Sequence[Sequence[str]], received: Callable[[], int] = lambda: 0) -> Sample:
        """Run the steps, then the job's imports twice. A last step with `{job}` runs the job itself."""
        once = f"{self.venv}/bin/python {self.job}"
        job = ["sh", "-c", f"{once} && {once}"]
        filled = self.disk_bytes()
        before, began = received(), time.monotonic()
        for step in steps[:-1]:
            self._run(step)
        last = [word for part in steps[-1] for word in (job if part == "{job}" else [part])] if steps else job
        if steps and "{job}" not in steps[-1]:
            self._run(last)
            last = job
        times: list[tuple[float, float]] = []
        link_bytes = 0
        log = self._folder / "log"
        with (
            log.open("w") as errors,
            subprocess.Popen(last, env=self.env, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                word, *numbers = line.split()
                if word == "imported":
                    times.append((float(numbers[0]), float(numbers[1])))
                    link_bytes = link_bytes or received() - before
        if process.returncode or not times:
            raise RuntimeError(f"{' '.join(last[:3])}: exit code {process.returncode}: {log.read_text()[-500:]}")
        (first_began, first_ended), (second_began, second_ended) = times[0], times[-1]
        return Sample(
            first_began - began,
            first_ended - first_began,
            second_ended - second_began,
            link_bytes,
            self.disk_bytes() - filled,
            self._said(),
        )

    def disk_bytes(self) -> int:
        """Disk usage of the node's files."""
        seen: dict[int, int] = {}
        for folder, _, names in os.walk(self._folder):
            for name in names:
                status = os.lstat(os.path.join(folder, name))  # noqa: PTH118 - a hundred thousand of them
                seen[status.st_ino] = status.st_blocks * 512
        return sum(seen.values())

    def bootseer(self, store: str, *words: str) -> list[str]:
        """The command line of a start by BootSeer."""
        run = [BOOTSEER, "run", "--quiet", "--spool", str(self._folder / "spool"), "--job", "bench"]
        return [*run, "--store", store, "--requirements", str(LOCK), *words, "--", "{job}"]

    def _said(self) -> Mapping[str, Any]:
        if not (self._folder / "spool").exists():
            return {}
        command = [BOOTSEER, "report", "--json", str(self._folder / "spool")]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=True)
        shutil.rmtree(self._folder / "spool")
        (said,) = json.loads(done.stdout)["environments"]
        return dict(said)

    def _run(self, command: Sequence[str]) -> None:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[:4])}: {done.stderr[-500:].strip()}")
