from __future__ import annotations

from bootseer.errors import CorruptError, TransientError
from bootseer.fetch.corrupt import CorruptBlocks


def test_a_corrupt_block_is_known_for_a_while_and_then_worth_an_attempt():
    blocks = CorruptBlocks()
    blocks.add((1, 7), CorruptError("first"), 100.0)
    assert str(blocks.error(1, [6, 7], 129.9)) == "first"
    assert blocks.error(0, [7], 101.0) is None
    assert blocks.error(1, [7], 130.0) is None


def test_what_came_soundly_or_failed_otherwise_is_not_known():
    blocks = CorruptBlocks()
    blocks.add((0, 1), TransientError("no answer"), 0.0)
    blocks.add((0, 2), CorruptError("wrong"), 0.0)
    blocks.forget((0, 2))
    assert blocks.error(0, [1, 2], 1.0) is None
    assert blocks.first == "wrong"
