"""The text as bytes, and the part of it that each rank reads at each step.

The default text is the source code of Python's standard library: a few megabytes of real text, present on every machine
that can run this job.
"""

import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
from errors import JobError
from torch import Tensor

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def read_text(path: Path | None, limit_bytes: int) -> bytes:
    """The first `limit_bytes` of the file, or of the sources of the standard library."""
    try:
        if path is not None:
            with path.open("rb") as file:
                return file.read(limit_bytes)
        return _standard_library(Path(sysconfig.get_path("stdlib")), limit_bytes)
    except OSError as error:
        raise JobError(f"cannot read the text: {error.strerror}: {error.filename}; name a file with --text") from None


def _standard_library(root: Path, limit_bytes: int) -> bytes:
    text = bytearray()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _NOT_LIBRARY)
        for name in sorted(names):
            if name.endswith(".py"):
                text += Path(folder, name).read_bytes()
                if len(text) >= limit_bytes:
                    return bytes(text[:limit_bytes])
    return bytes(text)


class Batches:
    """Windows of the text in a shuffled order that depends on the seed alone.

    The global order is divided among the ranks: no two read the same window in one epoch, and a job that resumes at
    step N reads what it would have read without the interruption.
    """

    def __init__(self, text: bytes, *, sequence: int, batch: int, seed: int, rank: int, world: int) -> None:
        num_windows = (len(text) - 1) // sequence
        if num_windows < batch * world:
            raise JobError(
                f"the text is too short: {len(text)} bytes, {batch * world * sequence + 1} are needed for one step; "
                "name a longer --text or use a smaller --batch"
            )
        self._bytes = np.frombuffer(text, dtype=np.uint8)
        self._order = np.random.default_rng(seed).permutation(num_windows)
        self._sequence, self._batch, self._rank, self._world = sequence, batch, rank, world

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Bytes and the bytes that follow them, each (batch, sequence)."""
        first = (step * self._world + self._rank) * self._batch
        windows = self._order[np.arange(first, first + self._batch) % len(self._order)]
        index = windows[:, None] * self._sequence + np.arange(self._sequence + 1)
        window = torch.from_numpy(self._bytes[index].astype(np.int64))
        return window[:, :-1], window[:, 1:]
