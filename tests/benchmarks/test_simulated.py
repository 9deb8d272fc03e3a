"""The figures of the evaluation, for a small job."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from bootseer.sim.job_start import ARMS
from bootseer.sim.scenario import Scenario, read_scenario

with pytest.MonkeyPatch.context() as patched:
    patched.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2] / "benchmarks")])
    import simulated

pytestmark = pytest.mark.slow

SMALL = ["image.gb=0.02", "environment.gb=0.02", "checkpoint.gb=0.02"]
WANTED = {
    "buckets", "stages", "image", "registry", "environment", "environment-spread", "checkpoint", "ablation",
    "stragglers", "connections", "gpu-hours", "hit-rate", "cache", "store",
}  # fmt: skip


def small(name: str, changes: Iterable[str] = ()) -> Scenario:
    more = {"month": ["month.nodes=4", "month.job-nodes=[1, 2]", "month.days=4"], "restarts-26": ["month.draws=1"]}
    return read_scenario(name, [*changes, *SMALL, *more.get(name, [])])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "read_scenario", small)
    monkeypatch.setattr(simulated, "_NODES", (1, 2))
    monkeypatch.setattr(simulated, "_SEEDS", 2)


@pytest.mark.usefixtures("quick")
def test_all_figures_say_that_and_what_is_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no browser
    done: list[str] = []
    assert simulated.write(tmp_path, range(1), done.append) == [tmp_path / "index.html", tmp_path / "moe.json"]
    starts = json.loads((tmp_path / "moe.json").read_text())["starts"]
    assert {(start["arm"], start["nodes"]) for start in starts} >= {(arm, nodes) for arm in ARMS for nodes in (1, 2)}
    page = (tmp_path / "index.html").read_text()
    figures = page.split("<figure ")[1:]
    assert {re.findall(r'id="([^"]+)"', figure)[0] for figure in figures} == WANTED
    for figure in figures:
        assert "<b>Simulated.</b>" in figure
        assert re.search("; seeds? 0", figure)
        for digest in re.findall(r"[a-z0-9-]+ \(([0-9a-f]{12})\)", figure.split("<figcaption>")[1]):
            assert f"({digest})</summary>" in page
        assert "NaN" not in figure
    num_done = len(done)
    # Existing results are reused, and the output has the same bytes.
    simulated.write(tmp_path, range(1), done.append)
    assert len(done) == num_done
    assert (tmp_path / "index.html").read_text() == page


@pytest.mark.browser
@pytest.mark.skipif(not any(map(shutil.which, simulated._BROWSERS)), reason="no chromium")
def test_a_figure_is_drawn_as_png(tmp_path: Path) -> None:
    figure = simulated.Figure("one", "One line", simulated.lines({"a": [(1, [2.0]), (2, [3.0])]}, y="s"), "", "here")
    browser = next(filter(None, map(shutil.which, simulated._BROWSERS)))
    png = simulated._photographed(browser, figure, tmp_path).read_bytes()
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20], "big") == 920
    assert len(png) > 5000  # blank ones are smaller
