"""Trees unpacked in a cache."""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.artifact.unpacked import delete_idle_trees, unpack_once
from bootseer.mounts.state import Runtime


def test_a_tree_that_another_machine_used_stays_for_a_month(tmp_path: Path) -> None:
    cache, runtime, boot = tmp_path / "cache", Runtime(tmp_path / "run"), Path("/proc/sys/kernel/random/boot_id")
    here = f"{os.uname().nodename}@{boot.read_text()[:8]}\n"
    tree = unpack_once(cache, ["a"], Path.mkdir, print)
    assert unpack_once(cache, ["a"], Path.mkdir, print) == tree
    lock = tree.with_name(f"{tree.name}.lock")
    assert lock.read_text() == here
    lock.write_text(f"{here}other@00000000\n")
    assert delete_idle_trees(cache, runtime, idle_s=0) == []
    os.utime(lock, (0, 0))
    assert delete_idle_trees(cache, runtime, idle_s=0) == [tree.name]
