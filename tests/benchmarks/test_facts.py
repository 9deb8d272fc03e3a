"""Facts for benchmark results: enough to compare them, and nothing that identifies the machine."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as patched:
    patched.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2] / "benchmarks")])
    from facts import disk_kind, facts


def test_facts_are_plain_and_anonymous(tmp_path: Path) -> None:
    known = facts(str(tmp_path))
    assert set(known) == {"cpu", "num_cores", "memory_bytes", "kernel", "machine", "python", "distribution", "disk"}
    assert known["num_cores"] >= 1
    assert known["memory_bytes"] > 2**20
    assert known["kernel"] == os.uname().release
    text = json.dumps(known)
    for secret in (socket.gethostname(), str(tmp_path), str(Path.home()), f'"{getpass.getuser()}"'):
        assert secret not in text


def test_disk_kind(tmp_path: Path) -> None:
    assert disk_kind("/dev/shm") == "tmpfs"
    assert disk_kind("/proc") == "proc"
    assert disk_kind(str(tmp_path / "nowhere")) is None
