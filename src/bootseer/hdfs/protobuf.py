"""Protocol Buffers, as little as HDFS needs of them: the fields of a message by number, all sizes checked.

Hadoop speaks `proto2` messages of a dozen fields each, in a layout that no version changes. Decides and touches
nothing.
"""

from __future__ import annotations

from typing import Final

MAX_VARINT_BYTES: Final = 10
_VARINT, _COUNTED = 0, 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
_KINDS: Final = {_VARINT, _COUNTED, *_FIXED_BYTES}
_MASK = (1 << 64) - 1
_EMPTY: Final[list[int | bytes]] = []
_ONE_BYTE: Final = [bytes((number,)) for number in range(0x80)]


class MalformedError(ValueError):
    """Malformed message, or not the one that was expected."""


def varint(number: int) -> bytes:
    """An integer in its variable length; negative ones as 64 bit of two's complement."""
    if 0 <= number <= 0x7F:  # nearly all
        return _ONE_BYTE[number]
    number &= _MASK
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def zigzag(number: int) -> int:
    """What a field of type `sint32` or `sint64` holds."""
    return ((number << 1) ^ (number >> 63)) & _MASK


def field(number: int, value: int | str | bytes) -> bytes:
    """One field. Messages are given as their bytes."""
    if isinstance(value, int):
        return varint(number << 3 | _VARINT) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | _COUNTED) + varint(len(data)) + data


def delimited(message: bytes) -> bytes:
    """A message behind its length."""
    return varint(len(message)) + message


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """The integer that begins at `at`, and where it ends."""
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


def read_delimited(data: bytes | memoryview, at: int) -> tuple[bytes, int]:
    """The message that begins at `at` with its length, and where it ends."""
    length, at = read_varint(data, at)
    if length > len(data) - at:
        raise MalformedError(f"a message of {length} bytes where {len(data) - at} are left")
    return bytes(data[at : at + length]), at + length


class Message:
    """The fields of a message. A field that is missing has its default; one of another type is `MalformedError`."""

    __slots__ = ("_fields",)

    def __init__(self, data: bytes) -> None:
        fields: dict[int, list[int | bytes]] = {}
        at, end = 0, len(data)
        try:
            while at < end:
                # Most numbers are one byte: asking for them by a call would take half of the time.
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
        """An integer, an enumeration or a truth value. A field without a default must be there."""
        value = self._last(number)
        if value is None:
            value = default
        if not isinstance(value, int):
            raise MalformedError(f"field {number} is not a number")
        return value

    def data(self, number: int, default: bytes | None = None) -> bytes:
        """Bytes, or a message in a message. A field without a default must be there."""
        value = self._last(number)
        if value is None:
            value = default
        if not isinstance(value, bytes):
            raise MalformedError(f"field {number} does not hold bytes")
        return value

    def text(self, number: int, default: str | None = None) -> str:
        """A string. A field without a default must be there."""
        if default is not None and number not in self._fields:
            return default
        try:
            return self.data(number).decode()
        except UnicodeDecodeError as error:
            raise MalformedError(f"field {number} is not text") from error

    def message(self, number: int) -> Message:
        """A message in this one, which must be there."""
        return Message(self.data(number))

    def every(self, number: int) -> list[bytes]:
        """All values of a repeated field of bytes or messages."""
        values = self._fields.get(number, _EMPTY)
        found = [value for value in values if isinstance(value, bytes)]
        if len(found) != len(values):
            raise MalformedError(f"field {number} does not hold bytes")
        return found

    def numbers(self, number: int) -> list[int]:
        """All values of a repeated field of integers or enumerations, each of which has its own tag in `proto2`."""
        values = self._fields.get(number, _EMPTY)
        found = [value for value in values if isinstance(value, int)]
        if len(found) != len(values):
            raise MalformedError(f"field {number} holds no numbers")
        return found

    def _last(self, number: int) -> int | bytes | None:
        values = self._fields.get(number)
        return values[-1] if values else None
