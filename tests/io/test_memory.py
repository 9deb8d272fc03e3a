"""Freed memory is reused."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource
{tell}
def read():
    return [bytearray(1 << 20) for _ in range(32)]
read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    read()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
_TELL = "from bootseer.io.memory import keep_freed_memory; keep_freed_memory()"


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such options")
def test_pieces_that_are_taken_and_freed_cost_no_page_faults() -> None:
    faults = [
        int(subprocess.run([sys.executable, "-c", _FAULTS.format(tell=tell)], check=True, capture_output=True).stdout)
        for tell in ("", _TELL)
    ]
    assert faults[1] < faults[0] / 10
