from __future__ import annotations

from bootseer.checkpoint.reading.late_nodes import LateNodes


def test_a_node_that_was_late_is_tried_once_in_a_while_and_forgotten_when_it_serves():
    late = LateNodes()
    assert not late.are_late(("a:1",))
    late.note("a:1", 100.0)
    late.note("a:1", 101.0)
    assert late.are_late(("a:1",))
    assert not late.are_late(("a:1", "b:1"))
    assert not late.may_try(("a:1",), 101.9)
    assert late.may_try(("a:1",), 102.0)
    assert not late.may_try(("a:1",), 102.0)
    assert not late.may_try(("a:1",), 105.9)
    assert late.may_try(("a:1",), 106.0)
    late.forget("a:1")
    assert not late.are_late(("a:1",))


def test_nobody_in_particular_is_never_late():
    late = LateNodes()
    late.note("", 0.0)
    assert not late.are_late(("",))
    assert not late.are_late(())
