"""A file whose content is in memory in pieces."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("torch")

from bootseer.checkpoint.dcp.saved import Pieces

pytestmark = pytest.mark.torch


def whole() -> Pieces:
    return Pieces(
        10, [(6, memoryview(b"ghij")), (0, memoryview(b"abc")), (3, memoryview(b"")), (3, memoryview(b"def"))]
    )


def test_reads_may_cross_the_borders_of_pieces() -> None:
    file = whole()
    assert file.read() == b"abcdefghij"
    assert file.read(5) == b""
    file.seek(2)
    assert file.read(6) == b"cdefgh"
    assert (file.tell(), file.seek(-1, io.SEEK_END), file.read(7)) == (8, 9, b"j")


def test_only_reads_of_missing_pieces_are_errors() -> None:
    file = Pieces(10, [(0, memoryview(b"ab")), (8, memoryview(b"ij"))])
    assert file.read(2) == b"ab"
    with pytest.raises(OSError, match="byte 2 of 10 was not read"):
        file.read(1)
    file.seek(8)
    assert file.read() == b"ij"
