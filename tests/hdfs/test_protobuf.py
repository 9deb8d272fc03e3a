from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.hdfs.protobuf import (
    MalformedError,
    Message,
    delimited,
    field,
    read_delimited,
    read_varint,
    varint,
    zigzag,
)


@given(st.integers(0, (1 << 64) - 1))
def test_a_number_survives_a_round_trip(number: int) -> None:
    assert read_varint(varint(number), 0) == (number, len(varint(number)))


def test_numbers_are_encoded_by_the_format() -> None:
    assert varint(300) == b"\xac\x02"
    assert varint(-1) == b"\xff" * 9 + b"\x01"
    assert [zigzag(number) for number in (0, -1, 1, -33)] == [0, 1, 2, 65]


@given(st.integers(1, 1000), st.integers(0, 1 << 62), st.text(), st.binary())
def test_fields_survive_a_round_trip(number: int, value: int, text: str, data: bytes) -> None:
    message = Message(field(number, value) + field(number + 1, text) + field(number + 2, data))
    assert (message.number(number), message.text(number + 1), message.data(number + 2)) == (value, text, data)
    assert number in message
    assert number + 3 not in message


def test_the_last_of_several_values_is_used_and_all_are_available() -> None:
    message = Message(field(1, 5) + field(1, 6) + field(2, b"a") + field(2, b"b"))
    assert message.number(1) == 6
    assert message.every(2) == [b"a", b"b"]
    assert message.every(3) == []


def test_fields_of_fixed_length_are_skipped() -> None:
    message = Message(b"\x09" + bytes(8) + b"\x15" + bytes(4) + field(3, 7))
    assert message.number(3) == 7
    assert (len(message.data(1)), len(message.data(2))) == (8, 4)


def test_missing_fields_have_their_default_or_are_malformed() -> None:
    message = Message(b"")
    assert (message.number(1, 4), message.text(1, "x"), message.data(1, b"y")) == (4, "x", b"y")
    for read in (message.number, message.text, message.data, message.message):
        with pytest.raises(MalformedError):
            read(1)


def test_a_field_of_another_type_is_malformed() -> None:
    message = Message(field(1, 5) + field(2, b"\xff"))
    for read, number in ((message.data, 1), (message.every, 1), (message.number, 2), (message.text, 2)):
        with pytest.raises(MalformedError):
            read(number)


@pytest.mark.parametrize(
    "data",
    [b"\x80", b"\xff" * 11, b"\x0a\x05abc", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x0b", b"\x09abc"],
)
def test_truncated_or_unterminated_messages_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedError):
        Message(data)
    with pytest.raises(MalformedError):
        read_delimited(varint(100) + data, 0)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_malformed(data: bytes) -> None:
    with contextlib.suppress(MalformedError):
        message = Message(data)
        message.every(1)
    with contextlib.suppress(MalformedError):
        assert len(read_delimited(data, 0)[0]) <= len(data)


def test_a_delimited_message_is_read_with_its_end() -> None:
    data = delimited(b"abc") + b"rest"
    assert read_delimited(data, 0) == (b"abc", 4)
