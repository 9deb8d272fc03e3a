"""The protocol's structures: hostile and unexpected bytes, listings in pieces, and requests that change files."""

from __future__ import annotations

import stat
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.fuse import protocol
from bootseer.fuse.filesystem import Attributes, Changes, FoundNode, Listed, Space


def test_a_name_ends_at_its_first_nul() -> None:
    assert protocol.parse_name(memoryview(b"name\0\0\0\0")) == b"name"


def init_in(*fields: int) -> memoryview:
    return memoryview(struct.pack("=IIII", *fields))


def test_a_kernel_of_a_later_major_version_is_asked_to_speak_ours() -> None:
    answer = protocol.init_out(init_in(8, 1, 0, 0xFFFF_FFFF))
    assert answer[:16] == bytes([7, 0, 0, 0, 31, 0, 0, 0]) + bytes(8)
    assert len(answer) == 64


def test_only_what_the_kernel_offers_is_agreed_on() -> None:
    offered = protocol.ASYNC_READ | 1 << 5
    answer = protocol.init_out(init_in(7, 40, 128 * 1024, offered))
    assert int.from_bytes(answer[12:16], "little") == protocol.ASYNC_READ


@given(st.lists(st.binary(min_size=1, max_size=255), max_size=30), st.integers(0, 31), st.integers(0, 2000))
def test_a_folder_is_cut_between_entries(names: list[bytes], start: int, room: int) -> None:
    entries = [Listed(name, number + 2, stat.S_IFREG) for number, name in enumerate(names)]
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


def setattr_in(valid: int, **values: int) -> memoryview:
    sizes_and_times = ("fh", "size", "lock_owner", "atime", "mtime", "ctime")
    rest = ("atimensec", "mtimensec", "ctimensec", "mode", "unused", "uid", "gid", "unused2")
    fields = [values.get(name, 0) for name in sizes_and_times + rest]
    return memoryview(struct.pack("=II6Q8I", valid, 0, *fields))


def test_only_what_is_valid_is_changed() -> None:
    assert protocol.parse_changes(setattr_in(0, size=5, mode=7, uid=9, gid=9, mtime=9), 3) == Changes()
    everything = setattr_in(0b1101111, size=5, mode=0o100640, uid=6, gid=7, mtime=8, mtimensec=9)
    assert protocol.parse_changes(everything, 3) == Changes(5, 0o640, 6, 7, 8_000_000_009)
    assert protocol.parse_changes(setattr_in(1 << 8 | 1 << 5, mtime=1), 3) == Changes(mtime_ns=3)
    before = setattr_in(1 << 5, mtime=(1 << 64) - 2, mtimensec=500_000_000)
    assert protocol.parse_changes(before, 3) == Changes(mtime_ns=-1_500_000_000)


def test_both_forms_of_a_rename() -> None:
    plain = protocol.parse_rename(memoryview(struct.pack("=Q", 9) + b"old\0new\0"), has_flags=False)
    assert plain == (b"old", 9, b"new", 0)
    body = memoryview(struct.pack("=QII", 9, 4, 0) + b"old\0new\0")
    assert protocol.parse_rename(body, has_flags=True) == (b"old", 9, b"new", 4)


@given(st.integers(0, 9), st.lists(st.tuples(st.integers(0, 1 << 64 - 1), st.integers(0, 1 << 63)), max_size=5))
def test_no_more_is_forgotten_than_was_sent(count: int, pairs: list[tuple[int, int]]) -> None:
    body = struct.pack("=II", count, 0) + b"".join(struct.pack("=QQ", *pair) for pair in pairs)
    assert protocol.parse_forgets(memoryview(body)) == pairs[:count]


def test_a_listing_holds_what_the_kernel_expects() -> None:
    found = FoundNode(7, Attributes(8, stat.S_IFREG | 0o600, 5))
    for plus in (False, True):
        packed = protocol.listed(Listed(b"name", 8, stat.S_IFREG, found), 3, 1, plus=plus)
        assert len(packed) % 8 == 0
        assert packed[-8:] == b"name" + bytes(4)
        assert struct.unpack_from("=QQII", packed, len(packed) - 32) == (8, 4, 4, 8)
    assert struct.unpack_from("=Q", packed) == (7,)
    unknown = protocol.listed(Listed(b"name", 8, stat.S_IFREG), 3, 1, plus=True)
    assert struct.unpack_from("=Q", unknown) == (0,), "a node without a reference of the kernel"


def test_answers_have_their_validity() -> None:
    assert struct.unpack_from("=QQQQ", protocol.entry_out(7, Attributes(8, 0), 5)) == (7, 0, 5, 5)
    assert struct.unpack_from("=Q", protocol.attr_out(Attributes(8, 0), 5)) == (5,)


@pytest.mark.parametrize(("keep", "flags"), [(True, 2), (False, 0)])
def test_an_open_file_has_the_flag_to_keep_pages(keep: bool, flags: int) -> None:
    assert struct.unpack("=QII", protocol.open_out(9, keep_pages=keep)) == (9, flags, 0)
    assert struct.unpack("=QII", protocol.open_out(9, keep_pages=keep, writes=False)) == (9, flags | 32, 0)


def test_space_is_reported_in_whole_blocks() -> None:
    assert struct.unpack_from("=QQQ", protocol.statfs_out(Space(5 << 20, (2 << 20) + 1), 1 << 20)) == (5, 2, 2)


def test_a_file_system_that_can_be_changed_agrees_on_large_writes_and_not_on_a_write_back_cache() -> None:
    answer = protocol.init_out(init_in(7, 40, 1 << 20, 0xFFFF_FFFF), writable=True)
    major, minor, _, flags, background, _, max_write, _, pages = struct.unpack_from("=IIIIHHIIH", answer)
    assert (major, minor, max_write, pages) == (7, 31, 1 << 20, 256)
    assert not flags & (1 << 16), "write-back cache"
    assert not flags & (1 << 15), "a waiting reader could not be killed"
    assert flags & (1 << 3), "O_TRUNC comes with the open"
    assert background == protocol.WRITABLE_BACKGROUND
    assert protocol.init_out(init_in(8, 1, 0, 0), writable=True) == protocol.init_out(init_in(8, 1, 0, 0))
