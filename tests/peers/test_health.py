"""Which peers are late: silent and slow ones, not those waiting for the origin; and the limits of the reaction."""

from __future__ import annotations

import pytest

from bootseer.peers.health import Health, PeerRequest

MIB = 1 << 20


def answered(health: Health, peer: str, num_bytes: int, seconds: float, at_s: float = 0.0) -> None:
    asked = health.begin(peer, at_s)
    health.received(asked, 0, at_s)
    health.received(asked, num_bytes, at_s + seconds)
    health.ended(asked, late=False, now_s=at_s + seconds)


def begin(health: Health, peer: str, seconds: float, times: int = 8) -> None:
    """Some answers, each with its first sign of life after `seconds`."""
    for _ in range(times):
        health.filling(health.begin(peer, 0.0), seconds)


def test_silence_is_late() -> None:
    health = Health()
    assert health.late_at(health.begin("a", 10.0)) == 12.0  # nothing is known yet
    begin(health, "b", 0.01)
    assert health.late_at(health.begin("a", 10.0)) == 10.5


def test_silence_is_late_later_where_all_answers_begin_late() -> None:
    health = Health()
    begin(health, "b", 0.3)
    assert health.late_at(health.begin("a", 10.0)) == 11.2


def test_an_answer_that_is_almost_whole_is_waited_for() -> None:
    health = Health()
    for peer in "abc":
        answered(health, peer, 80 * MIB, 1.0)
    slow, half = (health.begin("slow", 0.0, length) for length in (20 * MIB, 2 * MIB))
    for asked in (slow, half):
        health.received(asked, MIB, 0.0)
    assert health.late_at(slow) == 1.0
    assert health.late_at(half) == 2.0


def test_requests_that_were_under_way_when_a_peer_was_late_do_not_count_again() -> None:
    health = Health()
    two = [health.begin("a", 0.0) for _ in range(2)]
    for asked in two:
        health.ended(asked, late=True, now_s=2.0)
    assert health.absent(2.0) == frozenset()
    health.ended(health.begin("a", 2.5), late=True, now_s=4.0)
    assert health.absent(4.0) == {"a"}


def filling(health: Health, peer: str, since_s: float, until_s: float, *, moves: bool = False) -> PeerRequest:
    asked = health.begin(peer, since_s)
    for tenth in range(round(since_s * 10) + 1, round(until_s * 10)):
        assert health.late_at(asked) > tenth / 10
        health.filling(asked, tenth / 10, moves=moves)
    return asked


def test_one_that_fills_and_gets_something_meanwhile_is_not_late_before_a_minute() -> None:
    health = Health()
    asked = filling(health, "a", 0.0, 60.0, moves=True)
    assert health.late_at(asked) == 60.0


def test_one_that_fills_is_not_late_before_it_has_sent_nothing_at_all_for_20_seconds() -> None:
    health = Health()
    asked = filling(health, "a", 0.0, 20.0)
    answered(health, "a", 100, 1.0, at_s=18.9)
    assert health.late_at(asked) == 21.9  # by silence
    health.filling(asked, 39.8, moves=False)
    assert health.late_at(asked) == 39.9


@pytest.mark.parametrize(("other_s", "is_out"), [(None, True), (5.0, True), (-5.0, False)])
def test_one_that_fills_for_ever_is_left_alone_where_others_send_meanwhile(other_s: float | None, is_out: bool) -> None:
    """If no peer sends, the origin hangs; without owners, all nodes would ask it at once."""
    health = Health()
    if other_s is not None:
        answered(health, "b", 100, 0.1, at_s=10.0 + other_s)
    for _ in range(2):
        health.ended(filling(health, "a", 10.0, 30.0), late=True, now_s=30.0)
    assert health.absent(69.9) == ({"a"} if is_out else frozenset())
    assert health.absent(70.0) == frozenset()


