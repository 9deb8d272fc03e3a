"""A reader of striped files written from docs/formats/striped-file.md alone, without BootSeer's code."""

from __future__ import annotations

import hashlib
import struct
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from blake3 import blake3

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.writing.writing import Writing
from checkpoint.striped_files import content_of, in_memory

_MIB = 1 << 20


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def take(self, form: str) -> tuple[int, ...]:
        found = struct.unpack_from(f"<{form}", self._data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def bytes(self, length: int) -> bytes:
        self.at += length
        assert self.at <= len(self._data)
        return self._data[self.at - length : self.at]

    def text(self) -> str:
        return self.bytes(self.take("B")[0]).decode("ascii")


class _Segment(NamedTuple):
    size: int
    parts: list[tuple[str, bytes]]
    parity: tuple[str, bytes] | None
    digests: list[bytes]


def read(path: Path, *, without: str = "") -> bytes:
    """The content of the file with this head. The part `without` is not read but computed from the others."""
    head = path.read_bytes()
    assert len(head) % 4096 == 4083
    size, file_id, segments = parse(head)
    content = b"".join(read_segment(path.parent / ".stripes" / file_id, segment, without) for segment in segments)
    assert len(content) == size
    return content


def parse(head: bytes) -> tuple[int, str, list[_Segment]]:
    reader = _Reader(head)
    assert reader.bytes(8) == b"BSSTRIPE"
    version, zero, size = reader.take("IIQ")
    assert (version, zero) == (1, 0)
    file_id = reader.bytes(16).hex()
    length, num_segments, zero = reader.take("QII")
    assert (zero, reader.bytes(8)) == (0, blake3(head[:56]).digest()[:8])
    assert head[length : length + 32] == blake3(head[:length]).digest()
    assert head[length + 32 :].strip(b"\0") == b""
    segments = [parse_segment(reader) for _ in range(num_segments)]
    assert reader.at == length
    return size, file_id, segments


def parse_segment(reader: _Reader) -> _Segment:
    size, stripes, num_parity, zero = reader.take("QHBB")
    assert zero == 0
    parts = [parse_part(reader) for _ in range(stripes + num_parity)]
    digests = [reader.bytes(32) for _ in range(-(-size // _MIB))]
    return _Segment(size, parts[:stripes], parts[stripes] if num_parity else None, digests)


def parse_part(reader: _Reader) -> tuple[str, bytes]:
    name, sha256 = reader.text(), reader.bytes(32)
    for _ in range(reader.take("B")[0]):
        reader.text()  # the nodes
    return name, sha256


def read_segment(folder: Path, segment: _Segment, without: str) -> bytes:
    data: dict[str, bytes] = {}
    for name, sha256 in [*segment.parts, *([segment.parity] if segment.parity else [])]:
        if name != without:
            data[name] = (folder / name).read_bytes()
            assert hashlib.sha256(data[name]).digest() == sha256
    stripes = len(segment.parts)
    content = b""
    for number, digest in enumerate(segment.digests):
        length = min(_MIB, segment.size - number * _MIB)
        row = number // stripes * _MIB
        name = segment.parts[number % stripes][0]
        if name == without:
            others = [one[row : row + _MIB].ljust(_MIB, b"\0") for one in data.values()]
            mixed = 0
            for other in others:
                mixed ^= int.from_bytes(other, "little")
            chunk = mixed.to_bytes(_MIB, "little")[:length]
        else:
            chunk = data[name][row : row + length]
        assert blake3(chunk).digest() == digest
        content += chunk
    return content


@pytest.mark.parametrize("size", [2 * _MIB, 2 * _MIB + 1, 7 * _MIB - 1, 12 * _MIB, 19 * _MIB + 12345])
@pytest.mark.parametrize("parity", [False, True])
def test_the_document_is_enough_to_read_a_striped_file(files: Files, job: Path, size: int, parity: bool) -> None:
    content = content_of(size)
    policy = Policy(stripes=3, parity=parity, part_bytes=2 * _MIB, min_bytes_per_stripe=_MIB)
    with closing(Writing(files)) as writing:
        assert writing.write_file("file", *in_memory(content), policy=policy).is_striped
    assert read(job / "file") == content
    if parity:
        _, _, segments = parse((job / "file").read_bytes())
        for name, _ in (part for segment in segments for part in segment.parts):
            assert read(job / "file", without=name) == content
