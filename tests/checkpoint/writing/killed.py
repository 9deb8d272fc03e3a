"""A program that replaces a file again and again, and is killed at the first step, at the second, and so on.

    python killed.py ROOT replayed|stream

Each time in a folder ROOT/N of its own, until a writer comes to its end. Run by `test_killed`.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from pathlib import Path

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.places.folder import FolderPlace
from bootseer.checkpoint.policy import Policy
from bootseer.checkpoint.writing.source import BytesSource
from bootseer.checkpoint.writing.writing import Writing
from stepwise_place import StepwisePlace

MIB = 1 << 20
POLICY = Policy(stripes=2, parity=True, part_bytes=MIB, min_bytes_per_stripe=MIB)


def content(seed: int) -> bytes:
    """Three chunks and a half, other ones for each seed."""
    return b"".join(bytes([seed + chunk]) * MIB for chunk in range(3)) + bytes([seed]) * (MIB // 2)


def write(root: Path, kind: str, seed: int, kill_at: int) -> None:
    left = [kill_at]
    lock = threading.Lock()

    def count(step: str, path: str) -> None:
        with lock:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    place = StepwisePlace(FolderPlace(root))
    place.before = count
    writing = Writing(Files(place), spool=root / "spool")  # type: ignore[arg-type]
    if kind == "replayed":
        writing.write_file("job/file", BytesSource(content(seed)), policy=POLICY)
        return
    writer = writing.open("job/file", policy=POLICY)
    data = content(seed)
    for offset in range(0, len(data), MIB // 4):
        writer.write_at(offset, data[offset : offset + MIB // 4])
    writer.commit()


def main(root: Path, kind: str) -> None:
    for number in itertools.count(1):
        folder = root / str(number)
        (folder / "job").mkdir(parents=True)
        for seed, kill_at in ((0, 0), (100, number)):  # the second one replaces the first
            pid = os.fork()
            if pid == 0:
                write(folder, kind, seed, kill_at)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert code in (0, -signal.SIGKILL), code
        if code == 0:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
