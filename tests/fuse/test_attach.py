"""Mounting through the kernel and through fusermount3, and the errors."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from bootseer.errors import BootseerError
from bootseer.fuse import attach
from bootseer.fuse.session import mount
from fuse.memory_tree import MemoryTree

pytestmark = pytest.mark.fuse


def ordinary_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mount and unmount through fusermount3, like an ordinary user."""
    if shutil.which(attach.HELPER) is None:
        pytest.skip("fusermount3 is not installed")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


needs_device = pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse cannot be opened")


@needs_device
def test_mounting_through_the_helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary_user(monkeypatch)
    session = mount(MemoryTree({b"f": b"content"}), tmp_path)
    try:
        assert (tmp_path / "f").read_bytes() == b"content"
    finally:
        session.close()
    assert list(tmp_path.iterdir()) == []


@needs_device
@pytest.mark.parametrize("helper", [False, True])
def test_a_mount_that_fails_has_a_reason_and_leaves_no_descriptor(
    tmp_path: Path, helper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if helper:
        ordinary_user(monkeypatch)
    # Threads of earlier tests may close descriptors meanwhile.
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, not paths
    with pytest.raises(BootseerError, match="none"):
        attach.attach(tmp_path / "none", label="bootseer")
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


@needs_device
@pytest.mark.parametrize("helper", [False, True])
def test_a_label_adds_no_options(tmp_path: Path, helper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if helper:
        ordinary_user(monkeypatch)
    session = mount(MemoryTree({}), tmp_path, "oci:./lr=0.1,bs=32,allow_other x\\")
    try:
        (shown,) = (line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {tmp_path} " in line)
        assert shown.partition(" - ")[2].split()[1] == "oci:./lr=0.1_bs=32_allow_other_x_"
    finally:
        session.close(force=True)  # a mount namespace of another test may have a copy
