"""Suspected snapshots, kept in the store."""

from __future__ import annotations

import uuid

import pytest

from bootseer.artifact.objects import put
from bootseer.env.life.quarantine import Quarantine, quarantine_name
from bootseer.errors import AccessError, TransientError
from bootseer.store.store import Store
from env.life.samples import KEY, document
from store_doubles import Fault, FaultyStore, MemoryStore

A, B = document(), document(content="other")
READ_ONLY = Fault(status=403)
DOWN = Fault(status=503, retry_after_s=3600)


def memory() -> Store:
    return MemoryStore(uuid.uuid4().hex)


class Node:
    """A node and what it said."""

    def __init__(self, store: Store) -> None:
        self.said: list[str] = []
        self.quarantine = Quarantine(store, self.said.append)


@pytest.fixture
def store() -> Store:
    return memory()


def read_only(store: Store) -> Store:
    return FaultyStore(store, lambda request: READ_ONLY if request.verb in ("upload", "delete", "create") else None)


def test_what_one_node_suspects_no_node_uses(store: Store) -> None:
    first, second = Node(store), Node(store)
    assert first.quarantine.reason(A) == ""
    assert first.quarantine.mark(A, "node-1", "ImportError: libcuda.so.1", 100.0)
    assert second.quarantine.mark(A, "node-2", "ImportError", 200.0)
    assert second.quarantine.reason(A) == "a job died while importing with it, on node-1: ImportError: libcuda.so.1"
    assert first.quarantine.reason(B) == ""
    assert first.said == second.said == []


def test_a_rebuild_clears_all_snapshots_of_the_key_on_all_nodes(store: Store) -> None:
    first, second = Node(store), Node(store)
    first.quarantine.mark(A, "node-1", "ImportError", 100.0)
    second.quarantine.rebuilt(replaced=A)
    assert first.quarantine.reason(A) == ""
    for one in (A, B):
        assert not first.quarantine.mark(one, "node-1", "ImportError", 300.0)
        assert first.quarantine.reason(one) == ""


def test_a_store_that_refuses_is_an_error_and_nothing_is_suspected(store: Store) -> None:
    node = Node(read_only(store))
    with pytest.raises(AccessError, match="status 403"):
        node.quarantine.mark(A, "node-1", "ImportError", 100.0)
    assert node.quarantine.reason(A) == ""


@pytest.mark.parametrize("data", [b"", b"{", b'{"schema":"x"}'])
def test_a_state_that_cannot_be_read_holds_nothing_against_a_snapshot(store: Store, data: bytes) -> None:
    put(store, quarantine_name(KEY), data)
    node = Node(store)
    assert node.quarantine.reason(A) == ""
    assert node.quarantine.mark(A, "node-1", "ImportError", 100.0)
    assert node.quarantine.reason(A)


def test_a_store_that_is_down_is_said(store: Store) -> None:
    node = Node(FaultyStore(store, lambda request: DOWN))
    assert node.quarantine.reason(A) == ""
    assert "cannot be read" in node.said[0]
    with pytest.raises(TransientError):
        node.quarantine.mark(A, "node-1", "ImportError", 100.0)


def test_a_state_that_cannot_be_read_now_is_not_overwritten(store: Store) -> None:
    Node(store).quarantine.mark(A, "node-1", "ImportError", 100.0)
    node = Node(FaultyStore(store, lambda request: DOWN if request.verb in ("read", "stat") else None))
    with pytest.raises(TransientError):
        node.quarantine.mark(B, "node-2", "ImportError", 200.0)
    assert Node(store).quarantine.reason(A)
