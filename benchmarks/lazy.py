"""BootSeer's own ways to start a container from an image in a registry, next to those of `peers`.

A hot set belongs to an image and to a workload, and the text behind `python3 -c` makes the workload: another label is
another workload, which has no record yet. What the text executes is an argument, which does not count, so a record can
be made with other work than the one that is measured.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import node

_BOOTSEER = str(Path(sys.executable).parent / "bootseer")


class Lazy:
    """`bootseer image run` on a node of its own: an empty cache, nothing mounted."""

    def __init__(self, folder: Path, host: str, *, pull: bool = False) -> None:
        """`pull` gets the whole image first; otherwise blocks come when they are read, or were recorded."""
        self._folder = folder
        self._pull = pull
        self.env: Mapping[str, str] = {
            **os.environ,
            "BOOTSEER_CACHE": str(folder / "cache"),
            "BOOTSEER_PLAIN_HTTP": host,
            "BOOTSEER_RUNTIME": str(folder / "runtime"),
        }

    def prepare(self) -> None:
        (self._folder / "runtime").mkdir(parents=True)

    def start(self, reference: str, command: Sequence[str]) -> list[list[str]]:
        loading = "pull" if self._pull else "lazy"
        return [[_BOOTSEER, "image", "run", "--loading", loading, "--entrypoint", "", reference, "--", *command]]

    def again(self, reference: str, command: Sequence[str]) -> list[list[str]]:
        return self.start(reference, command)

    def clean(self) -> None:
        subprocess.run([_BOOTSEER, "image", "umount", "--all"], env=self.env, check=True, capture_output=True)
        shutil.rmtree(self._folder)


def convert(reference: str, host: str) -> None:
    """Attach block files to the image, in its own repository."""
    env = {**os.environ, "BOOTSEER_PLAIN_HTTP": host}
    subprocess.run([_BOOTSEER, "image", "convert", reference], env=env, check=True, capture_output=True)


def record(way: Lazy, reference: str, label: str, work: str) -> None:
    """Start the work once on a cold node, so that the next start of this label has a hot set."""
    way.prepare()
    try:
        for step in way.start(reference, node.workload(work, label)):
            subprocess.run(step, env=way.env, check=True, capture_output=True)
    finally:
        way.clean()
