from __future__ import annotations

from bootseer.checkpoint.reading.buffer import ChunkBuffer, Key, PieceRequest
from bootseer.checkpoint.reading.file import assembly
from bootseer.checkpoint.reading.transfer import Counters
from bootseer.errors import TransientError
from bootseer.io.timer import Timer

MIB = 1 << 20


def request(number):
    return PieceRequest(Key(1, number * MIB), number * MIB, MIB)


def test_readers_of_several_pieces_do_not_wait_for_each_others_memory():
    buffer = ChunkBuffer(8 * MIB, 60.0, Timer(), Counters())
    begun, answers = [], []

    def load(pieces, urgent):
        for piece in pieces:
            piece.data[:] = bytes([piece.offset // MIB]) * MIB
        begun.extend(pieces)

    def read(first):
        arrived = assembly(buffer, first * MIB + MIB // 2, MIB, 2, answers.append)
        buffer.acquire([request(first), request(first + 1)], load, arrived)

    # The first readers take all memory. Others need the same pieces, and each of them one more.
    for first in (10, 20, 30, 40):
        read(first)
    for first in (10, 20, 30, 40):
        read(first - 1)
        read(first + 1)
    while begun:
        buffer.finish(begun.pop(0), None)
    assert len(answers) == 12
    for answer in answers:
        first = answer[0]
        assert bytes(answer) == bytes([first]) * (MIB // 2) + bytes([first + 1]) * (MIB // 2)
    buffer.drop(1)
    assert buffer.used_bytes == 0


def test_the_error_of_any_piece_is_the_answer_when_all_have_ended():
    buffer = ChunkBuffer(8 * MIB, 60.0, Timer(), Counters())
    begun, answers = [], []
    requests = [request(number) for number in range(3)]
    buffer.acquire(
        requests,
        lambda pieces, urgent: begun.extend(pieces),
        assembly(buffer, 5, 3 * MIB - 5, 3, answers.append),
    )
    buffer.finish(begun[1], TransientError("no"))
    buffer.finish(begun[0], None)
    assert answers == []
    buffer.finish(begun[2], None)
    assert [str(answer) for answer in answers] == ["no"]
