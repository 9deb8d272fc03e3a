"""Mounts a place from a separate process: `mount_job.py URI TARGET RUNTIME CACHE [KEY=VALUE...]`.

The daemon must be forked from a process with one thread, unlike pytest. Prints the mount's target and the daemon's
process id, or the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bootseer.checkpoint.mount.mounted import mount_checkpoint
from bootseer.checkpoint.mount.serving import MountRequest
from bootseer.errors import BootseerError

if __name__ == "__main__":
    uri, target, runtime, cache, *rest = sys.argv[1:]
    values: dict[str, Any] = {key: json.loads(value) for key, _, value in (one.partition("=") for one in rest)}
    hold = values.pop("hold", False)
    try:
        own = {key: values.pop(key) for key in ("lifeline",) if key in values}
        request = MountRequest(uri, cache=Path(cache) if cache else None, **values)
        mounted = mount_checkpoint(request, Path(target) if target else None, runtime=Path(runtime), **own)
    except BootseerError as error:
        print(json.dumps({"error": str(error), "kind": type(error).__name__}), flush=True)
    else:
        daemon = mounted.state.daemon
        assert daemon is not None
        print(json.dumps({"target": str(mounted.target), "pid": daemon.pid}), flush=True)
        if hold:
            sys.stdin.readline()
