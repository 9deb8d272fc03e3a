"""Starts of an image on a disk that is full or too small for it: they are slower, but never fail."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import warm
from bootseer.artifact.cache_space import CacheSpace
from bootseer.cache.cache import Cache
from cached import BLOCK, content, index_of, put
from image_node import Node, have_converted
from small_disks import small_disk

pytestmark = [pytest.mark.root, pytest.mark.fuse]
Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB, less than 1.5 times one of the image's two large files."""
    with small_disk(tmp_path / "disk", "size=8m") as folder:
        yield folder


@pytest.fixture
def start(env: dict[str, str], node: Node, disk: Path) -> Start:
    """`start(loading)` runs a container that reads the large files and prints their size, with the cache on `disk`."""
    have_converted(node)

    def call(loading: str) -> subprocess.CompletedProcess[str]:
        words = ["image", "run", "--loading", loading, "--entrypoint", "none", node.reference, "--"]
        words += ["sh", "-c", "cat /hot /cold | wc -c"]
        return warm.bootseer(words, env={**env, **node.env, "BOOTSEER_CACHE": str(disk)}, cwd=node.folder)

    return call


def fill_up(disk: Path) -> Path:
    ballast = disk / "ballast"
    with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    return ballast


def test_starts_go_on_after_one_that_filled_the_disk(start: Start) -> None:
    for way in ("lazy", "lazy", "auto", "auto", "pull", "pull"):
        ran = start(way)
        assert (ran.returncode, ran.stdout) == (0, f"{2 * (6 << 20)}\n"), ran.stderr


def test_a_pull_that_does_not_fit_is_served_lazily_and_reported(start: Start) -> None:
    ran = start("pull")
    assert (ran.returncode, ran.stdout) == (0, f"{2 * (6 << 20)}\n"), ran.stderr
    assert "serving it lazily" in ran.stderr


def test_where_others_fill_the_disk_what_is_here_still_starts(start: Start, disk: Path) -> None:
    assert start("lazy").returncode == 0
    fill_up(disk)
    ran = start("lazy")
    assert "cannot sync" not in ran.stderr
    # If not even the container's folder fits, the error says so.
    assert ran.returncode == 0 or ran.stderr.endswith("cannot be prepared: No space left on device\n"), ran.stderr


def test_unused_entries_are_evicted_only_if_that_is_enough(disk: Path) -> None:
    cache = Cache(disk / "cache")
    data = content(600, zeros=False)
    old = cache.open(index_of(data))
    put(old, data, range(600))
    old.sync()
    old.close()
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(4 << 20))
    space = CacheSpace(cache, pytest.fail)
    assert not space.make_free(64 << 20)
    assert cache.entries()[0].ready_bytes == 600 * BLOCK
    assert space.make_free(2 << 20)
    usage = os.statvfs(disk)
    assert usage.f_bavail * usage.f_frsize >= 2 << 20
