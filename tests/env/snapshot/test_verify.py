"""Every change of a restored file is found, in the layer itself and in a job's view."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.env.changes import Change
from bootseer.env.snapshot.manifest import Entry
from bootseer.env.snapshot.verify import MAX_DIFFERENCES, Difference, verify
from env_snapshots import changes_of, deleted, overlay, shown, snapshot, written
from erofs_images import needs_root
from store_doubles import MemoryStore


def _fill(root: Path) -> Path:
    (root / "lib").mkdir(parents=True)
    (root / "lib/code.py").write_text("answer = 42\n")
    (root / "lib/data").write_bytes(b"x" * 3_000_000)
    (root / "lib/again").hardlink_to(root / "lib/data")
    (root / "lib/link").symlink_to("data")
    (root / "lib/tool").write_text("#!/bin/sh\n")
    (root / "lib/tool").chmod(0o755)
    os.mkfifo(root / "pipe")
    written(root)
    return root


def _entries(root: Path, *more: Change) -> tuple[Entry, ...]:
    return snapshot(MemoryStore(str(root)), root, changes=[*changes_of(root), *more]).entries


@needs_root
def test_a_mounted_snapshot_is_what_its_manifest_says(tmp_path: Path) -> None:
    upper = _fill(tmp_path / "upper")
    (upper / "closed").mkdir()
    os.setxattr(upper / "lib/tool", "user.note", b"x")
    changes = [*changes_of(upper, opaque=("/closed",)), deleted("/lib/gone"), deleted("/closed/old")]
    entries = snapshot(MemoryStore(str(tmp_path)), upper, changes=changes).entries
    with shown(upper, tmp_path, changes=changes) as layer:
        for tier in ("quick", "full"):
            assert verify(str(layer), entries, tier, layer=True) == []
        below = tmp_path / "below"
        for name in ("lib/gone", "lib/stays", "closed/old"):
            (below / name).parent.mkdir(parents=True, exist_ok=True)
            (below / name).write_text("below")
        with overlay([layer, below], tmp_path / "view") as view:
            assert verify(str(view), entries, "full", layer=False) == []
        fewer = [replace(change, opaque=False) for change in changes if change.path != "/lib/gone"]
        others = snapshot(MemoryStore(str(tmp_path)), upper, changes=fewer).entries
        assert verify(str(layer), others, "quick", layer=True) == [
            Difference("/closed", "hides what lies below"),
            Difference("/lib/gone", "in no manifest"),
        ]


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "gone": (lambda root: (root / "lib/code.py").unlink(), "/lib/code.py", "missing"),
    "mode": (lambda root: (root / "lib/tool").chmod(0o644), "/lib/tool", "mode 0644, not 0755"),
    "size": (lambda root: (root / "lib/code.py").write_text("x"), "/lib/code.py", "1 bytes, not 12"),
    "kind": (
        lambda root: ((root / "lib/code.py").unlink(), (root / "lib/code.py").mkdir(0o644)),
        "/lib/code.py",
        "a directory, not a file",
    ),
    "target": (
        lambda root: ((root / "lib/link").unlink(), (root / "lib/link").symlink_to("tool")),
        "/lib/link",
        "points to 'tool', not 'data'",
    ),
    "deletion": (lambda root: (root / "gone").touch(), "/gone", "there, although the setup deleted it"),
    "content": (lambda root: (root / "lib/code.py").write_text("answer = 43\n"), "/lib/code.py", "other content"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named(damage: str, tmp_path: Path) -> None:
    root = _fill(tmp_path / "root")
    entries = _entries(root, deleted("/gone"))
    assert verify(str(root), entries, "full", layer=False) == []
    spoil, path, words = DAMAGES[damage]
    spoil(root)
    assert verify(str(root), entries, "full", layer=False) == [Difference(path, words)]
    quick = verify(str(root), entries, "quick", layer=False)
    assert quick == ([] if damage == "content" else [Difference(path, words)])


@needs_root
def test_owners_attributes_and_links_count_where_they_can(tmp_path: Path) -> None:
    root = _fill(tmp_path / "root")
    entries = _entries(root)
    os.chown(root / "lib/tool", 7, 8)
    os.setxattr(root / "lib/code.py", "user.note", b"x")
    (root / "lib/data").unlink()
    (root / "lib/data").write_bytes(b"x" * 3_000_000)
    assert {found.path: found.words for found in verify(str(root), entries, "quick", layer=True)} == {
        "/lib/tool": "owner 7:8, not 0:0",
        "/lib/code.py": "extended attribute user.note is not what it was",
        "/lib/data": "no hard link to /lib/again",
    }
    found = verify(str(root), entries, "full", layer=False, owners=False)
    assert [difference.path for difference in found] == ["/lib/code.py"]


@needs_root
def test_a_layer_without_its_whiteout_is_no_layer(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    entries = (Entry("/gone", "deleted"),)
    assert verify(str(root), entries, "quick", layer=True) == [Difference("/gone", "missing")]
    (root / "gone").touch()
    assert verify(str(root), entries, "quick", layer=True) == [Difference("/gone", "not marked as deleted")]
    (root / "gone").unlink()
    os.mknod(root / "gone", stat.S_IFCHR)
    assert verify(str(root), entries, "quick", layer=True) == []


def test_the_number_of_reported_differences_is_bounded(tmp_path: Path) -> None:
    entries = [Entry(f"/{number:06}", "fifo") for number in range(5 * MAX_DIFFERENCES)]
    told: list[tuple[int, int]] = []
    found = verify(
        str(tmp_path), entries, "quick", layer=False, progress=lambda done, total: told.append((done, total))
    )
    assert len(found) == MAX_DIFFERENCES
    assert told[-1][0] < len(entries) == told[-1][1]
