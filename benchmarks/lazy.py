"""BootSeer's ways to start a container from an image in a registry; others are in `competitors`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import node

from bootseer.mounts import control
from bootseer.mounts.state import Runtime

_BOOTSEER = str(Path(sys.executable).parent / "bootseer")
_STREAMED_S = 120.0


class Lazy:
    """`bootseer image run` on a new node: an empty cache, no mounts."""

    def __init__(self, folder: Path, host: str, *, loading: str = "lazy", workload: str = "work") -> None:
        """`loading` is the option of `image run`. `workload` names the hot set that is used and recorded: by this name,
        not by the command, so it can be that of other work, or a new one."""
        self._folder = folder
        self._loading = loading
        self.workload = workload
        self.env: Mapping[str, str] = {
            **os.environ,
            "BOOTSEER_CACHE": str(folder / "cache"),
            "BOOTSEER_PLAIN_HTTP": host,
            "BOOTSEER_RUNTIME": str(folder / "runtime"),
        }

    def prepare(self) -> None:
        self._folder.mkdir()

    def start(self, reference: str, command: Sequence[str]) -> list[list[str]]:
        options = ["--loading", self._loading, "--workload", self.workload, "--entrypoint", "none"]
        return [[_BOOTSEER, "image", "run", *options, reference, "--", *command]]

    def again(self, reference: str, command: Sequence[str]) -> list[list[str]]:
        return self.start(reference, command)

    def clean(self) -> None:
        # Complete layers stay mounted for the next start.
        self._ask("cache", "prune", "--to", "0")
        shutil.rmtree(self._folder)

    def record(self, reference: str, work: str) -> None:
        """Start the work once on a cold node, so that the next start has a hot set."""
        self.prepare()
        try:
            node.start(self.start(reference, node.workload(work)), self.env, set(), lambda: None)
        finally:
            self.clean()

    def hot_set(self, reference: str) -> dict[str, Any]:
        """The output of `image hotset show` for the workload. The node must be prepared."""
        rows = self._ask("image", "hotset", "show", "--json", reference)["hotsets"]
        (row,) = [row for row in rows if row["workload"] == self.workload]
        return dict(row)

    def wait_until_streamed(self) -> None:
        """Wait until the running container's daemon has the whole image in the cache.

        The rest is fetched after training has begun, which the hook of a job would report.
        """
        runtime = Runtime(Path(self.env["BOOTSEER_RUNTIME"]))
        for state in runtime.all():
            if state.daemon is not None:
                control.send_request(runtime.folder(state), "began")
        deadline = time.monotonic() + _STREAMED_S
        while any(mount["here"] < 1 for mount in self._ask("image", "list", "--json")["mounts"]):
            if time.monotonic() > deadline:
                raise RuntimeError("the image was not streamed in time")
            time.sleep(1)

    def _ask(self, *words: str) -> Any:
        done = subprocess.run([_BOOTSEER, *words], env=self.env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"bootseer {' '.join(words)}: {done.stderr.strip()}")
        return json.loads(done.stdout) if "--json" in words else None


def convert(reference: str, host: str) -> None:
    """Convert the image; block files are stored in its repository."""
    env = {**os.environ, "BOOTSEER_PLAIN_HTTP": host}
    subprocess.run([_BOOTSEER, "image", "convert", reference], env=env, check=True, capture_output=True)
