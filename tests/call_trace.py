"""Records which functions of BootSeer a walk through the product calls, in all its threads and processes.

`CallTrace.recording()` records this process, and the programs and daemons that `python call_trace.py` started:

    trace = CallTrace(tmp_path)
    subprocess.run([*trace.bootseer, "image", "mount", ...])  # nothing is recorded yet
    with trace.recording():
        os.pread(file, 4096, 0)
    calls = trace.calls()
"""

from __future__ import annotations

import inspect
import mmap
import os
import runpy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import bootseer

_SOURCES = f"{Path(bootseer.__file__).parent}/"


class Call(NamedTuple):
    """A call of a function, or one step of a generator."""

    module: str
    """File below src/bootseer."""
    function: str


class CallTrace:
    """A trace in a folder. Programs of the same trace share a file with one byte, which says whether to record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = str(folder / "calls")
        switch = folder / "switch"
        if not switch.exists():
            switch.write_bytes(b"\0")
        # Mapped: a daemon closes the descriptors of its parent.
        with switch.open("r+b") as file:
            self._switch = mmap.mmap(file.fileno(), 1)

    @property
    def bootseer(self) -> list[str]:
        """Begin of a command that runs `bootseer` with this trace."""
        return [sys.executable, __file__, str(self.folder)]

    def follow(self) -> None:
        """Follow this thread, its later threads, and the forks of all of them."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._switch[0] = 1
        try:
            yield
        finally:
            self._switch[0] = 0

    def calls(self) -> list[Call]:
        """What was recorded, in order."""
        log = Path(self._log)
        return [Call(*line.split("\t")) for line in log.read_text().splitlines()] if log.exists() else []

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not self._switch[0] or not code.co_filename.startswith(_SOURCES):
            return
        if not code.co_flags & inspect.CO_OPTIMIZED:  # the body of a module or class: an import
            return
        line = f"{code.co_filename.removeprefix(_SOURCES)}\t{code.co_qualname}\n"
        # Opened again for each line: a daemon may close any descriptor.
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(log, line.encode())
        finally:
            os.close(log)


def main() -> None:
    folder, *words = sys.argv[1:]
    sys.argv = ["bootseer", *words]
    sys.path[0] = str(Path.cwd())  # like `python -m`
    CallTrace(Path(folder)).follow()
    runpy.run_module("bootseer", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
