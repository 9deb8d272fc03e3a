"""What every capture can do, whichever way it captures: see `capture`, which opens them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.capturing.walk import LeftOut
from bootseer.env.changes import Change
from bootseer.env.restoring.roots import is_system
from bootseer.errors import PermanentError
from bootseer.fuse.syscalls import libc

Way = Literal["overlay", "user", "scan"]
Stream = int | IO[Any] | None
_PR_SET_PDEATHSIG = 1


def is_not_system(path: str) -> bool:
    """Where `Change.before` is asked for: nobody keeps files of his own in the folders of the system."""
    return not is_system(path)


class Capture(ABC):
    """An open capture. A context manager."""

    way: Way
    refused: Mapping[str, str]
    """Why better ways were not taken: their names, and words."""
    notes: tuple[str, ...] = ()
    """Mounts of the machine that the setup does not see, or whose changes are not captured."""
    points: tuple[str, ...] = ()
    """Folders whose changes are captured, as the setup sees them; what else is mounted below them is not."""
    real: tuple[str, ...] = ()
    """Folders and files inside of them where the setup works on the machine's own, so that changes stay there."""

    def __init__(self, exclusions: Exclusions) -> None:
        self.left_out = LeftOut()
        """What the rules kept out of `changes`, once that was called."""
        self._exclusions = exclusions

    @property
    @abstractmethod
    def root(self) -> Path:
        """The root of the setup's view, for other processes of this user too, until `close`. Absolute symbolic links in
        it still lead to the reader's own root."""

    @abstractmethod
    def enter(self) -> None:
        """For a child between fork and exec: see what the setup sees, with the same user, in the same folder. Raises
        `OSError`. Ask for a death signal (`PR_SET_PDEATHSIG`) afterwards, as the kernel may forget it."""

    @abstractmethod
    def changes(self, *, wants_before: Callable[[str], bool] = is_not_system) -> list[Change]:
        """What is different now, sorted by path; call it when the setup has ended.

        `wants_before` tells for which paths `Change.before` is asked. Raises `PermanentError`.
        """

    @abstractmethod
    def source_of(self, path: str) -> Path:
        """Where the changed version of a path, or of a folder with changes, is to be read: in an upper layer, with
        overlayfs' marks, or the path itself."""

    def trouble(self) -> str:
        """Words about what the capture itself may have to do with a setup that failed; empty for nothing."""
        return ""

    @abstractmethod
    def close(self, *, keep: bool = False) -> None:
        """End it and delete what was captured, unless it is to be kept until the next capture."""

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        *,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> int:
        """Run a program in the setup's view to its end; its exit code, 128+N when signal N killed it. It dies with us.

        Raises `PermanentError` when it cannot be started.
        """
        parent = os.getpid()

        def begin() -> None:
            self.enter()
            libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            code = subprocess.run(
                argv,
                env=env,
                cwd=cwd,
                stdout=stdout,
                stderr=stderr,
                preexec_fn=begin,
                check=False,
            ).returncode
        except (OSError, subprocess.SubprocessError) as error:
            raise PermanentError(f"{argv[0]} cannot be started in the capture: {error}") from error
        return code if code >= 0 else 128 - code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
