"""What a setup did besides writing files: processes, mounts, kernel state, files where no capture keeps them.

A restore brings back files and the environment, nothing else. So any of these makes a setup "not snapshot-safe", in
words that say what it was. Users and groups are lines of files and come back with /etc; they are told as notes.

Who calls: whoever runs a setup in a capture: `Effects.before` it, and `after` it has ended.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bootseer.env.capturing import left_running
from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.capturing.kernel_state import KernelState
from bootseer.env.capturing.leftovers import SCRATCH, is_mentioned, left_elsewhere, left_in_scratch
from bootseer.env.capturing.watch import Reads
from bootseer.mounts.kernel import mount_table
from bootseer.mounts.process import end_child

Enter = Callable[[], None]
LOOK_S = 10.0
_PREFIX_FILES = ("pyvenv.cfg", "conda-meta")
_MAX_LOOK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """What a setup did besides writing files, for people."""

    unsafe: tuple[str, ...]
    """Why it is not snapshot-safe; empty when it is."""
    notes: tuple[str, ...]
    """What comes back with the files, and is worth telling."""


class Effects:
    """The state before a setup, to compare with."""

    def __init__(self, enter: Enter | None, inside: Mapping[str, Any], kernel: KernelState, mark: str) -> None:
        self._enter = enter
        self._inside = inside
        self._kernel = kernel
        self._mark = mark

    @classmethod
    def before(cls, enter: Enter | None = None) -> Effects:
        """Look before the setup runs. `enter` leads a process into the capture's namespace (`Capture.enter`).

        With `enter` it forks: call it while this process has one thread. What cannot be seen is not compared.
        """
        inside = _look(enter)
        if inside.get("namespace") == _namespace():  # a capture without mounts of its own
            enter = None
        return cls(enter, inside, KernelState.now(), left_running.new_mark())

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the setup must get, so that its processes are known."""
        return {left_running.MARK: self._mark}

    def after(
        self,
        reads: Reads,
        *,
        mentions: Sequence[str] = (),
        exclusions: Exclusions | None = None,
        ours: Collection[int] = (),
        grace_s: float = 1.0,
    ) -> Found:
        """Look once the setup has ended. `reads` is what `Watch.end` gave; `mentions` are texts that tell what the job
        will use (see `leftovers`); `ours` processes in the namespace that are not the setup's. Forks like `before`.

        Waits up to `grace_s` seconds for processes that are just ending.
        """
        namespace = self._inside.get("namespace") if self._enter is not None else None
        unsafe = left_running.left_running(self._mark, namespace, but=ours, grace_s=grace_s)
        inside = _look(self._enter)
        unsafe += self._mounted(inside)
        unsafe += KernelState.now().changes(self._kernel)
        if reads.complete:
            unsafe += left_in_scratch(reads.outside_writes, mentions)
            unsafe += left_elsewhere(reads.outside_writes, exclusions or Exclusions())
        else:
            unsafe += self._new_in_scratch(inside, mentions)
        notes = [
            f"it added the {kind} {name}"
            for kind, key in (("user", "users"), ("group", "groups"))
            for name in sorted({*inside.get(key, ())} - {*self._inside.get(key, ())})
        ]
        return Found(tuple(unsafe), tuple(notes))

    def _mounted(self, inside: Mapping[str, Any]) -> list[str]:
        before, after = ({tuple(row) for row in look.get("mounts", ())} for look in (self._inside, inside))
        # What the host mounts or unmounts meanwhile shows up inside too.
        host = {tuple(row) for row in _mounts()} if self._enter is not None else set()
        made = [f"it mounted {kind} on {path}" for path, kind, *_ in sorted(after - before - host)]
        gone = [f"it unmounted {path}" for path, *_ in sorted((before - after) & host)] if after else []
        return made + gone

    def _new_in_scratch(self, inside: Mapping[str, Any], mentions: Sequence[str]) -> list[str]:
        """Without a watch nobody knows who left what: only what surely matters counts."""
        before = {*map(tuple, self._inside.get("scratch", ()))}
        new = sorted({*map(tuple, inside.get("scratch", ()))} - before)
        return [
            f"it installed into {path}, which is not kept: use another folder"
            for path, is_prefix in new
            if is_prefix or is_mentioned(path, mentions)
        ]


def _look(enter: Enter | None) -> Mapping[str, Any]:
    """What can be seen where the setup runs; empty when nothing can."""
    if enter is None:
        return _seen()
    answer, report = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _tell(enter, report)
    os.close(report)
    data, end = b"", time.monotonic() + LOOK_S
    try:
        while select.select([answer], [], [], max(0.0, end - time.monotonic()))[0]:
            piece = os.read(answer, 1 << 20)
            data += piece
            if not piece or len(data) > _MAX_LOOK_BYTES:
                break
    finally:
        os.close(answer)
        end_child(pid)
    try:
        said: Mapping[str, Any] = json.loads(data)
    except ValueError:
        return {}
    return said


def _tell(enter: Enter, report: int) -> NoReturn:
    try:
        enter()
        with os.fdopen(report, "wb") as pipe:
            pipe.write(json.dumps(_seen()).encode())
    finally:
        os._exit(0)  # nothing may unwind into the parent's code


def _seen() -> dict[str, Any]:
    return {
        "namespace": _namespace(),
        "mounts": _mounts(),
        "users": _names("/etc/passwd"),
        "groups": _names("/etc/group"),
        "scratch": [
            (f"{folder}/{name}", any(Path(folder, name, file).exists() for file in _PREFIX_FILES))
            for folder in SCRATCH
            for name in _listed(folder)
        ],
    }


def _namespace() -> int:
    return Path("/proc/self/ns/mnt").stat().st_ino


def _mounts() -> list[tuple[str, str, str, str]]:
    return [(row.path, row.kind, row.device, row.root) for row in mount_table()]


def _names(path: str) -> list[str]:
    try:
        return [line.partition(":")[0] for line in Path(path).read_text(errors="replace").splitlines() if line]
    except OSError:
        return []


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names
    except OSError:
        return []
