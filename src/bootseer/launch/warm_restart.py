"""`bootseer run --restarts --warm`: the next launcher is forked from the warm parent that a dead launcher left.

When the launcher dies, its warm parent (`hook.warm_parent`) becomes a child of this process, which is a subreaper, and
connects to it. The new launcher, forked by `clone(CLONE_PARENT)`, is then a child of this process, too, as `waitpid`
needs it, and has a warm parent from its start on: neither it nor its ranks repeat an import. In a container this
process is `launch.inside`: `bootseer run` outside cannot adopt the container's processes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bootseer.hook import programs
from bootseer.hook.warm_launcher import EVENT, RefusedError, ask
from bootseer.io import proc
from bootseer.launch import process_snapshot
from bootseer.launch.supervise import PR_SET_CHILD_SUBREAPER, leads_group, log, prctl, say
from bootseer.trace.event import INSTANT

if TYPE_CHECKING:
    from bootseer.trace.tracer import Tracer

STAGE = "model_initialization.restore_process"
_READY_S = 60.0
"""The waiting warm parent has imported everything, and signals wait for its answer."""


class WarmRestart:
    """The waiting warm parents of one command."""

    def __init__(self, tracer: Tracer, span: str) -> None:
        """`span`: the parent of the events, and the run's id."""
        self._tracer, self._span = tracer, span
        self._waiting: dict[int, socket.socket] = {}
        self._restored: dict[str, Any] = {}
        """For the request to the warm parent that was restored."""
        self._images = ""
        self._basis: Any = None
        """Of the process snapshot; None without it."""
        self._socket: socket.socket | None = None
        try:
            if not prctl(PR_SET_CHILD_SUBREAPER, 1):
                return
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            self._socket.bind(programs.restart_address(span, os.getpid()))
            self._socket.listen(64)
        except (ImportError, OSError, AttributeError) as error:
            log(__name__, "restarts are not warm: %s", error)
            self.close()

    def restore(
        self, folder: str, command: Sequence[str], env: Mapping[str, str], enter: Callable[[], None] | None
    ) -> None:
        """Let the next launcher be forked from the warm parent whose process snapshot is in `folder`, if there is one.
        Without it the command is started as before, with the reason in an event."""
        self._images = os.path.join(folder, process_snapshot.RESTORED)
        if self._socket is None:
            return
        began_ns = time.monotonic_ns()
        try:
            found = process_snapshot.restore(folder, command, env, enter)
        except process_snapshot.SnapshotError as error:
            attrs = {"program": "the launcher", "why_not": f"no process snapshot: {error}"[:300]}
            self._tracer.emit(EVENT, INSTANT, parent=self._span, attrs=attrs)
            return
        if found is not None:
            pid, end, self._restored, self._basis = found
            self._waiting[pid] = end
            self._tracer.emit_ended(STAGE, began_ns)

    def record(
        self, folder: str, command: Sequence[str], env: Mapping[str, str], enter: Callable[[], None] | None
    ) -> None:
        """Make a process snapshot for later starts of the command in `folder`, unless this one was started from one
        that its ranks could use."""
        if os.path.isdir(os.path.join(folder, process_snapshot.FETCHED)):
            return
        try:
            process_snapshot.record(folder, command, env, enter, self._basis)
        except process_snapshot.SnapshotError as error:
            say(f"no process snapshot was made: {error}")

    def pids(self) -> set[int]:
        """Process ids of the waiting warm parents."""
        while self._socket is not None:
            try:
                end, _ = self._socket.accept()
            except OSError:
                break
            pid, uid = programs.peer(end)
            if uid == os.getuid():
                self._waiting[pid] = end
            else:
                end.close()
        return set(self._waiting)

    def spawn(self, env: Mapping[str, str], streams: Mapping[int, int | None], own_group: bool | None) -> int | None:
        """Fork the launcher with this environment; its pid, or None without a warm parent that agrees.
        `own_group` as in `supervise.spawn`."""
        self.pids()
        pid: int | None = None
        why_not, facts = "", dict[str, Any]()
        while self._waiting:
            parent, end = self._waiting.popitem()
            ours = proc.parent(parent) == os.getpid()
            if ours and pid is None and not why_not:
                try:
                    facts = self._ask(end, env, streams, leads_group() if own_group is None else own_group)
                    pid = facts.pop("pid")
                except RefusedError as refused:
                    why_not, facts = str(refused), dict(refused.facts)
                except Exception as error:  # no failure here may prevent the restart by exec
                    why_not = f"{type(error).__name__}: {error}"
            elif not ours:
                with contextlib.suppress(OSError):  # the reason why it has ended
                    why_not = why_not or os.fsdecode(end.recv(1000, socket.MSG_DONTWAIT))
            end.close()  # ends it, unless its copy has taken its place
            if self._restored:
                self._restored = {}
                process_snapshot.remove(self._images)  # before the kernel has written them to the disk
            if ours:
                proc.end_child(parent)
        if pid is None:
            self._basis = None
        if pid is not None or why_not:
            attrs = {**facts, "program": "the launcher", **({"why_not": why_not[:300]} if why_not else {"child": pid})}
            self._tracer.emit(EVENT, INSTANT, parent=self._span, attrs=attrs)
        return pid

    def _ask(
        self, end: socket.socket, env: Mapping[str, str], streams: Mapping[int, int | None], own_group: bool
    ) -> dict[str, Any]:
        wanted = {number: number for number in proc.open_files() if number < 3 or os.get_inheritable(number)}
        wanted |= {place: number for place, number in streams.items() if number is not None}
        request = {
            "env": {os.fsencode(name): os.fsencode(value) for name, value in env.items()},
            "places": list(wanted),
            "session": False,
            "group": 0 if own_group else -1,
            "umask": -1,
            "mask": [],
            **self._restored,
        }
        return ask(end, request, list(wanted.values()), _READY_S)

    def close(self) -> None:
        """Let the waiting warm parents end."""
        self.pids()
        for end in (*self._waiting.values(), self._socket):
            if end is not None:
                end.close()
        self._waiting.clear()
        self._socket = None
