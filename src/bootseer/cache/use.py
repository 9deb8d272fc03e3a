"""What is known of the use of each cached block: whether it is in a hot set, and whether anybody read it.

One byte per block in a file. A hint for eviction: written without a sync, and a lost update between two processes only
makes a block look colder than it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bootseer.cache import layout
from bootseer.cache.errors import Damaged

HOT = 1
READ = 2


def load(entry: Path, num_blocks: int) -> bytes:
    """Flags of all blocks; nothing is known of those that the file does not tell about."""
    try:
        data = layout.read_file(entry / layout.USE, num_blocks)
    except (OSError, Damaged):
        data = b""
    return data.ljust(num_blocks, b"\0")


def flags(flag: int, blocks: Iterable[int], num_blocks: int) -> bytearray:
    """The flag for some blocks. Raises `IndexError` for one that is not in the file."""
    made = bytearray(num_blocks)
    for block in blocks:
        made[block] = flag
    return made


def add(entry: Path, num_blocks: int, more: bytes | bytearray) -> None:
    """Add flags, one byte per block, to those that are stored. Raises `OSError`."""
    # As two large numbers: a loop over a million blocks would take longer than writing them.
    merged = int.from_bytes(load(entry, num_blocks), "little") | int.from_bytes(more, "little")
    layout.write_file(entry / layout.USE, merged.to_bytes(num_blocks, "little"))
