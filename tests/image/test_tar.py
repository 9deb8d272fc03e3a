"""Tar streams: every dialect, and forged archives."""

from __future__ import annotations

import contextlib
import io
import shutil
import stat
import struct
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.errors import CorruptError
from bootseer.image.conversion.tar import (
    HARD_LINK,
    MAX_RECORDS_BYTES,
    Member,
    TarReader,
    parse_records,
    parse_time,
)
from bootseer.image.sources.decompress import Stream
from oci_images import device, directory, file, hard_link, layer, symlink

DIALECTS = [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT]


def _cut(data: bytes, size: int = 700) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def _read(data: bytes, size: int = 700) -> list[tuple[Member, bytes]]:
    reader = TarReader(Stream(_cut(data, size)))
    return [(member, b"".join(_bytes(reader))) for member in reader]


def _bytes(reader: TarReader) -> Iterator[bytes]:
    for piece in reader.content():
        yield bytes(min(piece, 1 << 20)) if isinstance(piece, int) else bytes(piece)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("size", [1, 511, 512, 1 << 20])
def test_every_dialect_gives_the_same_members(dialect: int, size: int) -> None:
    entries = [
        directory("d"),
        file("d/f", b"content" * 100, mode=0o4755, uid=1000, gid=1001, mtime=1_600_000_000),
        symlink("l", "d/f"),
        hard_link("h", "d/f"),
        device("null", 1, 3),
        file("d/" + "x" * 90 + "/" + "y" * 60, b"1"),
    ]
    found = _read(layer(*entries, dialect=dialect), size)
    assert [member.name.rstrip(b"/") for member, _ in found] == [entry[0].name.encode() for entry in entries]
    assert [member.kind for member, _ in found] == [
        stat.S_IFDIR,
        stat.S_IFREG,
        stat.S_IFLNK,
        HARD_LINK,
        stat.S_IFCHR,
        stat.S_IFREG,
    ]
    member, content = found[1]
    assert content == b"content" * 100
    assert (member.mode, member.uid, member.gid, member.mtime_ns) == (0o4755, 1000, 1001, 1_600_000_000 * 10**9)
    assert (found[2][0].link, found[3][0].link, found[4][0].rdev) == (b"d/f", b"d/f", (1, 3))


@pytest.mark.parametrize("dialect", DIALECTS[:2])
def test_long_names_and_large_numbers_are_kept(dialect: int) -> None:
    name, target = "n/" * 400 + "n", "t" * 3000
    found = _read(layer(symlink(name, target, uid=2**32 - 2, mtime=2**40), file("b\udcff", b"x"), dialect=dialect))
    member = found[0][0]
    assert (member.name, member.link) == (name.encode(), target.encode())
    assert (member.uid, member.mtime_ns) == (2**32 - 2, 2**40 * 10**9)
    assert found[1][0].name == b"b\xff"


def test_xattrs_are_those_that_runtimes_read() -> None:
    pax = {"LIBARCHIVE.xattr.user.b%20c": "AP8"}
    found = _read(layer(file("f", xattrs={"user.a": b"y\xff", "user.empty": b""}, pax=pax)))
    assert found[0][0].xattrs == {b"user.a": b"y\xff", b"user.empty": b""}


def test_names_are_those_of_go() -> None:
    """A GNU name takes precedence over a pax name, and records of an unknown sparse format are ignored."""
    long_name = layer(file("g" * 200), dialect=tarfile.GNU_FORMAT)[:1024]
    assert [one.name for one, _ in _read(long_name + layer(file("f", pax={"path": "p"})))] == [b"g" * 200]
    for pax in ({"GNU.sparse.name": "s"}, {"GNU.sparse.name": "s", "GNU.sparse.size": "9", "GNU.sparse.major": "9"}):
        assert [(one.name, content) for one, content in _read(layer(file("f", b"x", pax=pax)))] == [(b"f", b"x")]


def test_global_headers_change_nothing() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", pax_headers={"comment": "x" * 2000, "uid": "7"}) as archive:
        archive.addfile(*_opened(file("f", b"x")))
    assert [(member.name, member.uid) for member, _ in _read(buffer.getvalue())] == [(b"f", 0)]


def _opened(entry: tuple[tarfile.TarInfo, bytes]) -> tuple[tarfile.TarInfo, io.BytesIO]:
    return entry[0], io.BytesIO(entry[1])


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs GNU tar")
@pytest.mark.parametrize("arguments", [["gnu"], ["pax", "0.0"], ["pax", "0.1"], ["pax", "1.0"]])
@pytest.mark.parametrize("segments", [1, 5, 60])
def test_sparse_files_of_gnu_tar_are_read(arguments: list[str], segments: int, tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        for number in range(segments):
            file.seek(number * 100_000 + 50_000)
            file.write(b"%d" % number * 5000)
        file.truncate(segments * 100_000 + 70_000)
    command = ["tar", "--sparse", f"--format={arguments[0]}", *[f"--sparse-version={v}" for v in arguments[1:]]]
    subprocess.run([*command, "-cf", "archive", "sparse"], cwd=tmp_path, check=True)
    assert (tmp_path / "archive").stat().st_size < sparse.stat().st_size / 2
    [(member, content)] = _read((tmp_path / "archive").read_bytes())
    assert (member.name, member.size) == (b"sparse", sparse.stat().st_size)
    assert content == sparse.read_bytes()


def test_a_terabyte_of_hole_is_one_number() -> None:
    pax = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)}
    reader = TarReader(Stream(_cut(layer(file("f", b"1\n5\n0\n".ljust(512, b"\0"), pax=pax)))))
    for member in reader:
        assert member.size == 1 << 40
        assert list(reader.content()) == [5, (1 << 40) - 5]


