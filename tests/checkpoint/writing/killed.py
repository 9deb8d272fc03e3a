"""A program that replaces a file and is killed at the first step, then at the second, and so on.

    python killed.py ROOT replayed|stream

Each write is in a new folder ROOT/N, until one completes. Run by `test_killed`.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.writing.writing import Writing
from bootseer.places import open_place
from bootseer.places.folder import FolderPlace
from checkpoint.striped_files import in_memory
from killed_steps import is_killed, kill_at
from stepwise_place import StepwisePlace

MIB = 1 << 20
POLICY = Policy(stripes=2, parity=True, part_bytes=MIB, min_bytes_per_stripe=MIB)


def content(seed: int) -> bytes:
    """Three and a half chunks, different for each seed."""
    return b"".join(bytes([seed + chunk]) * MIB for chunk in range(3)) + bytes([seed]) * (MIB // 2)


def write(root: Path, kind: str, seed: int, step: int) -> None:
    place = StepwisePlace(FolderPlace(root))
    place.before = kill_at(step)
    writing = Writing(Files(place), spool=root / "spool")  # type: ignore[arg-type]
    if kind == "replayed":
        writing.write_file("job/file", *in_memory(content(seed)), policy=POLICY)
        return
    writer = writing.open("job/file", policy=POLICY)
    data = content(seed)
    for offset in range(0, len(data), MIB // 4):
        writer.write_at(offset, data[offset : offset + MIB // 4])
    writer.commit()


def write_until_killed(pipe: Connection, uri: str, spool: Path) -> None:
    """Write a file of 12 MiB repeatedly, and send each number when its content is published."""
    writing = Writing(Files(open_place(uri)), spool=spool)
    policy = Policy(stripes=3, part_bytes=8 * MIB, min_bytes_per_stripe=MIB)
    for number in itertools.count():
        writer = writing.open("killed", policy=policy)
        for offset in range(0, 12 * MIB, MIB // 4):
            writer.write_at(offset, bytes([number % 256]) * (MIB // 4))
        writer.commit()
        pipe.send(number)


def main(root: Path, kind: str) -> None:
    first = root.with_name("first")
    (first / "job").mkdir(parents=True)
    assert not is_killed(partial(write, first, kind, 0, 0))
    for number in itertools.count(1):
        folder = root / str(number)
        shutil.copytree(first, folder)
        if not is_killed(partial(write, folder, kind, 100, number)):  # it replaces the first
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
