"""The HTML report in a real browser: no errors, no violations of its security policy, and its controls work."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.report.model import Report
from bootseer.report.render import html
from browser import needs_chromium, open_tab
from report.render.page import Page, look_up, rendered
from startups import began, report, span

pytestmark = [pytest.mark.browser, needs_chromium]

Opener = Callable[..., str]


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    """One tab of one browser for all tests: starting a browser takes a second of processor time, and a new tab as much
    as loading a page."""
    with open_tab(1280, 900) as page:
        yield page


@pytest.fixture
def opened(tmp_path: Path, tab: Any) -> Opener:
    """Opens a page and returns its DOM after the scripts ran, as text."""
    numbers = itertools.count()

    def run(text: str, *, fragment: str = "", steps: str = "") -> str:
        if steps:
            text = _with_steps(text, steps)
        file = tmp_path / f"report-{next(numbers)}.html"
        file.write_text(text, encoding="utf-8")
        tab.goto(file.as_uri() + fragment)
        tab.wait_for_selector("html[data-said], html[data-ready], html[data-error]", state="attached")
        return str(tab.content())

    return run


def _with_steps(text: str, steps: str) -> str:
    """The page with an additional script, allowed by its hash, with the actions of a user. `said` goes to the DOM."""
    script = f"const said = {{}};\n{steps}\ndocument.documentElement.dataset.said = JSON.stringify(said);"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = text.replace("script-src '", f"script-src 'sha256-{digest}' '")
    return text.replace("</body>", f"<script>{script}</script></body>")


def _root(dom: str) -> dict[str, str]:
    return Page(dom[: dom.index("<head")]).elements[0][1]


def _said(dom: str) -> Any:
    root = _root(dom)
    assert "data-error" not in root, root["data-error"]
    return json.loads(root["data-said"])


@pytest.mark.parametrize("name", ["small", "big", "empty"])
def test_the_numbers_on_the_screen_are_the_jsons(name: str, opened: Opener, request: pytest.FixtureRequest) -> None:
    report = request.getfixturevalue(name)
    dom = opened(rendered(report))
    root = _root(dom)
    assert "data-error" not in root
    assert "data-ready" in root
    document = report.to_json()
    numbers = Page(dom).with_key()
    assert len(numbers) >= (4 if name == "empty" else 20)
    for key, raw, _ in numbers:
        assert json.loads(raw) == look_up(document, key), key


def test_hostile_text_does_not_run(opened: Opener, hostile: Report) -> None:
    find = "const box = document.getElementById('find'); box.value = 'script'; box.dispatchEvent(new Event('input'));"
    count = "said.rows = document.querySelectorAll('#found .row').length; said.shown = document.title;"
    dom = opened(rendered(hostile), steps=find + count)
    assert "data-pwned" not in _root(dom)
    said = _said(dom)
    assert said["rows"] == 10
    assert said["shown"].startswith("</script><script>")


def test_the_policy_holds_even_if_escaping_failed(opened: Opener, small: Report) -> None:
    bad = "<script>document.documentElement.dataset.pwned = '1'</script><img src=x onerror=\"document.title='pwned'\">"
    text = rendered(small).replace("<main>", "<main>" + bad)
    dom = opened(text)
    assert "data-pwned" not in _root(dom)
    assert "<title>pwned" not in dom


def test_a_big_startup_folds_and_any_node_is_found(opened: Opener, big: Report) -> None:
    node = big.nodes[777]
    dom = opened(
        rendered(big),
        fragment=f"#find={node.node}",
        steps="""
        const row = document.querySelector("#found .row");
        said.folded = document.getElementById("gantt").dataset.folded;
        said.rows = document.querySelectorAll(".group:not(#found) details.node").length;
        said.found = document.querySelectorAll("#found .row").length;
        said.name = row.querySelector(".name").textContent;
        row.querySelector(".name").click();
        said.lines = row.parentElement.querySelectorAll("tbody tr").length;
        said.bars = [...row.querySelectorAll("rect")].map((bar) => bar.getBoundingClientRect().width);
        said.plot = row.querySelector(".plot").clientWidth;
        """,
    )
    said = _said(dom)
    assert (said["folded"], said["rows"], said["found"], said["name"]) == ("true", 24, 1, node.node)
    assert len(said["bars"]) == said["lines"] == len(node.segments)
    longest = max(node.segments, key=lambda seg: seg.end_s - seg.start_s)
    share = (longest.end_s - longest.start_s) / node.end_s
    assert max(said["bars"]) == pytest.approx(share * said["plot"], rel=0.02)


def test_zoom_sorting_and_filter(opened: Opener, small: Report) -> None:
    said = _said(
        opened(
            rendered(small),
            steps="""
            const bar = document.querySelector("details .bar");
            const width = () => Math.round(bar.getBoundingClientRect().width);
            const press = (name) => document.querySelector(`[data-zoom="${name}"]`).click();
            said.before = width();
            press("in");
            said.zoomed = width();
            said.ticks = document.querySelectorAll(".ticks text").length;
            press("all");
            said.after = width();
            const table = document.querySelector("#nodes table");
            const column = (index) => [...table.tBodies[0].rows].map((row) => row.cells[index].dataset.sort);
            const head = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === "work");
            table.tHead.rows[0].cells[head].querySelector("button").click();
            said.descending = column(head).map(Number);
            table.tHead.rows[0].cells[head].querySelector("button").click();
            said.ascending = column(head).map(Number);
            said.aria = table.tHead.rows[0].cells[head].getAttribute("aria-sort");
            const box = document.querySelector("[data-filter]");
            box.value = "gpu-b";
            box.dispatchEvent(new Event("input"));
            said.left = [...table.tBodies[0].rows].filter((row) => !row.hidden).map((row) => row.cells[0].textContent);
            """,
        )
    )
    assert said["zoomed"] == pytest.approx(2 * said["before"], abs=2)
    assert said["after"] == said["before"]
    assert 2 <= said["ticks"] <= 8
    assert said["descending"] == sorted(said["descending"], reverse=True)
    assert said["ascending"] == sorted(said["descending"])
    assert said["aria"] == "ascending"
    assert said["left"] == ["gpu-b-0203"]


def test_dragging_zooms_and_does_not_open_the_row(opened: Opener, small: Report) -> None:
    said = _said(
        opened(
            rendered(small),
            steps="""
            const plot = document.querySelector("summary .plot");
            const box = plot.getBoundingClientRect();
            const at = (share) => ({
              bubbles: true, cancelable: true, button: 0, pointerType: "mouse",
              clientX: box.left + share * box.width, clientY: box.top + 5,
            });
            plot.dispatchEvent(new PointerEvent("pointerdown", at(0.5)));
            plot.dispatchEvent(new PointerEvent("pointermove", at(0.7)));
            plot.dispatchEvent(new PointerEvent("pointerup", at(0.75)));
            plot.dispatchEvent(new MouseEvent("click", at(0.75)));
            const style = document.getElementById("gantt").style;
            said.zoom = Number(style.getPropertyValue("--z"));
            said.origin = Number(style.getPropertyValue("--o"));
            said.open = document.querySelectorAll("details.node[open]").length;
            document.querySelector("details.node .name").click();
            said.opened = document.querySelectorAll("details.node[open]").length;
            """,
        )
    )
    assert said["zoom"] == pytest.approx(4, rel=0.02)
    assert said["origin"] == pytest.approx(0.5, abs=0.01)
    assert (said["open"], said["opened"]) == (0, 1)


def test_tooltips_tell_the_segment(opened: Opener, small: Report) -> None:
    said = _said(
        opened(
            rendered(small),
            steps="""
            const bar = document.querySelector("details .bar > rect.c3");
            bar.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: 400, clientY: 300 }));
            const tip = document.getElementById("tip");
            said.text = tip.textContent;
            said.hidden = tip.hidden;
            document.body.dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
            said.away = tip.hidden;
            """,
        )
    )
    seg = next(seg for seg in small.nodes[0].segments if seg.stage.startswith("environment_setup"))
    assert said["text"].startswith(f"{seg.stage}, work: {seg.end_s - seg.start_s:.2f} s (")
    assert (said["hidden"], said["away"]) == (False, True)


def one_node(**more: Any) -> Report:
    """A torch job on one node without GPUs: 85 % of its start is model_initialization."""
    inner = "model_initialization."
    return report(
        span(0, 8.2, "command"),
        span(0, 5, inner + "import_torch"),
        span(5.2, 8, inner + "build"),
        span(8.2, 9.7, "first_step"),
        began(9.7),
        **more,
    )


def test_a_small_job_has_labelled_shades_and_no_empty_cells(opened: Opener) -> None:
    said = _said(
        opened(
            html.render(one_node()),
            steps="""
            const box = (one) => one.getBoundingClientRect();
            const row = document.querySelector("details.node .bar");
            const drawn = [...row.querySelectorAll("rect")];
            said.shades = drawn.map((one) => getComputedStyle(one).fill + getComputedStyle(one).fillOpacity);
            said.labels = [...row.querySelectorAll("text")].map((one) => [
              one.textContent, drawn.some((d) => box(d).left <= box(one).left && box(one).right <= box(d).right),
            ]);
            said.legend = document.querySelector(".legend").textContent;
            const cells = document.querySelectorAll("section > .scroll td, .tile");
            said.cells = [...cells].map((one) => one.textContent.trim());
            said.sections = [...document.querySelectorAll("section[id]")].map((one) => one.id);
            """,
        )
    )
    assert said["labels"] == [["import_torch", True], ["build", True], ["first_step", True]]
    assert len(set(said["shades"])) == 4
    assert "model_initialization: import_torch, build" in re.sub(r"\s+", " ", said["legend"])
    assert not [text for text in said["cells"] if "unobserved" in text or text in ("", "0", "–") or "0.00" in text]
    assert said["sections"] == ["timeline", "stages", "unobserved", "input", "words"]


def test_the_queue_is_drawn_and_a_long_one_does_not_hide_the_startup(opened: Opener) -> None:
    steps = """
    const wide = (row) => row.querySelector("rect").getBoundingClientRect().width;
    const [first, second] = document.querySelectorAll("details.node");
    said.name = first.querySelector(".name").textContent;
    said.told = first.querySelector(".fig").textContent;
    said.share = wide(first) / first.querySelector(".plot").clientWidth;
    said.starts = second.querySelector("rect").getBoundingClientRect().left
      - second.querySelector(".plot").getBoundingClientRect().left;
    said.queue = wide(first);
    """
    for queue_s, share in ((10.0, 0.25), (7200.0, 0.25)):
        queued = report(span(0, queue_s, "queue"), span(queue_s, queue_s + 30, "first_step"), began(queue_s + 30))
        said = _said(opened(html.render(queued), steps=steps))
        assert (said["name"], said["share"]) == ("scheduler", pytest.approx(share, rel=0.05))
        assert said["told"] == "queue " + ("10.0 s" if queue_s == 10 else "2 h 00 min")
        assert said["starts"] == pytest.approx(said["queue"], abs=2)


def test_attempts_are_columns_as_high_as_they_took(opened: Opener) -> None:
    parts = []
    for attempt, (install_s, ok) in enumerate(((10, True), (40, True), (20, False))):
        at = 1000 * attempt
        parts.append(
            span(at, at + install_s, "environment_setup.install", attempt=attempt, outcome="ok" if ok else "failed")
        )
        parts.append(span(at + install_s, at + install_s + 5, "first_step", attempt=attempt) if ok else [])
        parts.append(began(at + install_s + 5, attempt=attempt) if ok else [])
    text = html.render(report(*parts))
    said = _said(
        opened(
            text,
            steps="""
            const chart = document.querySelector("#startups .columns");
            said.heights = [...chart.querySelectorAll("rect")].map((one) => one.getBoundingClientRect().height);
            said.marks = [...chart.querySelectorAll("path")].length;
            said.below = [...chart.querySelectorAll("text[text-anchor]")].map((one) => one.textContent);
            """,
        )
    )
    scale = said["heights"][0] / 10
    assert [height / scale for height in said["heights"]] == pytest.approx([10, 5, 40, 5, 20], rel=0.02)
    assert (said["marks"], said["below"]) == (1, ["0", "1", "2"])


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", ["small", "big"])
def test_the_page_never_scrolls_sideways(
    name: str, width: int, opened: Opener, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    measured = """
    said.page = document.documentElement.scrollWidth;
    said.window = innerWidth;
    said.cut = [...document.querySelectorAll("figcaption span, .name, h1, h2, h3, dd, dt")]
      .filter((one) => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== "inline")
      .map((one) => one.textContent);
    said.wide = [...document.querySelectorAll(".scroll")].filter((one) => one.scrollWidth > one.clientWidth + 1)
      .map((one) => one.ariaLabel);
    parent.postMessage(JSON.stringify(said), "*");
    """
    # A headless window is at least 500 px wide; a frame in it may be narrower.
    inner = tmp_path / "inner.html"
    inner.write_text(_with_steps(rendered(request.getfixturevalue(name)), measured), encoding="utf-8")
    frame = f"""<!doctype html><html><body>
    <script>addEventListener("message", (event) => {{ document.documentElement.dataset.said = event.data; }});</script>
    <iframe src="{inner.as_uri()}" width="{width}" height="900" style="border:0"></iframe></body></html>"""
    said = _said(opened(frame))
    assert said["window"] == width
    assert said["page"] <= width
    assert said["cut"] == []
    assert width < 1280 or said["wide"] == []  # the last columns are visible


def test_it_reads_without_script(opened: Opener, small: Report) -> None:
    text = re.sub(r"<script>.*</script>", "", rendered(small), flags=re.DOTALL)
    click = "document.querySelector('details.node .name').click();"
    dom = opened(text, steps=click + "said.opened = document.querySelector('.detail').innerText;")
    assert "data-ready" not in _root(dom)
    assert small.verdict in dom
    assert "environment_setup.install" in _said(dom)["opened"]
