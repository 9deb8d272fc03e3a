"""Files with two origins: which one the scheduler asks for a block. In virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bootseer.blocks.codec import Buffer
from bootseer.errors import AccessError, BootseerError, CorruptError, NotFoundError, TransientError
from bootseer.fetch.ledger import Fetch
from fetch.virtual import BLOCK, Fault, Layout, World


def from_two(refuses: Callable[[Fetch, int], BootseerError | None]) -> World:
    """A world whose file has a near origin before the store; a request that `refuses` breaks off before any block."""

    def fault(fetch: Fetch, earlier: int) -> Fault | None:
        error = refuses(fetch, earlier)
        return Fault(error=error) if error else None

    return World([Layout([BLOCK] * 200)], origins=("near", "store"), fault=fault)


def test_blocks_are_asked_from_the_first_origin_alone_while_it_has_them() -> None:
    w = from_two(lambda fetch, earlier: None)
    w.prefetch((0, block) for block in range(50))
    w.scheduler.want_cold(0, range(200), w.now)
    answers: list[Buffer | BootseerError] = []
    w.read(0, [120], answers.append)
    w.run()
    assert answers == [b""]
    assert len(w.here) == 200
    assert {fetch.origin for _, fetch in w.launched} == {0}


@pytest.mark.parametrize("error", [NotFoundError("not here"), TransientError("reset"), CorruptError("wrong bytes")])
def test_what_an_origin_does_not_give_is_asked_from_the_next_one_at_once(error: BootseerError) -> None:
    w = from_two(lambda fetch, earlier: error if fetch.origin == 0 else None)
    answers: list[Buffer | BootseerError] = []
    w.read(0, [7], answers.append)
    w.run(until=0.1)
    assert answers == [b""]
    assert [fetch.origin for _, fetch in w.launched] == [0, 1]


def test_an_origin_that_does_not_have_a_block_is_as_well_as_before() -> None:
    w = from_two(
        lambda fetch, earlier: NotFoundError("not here") if (fetch.origin, fetch.blocks[0]) == (0, 7) else None
    )
    for block in (7, 50):
        w.read(0, [block], lambda answer: None)
        w.run(until=w.now + 0.05)
    assert [(fetch.blocks[0], fetch.origin) for _, fetch in w.launched] == [(7, 0), (7, 1), (50, 0)]
    assert w.scheduler.stats.failures == 0


def test_prefetched_and_cold_blocks_go_on_to_the_next_origin_too() -> None:
    w = from_two(lambda fetch, earlier: NotFoundError("not here") if fetch.origin == 0 else None)
    w.prefetch((0, block) for block in range(0, 50, 2))
    w.scheduler.want_cold(0, range(200), w.now)
    w.run()
    assert len(w.here) == 200
    assert w.scheduler.idle
    assert w.scheduler.stats.dropped == 0


def test_a_block_that_no_origin_has_fails_with_the_answer_of_the_last_one() -> None:
    w = from_two(lambda fetch, earlier: AccessError("refused") if fetch.origin else TransientError("near"))
    answers: list[Buffer | BootseerError] = []
    w.read(0, [7], answers.append)
    w.run()
    assert [str(answer) for answer in answers] == ["refused"]
    assert w.scheduler.idle
