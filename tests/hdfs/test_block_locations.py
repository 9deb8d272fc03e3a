from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.hdfs.block_locations import LocatedFile, parse_located
from bootseer.hdfs.protobuf import MalformedError, Message, field
from hdfs.peers import block, located

MIB = 1 << 20


def parse(size: int, blocks: list[bytes], **options: object) -> LocatedFile:
    return parse_located("/f", Message(located(size, blocks, **options)).data(1), {})  # type: ignore[arg-type]


def two(generation: int = 1, *, ports: tuple[int, ...] = (1, 2)) -> LocatedFile:
    return parse(MIB + 5, [block(0, 1, MIB, ports, generation=generation), block(MIB, 2, 5, ports)])


def being_written(length: int) -> LocatedFile:
    last = block(MIB, 2, length, (3,))
    return parse(MIB, [block(0, 1, MIB, (1,)), last], more=field(4, last), under_construction=True)


def test_blocks_and_their_nodes_are_read() -> None:
    file = two()
    assert (file.size_bytes, file.readable) == (MIB + 5, True)
    assert [(block.start, block.length, block.id, str(block)) for block in file.blocks] == [
        (0, MIB, 1, "blk_1"),
        (MIB, 5, 2, "blk_2"),
    ]
    assert [node.host_port for node in file.blocks[0].nodes] == ["127.0.0.1:1", "127.0.0.1:2"]
    assert b"secret" in file.blocks[0].token


def test_the_block_of_an_offset_is_found() -> None:
    file = two()
    assert [file.block_at(offset).id for offset in (0, MIB - 1, MIB, MIB + 4)] == [1, 1, 2, 2]


def test_an_empty_file_has_no_blocks() -> None:
    file = parse(0, [])
    assert (file.size_bytes, file.blocks) == (0, ())


def test_the_version_depends_on_blocks_generations_and_lengths_but_not_on_nodes() -> None:
    assert two().version == two(ports=(8,)).version
    assert len({two().version, two(2).version, being_written(6).version}) == 3


def test_a_file_is_continued_by_itself_wherever_its_blocks_are() -> None:
    assert two(ports=(7,)).continues(two())
    assert not two(2).continues(two())
    assert not parse(MIB, [block(0, 1, MIB, (1,))]).continues(two())
    assert not parse(MIB + 5, [block(0, 9, MIB, (1,)), block(MIB, 2, 5, (1,))]).continues(two())


def test_a_file_that_is_being_written_has_its_finished_blocks() -> None:
    last, first = block(MIB, 2, 7, (3,)), block(0, 1, MIB, (1,))
    for blocks in ([first], [first, last]):
        file = parse(MIB, blocks, more=field(4, last), under_construction=True)
        assert (file.size_bytes, [block.id for block in file.blocks]) == (MIB, [1])
        assert two().continues(file)


@pytest.mark.parametrize("number", [6, 7])
def test_encrypted_and_erasure_coded_files_are_not_readable(number: int) -> None:
    assert not parse(MIB, [block(0, 1, MIB, (1,))], more=field(number, b"")).readable


def test_a_file_without_its_last_blocks_is_malformed() -> None:
    with pytest.raises(MalformedError):
        parse(3 * MIB, [block(start * MIB, start + 1, MIB, (1,)) for start in range(2)])


@pytest.mark.parametrize(
    "blocks",
    [
        [block(0, 1, 5, (1,)), block(6, 2, 5, (1,))],
        [block(0, 1, 5, (0,))],
        [block(0, 1, 5, (1 << 16,))],
        [block(0, 1, 1 << 60, (1,))],
        [block(1 << 63, 1, 5, (1,))],
        [field(2, 0)],
    ],
)
def test_inconsistent_answers_are_malformed(blocks: list[bytes]) -> None:
    with pytest.raises(MalformedError):
        parse(11, blocks)


@given(st.data())
def test_a_corrupted_answer_is_valid_or_malformed(data: st.DataObject) -> None:
    told = bytearray(Message(located(MIB + 5, [block(0, 1, MIB, (1, 2)), block(MIB, 2, 5, (1,))])).data(1))
    at = data.draw(st.integers(0, len(told) - 1))
    told[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MalformedError):
        assert parse_located("/f", bytes(told), {}).size_bytes >= 0


def test_the_blocks_of_a_file_share_the_objects_of_their_nodes() -> None:
    file = parse(8192 * MIB, [block(number * MIB, number, MIB, (1, 2, 3)) for number in range(8192)])
    assert len(file.blocks) == 8192
    assert len({id(node) for block in file.blocks for node in block.nodes}) == 3
