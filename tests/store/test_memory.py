"""The store in memory."""

from __future__ import annotations

import uuid

import pytest

from bootseer.store import memory
from bootseer.store.memory import MemoryStore
from bootseer.store.store import Store
from store.contract import StoreContract, get, put


class Outside:
    def __init__(self, name: str) -> None:
        self.name = name

    def get(self, name: str) -> bytes | None:
        return memory._places[self.name].get(name)

    def unfinished(self) -> list[str]:
        return []


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def place(self) -> str:
        return uuid.uuid4().hex

    @pytest.fixture
    def store(self, place: str) -> Store:
        return MemoryStore(place)

    @pytest.fixture
    def outside(self, place: str) -> Outside:
        return Outside(place)


def test_two_stores_of_one_name_are_one_place() -> None:
    put(MemoryStore("shared"), b"x", "name")
    assert get(MemoryStore("shared"), "name") == b"x"
    assert list(MemoryStore("another").list()) == []
