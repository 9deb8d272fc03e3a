"""See which files a setup opens, so that a snapshot whose key does not know one of them is not trusted.

A process of our own looks at the mounts of the capture's private mount namespace with fanotify: only what runs in that
namespace opens files through them, so that the setup's accesses are told from everybody else's without asking who it
was. It also sees what the setup writes to places that are not captured. What it cannot see: files that were only looked
at (stat, listings) and mounts that the setup itself makes.

Where nobody may watch, `Reads.complete` is False and `why` tells: the snapshot is then "unobserved".
Who calls: whoever runs a setup in a capture.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bootseer.env.capturing import watching
from bootseer.mounts.process import end_child

READY_S = 10.0
END_S = 60.0
_MAX_REPORT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Reads:
    """What a setup read and wrote, as paths in its own view with all symbolic links resolved."""

    paths: frozenset[str]
    """Files that it opened and that still exist, without those that it wrote outside of the capture. Files that it
    wrote inside are among them: the capture knows them."""
    outside_writes: tuple[str, ...]
    """Files that it wrote on local mounts that are not captured and that still exist, sorted."""
    complete: bool
    """Whether nothing was missed."""
    why: str = ""
    """Why it is not complete, for people."""


def unobserved(why: str) -> Reads:
    """The answer where nobody watched."""
    return Reads(frozenset(), (), complete=False, why=why)


class Watch:
    """A running watch. Always `end` it."""

    def __init__(self, pid: int, answers: int, stop: int) -> None:
        self.pid = pid
        """The watching process, in the capture's namespace but not of the setup; 0 if there is none."""
        self._answers = answers
        self._stop = stop
        self._why: str | None = None
        """Why it does not watch; None: it has not said yet."""
        self._reads: Reads | None = None

    @classmethod
    def begin(
        cls,
        captured: Sequence[str],
        *,
        real: Sequence[str] = (),
        enter: Callable[[], None],
        below: str = "",
        ready: Callable[[], object] | None = None,
        deadline_s: float = READY_S,
    ) -> Watch:
        """Watch from now on all mounts that are there after `enter`, which runs in the watching process.

        `captured` are mount points whose writes the capture sees (`Capture.points`), `real` folders that no snapshot
        holds (`Capture.real`): there only what is written to scratch folders is of interest. Where `enter` leads to no
        other mounts than ours, nobody watches: everybody's accesses would be seen. Forks: call it while this process
        has one thread. Never raises: `end` tells why nobody watched.

        `below` is where a container's root is being made: only mounts below it are watched, and paths are the
        container's. `ready` runs in the watching process once it watches, or cannot; with it nothing waits for that
        here, as `enter` may wait for the container.
        """
        parent = os.getpid()
        answers, report = os.pipe2(os.O_CLOEXEC)
        order, stop = os.pipe2(os.O_CLOEXEC)
        watch = cls(0, answers, stop)
        try:
            watch.pid = os.fork()
            if watch.pid == 0:
                watching.run(parent, captured, real, enter, report, order, below=below, ready=ready)
        except OSError as error:
            watch._why = f"the watching process could not be started: {error.strerror}"
            watch._kill()
            return watch
        finally:
            os.close(report)
            os.close(order)
        if ready is None:
            watch._begun(deadline_s)
        return watch

    def _begun(self, deadline_s: float) -> None:
        try:
            self._why = str(json.loads(self._line(time.monotonic() + deadline_s))["why"])
        except (OSError, ValueError) as error:
            self._why = f"the watching process could not begin: {error}"
        if self._why:
            self._kill()

    def end(self, *, deadline_s: float = END_S) -> Reads:
        """What the setup has read and written until now, or until the first call. Raises nothing."""
        if self._why is None:
            self._begun(0.0)  # what it was to watch has ended
        if self._reads is None:
            self._reads = unobserved(self._why) if self._why else self._asked(deadline_s)
        return self._reads

    def _asked(self, deadline_s: float) -> Reads:
        os.close(self._stop)
        self._stop = -1
        try:
            said = json.loads(self._line(time.monotonic() + deadline_s))
        except (OSError, ValueError) as error:
            return unobserved(f"the watching process gave no answer: {error}")
        finally:
            self._kill()
        return Reads(frozenset(said["read"]), tuple(said["written"]), not said["why"], said["why"])

    def _line(self, deadline: float) -> bytes:
        pieces, size = [], 0
        while select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(self._answers, 1 << 20)
            pieces.append(piece)
            size += len(piece)
            if piece.endswith(b"\n"):
                return b"".join(pieces)
            if not piece:
                raise OSError("it has died")
            if size > _MAX_REPORT_BYTES:
                raise OSError("its answer is too long")
        raise OSError("it took too long")

    def _kill(self) -> None:
        for file in (self._answers, self._stop):
            if file >= 0:
                os.close(file)
        self._answers = self._stop = -1
        if self.pid:
            end_child(self.pid)
        self.pid = 0