ARCHIVE = layer(file("a", b"a" * 700), file("b", b"b"))


@pytest.mark.parametrize("end", [ARCHIVE, ARCHIVE + b"garbage", ARCHIVE[:3072], ARCHIVE[:2560], ARCHIVE[:2049], b""])
def test_an_archive_may_end_in_several_ways(end: bytes) -> None:
    assert [member.name for member, _ in _read(end)] == [b"a", b"b"][: len(end)]


@pytest.mark.parametrize("size", [100, 513, 800, 1600, 2048, 2600])
def test_an_archive_that_breaks_off_is_corrupt(size: int) -> None:
    with pytest.raises(CorruptError, match="ends in the middle"):
        _read(ARCHIVE[:size])


def _header(**changes: bytes) -> bytes:
    """A header with other fields, and their checksum."""
    places = {"name": 0, "uid": 108, "size": 124, "mtime": 136, "kind": 156, "devmajor": 329}
    block = bytearray(layer(file("f"))[:512])
    for name, value in changes.items():
        block[places[name] : places[name] + len(value)] = value
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + sum(block[156:]) + 256)
    return bytes(block)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"x" * 512, id="no header"),
        pytest.param(bytes(512) + _header(), id="header behind zeros"),
        pytest.param(_header(size=b"\xff" * 12), id="negative size"),
        pytest.param(_header(size=b"00000000009\0"), id="no octal digit"),
        pytest.param(_header(size=b"-0000000001\0"), id="sign"),
        pytest.param(_header(size=b"0_000000001\0"), id="underscore"),
        pytest.param(_header(kind=b"M"), id="unknown kind"),
        pytest.param(_header(kind=b"x", size=b"%011o\0" % (MAX_RECORDS_BYTES + 1)), id="huge records"),
        pytest.param(_header(kind=b"L", size=b"77777777777\0"), id="huge name"),
        pytest.param(_header(kind=b"x", size=b"%011o\0" % 5) + b"9 a=b".ljust(512, b"\0"), id="record too long"),
        pytest.param(
            _header(kind=b"x", size=b"%011o\0" % 6) + b"6 a=b\n".ljust(512, b"\0"), id="nothing behind records"
        ),
    ],
)
def test_a_damaged_archive_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        _read(data)


@pytest.mark.parametrize(
    "pax",
    [
        {"GNU.sparse.size": "5", "GNU.sparse.map": "0,1,2"},
        {"GNU.sparse.size": "5", "GNU.sparse.map": "3,1,0,1"},
        {"GNU.sparse.size": "5", "GNU.sparse.map": "4,2"},
        {"GNU.sparse.size": "500", "GNU.sparse.map": "0,400"},
        {"GNU.sparse.size": "-5", "GNU.sparse.map": "0,1"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "5"},
        {"size": "x"},
        {"mtime": "now"},
        {"path": "a\0b"},
    ],
)
def test_forged_records_are_corrupt(pax: dict[str, str]) -> None:
    with pytest.raises(CorruptError):
        _read(layer(file("f", b"0123456789", pax=pax)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), min_size=1, max_size=6), st.booleans())
def test_any_damage_is_an_error_or_members(damage: list[tuple[int, int]], fix: bool) -> None:
    data = bytearray(
        layer(file("a", b"a" * 700, pax={"mtime": "1.5", "GNU.sparse.size": "9"}), symlink("b" * 120, "c"))
    )
    for place, value in damage:
        data[place % len(data)] = value
    if fix:  # with a valid checksum, later checks see the damage
        for at in range(0, len(data), 512):
            if data[at + 257 : at + 262] == b"ustar":
                data[at + 148 : at + 156] = b" " * 8
                struct.pack_into("8s", data, at + 148, b"%06o\0 " % sum(data[at : at + 512]))
    with contextlib.suppress(CorruptError):
        _read(bytes(data))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"1", 1_000_000_000),
        (b"1700000000.123456789", 1_700_000_000_123_456_789),
        (b"1.1234567899", 1_123_456_789),
        (b"0.5", 500_000_000),
        (b"-0.5", -500_000_000),
        (b"-1.25", -1_250_000_000),
        (b"7.", 7_000_000_000),
    ],
)
def test_times_are_exact(text: bytes, expected: int) -> None:
    assert parse_time(text) == expected


def test_an_empty_record_takes_an_earlier_one_back() -> None:
    assert parse_records(b"8 uid=1\n7 uid=\n").values == {}
