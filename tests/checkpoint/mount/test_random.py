"""Random operations through the kernel, compared with a model in memory: names, content and sizes, on two mounts.

Each step is applied to a mounted file system and to the model. At the end, and sometimes before, both must be equal,
also on another mount of the same place when all files are closed.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.mount.conftest import Mounts
from checkpoint.mounted_place import MIB, MountedPlace

pytestmark = pytest.mark.fuse

_NAMES = ("a", "b", "folder/a", "folder/c")
_MOST = 5 * MIB
"""Enough for two segments of three stripes; most lengths are small."""


class Machine:
    """Applies the same operations to a mounted file system and to a dict of bytes."""

    def __init__(self, one: MountedPlace, seed: int) -> None:
        self.one = one
        self.random = random.Random(seed)
        self.model: dict[str, bytearray] = {}
        self.open: dict[int, str] = {}
        (one.target / "folder").mkdir()

    def step(self) -> None:
        """One random operation."""
        actions = (
            [self.write_new] * 3
            + [self.open_file, self.close_one, self.rename, self.unlink, self.truncate, self.look, self.sync]
            + [self.write_at] * 4
            + [self.read_at] * 4
        )
        self.random.choice(actions)()

    def _length(self) -> int:
        return self.random.choice((1, 100, 4096, 70_000, MIB, 2 * MIB + 1, self.random.randrange(3 * MIB)))

    def _offset(self, size: int) -> int:
        near = self.random.choice((0, MIB, 2 * MIB, 3 * MIB, size)) + self.random.randrange(-3, 3)
        return min(max(0, self.random.choice((near, self.random.randrange(size + 1000)))), _MOST)

    def _is_open(self, name: str) -> bool:
        return name in self.open.values()

    def write_new(self) -> None:
        name, data = self.random.choice(_NAMES), self.random.randbytes(self._length())
        (self.one.target / name).write_bytes(data)
        self.model[name] = bytearray(data)

    def open_file(self) -> None:
        name = self.random.choice(_NAMES)
        if len(self.open) < 4:
            self.open[os.open(self.one.target / name, os.O_RDWR | os.O_CREAT)] = name
            self.model.setdefault(name, bytearray())

    def close_one(self) -> None:
        if self.open:
            handle = self.random.choice(list(self.open))
            os.close(handle)
            del self.open[handle]

    def write_at(self) -> None:
        if self.open:
            handle, name = self.random.choice(list(self.open.items()))
            offset, data = self._offset(len(self.model[name])), self.random.randbytes(self._length())
            assert os.pwrite(handle, data, offset) == len(data)
            held = self.model[name]
            held.extend(bytes(max(0, offset - len(held))))
            held[offset : offset + len(data)] = data

    def read_at(self) -> None:
        if self.open:
            handle, name = self.random.choice(list(self.open.items()))
            offset, length = self._offset(len(self.model[name])), self._length()
            assert os.pread(handle, length, offset) == self.model[name][offset : offset + length]

    def truncate(self) -> None:
        name = self.random.choice(_NAMES)
        if name in self.model:
            size = self._offset(len(self.model[name]))
            os.truncate(self.one.target / name, size)
            held = self.model[name]
            del held[size:]
            held.extend(bytes(size - len(held)))

    def rename(self) -> None:
        source, target = self.random.sample(_NAMES, 2)
        # Open files are not renamed here: their descriptors after a rename have separate tests.
        if source in self.model and not self._is_open(source) and not self._is_open(target):
            try:
                (self.one.target / source).rename(self.one.target / target)
            except OSError:
                assert source.count("/") != target.count("/"), "only a move to another folder may be refused"
                assert len(self.model[source]) > MIB
            else:
                self.model[target] = self.model.pop(source)

    def unlink(self) -> None:
        name = self.random.choice(_NAMES)
        if name in self.model and not self._is_open(name):
            (self.one.target / name).unlink()
            del self.model[name]

    def sync(self) -> None:
        if self.open:
            os.fsync(self.random.choice(list(self.open)))

    def look(self) -> None:
        self.compare(self.one)

    def compare(self, mounted: MountedPlace) -> None:
        """Assert that all names, sizes and bytes equal the model's."""
        there = {str(path.relative_to(mounted.target)) for path in mounted.target.rglob("*") if path.is_file()}
        assert there == set(self.model)
        for name, data in self.model.items():
            assert (mounted.target / name).stat().st_size == len(data)
            assert (mounted.target / name).read_bytes() == data

    def end(self) -> None:
        """Close all open files."""
        for handle in self.open:
            os.close(handle)
        self.open.clear()


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.integers(0, 2**32))
def test_random_operations_have_the_same_results_as_in_memory(mounts: Mounts, seed: int) -> None:
    one = mounts()
    machine = Machine(one, seed)
    try:
        for _ in range(40):
            machine.step()
        machine.end()
        machine.compare(one)
        other = mounts()
        machine.compare(other)
        assert one.said == []
    finally:
        machine.end()
        for path in [*machine.model, "folder"]:
            _remove(one, path)
    parts = [path for path in one.root.rglob("*") if path.is_file() and path.name != "policy.json"]
    assert parts == [], "nothing is left of files that were removed"
    one.close()


def _remove(one: MountedPlace, path: str) -> None:
    if path == "folder":
        (one.target / path).rmdir()
    else:
        (one.target / path).unlink()


def test_many_processes_read_one_file_out_of_order(one: MountedPlace) -> None:
    import subprocess
    import sys

    data = random.Random(1).randbytes(24 * MIB)
    (one.target / "f").write_bytes(data)
    (one.root.parent / "copy").write_bytes(data)
    code = """
import os, random, sys
chosen = random.Random(int(sys.argv[3]))
one, copy = os.open(sys.argv[1], os.O_RDONLY), os.open(sys.argv[2], os.O_RDONLY)
size = os.fstat(copy).st_size
for _ in range(60):
    offset, length = chosen.randrange(size), chosen.choice((1, 4096, 300_000, 2_000_000))
    assert os.pread(one, length, offset) == os.pread(copy, length, offset)
"""
    argv = [sys.executable, "-c", code, one.target / "f", one.root.parent / "copy"]
    readers = [subprocess.Popen([*argv, str(number)]) for number in range(8)]
    assert [reader.wait(120) for reader in readers] == [0] * 8
    assert one.said == []
