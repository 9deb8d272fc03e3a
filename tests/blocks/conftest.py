from __future__ import annotations

import itertools

import pytest

from store_doubles import MemoryStore, MemoryUpload

_numbers = itertools.count()


class SteppingStore(MemoryStore):
    """A store in memory that counts the writer's steps, and fails at step `fail_at`."""

    def __init__(self):
        super().__init__(f"blocks-{next(_numbers)}")
        self.objects = self._objects
        self.steps = 0
        self.fail_at: int | None = None
        self.failure: BaseException | None = None
        self.before_step = lambda: None
        self.uploads: list[_Upload] = []

    def step(self):
        self.before_step()
        self.steps += 1
        if self.fail_at is not None and self.steps > self.fail_at:
            raise self.failure

    def upload(self):
        self.step()
        self.uploads.append(_Upload(self))
        return self.uploads[-1]


class _Upload(MemoryUpload):
    def __init__(self, store):
        super().__init__(store.objects, store.uri)
        self.step = store.step

    @property
    def ended(self):
        return self._data is None

    def write(self, data):
        self.step()
        super().write(data)

    def commit(self, name=None, **others):
        self.step()
        return super().commit(name, **others)


@pytest.fixture(scope="session")
def new_store():
    """Creates stores, for tests that need one per example."""
    return SteppingStore


@pytest.fixture
def store(new_store):
    return new_store()
