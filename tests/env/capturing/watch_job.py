"""Run a setup in a capture and print its reads and effects as JSON. A separate process with its own mount and UTS
namespaces, so that a defect cannot change the machine. Reads its parameters from standard input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bootseer.env.capturing.capture import WAYS, open_capture
from bootseer.env.capturing.effects import Baseline
from bootseer.env.capturing.leftovers import unaccounted
from bootseer.fuse.syscalls import check, libc
from bootseer.launch.environment.watch import Watch
from bootseer.mounts import kernel
from bootseer.mounts.user_namespace import may_mount
from in_capture import run_in

_CLONE_NEWUTS = 0x0400_0000
_MS_REC, _MS_SHARED = 1 << 14, 1 << 20


def beside(shell: str) -> None:
    """Run a command on the machine that is not part of the setup."""
    if shell:
        subprocess.run(shell, shell=True, check=True)  # noqa: S602 - the test's own words


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.stdin.readline())
    if may_mount():
        kernel.unshare_mounts()
        check(libc.unshare(_CLONE_NEWUTS), "own host name")
        check(libc.mount(None, b"/", None, _MS_REC | _MS_SHARED, None), "share mounts")
        for place, folder in spec["binds"].items():
            kernel.attach(kernel.clone_mount(Path(folder)), Path(place))
        os.chdir(spec["cwd"])
    beside(spec.get("prepare", ""))
    with open_capture(
        Path(spec["captures"]), ways=WAYS if spec["way"] == "auto" else (spec["way"],), env=spec["env"], own=spec["own"]
    ) as capture:
        baseline = Baseline.take(capture.enter)
        log = Path(os.devnull)
        watch = Watch.begin(capture.points, passthrough=capture.passthrough, enter=capture.enter, log=log)
        env = {**spec["env"], **baseline.environment}
        beside(spec.get("beside", ""))
        code = run_in(capture, ["/bin/sh", "-ec", spec["script"]], env, stdout=2)
        watching = watch.background.pid
        if spec.get("kill_the_watch"):
            os.kill(watching, 9)
        reads = watch.end()
        mentions = spec.get("mentions", ())
        unsafe, this_time, _ = baseline.side_effects(reads, mentions=mentions, grace_s=spec.get("grace_s", 0.2))
        captured = {change.path for change in capture.changes()}
        base = [os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix), *spec.get("base", ())]
        said = {
            "code": code,
            "way": capture.way,
            "reads": sorted(reads.paths),
            "writes": reads.outside_writes,
            "complete": reads.complete,
            "why": reads.why,
            "unsafe": [*unsafe, *this_time],
            "unaccounted": unaccounted(reads.paths, spec.get("accounted", ()), captured, base),
            "watching": Path(f"/proc/{watching}").exists(),
        }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
