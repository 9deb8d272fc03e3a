"""A program that replaces a checkpoint and is killed at the first step, then at the second, and so on.

    python killed_put.py ROOT folder|file

Each put is in a new folder ROOT/runs/N, until one completes. Run by `test_publish`.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from functools import partial
from pathlib import Path

from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.publish import PutSettings, put_checkpoint
from bootseer.places.folder import FolderPlace
from killed_steps import is_killed, kill_at
from stepwise_place import StepwisePlace

MIB = 1 << 20
POLICY = Policy(stripes=2, part_bytes=MIB, min_bytes_per_stripe=MIB)


def make_source(folder: Path, seed: int) -> None:
    """A checkpoint of two files, of which one is large enough to be striped."""
    folder.mkdir()
    (folder / "model").write_bytes(bytes([seed]) * (2 * MIB + 3))
    (folder / "config").write_bytes(b"%d" % seed)


def put(job: Path, source: Path, name: str, step: int) -> None:
    place = StepwisePlace(FolderPlace(job))
    place.before = kill_at(step)
    put_checkpoint(place, source, name, settings=PutSettings(replace=True, policy=POLICY))  # type: ignore[arg-type]


def main(root: Path, kind: str) -> None:
    for seed in (1, 2):
        make_source(root / f"source{seed}", seed)
    sources = [root / f"source{seed}" / ("model" if kind == "file" else "") for seed in (1, 2)]
    # The first put completes; those that replace it are killed.
    first = root / "first"
    first.mkdir()
    assert not is_killed(partial(put, first, sources[0], "step-1", 0))
    for number in itertools.count(1):
        job = root / "runs" / str(number)
        shutil.copytree(first, job)
        if not is_killed(partial(put, job, sources[1], "step-1", number)):
            return
        if number > 300:
            shutil.rmtree(root)
            raise SystemExit("no put has completed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
