"""Heads of striped files: encoding and parsing, and refusal of invalid bytes."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bootseer.checkpoint.head import (
    PEEK_BYTES,
    Head,
    encode_head,
    is_head_size,
    is_hidden,
    parse_head,
    part_path,
    peek,
    peek_id,
)
from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.checkpoint.reading.reading import Reading
from bootseer.errors import BootseerError, CorruptError, PermanentError
from bootseer.places.folder import FolderPlace
from checkpoint.heads import some_head
from checkpoint.striped_files import content_of, put_striped

_MIB = 1 << 20


def sealed(data: bytes, end: int) -> bytes:
    """A changed head with recomputed digests: a forgery, not an accidental change."""
    changed = bytearray(data)
    changed[56:64] = blake3(bytes(changed[:56])).digest()[:8]
    changed[end : end + 32] = blake3(bytes(changed[:end])).digest()
    return bytes(changed)


def body_end(data: bytes) -> int:
    return int(struct.unpack_from("<Q", data, 40)[0])


@given(
    st.integers(1, 30 * _MIB), st.sampled_from([4, 8, 1000]), st.integers(1, 6), st.booleans(), st.integers(0, 1 << 30)
)
@settings(max_examples=50)
def test_a_head_survives_a_round_trip(size: int, segment_mib: int, stripes: int, parity: bool, seed: int) -> None:
    head = some_head(size, segment_mib * _MIB, stripes=stripes, parity=parity, seed=seed)
    data = encode_head(head)
    assert parse_head(data) == head
    assert is_head_size(len(data))
    assert (peek(data[:PEEK_BYTES]), peek_id(data[:PEEK_BYTES])) == (size, head.id)


@pytest.mark.slow
def test_a_file_of_a_tebibyte_has_a_head_that_can_be_read() -> None:
    head = some_head(1 << 40, 256 * _MIB, parity=False)
    data = encode_head(head)
    assert len(data) < 45 << 20
    parsed = parse_head(data)
    assert parsed == head
    assert parsed.segment_at((1 << 40) - 1) == 4095
    assert parsed.segment_at(256 * _MIB) == 1
    with pytest.raises(IndexError):
        parsed.segment_at(1 << 40)


def test_every_flipped_byte_is_noticed() -> None:
    data = encode_head(some_head(9 * _MIB, 4 * _MIB, stripes=2))
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x55
        with pytest.raises(BootseerError):
            parse_head(bytes(changed))


def test_a_truncated_or_extended_head_is_refused() -> None:
    data = encode_head(some_head(9 * _MIB, 4 * _MIB))
    for length in [0, 1, 63, 64, 100, len(data) // 2, len(data) - 1]:
        with pytest.raises(CorruptError):
            parse_head(data[:length])
    for more in (b"\0", bytes(4096), data):
        with pytest.raises(CorruptError):
            parse_head(data + more)


@given(st.data())
@settings(max_examples=300)
def test_forged_bytes_with_right_digests_are_a_valid_head_or_a_bootseer_error(data: st.DataObject) -> None:
    original = encode_head(some_head(5 * _MIB, 3 * _MIB, stripes=2))
    changed = bytearray(original)
    end = body_end(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 1))
        changed[at] = data.draw(st.sampled_from([0, 1, 0x2E, 0x2F, 0x7F, 0x80, 0xFF]))
    try:
        head = parse_head(sealed(bytes(changed), end))
    except BootseerError:
        return
    assert encode_head(head)[:end] == sealed(bytes(changed), end)[:end]


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [
        (16, "<Q", 1 << 63),  # the file's size
        (40, "<Q", 1 << 63),  # length of the body
        (40, "<Q", 10),
        (48, "<I", 0xFFFF_FFFF),  # segments
        (48, "<I", 0),
        (64, "<Q", 1 << 62),  # bytes of the first segment
        (64, "<Q", 0),
        (72, "<H", 0),  # its stripes
        (72, "<H", 0xFFFF),
        (74, "<B", 7),  # its parity parts
    ],
)
def test_impossible_sizes_are_refused_before_they_are_used(at: int, form: str, value: int) -> None:
    data = bytearray(encode_head(some_head(9 * _MIB, 4 * _MIB)))
    end = body_end(data)
    struct.pack_into(form, data, at, value)
    with pytest.raises(CorruptError):
        parse_head(sealed(bytes(data), end))


def test_a_later_version_is_reported_as_such_and_its_size_can_be_read() -> None:
    data = bytearray(encode_head(some_head(9 * _MIB, 4 * _MIB)))
    struct.pack_into("<I", data, 8, 2)
    changed = sealed(bytes(data), body_end(data))
    with pytest.raises(PermanentError, match="version 2"):
        parse_head(changed)
    assert peek(changed[:64]) == 9 * _MIB


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\0b", "x" * 129, ".hidden", "ä", "a b"])
def test_unsafe_names_of_parts_are_refused(name: str) -> None:
    head = some_head(2 * _MIB, 4 * _MIB, stripes=2, parity=False)
    part = replace(head.segments[0].parts[0], name=name)
    with pytest.raises(ValueError, match="name"):
        encode_head(with_part(head, part))


def test_a_forged_name_of_a_part_is_refused() -> None:
    head = some_head(2 * _MIB, 4 * _MIB, stripes=2, parity=False)
    data = encode_head(with_part(head, replace(head.segments[0].parts[0], name="a_b")))
    forged = data.replace(b"\x03a_b", b"\x03a/b")
    assert forged != data
    with pytest.raises(CorruptError, match="name"):
        parse_head(sealed(forged, body_end(data)))


def test_invalid_heads_are_not_encoded() -> None:
    head = some_head(9 * _MIB, 4 * _MIB, stripes=2)
    first, *others = head.segments
    part = first.parts[0]
    wrong = [
        replace(head, id="0" * 31),
        replace(head, id="G" * 32),
        replace(head, size_bytes=head.size_bytes + 1),
        replace(head, segments=()),
        replace(head, segments=(first, *reversed(others))),
        replace(head, segments=(first, first, *others)),
        with_part(head, replace(part, size_bytes=part.size_bytes + 1)),
        with_part(head, replace(part, sha256="0" * 64)),
        with_part(head, replace(part, nodes=("host name:1",))),
        with_part(head, replace(part, nodes=("n" * 300,))),
        with_part(head, replace(part, name=first.parts[1].name)),
    ]
    for one in wrong:
        with pytest.raises(ValueError, match=r"[a-z]"):
            encode_head(one)


def test_only_the_last_segment_may_end_within_a_chunk() -> None:
    head = some_head(CHUNK_BYTES + 5, CHUNK_BYTES + 5, stripes=1, parity=False)
    again = some_head(CHUNK_BYTES, CHUNK_BYTES, stripes=1, parity=False)
    moved = replace(again.segments[0], start=CHUNK_BYTES + 5)
    with pytest.raises(ValueError, match="begins"):
        encode_head(Head(head.id, 2 * CHUNK_BYTES + 5, (*head.segments, moved)))


@pytest.mark.parametrize("at", [0, 7, 8, 20, 47, 63])
def test_a_file_with_a_damaged_head_is_not_taken_for_an_ordinary_file(at: int) -> None:
    first = bytearray(encode_head(some_head(CHUNK_BYTES, CHUNK_BYTES, stripes=1, parity=False))[:PEEK_BYTES])
    first[at] ^= 0x10
    with pytest.raises(CorruptError, match="damaged"):
        peek(bytes(first))


def test_ordinary_files_are_not_taken_for_heads() -> None:
    assert peek(b"") is None
    assert peek(b"BSSTRIPE") is None
    assert peek(b"BSSTRIPE" + bytes(56)) is None
    assert peek(bytes(64)) is None
    assert not is_head_size(0)
    assert not is_head_size(1 << 20)


def test_paths() -> None:
    assert part_path("a/b/file", "0" * 32, "p") == f"a/b/.stripes/{'0' * 32}/p"
    assert part_path("file", "0" * 32, "p") == f".stripes/{'0' * 32}/p"
    assert is_hidden(".stripes")
    assert is_hidden(".attempts-12")
    assert not is_hidden(".metadata")


def with_part(head: Head, part: object) -> Head:
    first, *others = head.segments
    return replace(head, segments=(replace(first, parts=(part, *first.parts[1:])), *others))


@pytest.fixture(scope="module")
def striped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A folder with the striped file `file`, and its content."""
    folder = tmp_path_factory.mktemp("striped")
    content = content_of(5 * _MIB + 77)
    with contextlib.closing(FolderPlace(folder)) as place:
        put_striped(place, "file", content, stripes=2, parity=True, segment_rows=2)
    return folder, content


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_with_any_forged_head_readers_get_the_written_content_or_an_error(
    striped: tuple[Path, bytes], data: st.DataObject
) -> None:
    folder, content = striped
    original = (folder / "file").read_bytes()
    body = bytearray(original[: body_end(original)])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(PEEK_BYTES, len(body) - 1))
        length = data.draw(st.sampled_from([1, 2, 8, 32, 300]))
        kind = data.draw(st.sampled_from(["change", "take", "add", "repeat"]))
        if kind == "change":
            body[at] = data.draw(st.integers(0, 255))
        elif kind == "take":
            del body[at : at + length]
        elif kind == "add":
            body[at:at] = data.draw(st.binary(min_size=length, max_size=length))
        else:
            body[at : at + length] = body[PEEK_BYTES : PEEK_BYTES + length]
    struct.pack_into("<Q", body, 40, len(body))
    struct.pack_into("<Q", body, 16, data.draw(st.sampled_from([len(content), 0, 1, 2 * _MIB, 1 << 40])))
    forged = sealed(bytes(body) + bytes(32), len(body))
    (folder / "forged").write_bytes(forged + bytes((4083 - len(forged)) % 4096))
    with contextlib.closing(FolderPlace(folder)) as place, contextlib.closing(Reading(place)) as reading:
        try:
            with reading.open("forged") as file:
                assert file.read(0, 8 * _MIB) == content
        except BootseerError:
            pass
