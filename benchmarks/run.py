"""Run benchmarks, keep their results, print a table: `benchmarks/run.py [--quick] [NAME...]`.

`make bench` calls this. The exit code is 1 if a claim was not reached, or a benchmark could not be measured; the others
are measured nevertheless.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
from typing import Any

import harness

sys.path.append(str(harness.ROOT / "tests"))  # the synthetic fleet

_BY_NAME = ("convert_image", "gpu_marks", "gpu_warm", "gpu_checkpoint")
"""These need an image or a GPU, and run only if named."""
NAMES = (
    "run_overhead",
    "hook_overhead",
    "warm",
    "connections",
    "tracing_cost",
    "report_fleet",
    "scan_foreign",
    "diff_noise",
    "image",
    "pods",
    "convert",
    "environment",
    "checkpoint",
    "buckets",
    "small_files",
    "secured_hdfs",
    "nodes",
    "nodes_parts",
    "nodes_faults",
    "nodes_train",
    "peer_server",
    "service_ingest",
    "service_load",
    "service_month",
    "tests",
    *_BY_NAME,
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the claims; results go to benchmarks/results.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller input")
    parser.add_argument(
        "--rounds",
        type=_count,
        metavar="N",
        help="for benchmarks whose rounds take minutes: checkpoint, small_files, nodes and its others",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    arguments = parser.parse_args()
    if unknown := set(arguments.names).difference(NAMES):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    _end_on_sigterm()
    # An installed program has bytecode: the discarded round writes it.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    names = arguments.names or [name for name in NAMES if name not in _BY_NAME]
    benchmarks: list[harness.Benchmark] = [importlib.import_module(name).BENCHMARK for name in names]
    if arguments.rounds and (fixed := [one.name for one in benchmarks if one.by_rounds is None]):
        parser.error(f"--rounds is not for {', '.join(fixed)}")
    results: list[dict[str, Any]] = []
    for benchmark in benchmarks:
        print(f"{benchmark.name}: {benchmark.question}", flush=True)
        try:
            results.append(harness.run(benchmark, arguments.quick, arguments.rounds))
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:  # such as: needs root
            print(f"  not measured: {error}", file=sys.stderr)
    for result in results:
        _print(result)
    reached = all(must["reached"] for result in results for must in result["must_reach"])
    return 0 if reached and len(results) == len(benchmarks) else 1


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 1000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rounds")
    return int(text)


def _end_on_sigterm() -> None:
    """Have SIGTERM end this process as Ctrl-C does, so that network links, mounts and servers are removed."""
    own = os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() != own:  # a fork: they belong to its parent
            os._exit(128 + number)
        signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the removal
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def _print(result: dict[str, Any]) -> None:
    unit = result["unit"]
    print(f"\n{result['name']}{' (quick)' if result['quick'] else ''}  [{unit}]")
    print(f"  {'':34}{'median':>12}{'least':>12}{'most':>12}{'vs baseline':>14}  baseline")
    for arm, row in result["summary"].items():
        against = result["against"].get(arm)
        compared = f"{against['difference']['median']:+14.4g}  {against['baseline']}" if against else ""
        print(f"  {arm:34}{row['median']:12.5g}{row['min']:12.5g}{row['max']:12.5g}{compared}")
    for must in result["must_reach"]:
        sign = "reached" if must["reached"] else "MISSED "
        print(f"  {sign}  {must['what']}: {must['value']:.4g} {must['unit']}, {must['rule']} {must['limit']:g}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the rounds that were made are kept\n")
        sys.exit(130)
