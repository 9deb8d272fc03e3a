"""The encoding of one block: raw, as a zstd frame, or nothing for a block of zeros.

Each block goes through `decode`, wherever it comes from, so that no reader gets unverified bytes. Nothing that a store
or a peer sends can make `decode` allocate more than the block's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import zstandard
from blake3 import blake3

from bootseer.errors import CorruptError

RAW = 0
ZSTD = 1
ZERO = 2
NUM_CODECS = 3

DIGEST_BYTES = 32
# Level 6 needs over three times the time of level 3 and saves 3 % of a library and 11 % of Python sources (ADR 7).
DEFAULT_LEVEL = 3
FAST_LEVEL = 2
"""Not zstd's own level 2 but its fast strategy with a larger table and shorter matches: in blocks of 256 KiB 1.4 to 1.9
times as fast as level 3, and 3 to 4 % more bytes (ADR 7)."""
_FAST = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=21,  # zstd takes no more than the block needs
    hash_log=16,
    chain_log=14,
    search_log=1,
    min_match=5,
    target_length=0,
    write_content_size=True,
    write_checksum=False,
    write_dict_id=False,
)
# A frame that saves less is not worth its decompression.
_MIN_SAVING = 0.10

Buffer = bytes | bytearray | memoryview
Encoded = tuple[int, bytes | memoryview, bytes]
"""Codec, stored bytes and digest of a block."""


def digest_of(data: Buffer) -> bytes:
    """BLAKE3 of uncompressed bytes: the digest of a block in the index."""
    return blake3(data).digest()


def compressor_of(level: int = DEFAULT_LEVEL) -> zstandard.ZstdCompressor:
    """A compressor for `encode`, of a level of zstd or `FAST_LEVEL`. Each thread needs its own."""
    # The digest in the index covers more than zstd's checksum would.
    if level == FAST_LEVEL:
        return zstandard.ZstdCompressor(compression_params=_FAST)
    return zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False, write_dict_id=False)


def encode(blocks: Sequence[bytes], compressor: zstandard.ZstdCompressor) -> list[Encoded]:
    """Encode blocks, each separately. The same for the same data, level and version of zstd."""
    if "multi_compress_to_buffer" not in zstandard.backend_features:  # built with the system's zstd, as by conda-forge
        return [_encoded(data, compressor.compress(data)) for data in blocks]
    # In one call: after each one a thread has to get the interpreter's lock again (ADR 7).
    frames = compressor.multi_compress_to_buffer(list(blocks))
    # The stub of a segment does not say that it is a buffer.
    return [_encoded(data, memoryview(frames[number])) for number, data in enumerate(blocks)]  # type: ignore[arg-type]


def _encoded(data: bytes, frame: bytes | memoryview) -> Encoded:
    if data[0] == 0 and data == bytes(len(data)):
        return ZERO, b"", _digest_of_zeros(len(data))
    if len(frame) > len(data) * (1 - _MIN_SAVING):
        return RAW, data, digest_of(data)
    return ZSTD, frame, digest_of(data)


def decode(codec: int, stored: Buffer, length: int, digest: bytes) -> Buffer:
    """The block's bytes, verified against length and digest. Raises `CorruptError`.

    A raw block is `stored` itself, without a copy: nothing may write to it afterwards.
    """
    if codec == ZERO:
        if len(stored) or digest != _digest_of_zeros(length):
            raise CorruptError("a block that should hold only zeros does not")
        return bytes(length)
    data = stored if codec == RAW else _decompress(codec, stored, length)
    if len(data) != length:
        raise CorruptError(f"a block has {len(data)} bytes, not {length}")
    if digest_of(data) != digest:
        raise CorruptError(f"a block of {length} bytes does not have the digest that the index says")
    return data


def _decompress(codec: int, stored: Buffer, length: int) -> bytes:
    if codec != ZSTD:
        raise CorruptError(f"a block has the unknown codec {codec}")
    try:
        # The size in the frame's header decides how much is allocated, so it is checked first.
        if zstandard.get_frame_parameters(stored).content_size != length:
            raise CorruptError(f"a zstd frame does not announce the block's {length} bytes")
        # A decompressor per block costs 3 % of the time, and saves one per thread.
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptError(f"a block cannot be decompressed: {error}") from error


@lru_cache(maxsize=16)
def _digest_of_zeros(length: int) -> bytes:
    return digest_of(bytes(length))
