"""The report in a terminal, at any width: numbers are not cut, and no control sequences reach the terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from bootseer.report.render import terminal
from bootseer.report.render.fold import outliers
from bootseer.trace.event import decode
from fleet import INSTALL, Fleet
from startups import began, report, span


def shown(result, width: int = 80, **options: object) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, markup=False, **options)  # type: ignore[arg-type]
    terminal.render(result, console)
    return file.getvalue()


def fleet(**more: object):
    events = [decode(line) for line in Fleet(**{"num_nodes": 5, **more}).lines()]  # type: ignore[arg-type]
    return report(events)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("num_nodes", [1, 3, 40])
def test_each_width_is_kept_and_each_number_is_whole(width, num_nodes):
    result = fleet(num_nodes=num_nodes, work_of={(0, INSTALL): 1234.0})
    text = shown(result, width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert not re.search(r"[\d.%]…", text)
    assert "1234" in text


@pytest.mark.parametrize(
    "name", ["n" * 300, "節点" * 40, "e\u0301" * 60, "\x1b[31mred\x1b[0m\r\n\x07", "\u202egpj", " "]
)
def test_odd_names_fit_and_are_harmless(name):
    parts = [span(0, 5 + 30 * i, INSTALL, node=f"{name}{i}", job=name + "j") for i in range(6)]
    result = report(*parts, *(began(200, node=f"{name}{i}", job=name + "j") for i in range(6)))
    text = shown(result, 80)
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    assert not set(text) & {chr(i) for i in range(32) if i != 10} | set(text) & {"\x7f", "\u202e"}
    bars = [line for line in text.splitlines() if line.count("▓") > 0]
    starts = {cell_len(line[: line.index("▓")]) for line in bars[:6]}
    assert starts == {19}


def test_a_duration_that_no_log_has_is_unobserved():
    (line,) = [line for line in shown(report(span(5, 5, "image_start"))).splitlines() if "node-level" in line]
    assert line.split() == ["node-level", "unobserved"]


def test_of_a_pod_the_name_of_its_machine_is_shown():
    """As `NODE_NAME/POD_UID`, of which the end would fit."""
    names = [f"gpu-{number}/0b5c7a0e-6f6b-4b0c-9a53-3f6d1c3e00{number}" for number in (17, 18)]
    text = shown(report(*(span(0, 10 + len(name), "environment_setup", node=name) for name in names)))
    assert all(f"{name[:11]} " in text for name in names)


def test_the_node_that_all_others_wait_for_is_shown_first():
    result = fleet(
        num_nodes=64, killed_in={50: INSTALL}, names=tuple(f"gpu-{at:02d}.rack.example.com" for at in range(64))
    )
    rows = [line for line in shown(result).splitlines() if line.startswith("gpu-")]
    assert len(rows) == 8
    assert rows[0].startswith("gpu-50 ")
    assert outliers(result)[0].node == "gpu-50.rack.example.com"


def test_a_long_name_of_a_job_can_be_copied():
    job = "-".join(["a-job-as-schedulers-name-them"] * 5)
    text = shown(report(span(0, 5, INSTALL, job=job), began(6, job=job)), 80)
    assert job in re.sub(r"\s+", "", text)


def test_markup_of_a_log_is_no_markup():
    text = shown(report(span(0, 5, INSTALL, node="[red]a[/red]"), began(6, node="[red]a[/red]")))
    assert "[red]a[/red]" in text


def test_what_was_not_observed_is_not_shown_as_zero():
    result = report(span(0, 5, INSTALL, node="a"), span(0, 6, INSTALL, node="b"))
    text = shown(result, 120)
    assert "job-level" in text
    assert "training did not begin" in text
    assert "bound to last event seen" in text
    assert "unobserved: GPUs per node unknown" in text
    assert re.search(r"^seen +2 nodes *$", text, re.M)
    assert "clock error: unknown" in text


def test_no_colour_in_a_file_and_colour_when_forced(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" not in shown(fleet())
    assert "\x1b[" in shown(fleet(), force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = shown(fleet(), force_terminal=True)
    assert "\x1b[3" not in plain


def test_bars_are_to_scale():
    """60 s of install out of 120 s: half of the bar."""
    result = report(span(0, 60, INSTALL), span(60, 120, "first_step"), began(120))
    (line,) = [line for line in shown(result, 121).splitlines() if line.startswith("n0")]
    assert line.count("▓") == pytest.approx(50, abs=1)
    assert line.count("◆") == pytest.approx(50, abs=1)


def test_many_nodes_are_summarized_by_quantiles_and_stragglers():
    text = shown(fleet(num_nodes=100, work_of={(42, INSTALL): 99.0}))
    assert "p50 of 100" in text
    assert "node-0042" in text
    assert "node-0007" not in text


def test_a_comparison_keeps_its_width_and_numbers():
    from bootseer.report.analysis.diff import compare

    slow = fleet(num_nodes=12, work_of={(n, INSTALL): 1234.5 + n for n in range(12)})
    difference = compare([fleet(num_nodes=12)], [slow])
    for width in (60, 80, 200):
        file = io.StringIO()
        terminal.render_difference(difference, Console(file=file, width=width, highlight=False, markup=False))
        text = file.getvalue()
        assert max(cell_len(line) for line in text.splitlines()) <= width
        assert "1240.00" in text
        assert not re.search(r"[\d.%]…", text)
        assert "slower" in text
