from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.fetch.pending import PendingRead, PendingReads


def ticket(deadline=10.0, file=0):
    return PendingRead(file, 0, 0, 0.0, deadline, lambda answer: None)


def test_a_read_is_complete_when_its_last_block_is_here_and_holds_what_came():
    tickets, one, other = PendingReads(), ticket(), ticket()
    tickets.wait(one, [1, 2])
    tickets.wait(other, [2])
    assert tickets.arrived((0, 2), b"two") == [other]
    assert tickets.arrived((1, 1), b"another file's") == []
    assert tickets.arrived((0, 1), None) == [one]
    assert one.held == {2: b"two"}
    assert tickets.next_deadline is None


def test_a_block_that_does_not_come_fails_its_reads_and_says_what_else_they_waited_for():
    tickets, one, other = PendingReads(), ticket(), ticket()
    tickets.wait(one, [1, 2, 3])
    tickets.wait(other, [3])
    assert tickets.fail_block((0, 1)) == [(one, {2, 3})]
    assert tickets.arrived((0, 3), b"") == [other]


def test_a_read_expires_once_at_its_deadline_and_not_when_it_was_closed():
    tickets, late, closed, later = PendingReads(), ticket(5.0), ticket(5.0), ticket(6.0)
    for each in (late, closed, later):
        tickets.wait(each, [1])
    assert tickets.close(closed) == {1}
    assert tickets.close(closed) == set()
    assert tickets.next_deadline == 5.0
    assert tickets.take_expired(4.9) == []
    assert tickets.take_expired(5.0) == [(late, {1})]
    assert tickets.take_expired(5.5) == []
    assert tickets.next_deadline == 6.0


def test_a_read_may_wait_again_for_a_block_that_vanished():
    tickets, one = PendingReads(), ticket()
    tickets.wait(one, [1])
    assert tickets.arrived((0, 1), None) == [one]
    tickets.wait(one, [1])
    assert tickets.arrived((0, 1), b"here") == [one]
    assert one.held == {1: b"here"}


@given(
    waits=st.lists(st.frozensets(st.integers(0, 5), min_size=1), max_size=8),
    events=st.lists(
        st.tuples(st.sampled_from(["arrive", "give up", "close", "expire"]), st.integers(0, 7)), max_size=30
    ),
)
def test_each_read_ends_at_most_once_and_nothing_is_left_of_it(waits, events):
    tickets = PendingReads()
    open_ones = [ticket(deadline=number) for number in range(len(waits))]
    for each, blocks in zip(open_ones, waits, strict=True):
        tickets.wait(each, blocks)
    ended = []
    for event, number in events:
        if event == "arrive":
            ended += tickets.arrived((0, number), b"")
        elif event == "give up":
            ended += [each for each, _ in tickets.fail_block((0, number))]
        elif event == "expire":
            ended += [each for each, _ in tickets.take_expired(number)]
        elif number < len(open_ones) and tickets.close(open_ones[number]):
            ended.append(open_ones[number])
    rest = [each for each, _ in tickets.take_expired(float("inf"))]
    assert tickets.next_deadline is None
    assert sorted(map(id, [*ended, *rest])) == sorted(map(id, open_ones))


def test_a_read_that_is_over_keeps_no_blocks_until_its_deadline():
    tickets, gone = PendingReads(), ticket()
    tickets.wait(gone, [1, 2])
    tickets.arrived((0, 1), b"one")
    tickets.close(gone)
    assert gone.held == {}
