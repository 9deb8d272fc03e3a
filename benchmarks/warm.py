"""What a warm parent saves: eight ranks that import the demo's packages, a recorded start of the demo's job (also from
a process snapshot), and its restart in place after a SIGKILL of its launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from harness import ROOT, Benchmark, Must, Outcome, alternate

_RANKS = 8
_LEARNT = 4
_RANK = """
import humanize, numpy, psutil, torch, yaml
import torch._dynamo, torch.distributed, torch.distributed.checkpoint, torch.distributed.tensor
from einops import rearrange
from tqdm import tqdm
import time
print(time.monotonic())
"""
_LAUNCHER = """
import json, resource, subprocess, sys, time
rank = [sys.executable, "-u", sys.argv[1]]
def cpu_s():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
began = time.monotonic()
subprocess.run(rank, check=True, stdout=subprocess.DEVNULL)  # from here on the warm parent is ready
first, before, began = time.monotonic() - began, cpu_s(), time.monotonic()
ranks = [subprocess.Popen(rank, stdout=subprocess.PIPE) for _ in range(int(sys.argv[2]))]
imported = max(float(one.communicate()[0]) for one in ranks)
print(json.dumps([imported - began, time.monotonic() - began, cpu_s() - before, first]))
"""


def measure(quick: bool) -> Outcome:
    rounds, start_rounds = (1, 1) if quick else (5, 5)
    with tempfile.TemporaryDirectory() as folder:
        work = _Work(Path(folder))
        ranks = alternate({arm: lambda mode=mode: work.ranks(mode) for arm, mode in _arms("8 ranks")}, rounds)
        arms = [*_arms("start"), ("start, restored", "snapshot")]
        starts = alternate({arm: lambda mode=mode: work.start(mode) for arm, mode in arms}, start_rounds)
        restarts = alternate(
            {arm: lambda mode=mode: work.restart(mode) for arm, mode in _arms("restart")}, start_rounds
        )
        losses = {"".join(one["losses"]) for of_arm in starts.values() for one in of_arm}
    if len(losses) != 1:
        raise RuntimeError("the losses differ between starts")
    samples = {arm: [one[0] for one in found] for arm, found in ranks.items()}
    samples |= {arm: [one["seconds"] for one in found] for arm, found in starts.items()}
    for arm, of_arm in restarts.items():
        samples[arm] = [one["seconds"] - one["stages"]["model_initialization.checkpoint_read"] for one in of_arm]
    return Outcome(
        parameters={"rounds": rounds, "rounds_start": start_rounds, "ranks": _RANKS, "ranks_start": 2},
        samples=samples,
        unit="s",
        baselines={
            "8 ranks, warm": "8 ranks, exec",
            "start, warm": "start, exec",
            "start, restored": "start, exec",
            "restart, warm": "restart, exec",
        },
        must_reach=[
            Must(
                "8 ranks have imported the demo's stack, from the first request on",
                median(samples["8 ranks, warm"]),
                0.5,
                "s",
            ),
            Must("the demo's recorded start, to the first step", median(samples["start, warm"]), 3.5, "s"),
            Must(
                "the demo's start by exec, in starts that restore a process snapshot",
                median(samples["start, exec"]) / median(samples["start, restored"]),
                2.0,
                "times",
                at_least=True,
            ),
            Must(
                "the demo's restart, from its launcher's death to the first step, without reading its checkpoint",
                median(samples["restart, warm"]),
                1.0,
                "s",
            ),
        ],
        details={
            "s_until_8_ranks_ended": {arm: [one[1] for one in found] for arm, found in ranks.items()},
            "cpu_s_of_8_ranks": {arm: [one[2] for one in found] for arm, found in ranks.items()},
            "s_until_one_rank_before_them_ended": {arm: [one[3] for one in found] for arm, found in ranks.items()},
            "s_of_restarts_stages": {arm: [one["stages"] for one in found] for arm, found in restarts.items()},
            "losses": sorted(losses),
        },
    )


def _arms(what: str) -> list[tuple[str, str]]:
    return [(f"{what}, exec", "off"), (f"{what}, warm", "on")]


class _Work:
    """Starts by `bootseer run`, with a separate cache and spools."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("BOOTSEER_", "PYTHON"))}
        self._env = {**clean, "BOOTSEER_SPOOL": str(folder / "spool"), "BOOTSEER_CACHE": str(folder / "cache")}
        if (criu := ROOT / ".criu" / "criu").exists():
            self._env["BOOTSEER_CRIU"] = str(criu)
        self._number = 0
        self._demo = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
        self._demo += [str(ROOT / "examples" / "moe" / "train.py"), "--checkpoint-mb", "30"]
        (folder / "rank.py").write_text(_RANK)
        (folder / "launcher.py").write_text(_LAUNCHER)
        self.ranks("on")  # is recorded
        self.start("on")
        self.start("snapshot", says="")

    def ranks(self, mode: str) -> list[float]:
        """Seconds from the first request to the last rank's imports, and to its exit; processor time until then."""
        words = [sys.executable, str(self._folder / "launcher.py"), str(self._folder / "rank.py"), str(_RANKS)]
        found: list[float] = json.loads(self._run(mode, [*words])[0].splitlines()[-1])
        return found

    def start(self, mode: str, says: str = "started warm") -> dict[str, Any]:
        """One start of the demo's job on two ranks."""
        if mode == "snapshot" and says:
            says = "3 Python programs started warm"  # the launcher, too
        checkpoints = self._folder / f"checkpoints-{self._number}"
        out, job = self._run(mode, [*self._demo, "--steps", "2", "--checkpoint-dir", str(checkpoints)], says)
        losses = [line.split("tokens/s")[0] for line in out.splitlines() if " loss " in line]
        return {"seconds": self._report(job)["overhead"]["startup_s"], "losses": losses}

    def restart(self, mode: str) -> dict[str, Any]:
        """The second start of the demo's job with `--restarts`: the launcher is killed after its first step."""
        self._number += 1
        job, folder = f"job-{self._number}", self._folder / "checkpoints-restart"
        words = [*self._demo, "--checkpoint-dir", str(folder), "--steps"]
        if not folder.exists():
            self._run("off", [*words, "1"])
            for _ in range(_LEARNT):  # a resumed job imports more, and the excluded modules are learned
                self._run("on", [*words, "1"], says="")
        run = [sys.executable, "-m", "bootseer", "run", "--restarts", "1", "--job", job, "--warm", mode, "--"]
        with subprocess.Popen(
            [*run, *words, "1000"], env=self._env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            for number, _ in enumerate(line for line in process.stdout or () if " loss " in line):
                if number == 0:
                    os.kill(_launcher_of(process.pid), signal.SIGKILL)
                else:
                    process.terminate()
        told = self._report(job)
        stages = {stage["stage"]: stage["max_s"] for stage in told["stages"]}
        return {"seconds": told["restarts"][0]["startup_s"], "stages": stages}

    def _report(self, job: str) -> dict[str, Any]:
        report = [sys.executable, "-m", "bootseer", "report", "--json", job]
        found: dict[str, Any] = json.loads(
            subprocess.run(report, env=self._env, capture_output=True, text=True, check=True).stdout
        )
        return found

    def _run(self, mode: str, words: list[str], says: str = "started warm") -> tuple[str, str]:
        self._number += 1
        job = f"job-{self._number}"
        options = ["--warm", "on", "--process-snapshot"] if mode == "snapshot" else ["--warm", mode]
        command = [sys.executable, "-m", "bootseer", "run", "--quiet", "--job", job, *options, "--", *words]
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        if mode != "off" and says not in done.stderr and "is recorded" not in done.stderr:
            raise RuntimeError(f"not warm: {done.stderr}")
        return done.stdout, job


def _launcher_of(run: int) -> int:
    for word in Path(f"/proc/{run}/task/{run}/children").read_text().split():
        text = Path(f"/proc/{word}/cmdline").read_text()
        if "torchrun" in text and "warm_parent" not in text:
            return int(word)
    raise RuntimeError("the job's launcher is gone")


BENCHMARK = Benchmark("warm", "What does a warm parent save when ranks start?", measure)
