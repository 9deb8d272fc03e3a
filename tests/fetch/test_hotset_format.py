from __future__ import annotations

import contextlib
import json

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bootseer.errors import BootseerError, CorruptError, PermanentError
from bootseer.fetch import hotset
from bootseer.fetch.hotset import (
    MAX_IMPORTS,
    MAX_NEEDS,
    HotSet,
    Record,
    encode_hot_set,
    parse_hot_set,
)

FILES = ["ab" * 32, "cd" * 32, "00" * 32]
needs = st.lists(
    st.tuples(st.tuples(st.sampled_from(FILES), st.integers(0, 2**26 - 1)), st.integers(0, 10**6)),
    unique_by=lambda need: need[0],
    max_size=50,
).map(lambda rows: dict(sorted(rows, key=lambda row: row[1])))
records = st.builds(
    Record,
    started_s=st.floats(0, 2e9),
    duration_ms=st.integers(0, 10**7),
    needs=needs,
)
sets = st.builds(
    HotSet,
    image=st.text(min_size=1, max_size=50),
    workload=st.text(min_size=1, max_size=50),
    records=st.lists(records, max_size=8).map(lambda each: tuple(sorted(each, key=lambda record: record.started_s))),
    imports=st.text(max_size=50),
)
SET = HotSet(
    "image",
    "workload",
    (Record(5.0, 900, {(FILES[0], 7): 3, (FILES[1], 8): 4}),),
)


def packed(document: object) -> bytes:
    return zstandard.ZstdCompressor().compress(json.dumps(document).encode())


def opened(data: bytes) -> dict:
    return json.loads(zstandard.ZstdDecompressor().decompress(data))


@settings(max_examples=100)
@given(sets)
def test_a_set_comes_back_as_it_was_and_equal_sets_have_equal_bytes(hot_set):
    data = encode_hot_set(hot_set)
    assert parse_hot_set(data) == hot_set
    orders = [[list(record.needs) for record in each.records] for each in (hot_set, parse_hot_set(data))]
    assert orders[0] == orders[1]
    assert encode_hot_set(parse_hot_set(data)) == data


def test_a_set_of_real_size_is_small():
    rows = {(FILES[at % 2], 3 * at): 2 * at for at in range(4000)}
    data = encode_hot_set(HotSet("image", "workload", tuple(Record(float(run), 9000, rows) for run in range(8))))
    assert len(data) < 20_000


@pytest.mark.parametrize("schema", ["bootseer.hotset/2", "bootseer.hotset/1.5"])
def test_a_later_version_is_distinguished_from_nonsense(schema):
    with pytest.raises(PermanentError, match="version") as raised:
        parse_hot_set(packed({**opened(encode_hot_set(SET)), "schema": schema}))
    assert not isinstance(raised.value, CorruptError)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["schema"], "something else"),
        (["image"], ""),
        (["workload"], "x" * 513),
        (["files"], ["ab"]),
        (["files"], [FILES[0], FILES[0]]),
        (["files"], FILES * 2000),
        (["imports"], "x" * (MAX_IMPORTS + 1)),
        (["runs"], {}),
        (["runs"], [[]]),
        (["runs", 0, "file"], [0, 2]),
        (["runs", 0, "file"], [0]),
        (["runs", 0, "block"], [7, -8]),
        (["runs", 0, "block"], [2**26, 0]),
        (["runs", 0, "block"], [True, False]),
        (["runs", 0, "block"], [1.5, 0]),
        (["runs", 0, "block"], "78"),
        (["runs", 0, "t_ms"], [3, -1]),
        (["runs", 0, "started_s"], "now"),
        (["runs", 0, "started_s"], True),
        (["runs", 0, "started_s"], float("nan")),
        (["runs", 0, "started_s"], float("inf")),
        (["runs", 0, "started_s"], 10**400),
        (["runs", 0, "duration_ms"], -1),
    ],
)
def test_each_impossible_value_is_refused(path, value):
    document = opened(encode_hot_set(SET))
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(CorruptError):
        parse_hot_set(packed(document))


def test_a_list_of_modules_of_the_largest_size_comes_back_and_a_number_that_json_lacks_is_refused():
    assert hotset.MAX_IMPORTS == 1 << 20
    assert parse_hot_set(encode_hot_set(replace(SET, imports="x" * MAX_IMPORTS))).imports == "x" * MAX_IMPORTS
    with pytest.raises(ValueError, match="JSON"):
        encode_hot_set(replace(SET, records=(replace(SET.records[0], started_s=float("nan")),)))


