"""What every capture can do, whichever way it captures: see `capture`, which opens them."""

from __future__ import annotations

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.capturing.walk import LeftOut
from bootseer.env.changes import Change
from bootseer.env.restoring.roots import is_system, may_be_edited
from bootseer.errors import PermanentError
from bootseer.mounts.process import die_with

Way = Literal["overlay", "user", "scan"]
Stream = int | IO[Any] | None


def may_be_somebodys(path: str) -> bool:
    """Where `Change.before` is asked for: in folders of the system only where people edit files."""
    return not is_system(path) or may_be_edited(path)


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
        self.left_out = LeftOut(exclusions)
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
        `OSError`. Ask for a death signal (`process.die_with`) afterwards, as the kernel may forget it."""

    @abstractmethod
    def changes(
        self, *, wants_before: Callable[[str], bool] = may_be_somebodys, again: Collection[str] = ()
    ) -> list[Change]:
        """What is different now, sorted by path; call it when the setup has ended.

        `wants_before` tells for which paths `Change.before` is asked; `again` is `Walk`'s. Raises `PermanentError`.
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
            die_with(parent)

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
