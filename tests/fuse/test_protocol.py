"""The protocol's structures: what hostile or unexpected bytes become, and how folders are cut into pieces."""

from __future__ import annotations

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.fuse import protocol
from bootseer.fuse.filesystem import Entry


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reading_of_a_request(data: bytes) -> None:
    request = protocol.parse_request(bytearray(data.ljust(200, b"\0")), len(data))
    assert request is None or request.end == len(data)


def test_a_request_is_read_back() -> None:
    packed = protocol.IN_HEADER.pack(48, protocol.LOOKUP, 77, 5, 1, 2, 3, 0, 0) + b"name\0\0\0\0"
    request = protocol.parse_request(bytearray(packed), len(packed))
    assert request == (protocol.LOOKUP, 77, 5, 48)
    assert protocol.parse_name(memoryview(packed)[40:]) == b"name"


def test_a_kernel_of_a_later_major_version_is_asked_to_speak_ours() -> None:
    answer = protocol.init_out(protocol.Hello(8, 1, 0, 0xFFFF_FFFF))
    assert answer[:16] == bytes([7, 0, 0, 0, 31, 0, 0, 0]) + bytes(8)
    assert len(answer) == 64


def test_only_what_the_kernel_offers_is_agreed_on() -> None:
    offered = protocol.ASYNC_READ | 1 << 5
    answer = protocol.init_out(protocol.Hello(7, 40, 128 * 1024, offered))
    assert int.from_bytes(answer[12:16], "little") == protocol.ASYNC_READ


@given(st.lists(st.binary(min_size=1, max_size=255), max_size=30), st.integers(0, 31), st.integers(0, 2000))
def test_a_folder_is_cut_between_entries(names: list[bytes], start: int, room: int) -> None:
    entries = [Entry(name, number + 2, stat.S_IFREG) for number, name in enumerate(names)]
    packed = protocol.directory(entries, start, room)
    assert len(packed) <= room
    seen = []
    while packed:
        inode, following, length, kind = protocol.DIRENT.unpack_from(packed)
        seen.append((packed[24 : 24 + length], inode, following, kind))
        packed = packed[-(-(24 + length) // 8) * 8 :]
    wanted = [(entry.name, entry.inode, start + place + 1, 8) for place, entry in enumerate(entries[start:])]
    assert seen == wanted[: len(seen)]
    if room >= 24 + 256 and start < len(names):
        assert seen


@pytest.mark.parametrize("errno", [0, 5, 511])
def test_the_header_of_an_answer(errno: int) -> None:
    assert protocol.OUT_HEADER.unpack(protocol.header(9, 100, errno)) == (116, -errno, 9)
