"""How fast `bootseer report` reads a large log that other programs wrote, and what each of its searches costs.

What a user would run instead is grep; `cat` tells what reading alone takes. The log is made anew (`training_log`), lies
in the page cache and is deleted afterwards.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import training_log
from harness import Benchmark, Cost, Must, Outcome, alternate, spawn

from bootseer.analysis.foreign.registry import parsers
from bootseer.trace.event import TAG_STEM

_LIMIT_MB_PER_S = 200.0
_LINES = 10_000_000
_BOOTSEER = str(Path(sys.executable).parent / "bootseer")
_NOTHING_FOUND = (0, 1)  # grep's exit code when no line holds the word
_PROFILED_BYTES = 64 << 20
_PROFILED_BLOCK = 4 << 20


def measure(quick: bool) -> Outcome:
    rounds, lines = (3, _LINES // 10) if quick else (5, _LINES)
    with tempfile.TemporaryDirectory() as folder:
        plain, part = Path(folder, "train.log"), Path(folder, "part.log")
        with ProcessPoolExecutor(1) as pool:  # what this process held, its children would be charged with
            sizes = {
                "plain": pool.submit(training_log.write, plain, lines).result(),
                "compressed": pool.submit(training_log.write, part, lines // 4).result(),
            }
        gz, zst = Path(folder, "part.gz"), Path(folder, "part.zst")
        _compress(["gzip", "-6", "-c", str(part)], gz)
        arms: dict[str, tuple[int, Callable[[], Cost]]] = {
            "cat": (sizes["plain"], lambda: spawn(["cat", str(plain)])),
            "grep -c bootseer1": (
                sizes["plain"],
                lambda: spawn(["grep", "-c", "bootseer1", str(plain)], exit_codes=_NOTHING_FOUND),
            ),
            "report": (sizes["plain"], lambda: spawn([_BOOTSEER, "report", str(plain)])),
            "gzip -dc | grep -c": (sizes["compressed"], lambda: _pipe(f"gzip -dc {gz} | grep -c bootseer1")),
            "report, gzip": (sizes["compressed"], lambda: spawn([_BOOTSEER, "report", str(gz)])),
        }
        if shutil.which("zstd"):
            _compress(["zstd", "-3", "-q", "-c", str(part)], zst)
            arms["zstd -dc | grep -c"] = (sizes["compressed"], lambda: _pipe(f"zstd -dc {zst} | grep -c bootseer1"))
            arms["report, zstd"] = (sizes["compressed"], lambda: spawn([_BOOTSEER, "report", str(zst)]))
        costs = alternate({name: run for name, (_, run) in arms.items()}, rounds)
        with plain.open("rb") as file:
            profile = _profile(file.read(_PROFILED_BYTES))
    speeds = {name: [arms[name][0] / cost.wall_s / 1e6 for cost in of_arm] for name, of_arm in costs.items()}
    cpu_s_per_gb = {name: median(cost.cpu_s for cost in of_arm) * 1e9 / arms[name][0] for name, of_arm in costs.items()}
    profile["all other work of the report"] = cpu_s_per_gb["report"] - sum(profile.values())
    baselines = {"report": "grep -c bootseer1", "report, gzip": "gzip -dc | grep -c"}
    if "report, zstd" in speeds:
        baselines["report, zstd"] = "zstd -dc | grep -c"
    return Outcome(
        parameters={"rounds": rounds, "lines": lines, "bytes": sizes},
        samples=speeds,
        unit="MB/s of unpacked log",
        baselines=baselines,
        must_reach=[Must("plain log (median)", median(speeds["report"]), _LIMIT_MB_PER_S, "MB/s", at_least=True)],
        details={
            "cpu_s_per_gb": cpu_s_per_gb,
            "peak_bytes": {name: max(cost.peak_bytes for cost in of_arm) for name, of_arm in costs.items()},
            "what_limits_s_per_gb": profile,
        },
    )


def _compress(command: list[str], target: Path) -> None:
    with target.open("wb") as file:
        subprocess.run(command, stdout=file, check=True)


def _pipe(script: str) -> Cost:
    return spawn(["sh", "-c", script], exit_codes=_NOTHING_FOUND)


def _profile(log: bytes) -> dict[str, float]:
    """CPU seconds for a gigabyte of this log, for each pass over the bytes that a scan without a hit makes.

    The search of `bytes` is what a scan in plain Python is bounded by; the scan itself may know a faster one.
    """
    blocks = [log[start : start + _PROFILED_BLOCK] for start in range(0, len(log), _PROFILED_BLOCK)]
    needles = [TAG_STEM, *dict.fromkeys(needle for parser in parsers() for needle in parser.needles)]
    passes = {f"find {needle.decode()!r}": _cpu_s(blocks, needle) for needle in needles}
    passes["count newlines"] = _cpu_s(blocks, b"\n")
    return {name: spent * 1e9 / len(log) for name, spent in passes.items()}


def _cpu_s(blocks: list[bytes], needle: bytes) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        for block in blocks:
            block.count(needle)  # to the end, unlike `find`
        best = min(best, time.process_time() - start)
    return best


BENCHMARK = Benchmark("scan_foreign", "How fast is a large log of other programs read?", measure)