def test_one_that_refuses_for_ever_is_left_alone() -> None:
    health = Health()
    for now_s in (0.0, 15.0, 19.9):
        health.refused("a", now_s)
    assert health.absent(19.9) == frozenset()
    answered(health, "a", 100, 0.1, at_s=19.9)
    health.refused("a", 100.0)  # for the first time since it has answered
    health.refused("a", 119.9)
    assert health.absent(119.9) == frozenset()
    health.refused("a", 120.0)
    assert health.absent(159.9) == {"a"}
    assert health.absent(160.0) == frozenset()


def test_bytes_that_drip_are_late_where_nothing_is_known_of_others() -> None:
    health = Health()
    give_up(health, 2)
    assert health.late_at(receiving(health, 100, 17.0)) == 19.0  # by silence
    assert 20.0 < health.late_at(receiving(health, 100, 19.9)) < 20.2


def receiving(health: Health, rate: float, seconds: float, length: int = 4 * MIB) -> PeerRequest:
    """A request that has received bytes at this rate for `seconds`, in steps of 0.1 s."""
    asked = health.begin("slow", 0.0, length)
    for tenth in range(int(seconds * 10) + 1):
        health.received(asked, int(rate / 10), tenth / 10)
    return asked


def test_bytes_at_less_than_an_eighth_of_the_median_are_late() -> None:
    health = Health()
    for peer, rate in (("a", 8), ("b", 8), ("c", 80)):
        answered(health, peer, rate * MIB, 1.0)
    begin(health, "d", 0.01)
    assert health.late_at(receiving(health, 0.4 * MIB, 2.0)) <= 2.0
    assert health.late_at(receiving(health, 1.5 * MIB, 2.0)) > 2.0


def test_a_slow_beginning_is_not_late_before_several_times_what_such_an_answer_takes() -> None:
    health = Health()
    for peer in "abc":
        answered(health, peer, 2 * MIB, 1.0)
    begin(health, "d", 0.25)
    for seconds in (0.0, 1.0, 2.0):
        assert health.late_at(receiving(health, 0.1 * MIB, seconds, 4 * MIB)) == seconds + 1.0  # by silence
    assert health.late_at(receiving(health, 0.1 * MIB, 7.9, 4 * MIB)) == 8.0


def test_two_late_answers_of_eight_open_the_circuit_for_five_seconds() -> None:
    health = Health()
    health.ended(health.begin("a", 0.0), late=True, now_s=0.5)
    for _ in range(6):
        health.ended(health.begin("a", 1.0), late=False, now_s=1.0)
    assert health.absent(1.0) == frozenset()
    health.ended(health.begin("a", 1.0), late=True, now_s=1.5)
    assert health.absent(1.5) == {"a"}
    assert health.absent(6.4) == {"a"}
    assert health.absent(6.6) == frozenset()


def test_a_peer_all_of_whose_answers_are_slow_is_out_though_none_is_late() -> None:
    health = Health()
    for peer in "abc":
        answered(health, peer, 8 * MIB, 0.1)
    for number in range(9):
        answered(health, "slow", MIB, 0.25, at_s=number)
    assert health.absent(9.0) == {"slow"}
    assert health.absent(7.25 + 5.1) == frozenset()
    for number in range(4):
        answered(health, "slow", MIB, 0.25, at_s=13.0 + number)
    assert health.absent(17.0) == {"slow"}
    assert health.num_given_up == 0


def test_the_only_peer_is_compared_with_the_origin() -> None:
    health = Health()
    assert not health.is_unsure("only", MIB)
    answered(health, "only", MIB, 2.0)
    assert health.is_unsure("only", MIB)
    health.store_sent(MIB, 0.01)
    assert not health.is_unsure("only", MIB)
    answered(health, "only", MIB, 2.0, at_s=2.0)
    answered(health, "only", MIB, 2.0, at_s=4.0)
    assert health.absent(6.0) == {"only"}


def test_a_peer_that_is_not_slow_or_not_the_only_one_needs_no_comparison() -> None:
    health = Health()
    answered(health, "quick", MIB, 0.05)
    assert not health.is_unsure("quick", MIB)
    answered(health, "slow", MIB, 1.0)
    assert not health.is_unsure("slow", MIB)


