"""The HTML report without a browser: numbers, escaping, structure, folding. `test_html_browser` opens it in one."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from bootseer.report.analysis.compose import analyse
from bootseer.report.analysis.prepare import Options
from bootseer.report.analysis.stragglers import host_list
from bootseer.report.model import Report
from bootseer.report.render import html
from fleet import INSTALL, Fleet
from report.render import sample
from report.render.page import Page, look_up, page_of, rendered

pytestmark = pytest.mark.slow

_SECTIONS = (
    "timeline",
    "chain",
    "stragglers",
    "stages",
    "spread",
    "coverage",
    "clock",
    "unobserved",
    "input",
)


@pytest.mark.parametrize("name", ["small", "big", "empty"])
def test_each_number_is_the_one_of_the_json(name: str, request: pytest.FixtureRequest) -> None:
    report = request.getfixturevalue(name)
    document = report.to_json()
    numbers = page_of(report).with_key()
    assert len(numbers) >= (4 if name == "empty" else 20)
    for key, raw, text in numbers:
        expected = look_up(document, key)
        assert json.loads(raw) == expected, key
        assert (text == "unobserved") == (expected is None), key


def test_the_key_figures_are_there(small: Report) -> None:
    keys = {key for key, _, _ in page_of(small).with_key()}
    parts = ("overhead", "coverage")
    document = small.to_json()
    wanted = {f"{part}.{name}" for part in parts for name in document[part]} - {
        "overhead.work_share",
        "overhead.currency",
    }
    assert wanted - keys == set()
    assert {"stragglers.length", "overhead.work_share", "share.share", "input.lines", "clock.max_error_s"} <= keys


def test_the_page_is_in_the_order_of_an_incident(small: Report) -> None:
    text = rendered(small)
    verdict, banner, tiles = text.index('id="verdict"'), text.index('class="banners"'), text.index('class="tiles"')
    places = [verdict, banner, tiles, *(text.index(f'<section id="{name}"') for name in _SECTIONS)]
    assert places == sorted(places)
    for line in (small.verdict, *small.headlines, *small.unobserved, small.facts[0].text):
        assert line in text


@pytest.mark.parametrize("name", ["small", "big", "empty", "hostile"])
def test_the_structure_is_sound(name: str, request: pytest.FixtureRequest) -> None:
    page = page_of(request.getfixturevalue(name))
    assert page.open == []
    idents = Counter(attrs["id"] for _, attrs in page.elements if "id" in attrs)
    assert max(idents.values()) == 1
    for tag, attrs in page.elements:
        if tag == "a":
            assert attrs["href"][1:] in idents
        if "aria-labelledby" in attrs:
            assert attrs["aria-labelledby"] in idents
        if tag == "th":
            assert attrs["scope"] == "col"
        if tag == "svg" and attrs.get("aria-hidden") != "true" and "overflow" not in attrs:
            assert attrs["role"] == "img"
            assert attrs["aria-label"]
        assert "style" not in attrs
    tables = sum(tag == "table" for tag, _ in page.elements)
    assert sum(tag == "caption" for tag, _ in page.elements) == tables


def test_nothing_is_loaded_from_elsewhere(big: Report) -> None:
    page = page_of(big)
    assert {tag for tag, _ in page.elements} & {"link", "img", "iframe", "object", "base", "form"} == set()
    assert not any({"src", "srcset", "action"} & attrs.keys() for _, attrs in page.elements)
    style = next(page.text[i] for i, (tag, _) in enumerate(page.elements) if tag == "style")
    assert re.findall(r"url\((?!#w\d\))|@import|@font-face", style) == []


def test_the_policy_allows_the_own_style_and_script_only(small: Report) -> None:
    page = page_of(small)
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    inline = [
        page.text[i] for i, (tag, a) in enumerate(page.elements) if tag in ("style", "script") and "type" not in a
    ]
    assert len(inline) == 2
    for source in inline:
        assert base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() in policy


def test_hostile_text_stays_text(hostile: Report, small: Report) -> None:
    text = rendered(hostile)
    page, harmless = page_of(hostile), page_of(small)
    known = {tag for tag, _ in harmless.elements}
    assert {tag for tag, _ in page.elements} - known == {"label", "input"} - known
    assert sum(tag == "script" for tag, _ in page.elements) == 2
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert next(page.text[i] for i, (tag, _) in enumerate(page.elements) if tag == "h1") == sample.HOSTILE[1]
    assert "\u202e" not in text
    assert "\x00" not in text
    text.encode("utf-8")


def data_of(report: Report) -> dict[str, Any]:
    page = page_of(report)
    return json.loads(next(page.text[i] for i, (_, attrs) in enumerate(page.elements) if attrs.get("id") == "data"))


def test_a_name_comes_back_whole_from_the_embedded_json(hostile: Report) -> None:
    names = [node[0] for node in data_of(hostile)["nodes"]]
    assert names[0] == sample.HOSTILE[0]
    assert names[4] == sample.HOSTILE[1] + "1"


def test_up_to_32_nodes_have_a_row_each() -> None:
    nodes = sample.big(33).nodes
    for count in (32, 33):
        report = replace(sample.big(33), nodes=nodes[:count])
        page = Page(html.render(report))
        rows = sum("node" in attrs.get("class", "").split() for tag, attrs in page.elements if tag == "details")
        assert rows == (32 if count == 32 else 4 + 20)


def test_a_big_startup_folds_and_stays_small(big: Report) -> None:
    assert len(rendered(big).encode()) < 3_000_000
    page = page_of(big)
    names = [page.text[i] for i, (_, attrs) in enumerate(page.elements) if attrs.get("class") == "who"]
    assert names[:4] == ["p0–p50720 nodes", "p50–p90576 nodes", "p90–p99129 nodes", "p99–p10015 nodes"]
    assert len(names) == 24
    slow = {straggler.node for straggler in big.stragglers}
    assert sum(any(name.startswith(node) for node in slow) for name in names) == len(slow)


def test_the_embedded_nodes_are_the_reports(big: Report) -> None:
    data = data_of(big)
    assert len(data["nodes"]) == len(big.nodes)
    for node, (name, rank, _, _, outcome, start, cuts) in zip(big.nodes, data["nodes"], strict=True):
        assert (name, rank, outcome, start) == (node.node, node.rank, node.outcome, round(node.start_s * 1000))
        assert cuts[1::2] == [round(seg.end_s * 1000) for seg in node.segments]
        assert [data["looks"][i][1].split(", ")[0] for i in cuts[::2]] == [seg.stage for seg in node.segments]


def test_marks_of_a_truncated_node(small: Report) -> None:
    text = rendered(small)
    row = text[text.index(">gpu-b-0203<") :]
    row = row[: row.index("</details>")]
    assert '<b class="tag bad">truncated</b>' in row
    assert re.search(r'<rect class="c3 bad"', row)
    assert "its events end in environment_setup.install" in row


def test_the_bars_cover_the_time_axis(small: Report) -> None:
    text = rendered(small)
    row = text[text.index('<span class="name" title="gpu-a-0018"') :]
    row = row[: row.index("</summary>")]
    widths = re.findall(r'<rect class="[ch]\w(?: v\d)?" x="[\d.]+%" y="4" width="([\d.]+)%"', row)
    assert len(widths) == len(small.nodes[1].segments)
    assert sum(map(float, widths)) == pytest.approx(100 * small.nodes[1].end_s / end_of(small), abs=0.1)


def end_of(report: Report) -> float:
    return max(seg.end_s for node in report.nodes for seg in (*node.segments, *node.background))


def test_the_precision_of_the_clocks_follows_the_finding(small: Report) -> None:
    lines = ["The nodes' clocks differ by up to 5.0 s.", "Only 1 of 2 nodes were seen."]
    text = html.render(replace(small, headlines=lines))
    places = [text.index(line.replace("'", "&#39;")) for line in lines]
    assert places[1] < text.index('class="tiles"') < places[0]


def test_distributions_are_drawn_where_there_is_spread() -> None:
    fleet = Fleet(8, work_of={(3, INSTALL): 90.0})
    page = Page(html.render(analyse(fleet.events(), Options())))
    drawn = [page.text[i] for i, (tag, _) in enumerate(page.elements) if tag == "figcaption"]
    assert [text.partition("install")[0] for text in drawn if "install" in text] == ["environment_setup."]
    assert not any(text.startswith(("image_loading", "first_step")) for text in drawn)


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        (["a-1"], "a-1"),
        (["r1-n03", "r1-n04", "r1-n05", "r1-n09"], "r1-n[03-05,09]"),
        (["n9", "n10", "x"], "n[10,9], x"),
    ],
)
def test_names_are_written_as_slurm_takes_them(nodes: list[str], told: str) -> None:
    assert host_list(nodes) == told


def test_a_group_of_stragglers_is_named() -> None:
    slow = {(node, INSTALL): 90.0 for node in range(3)}
    page = html.render(analyse(Fleet(16, work_of=slow).events(), Options()))
    assert "node-[0000-0002]" in page
