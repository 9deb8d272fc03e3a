"""Text, folding and drawing of the HTML report, separately."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.report.model import Node, Report, Segment
from bootseer.report.render.fold import bands, clean, coalesced, domain, outliers, own_s, time_range
from bootseer.report.render.html_svg import Palette, Scale, axis, bar, clock, tick_times
from bootseer.report.render.html_text import data_block, esc, hours, money, num, raw, seconds


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (hours, 0.0, "0.00"),
        (hours, 0.00028, "0.00028"),
        (hours, 0.077, "0.077"),
        (hours, 1e-9, "< 0.0001"),
        (hours, 12.345, "12.35"),
        (hours, 393.04, "393.0"),
        (hours, 18_000.4, "18,000"),
        (money, 0.19, "0.19"),
        (money, 982.43, "982.43"),
        (money, 45_000.4, "45,000"),
    ],
)
def test_numbers_as_people_read_them(form, value, text) -> None:
    assert form(value) == text


def test_a_missing_number_is_never_zero() -> None:
    assert num(None, seconds, "a.b") == '<span class="na" data-key="a.b" data-value="null">unobserved</span>'
    assert num(0.0, seconds, "a.b") == '<span data-key="a.b" data-value="0.0">0.00 s</span>'


def test_raw_has_the_precision_of_the_json() -> None:
    assert raw(1 / 3) == "0.333333"
    assert raw(7) == "7"


@given(st.text())
def test_escaped_text_has_no_markup_and_can_be_written(text: str) -> None:
    safe = esc(text)
    assert not set("<>\"'") & set(safe)
    safe.encode("utf-8")
    assert clean(clean(text)) == clean(text)


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))
def test_a_data_block_cannot_end_its_element(value) -> None:
    block = data_block({"a": value, "b": "</script><!--"})
    assert not set("<>&") & set(block)
    assert json.loads(block)["b"] == "</script><!--"


@given(st.floats(-1e6, 1e7), st.floats(0.001, 1e7))
def test_time_marks_are_few_and_inside(low: float, span: float) -> None:
    ticks = tick_times(low, low + span)
    assert len(ticks) <= 9
    assert all(low - 1e-6 <= tick <= low + span + 1e-6 for tick in ticks)
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 s"), (2.5, "2.5 s"), (90, "1:30"), (7505, "2:05:05"), (-90, "−1:30")]
)
def test_marks_read_like_a_clock(value: float, text: str) -> None:
    assert clock(value) == text


def test_bands_hold_each_node_once_and_in_order(big: Report) -> None:
    found = bands(big.nodes)
    assert [len(band.nodes) for band in found] == [720, 576, 129, 15]
    members = [node for band in found for node in band.nodes]
    assert sorted(node.node for node in members) == sorted(node.node for node in big.nodes)
    assert [own_s(node) for node in members] == sorted(own_s(node) for node in members)


def test_a_band_shows_its_median_node(big: Report) -> None:
    for band in bands(big.nodes):
        slower = sum(own_s(node) > own_s(band.middle) for node in band.nodes)
        faster = sum(own_s(node) < own_s(band.middle) for node in band.nodes)
        assert max(slower, faster) <= len(band.nodes) // 2


def test_no_nodes_no_bands() -> None:
    assert bands([]) == []
    assert time_range([]) == (0.0, 1.0)


def test_one_node_is_one_band(small: Report) -> None:
    assert [len(band.nodes) for band in bands(small.nodes[:1])] == [1]


def test_outliers_begin_with_the_critical_chain(big: Report) -> None:
    chosen = [node.node for node in outliers(big)]
    assert len(chosen) == len(set(chosen)) == 20
    assert set(chosen[:2]) == {link.node for link in big.critical_chain}
    assert {straggler.node for straggler in big.stragglers} <= set(chosen)


def test_an_outlier_that_is_not_in_the_report_is_left_out(small: Report) -> None:
    gone = replace(small, nodes=small.nodes[:1])
    assert [node.node for node in outliers(gone)] == [small.nodes[0].node]


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        (("a1.rack.example.com", "a2.rack.example.com"), ".rack.example.com"),
        (("a.rack1.example.com", "a.rack2.example.com"), ""),
        (("a", "b"), ""),
        (("10.0.0.1", "11.0.0.1"), ""),
        (("a.example.com",), ""),
    ],
)
def test_labels_leave_out_the_domain_that_all_nodes_share(small: Report, names: tuple[str, ...], shared: str) -> None:
    assert domain([replace(small.nodes[0], node=name) for name in names]) == shared


def test_a_stage_that_was_cut_off_at_its_begin_is_marked(small: Report) -> None:
    segments = [Segment("image_loading", 0, 5, "work", "ok"), Segment("environment_setup", 5, 5, "work", "truncated")]
    drawn = bar(segments, Scale(0, 10, ()), Palette(small), "n0")
    assert drawn.count('class="x"') == 1


def test_coalesced_keeps_the_time_and_merges_sub_stages(small: Report) -> None:
    node: Node = small.nodes[0]
    merged = coalesced(node.segments)
    assert len(merged) < len(node.segments)
    assert sum(s.end_s - s.start_s for s in merged) == pytest.approx(sum(s.end_s - s.start_s for s in node.segments))
    assert not any("." in seg.stage for seg in merged)


def test_coalesced_keeps_holes() -> None:
    apart = [Segment("a.b", 0, 1, "work", ""), Segment("a.c", 2, 3, "work", "")]
    assert [(seg.start_s, seg.end_s) for seg in coalesced(apart)] == [(0, 1), (2, 3)]


def test_a_stage_of_the_user_gets_a_colour_of_its_own(small: Report) -> None:
    mine = Segment("warm_caches.disk", 0, 1, "work", "ok")
    palette = Palette(replace(small, nodes=[replace(small.nodes[0], segments=[mine])]))
    assert palette.stages[-1] == "warm_caches"
    assert palette.css(mine.stage, "work") == "c6"
    assert palette.css(mine.stage, "wait") == "h6"
    assert palette.css("environment_setup.untracked", "untracked") == "cu"


def test_each_barrier_has_its_number_and_a_name_where_there_is_room() -> None:
    drawn = axis(Scale(0, 100, (("process_group", 84.6), ("first_collective", 96.5), ("training_began", 100.0))))
    labels = re.findall(r'<text class="b".*?>(.*?)</text>', drawn)
    assert [re.sub("<.*?>", "", label).strip() for label in labels] == ["process_group 1", "2", "3"]


def test_a_stage_of_nothing_but_waiting_is_hatched_in_the_legend(small: Report) -> None:
    only = replace(small.stages[0], stage="wait_for_others", work_s=0.0, wait_s=5.0)
    palette = Palette(replace(small, stages=[*small.stages, only]))
    assert palette.sign("wait_for_others") == "h6"
    assert palette.sign("image_loading") == "c2"