def test_a_slow_origin_excludes_no_peer() -> None:
    health = Health()
    health.store_sent(MIB, 4.0)
    for number in range(4):
        answered(health, "only", MIB, 2.0, at_s=2.0 * number)
    assert health.absent(8.0) == frozenset()


def test_a_single_slow_answer_excludes_no_peer_however_long_it_takes() -> None:
    health = Health()
    for peer in "abc":
        answered(health, peer, 8 * MIB, 1.0)
    answered(health, "slow", MIB, 3.0)
    assert health.absent(3.0) == frozenset()
    answered(health, "slow", MIB, 3.0, at_s=3.0)
    assert health.absent(6.0) == {"slow"}


def test_one_answer_at_the_usual_rate_ends_the_suspicion() -> None:
    health = Health()
    for peer in "abc":
        answered(health, peer, 8 * MIB, 0.1)
    for _ in range(4):
        answered(health, "sometimes", MIB, 0.4)
        answered(health, "sometimes", 8 * MIB, 0.1)
    assert health.absent(1.0) == frozenset()


def test_an_old_late_answer_is_forgotten() -> None:
    health = Health()
    health.ended(health.begin("a", 0.0), late=True, now_s=0.5)
    for _ in range(8):
        health.ended(health.begin("a", 1.0), late=False, now_s=1.0)
    health.ended(health.begin("a", 1.0), late=True, now_s=1.5)
    assert health.absent(1.5) == frozenset()


def give_up(health: Health, times: int) -> None:
    for _ in range(times):
        health.gave_up()


def test_one_request_in_twenty_may_be_given_up() -> None:
    health = Health()
    give_up(health, 3)
    assert health.num_given_up == 2
    for _ in range(100):
        health.begin("a", 0.0)
    give_up(health, 4)
    assert health.num_given_up == 5


def test_when_enough_were_given_up_a_slow_peer_is_still_excluded_and_its_earlier_requests_end() -> None:
    health = Health()
    for peer in "abc":
        answered(health, peer, 8 * MIB, 1.0)
    give_up(health, 2)
    slow = [health.begin("slow", at, 4 * MIB) for at in (0.0, 3.0)]
    for tenth in range(100):
        for asked, since in zip(slow, (0.0, 3.0), strict=True):
            if tenth / 10 >= since:
                health.received(asked, MIB // 100, tenth / 10)
        if "slow" in health.absent(tenth / 10):
            break
    assert 4.9 < tenth / 10 < 5.2
    assert all(health.late_at(asked) <= tenth / 10 for asked in slow)
    assert health.late_at(health.begin("a", 5.0)) == 7.0


def test_when_enough_were_given_up_only_long_silence_is_late() -> None:
    health = Health()
    for peer in "abc":
        answered(health, peer, 8 * MIB, 1.0)
    give_up(health, 2)
    slow = receiving(health, 0.1 * MIB, 1.0)
    assert health.late_at(slow) == 3.0
    assert health.late_at(health.begin("a", 10.0)) == 12.0


def test_one_that_is_late_again_after_its_pause_is_out_at_once() -> None:
    health = Health()
    for at in (0.0, 1.0, 8.0):
        health.ended(health.begin("a", at), late=True, now_s=at)
    assert health.absent(12.9) == {"a"}


def test_one_that_does_not_serve_a_file_yet_is_left_alone_for_this_file_for_two_seconds() -> None:
    health = Health()
    health.mark_absent("a", 1.0, "f")
    health.mark_absent("b", 2.0)
    assert health.absent(2.5) == {"b"}
    assert health.absent(2.5, "f") == {"a", "b"}
    assert health.absent(2.5, "f") is health.absent(2.6, "f")
    assert health.absent(3.1, "f") == health.absent(3.1) == {"b"}
    assert health.absent(4.1, "f") == frozenset()


def test_a_peer_that_sent_a_wrong_block_is_not_asked_again() -> None:
    health = Health()
    health.sent_wrong("a")
    assert health.absent(1e9) == {"a"}
