"""A helper process that watches which files a setup opens (`env.capturing.reads`), and since when sockets listen."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bootseer.env.capturing.reads import AccessLog, Reads, not_watched, start_watching
from bootseer.env.processes import listening
from bootseer.errors import BootseerError
from bootseer.launch.background import Background, Send, start_background
from bootseer.launch.supervise import next_signal
from bootseer.mounts.process import die_with

READY_S = 10.0
END_S = 60.0
_PAUSE_S = 0.02
"""Between reads of the events: meanwhile the kernel merges those of the same file."""
_LOOK_S = 0.1
"""Between looks for new sockets."""


class Watch:
    """A running watch; `end` must be called."""

    def __init__(self, background: Background) -> None:
        self.background = background
        """In the capture's namespace, but not of the setup."""
        self._reads: Reads | None = None

    @classmethod
    def begin(
        cls,
        captured: Sequence[str],
        *,
        passthrough: Sequence[str] = (),
        enter: Callable[[], None],
        log: Path,
        below: str = "",
        ready: Callable[[], object] | None = None,
    ) -> Watch:
        """Start to watch all mounts of the namespace that `enter` leads to; `enter` runs in the helper.

        `captured` are mount points whose writes the capture records (`Capture.points`); of `passthrough` folders
        (`Capture.passthrough`) only writes to scratch folders are recorded. Forks: call it while this process has one
        thread. If nothing can be watched, the result of `end` has the reason. Raises `PermanentError` when no process
        can be created.

        `below` is the mount point of a container's root: only mounts below it are watched, and paths are the
        container's. `ready` runs in the helper once it watches, or cannot; with it this call does not wait for the
        helper, as `enter` may wait for the container.
        """
        work = partial(_watch, captured, passthrough, enter, below, ready)
        watch = cls(start_background(work, name="bootseer-reads", log=log))
        if ready is None:
            try:
                watch.background.next_message(READY_S)
            except BootseerError as error:
                watch.background.stop()
                watch._reads = not_watched(str(error))
        return watch

    def end(self) -> Reads:
        """The files that the setup has read and written until the first call. Raises nothing."""
        if self._reads is None:
            self.background.stop(END_S)
            parts = self.background.messages()
            reason = next(
                (str(part["error"]) for part in parts if "error" in part),
                f"the watching process has died, or did not report within {END_S:.0f} s",
            )
            self._reads = Reads.of(parts) or not_watched(reason)
        return self._reads


def _watch(
    captured: Sequence[str],
    passthrough: Sequence[str],
    enter: Callable[[], None],
    below: str,
    ready: Callable[[], object] | None,
    send: Send,
) -> None:
    gc.freeze()  # a collection would write to all objects of the parent, and so copy their pages
    parent = os.getppid()
    try:
        group, table = start_watching(captured, passthrough, enter, below)
        die_with(parent, signal.SIGTERM)
        # Waited for instead of handled: an event that was read is never lost by an exception.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        accesses = AccessLog(group)
    except Exception:
        if ready is not None:
            ready()
        raise
    send({"watching": True})
    if ready is not None:
        ready()
    before, since, look_s = {*listening()}, dict[int, float](), 0.0
    ended = None
    while ended is None:
        ended = next_signal({signal.SIGTERM}, _PAUSE_S)
        accesses.drain()
        now_s = time.monotonic()
        if not below and (now_s >= look_s or ended is not None):  # what a container leaves running is not recorded
            since |= dict.fromkeys(listening().keys() - before - since.keys(), now_s)
            # Of a machine with many sockets the kernel's tables are long: at most 5 % of a core.
            look_s = now_s + max(_LOOK_S, 20 * (time.monotonic() - now_s))
    send({"listening": [*since.items()]})
    for part in accesses.report(table, passthrough):
        send(part)
