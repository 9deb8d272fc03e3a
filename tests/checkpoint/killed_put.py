"""A program that puts a checkpoint over another one, and is killed at the first step, at the second, and so on.

    python killed_put.py ROOT folder|file

Each time in a folder ROOT/N of its own, until a put comes to its end. Run by `test_publish`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

from bootseer.checkpoint.places.folder import FolderPlace
from bootseer.checkpoint.policy import Policy
from bootseer.checkpoint.publish import PutSettings, put_checkpoint
from stepwise_place import StepwisePlace

MIB = 1 << 20
POLICY = Policy(stripes=2, part_bytes=MIB, min_bytes_per_stripe=MIB)


def make_source(folder: Path, seed: int) -> None:
    """A checkpoint of two files, one of which becomes stripes."""
    folder.mkdir()
    (folder / "model").write_bytes(bytes([seed]) * (2 * MIB + 3))
    (folder / "config").write_bytes(b"%d" % seed)


def put(job: Path, source: Path, name: str, kill_at: int) -> None:
    left = [kill_at]
    lock = threading.Lock()

    def count(step: str, path: str) -> None:
        with lock:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    place = StepwisePlace(FolderPlace(job))
    place.before = count
    put_checkpoint(place, source, name, settings=PutSettings(replace=True, policy=POLICY))  # type: ignore[arg-type]


def main(root: Path, kind: str) -> None:
    for seed in (1, 2):
        make_source(root / f"source{seed}", seed)
    sources = [root / f"source{seed}" / ("model" if kind == "file" else "") for seed in (1, 2)]
    for number in itertools.count(1):
        job = root / "runs" / str(number)
        job.mkdir(parents=True)
        # The first is put whole; then the same name again, which is killed.
        for source, kill_at in ((sources[0], 0), (sources[1], number)):
            pid = os.fork()
            if pid == 0:
                put(job, source, "step-1", kill_at)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert code in (0, -signal.SIGKILL), code
        if code == 0:
            return
        if number > 300:
            shutil.rmtree(root)
            raise SystemExit("it never ends")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