def test_a_block_that_is_named_twice_in_a_run_is_refused():
    document = opened(encode_hot_set(SET))
    document["runs"][0]["file"] = [0, 0]
    document["runs"][0]["block"] = [7, 0]
    with pytest.raises(CorruptError, match="twice"):
        parse_hot_set(packed(document))


def test_runs_in_the_wrong_order_are_refused():
    document = opened(encode_hot_set(SET))
    document["runs"] = [document["runs"][0], {**document["runs"][0], "started_s": 4.0}]
    with pytest.raises(CorruptError, match="order"):
        parse_hot_set(packed(document))
    document["runs"][1]["started_s"] = 5.0
    assert len(parse_hot_set(packed(document)).records) == 2


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"x" * (hotset.MAX_STORED_BYTES + 1),
        zstandard.ZstdCompressor().compress(b" " * (hotset.MAX_JSON_BYTES + 1)),
        zstandard.ZstdCompressor(write_content_size=False).compress(b"{}"),
        zstandard.ZstdCompressor().compress(b"[" * 1_000_000),
        zstandard.ZstdCompressor().compress(b"\xff\xfe"),
        zstandard.ZstdCompressor().compress(b'{"a":1' + b"0" * 5000 + b"}"),
        packed([]),
        encode_hot_set(SET)[:-3],
        encode_hot_set(SET) + b"more",
    ],
    ids=range(11),
)
def test_what_is_no_hot_set_is_refused_before_it_takes_memory(data):
    with pytest.raises(CorruptError):
        parse_hot_set(data)


@settings(max_examples=100)
@given(st.binary(max_size=200), st.integers(0, 500))
def test_damaged_bytes_end_in_an_error_of_ours_or_in_a_set(noise, at):
    data = bytearray(encode_hot_set(SET))
    data[at % len(data) : at % len(data) + len(noise)] = noise
    with contextlib.suppress(BootseerError):
        parse_hot_set(bytes(data))


def test_the_oldest_runs_are_left_out_when_all_do_not_fit(monkeypatch):
    rows = {(FILES[0], at * 7919 % 2**20): at * 37 for at in range(1000)}
    whole = HotSet("image", "workload", tuple(Record(float(run), 9000, rows) for run in range(8)))
    size = zstandard.get_frame_parameters(encode_hot_set(whole)).content_size
    for limit, num_kept in ((size, 8), (size - 1, 7)):
        monkeypatch.setattr(hotset, "MAX_JSON_BYTES", limit)
        assert len(parse_hot_set(encode_hot_set(whole)).records) == num_kept
    monkeypatch.setattr(hotset, "MAX_JSON_BYTES", 50_000)
    kept = parse_hot_set(encode_hot_set(whole))
    assert 0 < len(kept.records) < 8
    assert kept.records == whole.records[-len(kept.records) :]
    monkeypatch.setattr(hotset, "MAX_JSON_BYTES", 200)
    assert parse_hot_set(encode_hot_set(whole)) == HotSet("image", "workload")


def test_the_largest_numbers_and_the_most_files_are_read():
    document = opened(encode_hot_set(SET))
    document["files"] = [f"{number:064x}" for number in range(4096)]
    document["runs"][0].update(block=[2**26 - 1, 0], file=[0, 4095], t_ms=[2**40 - 1, 0], duration_ms=2**40)
    (record,) = parse_hot_set(packed(document)).records
    assert record.needs[f"{4095:064x}", 2**26 - 1] == 2**40 - 1
    for change in ({"t_ms": [2**40, 0]}, {"duration_ms": 2**40 + 1}):
        with pytest.raises(CorruptError):
            parse_hot_set(packed({**document, "runs": [document["runs"][0] | change]}))
    with pytest.raises(CorruptError):
        parse_hot_set(packed({**document, "files": [*document["files"], "ff" * 32]}))


def test_sets_of_version_0_2_are_read_and_its_readers_find_their_column():
    document = opened(encode_hot_set(SET))
    assert document["runs"][0]["found"] == [0, 0]
    document["runs"][0]["found"] = [2, -1]
    assert parse_hot_set(packed(document)) == SET


def test_more_needs_than_a_run_may_have_are_refused():
    document = opened(encode_hot_set(SET))
    for column in ("file", "block", "t_ms"):
        document["runs"][0][column] = [0] * (MAX_NEEDS + 1)
    with pytest.raises(CorruptError):
        parse_hot_set(packed(document))
