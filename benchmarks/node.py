"""A cold node: empties the page cache, and measures a start until its first useful work, with the costs of its tools.

The workload reports its first useful work by a line on stdout: `ready`, the CPU seconds so far and the seconds of the
work itself. Then it waits for a line on stdin, so that the node's state at that moment can be measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

T = TypeVar("T")

_PR_SET_CHILD_SUBREAPER = 36
_DEADLINE_S = 600.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def workload(work: str) -> list[str]:
    """A Python program that does the work and reports it."""
    program = (
        "import sys, time\nbegan = time.monotonic()\nexec(sys.argv[1])\n"
        "print('ready', time.process_time(), time.monotonic() - began, flush=True)\nsys.stdin.readline()"
    )
    return ["python3", "-c", program, work]


TORCH = "import torch; ones = torch.ones(64, 64); ones @ ones"
OTHER = "import pandas, scipy.stats"
NOTHING = ["busybox", "sh", "-c", "echo ready 0 0; read line"]
"""The workload of the small image, which has no Python."""


def drop_page_cache() -> None:
    """Empty the page cache, except for pages that running programs have mapped. Needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def adopt() -> None:
    """Make this process the parent of orphaned descendants, so that `descendants` finds all daemons."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def descendants(pid: int) -> Iterator[int]:
    """All descendants of a process."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield child
        yield from descendants(child)


def cpu_s(pid: int) -> float:
    """CPU time of a process and of the children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) * _TICK_S


def processors_s() -> tuple[float, float]:
    """Time of all processors since boot: busy, and idle."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) * _TICK_S, idle * _TICK_S


def peak_bytes(pid: int) -> int:
    """The largest resident size so far."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


@dataclass(frozen=True, slots=True)
class Started:
    """One start up to its first useful work."""

    ready_s: float
    work_s: float
    """The part of the work itself, from the first line of the program."""
    tools_cpu_s: float
    """CPU time of clients and daemons, without workload, server and kernel threads."""
    tools_peak_bytes: int
    """The largest running process of the tools."""


def start(
    steps: Sequence[Sequence[str]],
    env: Mapping[str, str],
    others: set[int],
    at_ready: Callable[[], T],
    linger: Callable[[], None] = lambda: None,
) -> tuple[Started, T]:
    """Run the steps one after the other, the last one with the workload, and wait for their end.

    `others` are processes that are not part of the start, such as the server. `at_ready` is called at the first useful
    work, `linger` later, while the container still runs. Raises `RuntimeError` with the last lines of a step that
    fails.
    """
    before = _cpu_of_tools(others)
    began = time.monotonic()
    for step in steps[:-1]:
        done = subprocess.run(
            step, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=_DEADLINE_S, check=False
        )
        if done.returncode:
            raise _failed(step, done.returncode, done.stdout + done.stderr)
    with subprocess.Popen(
        steps[-1], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            text = b""
            while not (line := _line(process.stdout, began + _DEADLINE_S)).startswith(b"ready "):
                text += line
                if not line:
                    raise _failed(steps[-1], process.wait(_DEADLINE_S), text)
            ready_s = time.monotonic() - began
            seen = at_ready()
            tools_s = _cpu_of_tools(others) - before - float(line.split()[1])
            tools = [pid for pid in {*descendants(os.getpid())} - others if not _is_workload(pid)]
            peak = max(map(peak_bytes, tools), default=0)
            linger()
            with contextlib.suppress(BrokenPipeError):  # it did not wait
                process.stdin.write(b"\n")
                process.stdin.close()
            text = process.stdout.read()
            if process.wait(_DEADLINE_S):
                raise _failed(steps[-1], process.returncode, text)
        except BaseException:
            process.terminate()
            raise
    return Started(ready_s, float(line.split()[2]), max(tools_s, 0.0), peak), seen


def _cpu_of_tools(others: set[int]) -> float:
    pids = {os.getpid(), *descendants(os.getpid())} - others
    return sum(cpu_s(pid) for pid in pids)


def _is_workload(pid: int) -> bool:
    # The tools' command lines contain that of the workload after their own name.
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"python3\0-c\0")
    except OSError:
        return False


def _line(stream: IO[bytes], deadline: float) -> bytes:
    """The next line, empty at the end. Read byte by byte, so that no data stays in a buffer."""
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(deadline - time.monotonic(), 0)):
                raise RuntimeError("the workload was not ready in time")
            byte = os.read(stream.fileno(), 1)
            if not byte:
                break
            line += byte
    return line


def _failed(step: Sequence[str], code: int, text: bytes) -> RuntimeError:
    last = b" | ".join(text.strip().splitlines()[-5:]).decode(errors="replace")
    return RuntimeError(f"{' '.join(step[:3])}: exit code {code}: {last}")
