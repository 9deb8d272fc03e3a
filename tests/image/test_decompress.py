"""Compressed streams, whole and damaged."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
import zlib
from collections.abc import Callable, Iterator

import pytest
import zstandard

from bootseer.errors import CorruptError, PermanentError
from bootseer.image.sources import decompress
from bootseer.image.sources.decompress import decompressed
from oci_images import file, layer

DATA = random.Random(1).randbytes(50_000) + bytes(5_000_000)
GZIP = gzip.compress(DATA, mtime=0)
ZSTD = zstandard.ZstdCompressor(write_checksum=True).compress(DATA)
XZ = lzma.compress(DATA)
BZIP2 = bz2.compress(DATA)
SKIPPABLE = b"\x50\x2a\x4d\x18" + (10).to_bytes(4, "little") + bytes(10)


@pytest.fixture(autouse=True, params=["gzip", "isal.igzip"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both must give the same results, for damaged streams too."""
    found = pytest.importorskip(request.param)
    assert decompress.gzip_module().__name__ in (found.__name__, "isal.igzip")  # if it is installed
    monkeypatch.setattr(decompress, "gzip_module", lambda: found)


def _cut(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


@pytest.mark.parametrize("size", [1000, 1 << 20])
@pytest.mark.parametrize(
    ("stored", "times"),
    [
        pytest.param(DATA, 1, id="as it stands"),
        pytest.param(GZIP, 1, id="gzip"),
        pytest.param(GZIP + GZIP, 2, id="members"),
        pytest.param(GZIP + bytes(700), 1, id="filled up"),
        pytest.param(ZSTD, 1, id="zstd"),
        pytest.param(SKIPPABLE + ZSTD + SKIPPABLE + ZSTD + SKIPPABLE, 2, id="frames"),
        pytest.param(XZ, 1, id="xz"),
        pytest.param(XZ + XZ + bytes(8), 2, id="xz streams"),
        pytest.param(BZIP2 + BZIP2, 2, id="bzip2"),
        pytest.param(b"", 0, id="nothing"),
    ],
)
def test_every_form_is_decompressed(stored: bytes, times: int, size: int) -> None:
    assert b"".join(decompressed(_cut(stored, size))) == DATA * times


def test_the_name_of_the_first_file_is_no_compression() -> None:
    stored = layer(file("BZh/data", b"x"))
    assert b"".join(decompressed(_cut(stored, 100))) == stored


def test_a_stream_that_comes_byte_by_byte_is_recognised() -> None:
    assert b"".join(decompressed(_cut(gzip.compress(b"x" * 100), 1))) == b"x" * 100


@pytest.mark.parametrize(
    "stored",
    [
        *(
            GZIP[:-3],
            GZIP[:20],
            GZIP[:5],
            GZIP + b"xx",
            GZIP[:-8] + bytes(8),
            GZIP[:900] + b"zz" + GZIP[902:],
            ZSTD[:500] + b"zz" + ZSTD[502:],
        ),
        *(XZ[:-3], XZ[:20], XZ + b"xx", XZ[:900] + b"zz" + XZ[902:], BZIP2[:-3], BZIP2[:900] + b"zz" + BZIP2[902:]),
    ],
)
def test_damaged_data_is_corrupt(stored: bytes) -> None:
    with pytest.raises(CorruptError):
        assert b"".join(decompressed(_cut(stored, 1000))) == DATA


def test_other_compressions_are_named() -> None:
    with pytest.raises(PermanentError, match="compressed with lz4"):
        decompressed(iter([b"\x04\x22\x4d\x18lz4"]))


def test_a_zstd_frame_that_wants_gigabytes_of_memory_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=30)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with pytest.raises(CorruptError, match="memory"):
        list(decompressed(iter([compressor.compress(b"x" * 1000) + compressor.flush()])))


def test_xz_data_that_wants_gigabytes_of_memory_is_refused() -> None:
    data = bytearray(lzma.compress(b"x" * 1000))
    data[16] = 38  # the size of the dictionary in the block's header: 2 GiB
    data[20:24] = zlib.crc32(data[12:20]).to_bytes(4, "little")
    with pytest.raises(CorruptError, match="emory"):
        list(decompressed(iter([bytes(data)])))


@pytest.mark.slow
@pytest.mark.parametrize(
    "bomb",
    [
        lambda: gzip.compress(bytes(1 << 26)),
        lambda: zstandard.ZstdCompressor().compress(bytes(1 << 26)),
        lambda: lzma.compress(bytes(1 << 24), preset=0) * 4,
        lambda: bz2.compress(bytes(1 << 22)) * 16,
    ],
    ids=["gzip", "zstd", "xz", "bzip2"],
)
def test_a_bomb_comes_in_small_pieces(bomb: Callable[[], bytes]) -> None:
    sizes = [len(piece) for piece in decompressed(iter([bomb()]))]
    assert sum(sizes) == 1 << 26
    assert max(sizes) <= 1 << 20
