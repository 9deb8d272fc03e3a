"""Images that a node converts by itself: deleted when no start uses them, and not while one reads them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bootseer.artifact.cache_space import CacheSpace
from bootseer.artifact.loading import Loading
from bootseer.artifact.places import blocks_folder, converted_folder
from bootseer.cache.cache import Cache
from bootseer.errors import UsageError
from bootseer.image.catalog import delete_idle
from bootseer.image.mounting.mount import mount_image
from bootseer.image.mounting.mounted import MountedImage
from bootseer.image.mounting.request import Request
from bootseer.image.reference import parse_reference
from bootseer.mounts.shared_layers import unmount_idle
from bootseer.mounts.state import Runtime
from image_node import Node
from waiting import until

pytestmark = [pytest.mark.root, pytest.mark.fuse]


def mount(node: Node, name: str = "", *, loading: Loading = "lazy") -> MountedImage:
    reference = parse_reference(name or node.reference)
    request = Request(reference, None, cache=node.cache, runtime=node.runtime, loading=loading)
    return mount_image(request, node.folder / "mnt")


def stored(node: Node) -> list[Path]:
    """The objects in the node's own store."""
    return [*converted_folder(node.cache).glob("sha256/*/*")]


def age(node: Node) -> None:
    then = time.time() - 8 * 86_400
    for path in (*stored(node), *converted_folder(node.cache).glob("*/*")):
        os.utime(path, (then, then))


def clean_up(node: Node, *, evict: bool = True) -> None:
    cache = Cache(blocks_folder(node.cache))
    unmount_idle(Runtime(node.runtime), idle_s=0)
    cache.prune(0 if evict else None)
    delete_idle(node.cache, cache, idle_s=7 * 86_400)


def test_an_image_is_deleted_after_its_last_reader(node: Node) -> None:
    mounted = mount(node)
    age(node)
    clean_up(node)
    assert (mounted.root / "cold").read_bytes() == (node.folder / "tree" / "cold").read_bytes()
    mounted.close()

    def is_gone() -> bool:
        clean_up(node)
        return not stored(node)

    until(is_gone, "the daemon has ended, and with it the last use")
    again = mount(node)
    assert again.facts["mode"] == "fallback"
    assert (again.root / "hot").read_bytes() == (node.folder / "tree" / "hot").read_bytes()
    again.close()


def test_an_image_whose_blocks_are_all_in_the_cache_can_still_be_started(node: Node) -> None:
    mount(node, loading="pull").close()
    before = stored(node)
    age(node)
    clean_up(node, evict=False)
    assert 0 < len(stored(node)) < len(before)  # the indexes are left
    again = mount(node, node.digest)
    assert again.facts["mode"] == "local"
    assert (again.root / "hot").read_bytes() == (node.folder / "tree" / "hot").read_bytes()
    again.close()
    unmount_idle(Runtime(node.runtime), idle_s=0)
    Cache(blocks_folder(node.cache)).prune(0)
    with pytest.raises(UsageError, match="not found"):  # its name by the digest says no registry
        mount(node, node.digest)
    once_more = mount(node)
    assert once_more.facts["mode"] == "fallback"
    assert (once_more.root / "hot").read_bytes() == (node.folder / "tree" / "hot").read_bytes()
    once_more.close()


def test_a_start_notes_its_use(node: Node) -> None:
    mount(node).close()
    age(node)
    again = mount(node)
    assert again.facts["mode"] != "fallback"
    again.close()
    clean_up(node)
    assert stored(node)


def test_a_conversion_on_a_full_disk_deletes_older_ones_before(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheSpace, "is_short", lambda space, num_bytes=0: True)
    tree = node.folder / "image"
    tree.mkdir()
    for content in ("first", "second"):
        (tree / "file").write_text(content * 1000)
        mounted = mount(node, f"dir:{tree}")
        assert (mounted.root / "file").read_text() == content * 1000
        mounted.close()
        cache = Cache(blocks_folder(node.cache))
        unmount_idle(Runtime(node.runtime), idle_s=0)
        until(lambda cache=cache: not cache.prune(0).in_use)
        age(node)
    assert len([*converted_folder(node.cache).glob("images/*")]) == 1
