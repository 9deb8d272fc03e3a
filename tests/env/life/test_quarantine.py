"""Suspected snapshots, kept in the store, or on the node where the store refuses."""

from __future__ import annotations

import uuid

import pytest

from bootseer.artifact.objects import put
from bootseer.env.life.quarantine import Quarantine, quarantine_name
from bootseer.errors import NotFoundError
from bootseer.store.store import Store
from env.life.samples import KEY, document
from store_doubles import Fault, FaultyStore, MemoryStore

A, B = document(), document(content="other")
READ_ONLY = Fault(status=403)
DOWN = Fault(status=503, retry_after_s=3600)


def memory() -> Store:
    return MemoryStore(uuid.uuid4().hex)


class Node:
    """A node with its own memory and what it said."""

    def __init__(self, store: Store | None) -> None:
        self.here = memory()
        self.said: list[str] = []
        self.quarantine = Quarantine(store, self.here, self.said.append)


@pytest.fixture
def store() -> Store:
    return memory()


def read_only(store: Store) -> Store:
    return FaultyStore(store, lambda request: READ_ONLY if request.verb in ("upload", "delete", "create") else None)


def test_what_one_node_suspects_no_node_uses(store: Store) -> None:
    first, second = Node(store), Node(store)
    assert first.quarantine.reason(A) == ""
    assert first.quarantine.mark(A, "node-1", "ImportError: libcuda.so.1", 100.0)
    assert (
        second.quarantine.reason(A)
        == "a job died while importing with it, the last on node-1: ImportError: libcuda.so.1"
    )
    second.quarantine.mark(A, "node-2", "ImportError", 200.0)
    assert first.quarantine.reason(A).startswith("at least 2 jobs died")
    assert first.quarantine.reason(B) == ""
    assert first.said == second.said == []


def test_a_rebuild_with_the_same_content_clears_it_on_all_nodes(store: Store) -> None:
    first, second = Node(store), Node(store)
    first.quarantine.mark(A, "node-1", "ImportError", 100.0)
    assert second.quarantine.rebuilt(document(built_s=5e9), replaced=A)
    assert first.quarantine.reason(A) == ""
    assert not first.quarantine.mark(A, "node-1", "ImportError", 300.0)
    assert first.quarantine.reason(A) == ""


def test_a_rebuild_with_other_content_is_used_and_the_old_one_is_not(store: Store) -> None:
    node = Node(store)
    node.quarantine.mark(A, "node-1", "ImportError", 100.0)
    assert not node.quarantine.rebuilt(B, replaced=A)
    assert node.quarantine.reason(B) == ""
    assert node.quarantine.reason(A)


def test_where_the_store_refuses_the_node_remembers(store: Store) -> None:
    node, other = Node(read_only(store)), Node(store)
    assert node.quarantine.mark(A, "node-1", "ImportError", 100.0)
    assert node.quarantine.reason(A)
    assert other.quarantine.reason(A) == ""
    assert node.said == [f"the quarantine of environment {KEY[:12]} is stored on this node only: "
                         f"{store.uri}: an upload: status 403"]  # fmt: skip


def test_without_a_store_the_node_is_asked_alone() -> None:
    node = Node(None)
    node.quarantine.mark(A, "node-1", "ImportError", 100.0)
    assert node.quarantine.reason(A)


def test_what_is_cleared_in_the_store_is_cleared_for_the_node_that_told_it(store: Store) -> None:
    node = Node(store)
    node.quarantine.mark(A, "node-1", "ImportError", 100.0)
    store.delete(quarantine_name(KEY))
    assert node.quarantine.reason(A) == ""


def test_what_a_node_remembered_goes_into_the_store_when_it_takes_it_again(store: Store) -> None:
    refusing: list[Fault | None] = [READ_ONLY]
    node = Node(FaultyStore(store, lambda request: refusing[0] if request.verb == "upload" else None))
    node.quarantine.mark(A, "node-1", "ImportError", 100.0)
    refusing[0] = None
    node.quarantine.mark(A, "node-1", "ImportError", 200.0)
    assert Node(store).quarantine.reason(A).startswith("at least 2 jobs died")
    with pytest.raises(NotFoundError):
        node.here.stat(quarantine_name(KEY))


@pytest.mark.parametrize("data", [b"", b"{", b'{"schema":"x"}'])
def test_a_state_that_cannot_be_read_holds_nothing_against_a_snapshot(store: Store, data: bytes) -> None:
    put(store, quarantine_name(KEY), data)
    node = Node(store)
    assert node.quarantine.reason(A) == ""
    assert node.quarantine.mark(A, "node-1", "ImportError", 100.0)
    assert node.quarantine.reason(A)


def test_a_store_that_is_down_is_said_and_the_node_still_knows_its_own(store: Store) -> None:
    node = Node(FaultyStore(store, lambda request: DOWN))
    assert node.quarantine.reason(A) == ""
    assert "cannot be read" in node.said[0]
    node.quarantine.mark(A, "node-1", "ImportError", 100.0)
    assert node.quarantine.reason(A)
