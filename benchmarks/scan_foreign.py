"""How fast `bootseer report` reads a large log of other programs, and what each of its searches costs.

The baselines are grep, and `cat` for reading alone. The log is generated (`training_log`), is in the page cache, and is
deleted afterwards. Logs with a word that parsers look for in every line show the worst case: such words are ordinary
English.
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

from bootseer.report.foreign.program_tables import parsers, search
from bootseer.report.search import fastest_find
from bootseer.trace.event import TAG_STEM

_LIMIT_MB_PER_S = 200.0
_WORDS_LIMIT_MB_PER_S = 150.0
_WORDS = {
    "Successful": "Successful",
    "package": " package",
    "nranks": " nranks ",
    "PullImage": "PullImage",
    "torch/distributed": "torch/distributed/",
}
_LINES = 10_000_000
_BOOTSEER = str(Path(sys.executable).parent / "bootseer")
_NOTHING_FOUND = (0, 1)  # grep's exit code when no line matches
_PROFILED_BYTES = 64 << 20
_PROFILED_BLOCK = 1 << 20


def measure(quick: bool) -> Outcome:
    rounds, lines = (3, _LINES // 10) if quick else (5, _LINES)
    with tempfile.TemporaryDirectory() as folder:
        plain, part = Path(folder, "train.log"), Path(folder, "part.log")
        with ProcessPoolExecutor(1) as pool:  # memory of this process would count as that of its children
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
        for name, words in (*_WORDS.items(), ("all clues, less a letter", _all_clues())):
            dense = Path(folder, f"{len(arms)}.log")
            size = training_log.write_words(dense, words, lines * 20)
            arms[f"report, {name}"] = (
                size,
                lambda dense=dense: spawn([_BOOTSEER, "report", str(dense)], exit_codes=(0, 1)),
            )
        costs = alternate({name: run for name, (_, run) in arms.items()}, rounds)
        with plain.open("rb") as file:
            profile = _profile(file.read(_PROFILED_BYTES))
    speeds = {name: [arms[name][0] / cost.wall_s / 1e6 for cost in of_arm] for name, of_arm in costs.items()}
    cpu_s_per_gb = {name: median(cost.cpu_s for cost in of_arm) * 1e9 / arms[name][0] for name, of_arm in costs.items()}
    profile["all other work of the report"] = cpu_s_per_gb["report"] - sum(profile.values())
    baselines = {"report": "grep -c bootseer1", "report, gzip": "gzip -dc | grep -c"}
    if "report, zstd" in speeds:
        baselines["report, zstd"] = "zstd -dc | grep -c"
    # By processor time, because a scan uses one core: other load must not affect it.
    words_cpu_s = max(cpu_s_per_gb[name] for name in arms if name.startswith("report, ") and name not in baselines)
    return Outcome(
        parameters={"rounds": rounds, "lines": lines, "bytes": sizes},
        samples=speeds,
        unit="MB/s of unpacked log",
        baselines=baselines,
        must_reach=[
            Must("plain log", 1000 / cpu_s_per_gb["report"], _LIMIT_MB_PER_S, "MB per CPU second", at_least=True),
            Must("slowest log of words", 1000 / words_cpu_s, _WORDS_LIMIT_MB_PER_S, "MB per CPU second", at_least=True),
        ],
        details={
            "cpu_s_per_gb": cpu_s_per_gb,
            "peak_bytes": {name: max(cost.peak_bytes for cost in of_arm) for name, of_arm in costs.items()},
            "what_limits_s_per_gb": profile,
        },
    )


def _all_clues() -> str:
    """The keywords of all parsers, each without its last letter."""
    literals = {clue.literal.decode() for parser in parsers() for clue in parser.clues}
    return " ".join(literal[:-1] + "~" for literal in sorted(literals))


def _compress(command: list[str], target: Path) -> None:
    with target.open("wb") as file:
        subprocess.run(command, stdout=file, check=True)


def _pipe(script: str) -> Cost:
    return spawn(["sh", "-c", script], exit_codes=_NOTHING_FOUND)


def _profile(log: bytes) -> dict[str, float]:
    """CPU seconds per gigabyte of this log, for each pass over the bytes of a scan without a hit."""
    blocks = [log[start : start + _PROFILED_BLOCK] for start in range(0, len(log), _PROFILED_BLOCK)]
    searching, _ = search()
    passes = {
        "search for all clues": _cpu_s(blocks, lambda block: list(searching.hits(block))),
        "find the events' tag": _cpu_s(blocks, lambda block: fastest_find(block, TAG_STEM, 0)),
        "count newlines": _cpu_s(blocks, lambda block: block.count(b"\n")),
    }
    return {name: spent * 1e9 / len(log) for name, spent in passes.items()}


def _cpu_s(blocks: list[bytes], work: Callable[[bytes], object]) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        for block in blocks:
            work(block)
        best = min(best, time.process_time() - start)
    return best


BENCHMARK = Benchmark("scan_foreign", "How fast is a large log of other programs read?", measure)
