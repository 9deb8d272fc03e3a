"""Python stacks of late processes, requested by the service and sampled by py-spy.

The service requests stacks in its answer to a batch (`StackRequest`); the sender on the process's node takes them. Only
processes with `BOOTSEER_STACKS=1` and the job in their environment, which only their user and root can read, are
sampled. The process is not stopped. Only functions, file names and lines are read, no values of variables. Each process
is sampled once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bootseer.io import proc
from bootseer.trace.event import INSTANT, STACK, Event, encode
from bootseer.trace.identity import Identity, discover

SWITCH: Final = "BOOTSEER_STACKS"
MAX_REQUESTS: Final = 8
"""Maximum number of requested processes of one startup."""
_ANOTHER: Final = "newest process of the job"
_LIMIT_S: Final = 10.0
_TRIES: Final = 3
_MAX_STACK_BYTES: Final = 1000
"""Limit for a stack, from the innermost frame on, so that it fits into an event."""


class StackRequest(NamedTuple):
    """A late process whose stack is requested."""

    job: str
    attempt: int
    restart: int
    node: str
    rank: int
    stage: str
    pid: int
    """Process id in the process's own namespace."""


def read_requests(stacks: object) -> list[StackRequest]:
    """Parse the requests in a service's answer; invalid ones are skipped."""
    found = []
    for one in stacks[:MAX_REQUESTS] if isinstance(stacks, list) else ():
        with contextlib.suppress(LookupError, TypeError, ValueError):
            number = {name: int(one[name]) for name in ("attempt", "restart", "rank", "pid")}
            found.append(StackRequest(job=str(one["job"]), node=str(one["node"]), stage=str(one["stage"]), **number))
    return found


def program() -> str | None:
    """The path of py-spy in this Python's folder, or on PATH; None if it is not installed."""
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


class Sampler:
    """Takes stacks on this node, once for each process."""

    def __init__(self) -> None:
        self._sampled: set[tuple[str, int, int, int]] = set()

    def lines(self, wanted: Sequence[StackRequest]) -> Iterator[bytes]:
        """An event line for each requested process of this node that was not sampled yet.

        Stops after 10 s; the service requests the remaining processes again. Never raises `OSError`.
        """
        until_s = time.monotonic() + _LIMIT_S
        for one in wanted:
            if time.monotonic() > until_s:
                break
            found, is_exact = self._find_processes(one)
            if not found:
                continue
            text, why_not = sample(found, until_s - time.monotonic())
            attrs = {"in_stage": one.stage, "of_rank": one.rank, "of_pid": one.pid}
            attrs |= {"stack": text if is_exact else f"{_ANOTHER}: {text}"} if text else {"why_not": why_not}
            yield encode(
                Event(wall_ns=time.time_ns(), mono_ns=time.monotonic_ns(), job=one.job, node=one.node, stage=STACK,
                      phase=INSTANT, span=os.urandom(8).hex(), attempt=one.attempt, restart=one.restart, attrs=attrs)
            )  # fmt: skip

    def _find_processes(self, wanted: StackRequest) -> tuple[list[int], bool]:
        """The requested process, and True. If it is not visible, because another process reported the stage, the job's
        newest processes on this node, and False."""
        exact, others = [], []
        for pid in proc.pids():
            identity = _identity_of(pid)
            if identity is None or (identity.job, identity.node) != (wanted.job, wanted.node):
                continue
            if identity.attempt not in (None, wanted.attempt):
                continue
            key = (wanted.job, wanted.attempt, wanted.restart, pid)
            begun, inner = _start_and_inner_pid(pid)
            if inner != wanted.pid:
                others.append((begun, pid, key))
            elif key in self._sampled:
                return [], True
            else:
                exact.append((begun, pid, key))
        chosen = exact or sorted(others, reverse=True)[:_TRIES]
        if any(key in self._sampled for *_, key in chosen):
            return [], False
        self._sampled.update(key for *_, key in chosen)
        return [pid for _, pid, _ in chosen], bool(exact)


def _identity_of(pid: int) -> Identity | None:
    """The identity of a process from its environment; None if the environment does not permit sampling."""
    env = proc.environment(pid)
    return discover(env, hostname=os.uname().nodename) if env.get(SWITCH) == "1" else None


def _start_and_inner_pid(pid: int) -> tuple[int, int]:
    """Start time of a process in ticks, and its id in its own namespace."""
    fields, inner = proc.stat(pid), proc.status(pid).get("NSpid", "").split()
    return (int(fields[19]), int(inner[-1])) if fields and inner else (0, 0)


def sample(pids: Sequence[int], limit_s: float = _LIMIT_S) -> tuple[str, str]:
    """The stack of the first of these processes that can be sampled, and ""; else "" and an error text."""
    until_s = time.monotonic() + limit_s
    spy, why = program(), "py-spy is not installed on the node"
    for pid in pids if spy is not None else ():
        words = [str(spy), "dump", "--pid", str(pid), "--json", "--nonblocking"]
        try:
            done = subprocess.run(words, capture_output=True, check=False, stdin=subprocess.DEVNULL,
                                  timeout=max(until_s - time.monotonic(), 0.1))  # fmt: skip
            if done.returncode == 0 and (text := _stack_text(json.loads(done.stdout), pid)):
                return text, ""
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            why = f"py-spy: {lines[0] if lines else 'no frames'}"
        except subprocess.TimeoutExpired:
            why = f"py-spy took longer than {limit_s:.1f} s"
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = f"py-spy: {type(error).__name__}"
    return "", why[:200]


def _stack_text(threads: Sequence[Mapping[str, Any]], pid: int) -> str:
    """The main thread's frames, the innermost first: `FUNCTION (FILE:LINE) < ...`."""
    of = next((one for one in threads if one.get("thread_name") == "MainThread" or one["os_thread_id"] == pid), None)
    frames = (of or threads[-1])["frames"]
    text = ""
    for frame in frames:
        one = f"{' < ' * bool(text)}{frame['name']} ({Path(frame['filename']).name}:{frame['line']})"
        if len((text + one).encode()) > _MAX_STACK_BYTES:
            break
        text += one
    return text
