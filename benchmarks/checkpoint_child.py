"""The process of one arm of `checkpoint`.

    python ARMS_MODULE.py ARM '{"uri": ..., "path": ...}'

prepares (imports, connections), writes `ready`, waits for a line, and runs the timed part: so several processes can
begin at the same time. Then it writes one line of JSON: begin and end on the monotonic clock, which all processes
share, the number of bytes, its CPU time, and a digest of the data, computed afterwards. Uses only the standard library:
one of the arms runs in an environment without other packages.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
PIECE = 4 * MIB
"""Default size of one read."""


@dataclass(slots=True)
class Job:
    """The task of an arm. The arm fills `facts`, which become part of the result."""

    uri: str = ""
    """Of the NameNode."""
    path: str = ""
    """In HDFS."""
    paths: list[str] = field(default_factory=list)
    offset: int = 0
    length: int = 0
    address: str = ""
    """host:port of a DataNode's web server."""
    local: str = ""
    """A file or folder on this machine."""
    block_bytes: int = 1 << 30
    replication: int = 1
    stripes: int = 0
    parity: bool = False
    threads: int = 1
    facts: dict[str, Any] = field(default_factory=dict)


Arm = Callable[[Job], AbstractContextManager[Callable[[], Any]]]
"""Prepares, gives what is measured, and cleans up. That returns a buffer, or tensors by name, or None."""


def main(arms: Mapping[str, Arm]) -> None:
    """Run the arm named on the command line."""
    job = Job(**json.loads(sys.argv[2]))
    with arms[sys.argv[1]](job) as run:
        _say("ready")
        sys.stdin.readline()
        cpu, begin = time.process_time(), time.monotonic()
        result = run()
        end, cpu = time.monotonic(), time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        said = {"begin": begin, "end": end, "cpu_s": cpu, "peak_bytes": peak, "digest": digest(result)}
    _say(json.dumps({**said, "facts": job.facts}))


def buffer(length: int) -> memoryview:
    """Memory to read into, with its pages allocated, which is not part of what is measured."""
    memory = mmap.mmap(-1, max(1, length))
    for at in range(0, length, mmap.PAGESIZE):
        memory[at] = 1
    return memoryview(memory)[:length]


def digest(result: Any, times: int = 1) -> str:
    """The digest of a buffer, or of tensors in the order of their names, repeated `times` times."""
    if result is None:
        return ""
    state = hashlib.blake2b(digest_size=16)
    for _ in range(times):
        for part in [result] if not isinstance(result, dict) else [_bytes(result[name]) for name in sorted(result)]:
            state.update(part)
    return state.hexdigest()


def _bytes(tensor: Any) -> Any:
    import torch

    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
