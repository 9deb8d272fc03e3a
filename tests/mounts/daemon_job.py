"""A program that starts a mount daemon: `daemon_job.py FOLDER IMAGE [LIFELINE]`.

The image is served from the local file. Reads of its last MiB never return. With the file `broken` next to the image
`open` fails, with `hang` it hangs, with `bug` `close` fails and with `endless` it never comes; with `recover` a killed
daemon is restarted, and then all reads return. Prints the daemon's process ID, then waits for a line on standard input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

from bootseer.errors import AccessError, BootseerError
from bootseer.fetch.pending import Done
from bootseer.fuse.filesystem import Cancel, Data
from bootseer.fuse.session import Session, mount
from bootseer.mounts.daemon import start_daemon
from bootseer.mounts.serve import DaemonSpec, OnError, Served
from bootseer.mounts.trees import LazyFiles

HELD_BYTES = 1 << 20


class LocalSource:
    """A local file instead of a fetcher; each answer comes from a new thread."""

    def __init__(self, path: Path, held_bytes: int = HELD_BYTES) -> None:
        self.held_bytes = held_bytes
        self.file = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.file).st_size
        self.closed = False

    def read(self, file: int, offset: int, length: int, done: Done, deadline_s: float | None = None) -> Cancel | None:
        if offset + length > self.size - self.held_bytes:
            return lambda: None  # never answered
        data = os.pread(self.file, length, offset)
        threading.Thread(target=done, args=(data,)).start()
        return None

    def read_blocking(self, file: int, offset: int, length: int) -> Data:
        return os.pread(self.file, length, offset)

    def close(self) -> None:
        self.closed = True


class FileRecorder:
    """Creates one file when it ends, and another when it is handed over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def end(self) -> None:
        (self.folder / "ended").touch()

    def close(self) -> None:
        (self.folder / "handed over").touch()


class ServedFile(Served):
    """One image."""

    def __init__(self, image: Path, held_bytes: int, recorder: FileRecorder | None) -> None:
        self.recorder = recorder
        self.source = LocalSource(image, held_bytes)
        self._bug, self._endless = image.with_name("bug"), image.with_name("endless")

    def mount(self, target: Path, label: str, on_error: OnError, device: int | None) -> Session:
        tree = LazyFiles(self.source, [SimpleNamespace(identity="image", size_bytes=self.source.size)])
        return mount(tree, target, label, on_error, device)

    def status(self) -> dict[str, object]:
        return {"figure": 42}

    def finish_writes(self) -> dict[str, object]:
        if self._endless.exists():
            threading.Event().wait()
        return {}

    def close(self) -> None:
        self.source.close()
        if self._bug.exists():
            raise RuntimeError("unforeseen")


def main(folder: Path, image: Path, lifeline: bool) -> None:
    def serve(on_error: OnError) -> Served:
        if (image.parent / "broken").exists():
            raise AccessError("the registry refuses")
        if (image.parent / "hang").exists():
            threading.Event().wait()
        return ServedFile(image, HELD_BYTES, FileRecorder(image.parent))

    def reopen(on_error: OnError) -> Served:
        return ServedFile(image, 0, None)

    os.set_inheritable(os.open(image.parent / "lease", os.O_RDWR | os.O_CREAT), True)
    spec = DaemonSpec(folder, serve, lifeline=lifeline, reopen=reopen if (image.parent / "recover").exists() else None)
    try:
        daemon = start_daemon(spec, deadline_s=1.0 if (image.parent / "hang").exists() else 20.0)
    except BootseerError as error:
        said: dict[str, object] = {"error": str(error), "kind": type(error).__name__}
    else:
        said = {"pid": daemon.process.pid, "started": daemon.process.started}
    print(json.dumps(said), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), len(sys.argv) > 3)
