"""The nodes (inodes) of paths after lookups, replacements, renames and forget requests of the kernel."""

from __future__ import annotations

import errno

import pytest

from bootseer.checkpoint.files import FileInfo
from bootseer.checkpoint.mount.nodes import Nodes
from bootseer.places.place import Entry


def info(path: str, version: str = "1", *, folder: bool = False) -> FileInfo:
    return FileInfo(Entry(path, folder, 5, 0, 0o644, "o", "g", version), 5, is_striped=False)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(info("", folder=True))


def test_a_path_keeps_its_node_as_long_as_its_version(nodes: Nodes) -> None:
    first = nodes.acquire("a", info("a"))
    assert nodes.acquire("a", info("a")) is first
    second = nodes.acquire("a", info("a", "2"))
    assert second is not first
    assert (first.path, second.path) == (None, "a")
    assert nodes.get(first.number) is first, "it is kept for its open handles"
    assert nodes.acquire("a", info("a", folder=True)) not in (first, second)


def test_a_folder_keeps_its_node_when_its_content_changes(nodes: Nodes) -> None:
    assert nodes.acquire("a", info("a", "1", folder=True)) is nodes.acquire("a", info("a", "2", folder=True))


def test_a_node_is_dropped_at_a_lookup_count_of_zero(nodes: Nodes) -> None:
    node = nodes.acquire("a", info("a"))
    nodes.acquire("a", info("a"))
    nodes.forget(node.number, 1)
    assert nodes.get(node.number) is node
    nodes.forget(node.number, 1)
    with pytest.raises(OSError) as raised:
        nodes.get(node.number)
    assert raised.value.errno == errno.ESTALE
    assert nodes.at("a") is None
    nodes.forget(node.number, 5)
    nodes.forget(nodes.root.number, 5)
    assert nodes.at("") is nodes.root


def test_numbers_are_never_reused(nodes: Nodes) -> None:
    numbers = set()
    for _ in range(5):
        node = nodes.acquire("a", info("a"))
        numbers.add(node.number)
        nodes.forget(node.number, 1)
    assert len(numbers) == 5


def test_a_rename_moves_everything_below_and_replaces_the_target(nodes: Nodes) -> None:
    moved = {path: nodes.acquire(path, info(path, folder=path == "a")) for path in ("a", "a/b", "a/b/c", "ab")}
    target = nodes.acquire("x", info("x", folder=True))
    nodes.rename("a", "x")
    assert [moved[path].path for path in moved] == ["x", "x/b", "x/b/c", "ab"]
    assert moved["a/b"].info.path == "x/b"
    assert target.path is None
    assert nodes.at("a/b") is None
    assert nodes.at("x/b/c") is moved["a/b/c"]


def test_a_removed_name_has_no_node(nodes: Nodes) -> None:
    node = nodes.acquire("a", info("a"))
    nodes.remove("a")
    nodes.remove("a")
    assert (node.path, nodes.at("a")) == (None, None)
    assert nodes.acquire_new("a", info("a")) is not node
