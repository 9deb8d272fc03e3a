"""Open a capture, run a shell script in it and print its changes as JSON.

A separate process with its own mount namespace, so that a test can kill it and a defect cannot change the machine's
folders. Reads its parameters from standard input.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from bootseer.env.capturing.capture import WAYS, open_capture
from bootseer.env.capturing.capture_base import Capture
from bootseer.mounts import kernel
from bootseer.mounts.user_namespace import may_mount
from in_capture import run_in


def described(change: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"action": change.action.value, "opaque": change.opaque, "before": change.before}
    if change.source:
        status = os.lstat(change.source)
        found |= {
            "kind": stat.S_IFMT(status.st_mode),
            "mode": stat.S_IMODE(status.st_mode),
            "owner": [status.st_uid, status.st_gid],
            "inode": status.st_ino,
            "blocks": status.st_blocks,
            "size": status.st_size,
            "xattrs": sorted(os.listxattr(change.source, follow_symlinks=False)),
        }
        if stat.S_ISREG(status.st_mode) and status.st_size < 1000:
            found["text"] = Path(change.source).read_bytes().decode("utf-8", "replace")
        if stat.S_ISLNK(status.st_mode):
            found["text"] = str(Path(change.source).readlink())
    return found


def report(capture: Capture, code: int) -> dict[str, Any]:
    return {
        "way": capture.way,
        "refused": dict(capture.rejected),
        "points": capture.points,
        "notes": capture.notes,
        "trouble": capture.failure_hint(),
        "code": code,
        "changes": {change.path: described(change) for change in capture.changes()},
        "left_out": capture.left_out.paths,
        "missed": capture.left_out.warnings,
    }


def main() -> None:
    spec = json.loads(sys.stdin.readline())
    if may_mount():
        kernel.unshare_mounts()
        for place, folder in spec["binds"].items():
            kernel.attach(kernel.clone_mount(Path(folder)), Path(place))
        os.chdir(spec["cwd"])
    said: list[str] = []
    captures = Path(spec["captures"])
    with open_capture(
        captures,
        say=said.append,
        ways=WAYS if spec["way"] == "auto" else (spec["way"],),
        env=spec["env"],
        own=spec["own"],
        folders=spec["folders"],
    ) as capture:
        code = run_in(capture, ["/bin/sh", "-ec", spec["script"]], spec["env"], stdout=2)
        print(json.dumps(report(capture, code) | {"said": said}))


if __name__ == "__main__":
    main()
