"""Files that a peer may have: when a block is requested from it, and when from the store. In virtual time."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest

from bootseer.blocks.codec import Buffer
from bootseer.errors import AccessError, BootseerError, CorruptError, TransientError
from bootseer.fetch.ledger import Fetch
from fetch.virtual import BLOCK, Fault, Layout, Near, World


def from_two(refuses: Callable[[Fetch, int], BootseerError | None]) -> World:
    """A world with a peer before the store; `refuses` may end a request with an error before any block."""

    def fault(fetch: Fetch, earlier: int) -> Fault | None:
        error = refuses(fetch, earlier)
        return Fault(error=error) if error else None

    return World([Layout([BLOCK] * 200)], routes=Near(), fault=fault)


def asked(w: World) -> list[Hashable]:
    """The origins from which blocks were requested, in order."""
    return [fetch.step for _, fetch in w.launched]


def test_blocks_are_asked_from_the_peer_alone_while_it_has_them() -> None:
    w = from_two(lambda fetch, earlier: None)
    w.prefetch((0, block) for block in range(50))
    w.scheduler.want_cold(0, range(200), w.now)
    answers: list[Buffer | BootseerError] = []
    w.read(0, [120], answers.append)
    w.run()
    assert answers == [b""]
    assert len(w.here) == 200
    assert set(asked(w)) == {"near"}


@pytest.mark.parametrize("error", [TransientError("reset"), CorruptError("wrong bytes")])
def test_what_the_peer_does_not_give_is_asked_from_the_store_at_once(error: BootseerError) -> None:
    w = from_two(lambda fetch, earlier: error if fetch.step else None)
    answers: list[Buffer | BootseerError] = []
    w.read(0, [7], answers.append)
    w.run(until=0.1)
    assert answers == [b""]
    assert asked(w) == ["near", None]


def test_prefetched_and_cold_blocks_go_on_to_the_store_too() -> None:
    w = from_two(lambda fetch, earlier: TransientError("not here") if fetch.step else None)
    w.prefetch((0, block) for block in range(0, 50, 2))
    w.scheduler.want_cold(0, range(200), w.now)
    w.run()
    assert len(w.here) == 200
    assert w.scheduler.idle
    assert w.scheduler.stats.dropped == 0


def test_a_block_that_neither_has_fails_with_the_answer_of_the_store() -> None:
    w = from_two(lambda fetch, earlier: TransientError("near") if fetch.step else AccessError("refused"))
    answers: list[Buffer | BootseerError] = []
    w.read(0, [7], answers.append)
    w.run()
    assert [str(answer) for answer in answers] == ["refused"]
    assert w.scheduler.idle
