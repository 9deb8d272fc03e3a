"""Shared by the benchmarks on a GPU: one start of `gpu_job.py`, with its own timestamps and BootSeer's marks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import ROOT

_JOB = ROOT / "benchmarks" / "gpu_job.py"
SMALL = ("--width", "64", "--layers", "2", "--batch", "2", "--length", "32")
"""To try the benchmarks on a machine without a GPU."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the job. Times are ns of the monotonic clock."""

    ranks: Sequence[Mapping[str, Any]]
    """What each rank wrote."""
    marks: Mapping[str, tuple[int, int]]
    """By stage of the first rank, its begin and end, which are equal for instants."""
    began_ns: int
    """When the command was started."""
    stderr: str

    def point(self, name: str) -> int | None:
        """The time at which the last rank reached this point."""
        times = [one["points"][name] for one in self.ranks if name in one["points"]]
        return max(times) if times else None


def gpu() -> dict[str, Any]:
    """The kind of GPU and the versions of its software; empty without one."""
    try:
        words = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        name, memory, driver = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split(", ")
    except (OSError, subprocess.CalledProcessError, ValueError):
        return {}
    code = "import torch; print(torch.__version__, torch.version.cuda, *torch.cuda.nccl.version())"
    torch, cuda, *nccl = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    return {
        "gpu": name,
        "memory": memory,
        "driver": driver.strip(),
        "torch": torch,
        "cuda": cuda,
        "nccl": ".".join(nccl),
    }


class Work:
    """Starts with a separate spool and cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("BOOTSEER_", "PYTHON"))}
        paths = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
        self.env = {**clean, **paths, "BOOTSEER_SPOOL": str(folder / "spool"), "BOOTSEER_CACHE": str(folder / "cache")}
        self._number = 0
        self._sizes = () if gpu() else SMALL

    def start(
        self,
        *words: str,
        launcher: Sequence[str] = (),
        run: Sequence[str] | None = (),
        env: Mapping[str, str] | None = None,
        job: str = "",
    ) -> Start:
        """Run the job: `words` are its arguments, `run` options of `bootseer run` (None: without BootSeer)."""
        self._number += 1
        out = Path(tempfile.mkdtemp(dir=self.folder))
        job = job or f"job-{self._number}"
        command = [sys.executable, *launcher, str(_JOB), "--out", str(out / "rank.json"), *words, *self._sizes]
        if run is not None:
            command = [sys.executable, "-m", "bootseer", "run", "--quiet", "--job", job, *run, "--", *command]
        clock = "import os, sys, time; print(time.monotonic_ns(), flush=True); os.execvp(sys.argv[1], sys.argv[1:])"
        done = subprocess.run(
            [sys.executable, "-S", "-c", clock, *command],
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        print(f"  {job} {' '.join(words)}: exit code {done.returncode}", file=sys.stderr, flush=True)
        if done.returncode:
            raise RuntimeError(f"{words}: exit code {done.returncode}: {done.stderr[-3000:]}")
        ranks = [json.loads(path.read_text()) for path in sorted(out.glob("rank-*.json"))]
        began_ns = int(done.stdout.split("\n", 1)[0])
        return Start(ranks, self._marks(job, began_ns), began_ns, done.stderr)

    def _marks(self, job: str, began_ns: int) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        begun: dict[str, int] = {}
        for path in sorted((self.folder / "spool" / job).rglob("*.events")):
            for line in path.read_text().splitlines():
                event = json.loads(line.partition("@bootseer1 ")[2])
                if event.get("rank", 0) > 0 or event["mono_ns"] < began_ns:
                    continue
                stage, at_ns = event["stage"], event["mono_ns"]
                if event["phase"] == "begin":
                    begun[event["span"]] = at_ns
                else:  # the launcher imports torch too, before the rank
                    found[stage] = begun.get(event["span"], at_ns), at_ns
        return found


def warm_reasons(stderr: str) -> list[str]:
    """The message of `--warm on` about the start."""
    return re.findall(r"^.*(?:warm|recorded).*$", stderr, re.MULTILINE)
