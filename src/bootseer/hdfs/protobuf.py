"""A minimal Protocol Buffers codec for HDFS: fields by number, all sizes checked.

Hadoop's `proto2` messages have a dozen fields each, in a layout that is stable across versions. Decides and touches
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MAX_VARINT_BYTES: Final = 10
_VARINT, _COUNTED = 0, 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
_KINDS: Final = {_VARINT, _COUNTED, *_FIXED_BYTES}
_MASK = (1 << 64) - 1
_EMPTY: Final[list[int | bytes]] = []
_ONE_BYTE: Final = [bytes((number,)) for number in range(0x80)]


class MalformedError(ValueError):
    """A malformed message, or an unexpected one."""


def varint(number: int) -> bytes:
    """Encode a varint; negative integers as 64-bit two's complement."""
    if 0 <= number <= 0x7F:  # nearly all are
        return _ONE_BYTE[number]
    number &= _MASK
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def zigzag(number: int) -> int:
    """Encode a field of type `sint32` or `sint64`."""
    return ((number << 1) ^ (number >> 63)) & _MASK


def field(number: int, value: int | str | bytes) -> bytes:
    """Encode one field. Messages are passed as their bytes."""
    if isinstance(value, int):
        return varint(number << 3 | _VARINT) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | _COUNTED) + varint(len(data)) + data


def delimited(message: bytes) -> bytes:
    return varint(len(message)) + message


def read_varint(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int]:
    """Decode the varint at `at`; returns it and its end."""
    value = shift = 0
    try:
        while (byte := data[at]) > 0x7F:
            value |= (byte & 0x7F) << shift
            shift += 7
            at += 1
            if shift == 7 * MAX_VARINT_BYTES:
                raise MalformedError("a varint does not end")
    except IndexError:
        raise MalformedError("a varint does not end") from None
    return (value | byte << shift) & _MASK, at + 1


def read_delimited(data: bytes | bytearray | memoryview, at: int) -> tuple[bytes, int]:
    """The length-prefixed message at `at`, and its end."""
    length, at = read_varint(data, at)
    if length > len(data) - at:
        raise MalformedError(f"a message of {length} bytes where {len(data) - at} are left")
    return bytes(data[at : at + length]), at + length


def receive_delimited(receive: Callable[[int], bytes], max_bytes: int) -> bytes:
    """Receive a length-prefixed message. The length is read byte by byte, because what follows the message belongs to
    another reader."""
    length = b""
    while not length or length[-1] > 0x7F:
        if len(length) == MAX_VARINT_BYTES:
            raise MalformedError("a varint does not end")
        length += receive(1)
    num_bytes, _ = read_varint(length, 0)
    if num_bytes > max_bytes:
        raise MalformedError(f"an answer of {num_bytes} bytes")
    return receive(num_bytes)


class Message:
    """The fields of a message. Missing fields have their default; fields of another type raise `MalformedError`."""

    __slots__ = ("_fields",)

    def __init__(self, data: bytes) -> None:
        fields: dict[int, list[int | bytes]] = {}
        at, end = 0, len(data)
        try:
            while at < end:
                # Most numbers are one byte: a function call for each would take half of the time.
                key, at = data[at], at + 1
                if key > 0x7F:
                    key, at = read_varint(data, at - 1)
                kind = key & 7
                value: int | bytes
                if kind in _FIXED_BYTES:
                    length = _FIXED_BYTES[kind]
                else:
                    length, at = data[at], at + 1
                    if length > 0x7F:
                        length, at = read_varint(data, at - 1)
                if kind == _VARINT:
                    value = length
                else:
                    if kind not in _KINDS:
                        raise MalformedError(f"a field of the unknown kind {kind}")
                    if length > end - at:
                        raise MalformedError(f"a field of {length} bytes where {end - at} are left")
                    value = data[at : at + length]
                    at += length
                number = key >> 3
                if number in fields:
                    fields[number].append(value)
                else:
                    fields[number] = [value]
        except IndexError:
            raise MalformedError("a varint does not end") from None
        self._fields = fields

    def __contains__(self, number: int) -> bool:
        return number in self._fields

    def number(self, number: int, default: int | None = None) -> int:
        """An integer, enum or bool. Without a default the field is required."""
        value = self._last(number)
        if value is None:
            value = default
        if not isinstance(value, int):
            raise MalformedError(f"field {number} is not a number")
        return value

    def data(self, number: int, default: bytes | None = None) -> bytes:
        """Bytes, or an encoded message. Without a default the field is required."""
        value = self._last(number)
        if value is None:
            value = default
        if not isinstance(value, bytes):
            raise MalformedError(f"field {number} does not hold bytes")
        return value

    def text(self, number: int, default: str | None = None) -> str:
        """A string. Without a default the field is required."""
        if default is not None and number not in self._fields:
            return default
        try:
            return self.data(number).decode()
        except UnicodeDecodeError as error:
            raise MalformedError(f"field {number} is not text") from error

    def message(self, number: int) -> Message:
        """A nested message, which is required."""
        return Message(self.data(number))

    def every(self, number: int) -> list[bytes]:
        """All values of a repeated field of bytes or messages."""
        values = self._fields.get(number, _EMPTY)
        found = [value for value in values if isinstance(value, bytes)]
        if len(found) != len(values):
            raise MalformedError(f"field {number} does not hold bytes")
        return found

    def numbers(self, number: int) -> list[int]:
        """All values of a repeated field of integers or enums, not packed (`proto2`)."""
        values = self._fields.get(number, _EMPTY)
        found = [value for value in values if isinstance(value, int)]
        if len(found) != len(values):
            raise MalformedError(f"field {number} holds no numbers")
        return found

    def _last(self, number: int) -> int | bytes | None:
        values = self._fields.get(number)
        return values[-1] if values else None
