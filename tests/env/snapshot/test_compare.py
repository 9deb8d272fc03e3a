"""Comparing two installations: what counts as a difference, and what does not."""

from __future__ import annotations

import marshal
import os
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import pytest

from bootseer.env.snapshot.oracle import compare
from env_snapshots import changes_of, deleted, snapshot
from store_doubles import MemoryStore


@pytest.fixture
def sides(tmp_path):
    """The restored tree, and the view of a new installation."""
    for name in ("restored", "fresh"):
        (tmp_path / name).mkdir()
    return tmp_path / "restored", tmp_path / "fresh"


def _compared(sides, *, kept=None, changed=None):
    restored, fresh = sides
    options = {"changes": kept} if kept is not None else {}
    entries = snapshot(MemoryStore("test"), restored, **options).entries
    return compare(entries, str(restored), changes_of(fresh) if changed is None else changed, str(fresh))


def _found(sides, **options):
    return {one.path: one.words for one in _compared(sides, **options).differences}


def _both(sides, write):
    for side in sides:
        write(side)


def _bytecode(stamp: bytes, code: object) -> bytes:
    return MAGIC_NUMBER + bytes(4) + stamp + marshal.dumps(code)


def test_equal_files_are_equal(sides):
    def write(side: Path) -> None:
        (side / "a").mkdir()
        (side / "a" / "file").write_text("same")
        (side / "a" / "link").symlink_to("file")

    _both(sides, write)
    found = _compared(sides)
    assert (found.differences, found.num_paths) == ((), 3)


def test_each_kind_of_difference_has_its_words(sides):
    restored, fresh = sides
    for name, ours, theirs in (("content", "1", "2"), ("ours", "1", None), ("theirs", None, "2"), ("mode", "1", "1")):
        for side, text in ((restored, ours), (fresh, theirs)):
            if text is not None:
                (side / name).write_text(text)
    (fresh / "mode").chmod(0o600)
    (restored / "mode").chmod(0o644)
    (restored / "link").symlink_to("one")
    (fresh / "link").symlink_to("two")
    (restored / "kind").mkdir()
    (fresh / "kind").write_text("")
    assert _found(sides) == {
        "/content": "in the fresh installation: other content",
        "/kind": "in the fresh installation: a file, not a directory",
        "/link": "in the fresh installation: points to 'two', not 'one'",
        "/mode": "in the fresh installation: mode 0600, not 0644",
        "/ours": "in the fresh installation: missing",
        "/theirs": "only in the fresh installation",
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_another_owner_is_a_difference(sides):
    _both(sides, lambda side: (side / "file").write_text(""))
    os.chown(sides[1] / "file", 12, 34)
    assert _found(sides) == {"/file": "in the fresh installation: owner 12:34, not 0:0"}


def test_deletions_are_compared(sides):
    restored, fresh = sides
    (restored / "kept").write_text("")
    kept = [*changes_of(restored), deleted("/both"), deleted("/only-ours")]
    (fresh / "only-ours").write_text("still there")
    found = _found(sides, kept=kept, changed=[deleted("/both"), deleted("/kept"), deleted("/only-theirs")])
    assert found == {
        "/kept": "in the fresh installation: missing",
        "/only-ours": "in the fresh installation: there, although the setup deleted it",
        "/only-theirs": "only in the fresh installation",
    }


def test_what_the_installation_found_in_place_counts_as_its_own(sides):
    restored, fresh = sides
    _both(sides, lambda side: (side / "clone").write_text("same"))
    (restored / "other").write_text("1")
    (fresh / "other").write_text("2")
    assert _found(sides, changed=[]) == {"/other": "in the fresh installation: other content"}


def test_logs_may_differ(sides):
    for side, text in zip(sides, "12", strict=True):
        (side / "var" / "log").mkdir(parents=True)
        (side / "var" / "log" / "setup.log").write_text(text)
    # The writer stores no logs: these entries are made by hand.
    found = compare(_entries_of(sides[0]), str(sides[0]), changes_of(sides[1]), str(sides[1]))
    assert found.differences == ()


def test_bytecode_may_name_another_time_but_not_hold_other_code(sides):
    restored, fresh = sides
    for side, stamp in ((restored, b"1" * 8), (fresh, b"2" * 8)):
        (side / "m" / "__pycache__").mkdir(parents=True)
        (side / "m" / "__pycache__" / "same.cpython-311.pyc").write_bytes(_bytecode(stamp, ("code", 1)))
        (side / "m" / "__pycache__" / "other.cpython-311.pyc").write_bytes(_bytecode(stamp, ("code", stamp)))
    # The writer stores no bytecode without a source: these entries are made by hand.
    found = compare(_entries_of(restored), str(restored), changes_of(fresh), str(fresh))
    assert [one.path for one in found.differences] == ["/m/__pycache__/other.cpython-311.pyc"]


def _entries_of(folder: Path):
    from bootseer.env.snapshot.contents import inspect_changes

    items, _ = inspect_changes(changes_of(folder), None)
    return [item.entry for item in items]


def test_bytecode_that_only_one_has_is_no_difference(sides):
    _, fresh = sides
    (fresh / "m" / "__pycache__").mkdir(parents=True)
    (fresh / "m" / "__pycache__" / "one.cpython-311.pyc").write_bytes(b"")
    (sides[0] / "m").mkdir()
    found = _compared(sides)
    assert found.differences == ()


def test_a_restored_file_that_cannot_be_read_is_a_difference(sides):
    restored, fresh = sides
    _both(sides, lambda side: (side / "file").write_text("x"))
    entries = snapshot(MemoryStore("test"), restored).entries
    (restored / "file").unlink()
    (found,) = compare(entries, str(restored), changes_of(fresh), str(fresh)).differences
    assert found.words == "in the fresh installation: cannot be read: No such file or directory"


def test_names_that_are_no_text_are_compared(sides):
    for side, text in zip(sides, "12", strict=True):
        with open(os.fsencode(side) + b"/n\xff", "w") as file:  # noqa: PTH123
            file.write(text)
    (one,) = _compared(sides).differences
    assert os.fsencode(one.path) == b"/n\xff"
