from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.artifact.objects import read_index
from bootseer.blocks.block_file import BlockFile
from bootseer.blocks.writer import BlockWriter
from bootseer.errors import CorruptError, PermanentError
from bootseer.store.store import Stored

NAME = "sha256:" + "a" * 64


@pytest.fixture
def block_file(store):
    with BlockWriter(store, block_size=4096) as writer:
        writer.write(b"some text " * 1000)
        return writer.finish()


def test_a_description_survives_json(block_file):
    assert msgspec.json.decode(msgspec.json.encode(block_file), type=BlockFile) == block_file


def test_the_index_is_read_from_its_description(store, block_file):
    index = read_index(store, block_file)
    assert (index.identity, index.size_bytes) == (block_file.identity, 10_000)


def test_objects_leave_out_stripes_without_bytes(store):
    with BlockWriter(store, block_size=4096) as writer:
        writer.write(bytes(4096))
        block_file = writer.finish()
    assert [stripe.size_bytes for stripe in block_file.stripes] == [0]
    assert {stored.name for stored in block_file.objects} == set(store.objects)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: bytes(len(data)),
        lambda data: data[:50] + b"x" + data[51:],
        lambda data: data[:50],
        lambda data: data + b"x",
        lambda data: b"",
    ],
)
def test_an_index_of_other_bytes_is_refused(store, block_file, change):
    store.objects[block_file.index_name] = change(store.objects[block_file.index_name])
    with pytest.raises(PermanentError, match=block_file.index_name):
        read_index(store, block_file)


def test_an_index_that_never_ends_is_not_read_to_its_end(store, block_file):
    given = []

    def endless(*_, **__):
        while True:
            given.append(1)
            yield bytes(1000)

    store.read = endless
    with pytest.raises(PermanentError):
        read_index(store, block_file)
    assert len(given) == block_file.index_bytes // 1000 + 1


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": "0" * 64},
        {"size_bytes": 10_001},
        {"stripes": [[NAME, 2]], "stored_bytes": 2},
    ],
)
def test_the_index_of_another_file_is_refused(store, block_file, changes):
    with pytest.raises((CorruptError, msgspec.ValidationError)):
        read_index(store, msgspec.convert({**msgspec.to_builtins(block_file), **changes}, BlockFile))


@pytest.mark.parametrize(
    "changes",
    [
        {"index": "../../etc/passwd"},
        {"index": 5},
        {"index_bytes": -1},
        {"index_bytes": True},
        {"index_bytes": 1 << 60},
        {"identity": "A" * 64},
        {"identity": None},
        {"size_bytes": 1.5},
        {"stored_bytes": 1},
        {"stripes": []},
        {"stripes": {}},
        {"stripes": [[NAME]]},
        {"stripes": [["images/x", 0]]},
        {"stripes": [NAME]},
        {"stripes": [[NAME, 2], [NAME, 3]], "stored_bytes": 5},
        {"stripes": [[NAME, 2]], "stored_bytes": 3},
        {"stripes": [[NAME, -1]], "stored_bytes": -1},
    ],
)
def test_an_impossible_description_is_refused(block_file, changes):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**msgspec.to_builtins(block_file), **changes}, BlockFile)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
FIELDS = ["index", "index_bytes", "identity", "size_bytes", "stored_bytes", "stripes"]


@given(JSON | st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, JSON)))
def test_any_json_is_refused(value):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(value, BlockFile)


def test_a_description_without_stripe_bytes_has_one_object():
    block_file = BlockFile(NAME, 100, "0" * 64, 0, 0, (Stored(NAME, 0),))
    assert [stored.name for stored in block_file.objects] == [NAME]
