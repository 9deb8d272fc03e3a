"""Examples of event lines: what is written, what is read back, and what is refused with which reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bootseer.trace.event import (
    BEGIN,
    END,
    FAILED,
    MAX_LINE_BYTES,
    MAX_READ_BYTES,
    Event,
    Malformed,
    decode,
    encode,
    stage_name,
)

SMALL = Event(1, 2, "moe", "n0", "image_loading", BEGIN, "00f067aa0ba902b7")
FULL = Event(
    wall_ns=1_700_000_000_123_456_789,
    mono_ns=42,
    job="moe",
    node="n0/5f2a",
    stage="environment_setup.install",
    phase=END,
    span="00f067aa0ba902b7",
    attempt=3,
    restart=1,
    kind="restart",
    rank=7,
    parent="b7ad6b7169203331",
    outcome=FAILED,
    pid=4711,
    trace="4bf92f3577b34da6a3ce929d0e0e4736",
    attrs={"bytes": 2**40, "hits": 0.5, "barrier": True, "what": "naïve ☃ 🚀", "none": None},
)
LINE = (
    b'@bootseer1 {"wall_ns":1,"mono_ns":2,"job":"moe","node":"n0","stage":"image_loading","phase":"begin",'
    b'"span":"00f067aa0ba902b7"}\n'
)


def reason(text: bytes) -> str:
    with pytest.raises(Malformed) as caught:
        decode(text)
    return caught.value.reason


def line(version: int = 1, **changes: Any) -> bytes:
    """A line with some fields changed; None leaves a field out."""
    record = {
        "wall_ns": 1,
        "mono_ns": 2,
        "job": "j",
        "node": "n",
        "stage": "s",
        "phase": "begin",
        "span": "a",
        **changes,
    }
    known = {key: value for key, value in record.items() if value is not None}
    return b"@bootseer%d %s\n" % (version, json.dumps(known).encode())


def test_golden_lines() -> None:
    assert encode(SMALL) == LINE
    assert encode(FULL) == (
        b'@bootseer1 {"wall_ns":1700000000123456789,"mono_ns":42,"job":"moe","node":"n0/5f2a",'
        b'"stage":"environment_setup.install","phase":"end","span":"00f067aa0ba902b7","attempt":3,"restart":1,'
        b'"kind":"restart","rank":7,"parent":"b7ad6b7169203331","outcome":"failed","pid":4711,'
        b'"trace":"4bf92f3577b34da6a3ce929d0e0e4736","attrs":{"bytes":1099511627776,"hits":0.5,"barrier":true,'
        b'"what":"na\\u00efve \\u2603 \\ud83d\\ude80","none":null}}\n'
    )


@pytest.mark.parametrize("event", [SMALL, FULL])
def test_round_trip(event: Event) -> None:
    text = encode(event)
    assert decode(text) == event


@pytest.mark.parametrize(
    ("prefix", "suffix"),
    [
        (b"[rank0]:", b""),
        (b"0: ", b""),
        (b"[default0]:", b""),
        (b"2025-01-01T00:00:00.000000000Z stdout F ", b""),
        (b"\x1b[32mINFO\x1b[0m \xff\xfe ", b"\x1b[0m"),
        (b"progress 10%\rprogress 20%\r", b"\r"),
        (b'{"log":"', b' trailing } { "garbage'),
        (b"", b'}}}{"a":1}'),
        (b"@bootseer @bootseerX @bootseer1 nothing ", b""),
    ],
)
def test_found_within_any_line(prefix: bytes, suffix: bytes) -> None:
    bare = encode(FULL).rstrip(b"\n")
    assert decode(prefix + bare + suffix + b"\n") == FULL


@pytest.mark.parametrize("junk", [b"\xff", b"\xe2\x82", b"\xed\xa0\x80", "é☃🚀".encode()])
def test_the_event_after_invalid_utf8_is_not_lost(junk: bytes) -> None:
    broken = LINE.rstrip(b"\n").replace(b'"moe"', b'"m' + junk * 20 + b'"')
    event = decode(broken + LINE)
    assert event.job.startswith("m")
    event.job.encode()


def test_an_event_across_a_newline_is_truncated() -> None:
    assert reason(LINE[:60] + b"\n" + LINE[60:]) == "truncated"


@pytest.mark.parametrize("length", range(len("@bootseer1 {"), len(LINE) - 1, 7))
def test_cut_short(length: int) -> None:
    assert reason(LINE[:length]) in ("truncated", "not_json")


def test_interleaved_with_another_writer() -> None:
    assert reason(LINE[:24] + b"INFO step 1 loss 2.5" + LINE[24:]) == "not_json"
    assert decode((LINE[:24] + LINE)[1:]) == SMALL


@pytest.mark.parametrize("version", [0, 2, 7, 9999])
def test_other_versions_are_refused(version: int) -> None:
    assert reason(line(version)) == "version"


def test_no_tag() -> None:
    for text in (b"", b"\n", b"INFO hello", b"@bootseer", b"@bootseer1", b"@bootseer1 hello", b"@bootseer12345 {}"):
        assert reason(text) == "no_tag"


def test_keys_of_a_later_version_are_ignored() -> None:
    assert decode(line(t=9, ev="E", new={"deep": [1, {"a": "@bootseer1 {}"}]})) == decode(line())


@pytest.mark.parametrize(
    "changes",
    [
        {name: None} for name in ("wall_ns", "mono_ns", "job", "node", "stage", "phase", "span")
    ] + [
        {"wall_ns": "1"}, {"wall_ns": 1.0}, {"wall_ns": True}, {"wall_ns": 2**63}, {"mono_ns": -(2**63) - 1},
        {"wall_ns": float("nan")}, {"mono_ns": float("inf")}, {"job": 1}, {"job": ""}, {"node": ""}, {"span": ""},
        {"node": ["n"]}, {"stage": "Bad Name"}, {"stage": ""}, {"stage": "a..b"}, {"stage": "a\n"}, {"phase": "BEGIN"},
        {"phase": ""}, {"outcome": "maybe"}, {"attempt": -1}, {"restart": -1}, {"attempt": "0"}, {"rank": "0"},
        {"attrs": [1]}, {"attrs": "text"}, {"pid": {}}, {"trace": 5}, {"parent": False},
    ],
)  # fmt: skip
def test_bad_fields(changes: dict[str, Any]) -> None:
    assert reason(line(**changes)) == "bad_field"


def test_limits_of_int64_are_fine() -> None:
    event = decode(line(wall_ns=2**63 - 1, mono_ns=-(2**63)))
    assert (event.wall_ns, event.mono_ns) == (2**63 - 1, -(2**63))


def test_numbers_that_are_none_stay_text() -> None:
    text = b'@bootseer1 {"wall_ns":1,"mono_ns":2,"job":"j","node":"n","stage":"s","phase":"begin","span":"a",'
    event = decode(text + b'"attrs":{"a":NaN,"b":-Infinity,"c":1e999,"d":-1e999,"e":1e5},"later":[1e999,NaN]}')
    assert event.attrs == {"a": "NaN", "b": "-Infinity", "c": "1e999", "d": "-1e999", "e": 1e5}
    assert decode(encode(event)) == event
    json.loads(encode(event).partition(b" ")[2], parse_constant=pytest.fail)


def test_huge_integers() -> None:
    event = decode(line(attrs={"a": 10**30, "b": -(10**400), "c": 2**63 - 1}))
    assert event.attrs == {"a": 1e30, "b": -float(2**1000), "c": 2**63 - 1}
    digits = b"9" * 5000
    assert reason(LINE.replace(b'"wall_ns":1', b'"wall_ns":' + digits)) == "not_json"
    written = decode(encode(SMALL._replace(attrs={"a": 10**30, "b": -(10**5000)})))
    assert written.attrs == {"a": 1e30, "b": -float(2**1000)}


def test_floats_that_json_has_no_word_for_are_written_as_text() -> None:
    attrs = {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1.5e308}
    written = decode(encode(SMALL._replace(attrs=attrs)))
    assert written.attrs == {"a": "nan", "b": "inf", "c": "-inf", "d": "1.5e+308"}


def test_lone_surrogates_become_printable() -> None:
    event = decode(line(job="a\ud800b", attrs={"\udfff": "x\udc80"}))
    assert event.job == "a?b"
    assert event.attrs == {"?": "x?"}
    # Python represents a file name that is not UTF-8 with surrogates: it is written, too.
    assert decode(encode(SMALL._replace(attrs={"file": "a\udcff"}))).attrs == {"file": "a?"}


@pytest.mark.parametrize("depth", [100, 900, 980, 985, 990, 995, 1000, 5000, 30_000])
def test_deep_nesting_is_read_or_refused(depth: int) -> None:
    """At any depth, and wherever the stack ends."""
    nested = b"[" * depth + b"]" * depth
    for key in (b'"later":', b'"attrs":{"a":'):
        text = LINE.rstrip(b"}\n") + b"," + key + nested + (b"}}" if key.startswith(b'"attrs') else b"}")
        try:
            event = decode(text)
        except Malformed as error:
            assert error.reason == "not_json"
        else:
            assert decode(encode(event)).span == event.span


def test_tag_within_values_is_not_an_event() -> None:
    hidden = "before @bootseer1 {} after \\@bootseer1 " + LINE.decode()
    event = SMALL._replace(job=hidden[:200], attrs={"log": hidden, hidden[:60]: 1})
    text = encode(event)
    assert text.count(b"@bootseer") == 1
    assert decode(text) == event


@pytest.mark.parametrize("value", ["x" * 10_000_000, "☃" * 1_000_000, "\\" * 5000, ["x" * 5000], b"x" * 5000])
def test_a_huge_value_is_cut_and_marked(value: object) -> None:
    text = encode(FULL._replace(attrs={"log": value, "bytes": 5}))
    assert len(text) <= MAX_LINE_BYTES
    event = decode(text)
    assert event.attrs["attrs_cut"] is True
    assert event.attrs["bytes"] == 5
    assert (event.stage, event.span, event.parent) == (FULL.stage, FULL.span, FULL.parent)


@pytest.mark.slow
def test_many_attributes_and_long_names_fit() -> None:
    long = "🚀" * 10_000
    stage = ".".join(["s" * 64] * 8)
    event = FULL._replace(job=long, node=long, stage=stage, attrs={f"{number}{long}": long for number in range(100)})
    text = encode(event)
    assert len(text) <= MAX_LINE_BYTES
    assert decode(text).stage == stage
    assert decode(text).attrs["attrs_cut"] is True


def test_longest_stage_name_survives() -> None:
    """Cut at 256 characters, this name would end with a dot and be refused."""
    stage = ".".join(["s" * 63] * 8)
    assert decode(encode(SMALL._replace(stage=stage))).stage == stage


def test_reading_an_oversized_event() -> None:
    assert reason(line(attrs={"a": "x" * 10_000_000})) == "oversized"
    assert reason(line(attrs={"a": "x" * (MAX_READ_BYTES + 10)})) == "oversized"
    assert decode(line(attrs={"a": "x" * (MAX_READ_BYTES - 1000)})).attrs == {"a": "x" * 1024}


def test_objects_as_values_never_end_the_job() -> None:
    class Hostile:
        def __str__(self) -> str:
            raise RuntimeError("no")

    loop: list[object] = []
    loop.append(loop)
    event = SMALL._replace(attrs={"hostile": Hostile(), "loop": loop, "path": {"a": 1}})
    assert decode(encode(event)).attrs == {"hostile": "<Hostile>", "loop": "[[...]]", "path": "{'a': 1}"}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("environment_setup.install", "environment_setup.install"),
        ("Data Loading", "data_loading"),
        ("a..b", "a.b"),
        ("ünïcode", "n_code"),
        ("", "unnamed"),
        ("...", "unnamed"),
        ("x" * 100, "x" * 64),
        ("a.b.c.d.e.f.g.h.i.j", "a.b.c.d.e.f.g.h"),
        ("a\n", "a"),
    ],
)
def test_nearest_stage_name(text: str, name: str) -> None:
    assert stage_name(text) == name
    assert decode(encode(SMALL._replace(stage=name))).stage == name


@pytest.mark.parametrize("letter", ["x", "é", "🚀", "\x01", "\udc80"])
def test_long_names_that_differ_at_their_ends_stay_different_jobs(letter: str) -> None:
    """As the names of Slurm's jobs do: `NAME-4711`."""
    one, two = (decode(encode(SMALL._replace(job=f"{letter * 300}-{number}"))).job for number in (4711, 4712))
    assert one != two
    assert one[:87] == two[:87] == letter * 87 or letter == "\udc80"


def test_all_lines_of_a_start_name_the_same_job_and_node() -> None:
    """Also those whose attributes do not fit into a line."""
    event = SMALL._replace(job="j" * 200, node=f"pod-{'p' * 60}/{'u' * 36}")
    long = event._replace(attrs={str(number): "v" * 500 for number in range(20)})
    assert decode(encode(long)).attrs["attrs_cut"] is True
    assert {decode(encode(one))[:4] for one in (event, long)} == {decode(encode(event))[:4]}
    assert (decode(encode(long)).job, decode(encode(long)).node) == (event.job, event.node)
