"""The event line with arbitrary events, arbitrary bytes, and damaged valid lines."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.trace.event import KINDS, MAX_LINE_BYTES, OUTCOMES, PHASES, Event, Malformed, decode, encode

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NAME = TEXT.filter(bool).map(lambda text: text[:60])
STAGE = st.from_regex(r"[a-z0-9_]{1,20}(\.[a-z0-9_]{1,20}){0,7}", fullmatch=True)
FLOAT = st.floats(allow_nan=False, allow_infinity=False, min_value=-9e307, max_value=9e307)
SCALAR = st.one_of(st.none(), st.booleans(), INT64, FLOAT, TEXT.map(lambda text: text[:40]))
JSON = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAME, inner, max_size=3), max_leaves=6
)
HEX16 = st.text("0123456789abcdef", min_size=16, max_size=16)


def events(attrs: st.SearchStrategy[Any], names: st.SearchStrategy[str]) -> st.SearchStrategy[Event]:
    return st.builds(
        Event,
        wall_ns=INT64,
        mono_ns=INT64,
        job=names,
        node=names,
        stage=STAGE,
        phase=st.sampled_from(sorted(PHASES)),
        span=HEX16,
        attempt=st.integers(0, 2**63 - 1),
        restart=st.integers(0, 2**63 - 1),
        kind=st.sampled_from(KINDS),
        rank=INT64,
        parent=st.one_of(st.just(""), HEX16),
        outcome=st.sampled_from(sorted(OUTCOMES)),
        pid=INT64,
        trace=HEX16,
        attrs=attrs,
    )


def fits(event: Event) -> bool:
    return len(encode(event)) < 3000


@settings(max_examples=300, deadline=None)
@given(events(st.dictionaries(NAME, SCALAR, max_size=3), NAME).filter(fits), TEXT, TEXT)
def test_what_was_written_is_read(event: Event, before: str, behind: str) -> None:
    text = encode(event)
    assert decode(before.replace("@", "").encode() + text.rstrip(b"\n") + behind.encode()) == event


@settings(max_examples=300, deadline=None)
@given(
    events(
        st.dictionaries(
            st.text(max_size=200),
            st.one_of(st.integers(), st.floats(), st.binary(), st.lists(st.text()), st.text().map(lambda t: t * 500)),
            max_size=60,
        ),
        st.text(min_size=1).map(lambda text: text * 50),
    )
)  # fmt: skip
def test_every_line_is_short_ascii_and_one_line(event: Event) -> None:
    text = encode(event)
    assert len(text) <= MAX_LINE_BYTES
    assert text.isascii()
    assert text.endswith(b"}\n")
    assert text.count(b"\n") == 1
    found = decode(text)
    assert (found.wall_ns, found.mono_ns, found.span, found.stage) == (
        event.wall_ns,
        event.mono_ns,
        event.span,
        event.stage,
    )


def decode_all(text: bytes) -> int:
    """Look for an event after each tag. Returns the number of events."""
    num_events = 0
    for tag in re.finditer(rb"@bootseer\d", text):
        try:
            event = decode(text[tag.start() :])
        except Malformed as error:
            assert error.reason in ("no_tag", "version", "truncated", "oversized", "not_json", "bad_field")
        else:
            again = decode(encode(event))
            assert (again.span, again.wall_ns, again.job[:50]) == (event.span, event.wall_ns, event.job[:50])
            json.dumps(event._asdict(), allow_nan=False)
            num_events += 1
    return num_events


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([b"", b"@bootseer1 {", b"@bootseer0 {", b'@bootseer1 {"wall_ns":1,']))
def test_arbitrary_bytes_raise_nothing_else(text: bytes, prefix: bytes) -> None:
    decode_all(prefix + text)


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from([0, 1]),
    st.dictionaries(
        st.sampled_from(sorted({*Event._fields, "t", "m", "att", "id", "par", "st", "ev", "ok", "x", "new"})), JSON
    ),
)
def test_arbitrary_json_raises_nothing_else(version: int, record: dict[str, Any]) -> None:
    decode_all(b"@bootseer%d %s" % (version, json.dumps(record).encode()))


SEEDS = [
    encode(
        Event(10**18, 5, "moe", "n0", "a.b", "begin", "00f067aa0ba902b7", attrs={"bytes": 1, "x": "é@bootseer1 {}"})
    ),
    encode(Event(-1, 2**63 - 1, "☃" * 40, "n0/ü", "first_step", "end", "ff", outcome="ok"))[:-2]
    + b',"new":[[[1.5e3]]]}\n',
    b'[rank0]: @bootseer1 {"wall_ns":1,"mono_ns":2,"job":"j","node":"n","stage":"s","phase":"end","span":"a",'
    b'"outcome":"ok","attrs":{"a":null}}\n',
]


@pytest.mark.parametrize("seed", range(8))
def test_damaged_lines(seed: int) -> None:
    """Flips, cuts, duplications and splices of valid lines: every event found can be written again."""
    rng = random.Random(seed)
    num_found = 0
    for _ in range(500):
        text = bytearray(rng.choice(SEEDS))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text) + 1)
            kind = rng.randrange(5)
            if kind == 0 and at < len(text):
                text[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del text[at : at + rng.randint(1, 20)]
            elif kind == 2:
                text[at:at] = rng.choice(
                    [b"\xff", b"\r", b"\0", b'"', b"{", b"}", b"\\", b"9" * 30, b"1e999", b"[" * 2000]
                )
            elif kind == 3:
                other = rng.choice(SEEDS)
                text[at:] = other[rng.randrange(len(other)) :]
            else:
                text[at:at] = text[: rng.randrange(len(text) + 1)]
        num_found += decode_all(bytes(text))
    assert num_found > 25  # enough lines are intact that the fuzzer covers all of decode
