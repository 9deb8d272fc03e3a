"""Where a process stands that is late: its Python stack, which the service asks for and py-spy takes.

The service names a process in its answer to a batch (`Wanted`); the sender of the node it runs on looks for it. Only a
process that has `BOOTSEER_STACKS=1` and the job in its own environment is looked at, which only its user and root can
read. It is not stopped meanwhile, and no values of variables are read: functions, files' names and lines alone. Each
process is sampled once.
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

from bootseer.trace.event import INSTANT, STACK, Event, encode
from bootseer.trace.identity import Identity, discover

SWITCH: Final = "BOOTSEER_STACKS"
MOST: Final = 8
"""Processes of a start that are asked for."""
_ANOTHER: Final = "newest process of the job"
_LIMIT_S: Final = 10.0
_TRIES: Final = 3
_MOST_BYTES: Final = 1000
"""Of a stack, from the innermost frame on: an event holds no more."""
_MOST_ENVIRONMENT: Final = 1 << 20


class Wanted(NamedTuple):
    """A process that is late."""

    job: str
    attempt: int
    restart: int
    node: str
    rank: int
    stage: str
    pid: int
    """As the process itself knows it, in its own namespace."""


def read_wanted(stacks: object) -> list[Wanted]:
    """What a service's answer names; what is damaged is left out."""
    found = []
    for one in stacks[:MOST] if isinstance(stacks, list) else ():
        with contextlib.suppress(LookupError, TypeError, ValueError):
            number = {name: int(one[name]) for name in ("attempt", "restart", "rank", "pid")}
            found.append(Wanted(job=str(one["job"]), node=str(one["node"]), stage=str(one["stage"]), **number))
    return found


def program() -> str | None:
    """Where py-spy is: beside this Python, or in the search path."""
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


class Sampler:
    """Takes stacks on this node; knows which processes it has looked at."""

    def __init__(self) -> None:
        self._sampled: set[tuple[str, int, int, int]] = set()

    def lines(self, wanted: Sequence[Wanted]) -> Iterator[bytes]:
        """An event line for each process that is here and was not sampled yet. Takes up to 10 s: what is left then is
        asked for again. Never raises `OSError`."""
        until_s = time.monotonic() + _LIMIT_S
        for one in wanted:
            if time.monotonic() > until_s:
                break
            found, is_it = self._found(one)
            if not found:
                continue
            text, why_not = sample(found, until_s - time.monotonic())
            attrs = {"in_stage": one.stage, "of_rank": one.rank, "of_pid": one.pid}
            attrs |= {"stack": text if is_it else f"{_ANOTHER}: {text}"} if text else {"why_not": why_not}
            yield encode(
                Event(wall_ns=time.time_ns(), mono_ns=time.monotonic_ns(), job=one.job, node=one.node, stage=STACK,
                      phase=INSTANT, span=os.urandom(8).hex(), attempt=one.attempt, restart=one.restart, attrs=attrs)
            )  # fmt: skip

    def _found(self, wanted: Wanted) -> tuple[list[int], bool]:
        """The process, and True; where it is a program that tells of the stage of others, the job's newest ones here,
        and False."""
        exact, others = [], []
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            identity = _owner_agrees(pid)
            if identity is None or (identity.job, identity.node) != (wanted.job, wanted.node):
                continue
            if identity.attempt not in (None, wanted.attempt):
                continue
            key = (wanted.job, wanted.attempt, wanted.restart, pid)
            begun, inner = _begun(pid)
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


def _owner_agrees(pid: int) -> Identity | None:
    """Whose a process is by its environment, if that says that its stack may be told."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            data = file.read(_MOST_ENVIRONMENT)
    except OSError:  # another user's, or gone
        return None
    env = dict(os.fsdecode(word).partition("=")[::2] for word in data.split(b"\0"))
    return discover(env, hostname=os.uname().nodename) if env.get(SWITCH) == "1" else None


def _begun(pid: int) -> tuple[int, int]:
    """When a process began, in ticks, and its number in its own namespace."""
    try:
        stat, status = Path(f"/proc/{pid}/stat").read_bytes(), Path(f"/proc/{pid}/status").read_text("ascii", "replace")
        spaces = next((line for line in status.splitlines() if line.startswith("NSpid:")), "")
        return int(stat.rpartition(b")")[2].split()[19]), int((spaces.split() or ["0"])[-1])
    except (OSError, ValueError, IndexError):
        return 0, 0


def sample(pids: Sequence[int], limit_s: float = _LIMIT_S) -> tuple[str, str]:
    """The stack of the first of these processes that has one; else why there is none."""
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
        if len((text + one).encode()) > _MOST_BYTES:
            break
        text += one
    return text
