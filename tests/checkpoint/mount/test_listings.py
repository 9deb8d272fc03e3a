"""Cached listings, which are valid for a moment and until something changes."""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.checkpoint.files import FileInfo, Files
from bootseer.checkpoint.mount.content import MountContext
from bootseer.checkpoint.mount.filesystem import CheckpointFiles
from bootseer.checkpoint.mount.open_files import REMEMBERED_S, Listings
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.writing.writing import FileWriter
from bootseer.fuse.filesystem import Caller
from bootseer.fuse.protocol import ROOT
from bootseer.places.folder import FolderPlace
from bootseer.places.place import Entry


def info(path: str) -> FileInfo:
    return FileInfo(Entry(path, False, 5, 0, 0o644, "o", "g", "1"), 5, is_striped=False)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_listing_is_cached_for_a_while() -> None:
    clock = Clock()
    listings = Listings(clock)
    listings.remember("f", [info("f/a")], since=listings.num_changes)
    listings.remember("", [info("b")], since=listings.num_changes)
    assert listings.recall("f/a") == info("f/a")
    assert listings.recall("b") == info("b")
    assert listings.recall("f/none") is None
    assert listings.recall("") is None
    clock.now += REMEMBERED_S + 0.1
    assert listings.recall("f/a") is None


def test_a_change_invalidates_a_listing() -> None:
    listings = Listings(Clock())
    for folder in ("f", "g", "h"):
        listings.remember(folder, [info(f"{folder}/a")], since=listings.num_changes)
    listings.forget("f", "none")
    assert [listings.recall(f"{folder}/a") is None for folder in ("f", "g", "h")] == [True, False, False]
    listings.forget_all()
    assert listings.recall("g/a") is None


def test_a_missing_name_is_reported_once_and_only_for_a_moment() -> None:
    clock = Clock()
    listings = Listings(clock)
    assert not listings.was_missing("f/a")
    listings.looked_up("f/a", None)
    assert [listings.was_missing("f/a"), listings.was_missing("f/a")] == [True, False]
    listings.looked_up("f/a", None)
    listings.looked_up("f/a", info("f/a"))
    assert not listings.was_missing("f/a")
    listings.looked_up("f/a", None)
    clock.now += 0.2
    assert not listings.was_missing("f/a")


def test_only_the_latest_folders_are_cached() -> None:
    listings = Listings(Clock())
    for number in range(200):
        listings.remember(str(number), [info(f"{number}/a")], since=listings.num_changes)
    assert sum(listings.recall(f"{number}/a") is not None for number in range(200)) == 64
    assert listings.recall("199/a") is not None


def test_a_listing_during_which_something_has_changed_is_not_cached() -> None:
    listings = Listings(Clock())
    begun = listings.num_changes
    listings.forget("g")
    listings.remember("f", [info("f/a")], since=begun)
    assert listings.recall("f/a") is None


class _CountingPlace(FolderPlace):
    num_stats = 0

    def stat(self, path: str) -> Entry:
        self.num_stats += 1
        return super().stat(path)


def test_reading_the_files_of_a_listed_folder_needs_no_lookups_in_the_place(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    for number in range(3):
        (tmp_path / "f" / str(number)).write_bytes(b"content")
    place = _CountingPlace(tmp_path)
    reading, caller = Reading(place), Caller(0, 0, 0)
    context = MountContext(Files(place), reading.open, _no_writer, 0, print, lambda path, offset, length: None)
    shown = CheckpointFiles(context)
    folder = shown.lookup(ROOT, b"f")
    assert folder is not None
    handle = shown.open_folder(folder.node)
    names = [entry.name for entry in shown.entries(handle, 0, 10, attributes=False)]
    num_stats = place.num_stats
    for name in names * 2:  # like other processes of the node, while the first ones have them open
        found = shown.lookup(folder.node, name)
        assert found is not None
        shown.open(found.node, os.O_RDONLY, caller)
    assert (len(names), place.num_stats) == (3, num_stats)
    reading.close()


def _no_writer(path: str, mode: int) -> FileWriter:
    raise AssertionError(path)
