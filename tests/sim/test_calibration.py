"""Calibration: the parameters of simulated starts are recovered from their reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from subprocess import CompletedProcess
from typing import Any

import msgspec
import pytest

from bootseer.sim.calibration import Report, calibrated
from bootseer.sim.scenario import read_scenario

pytestmark = pytest.mark.slow

Run = Callable[..., CompletedProcess[str]]
FEW = [word for small in ("image.gb=0.4", "checkpoint.gb=20", "environment.gb=0.1") for word in ("--what-if", small)]


def report_of(*setups_s: float) -> dict[str, Any]:
    """A report of nodes whose environment setups take these times."""
    segments = [{"stage": "environment_setup.install", "start_s": 1.0, "end_s": 1.0 + seconds, "kind": "work",
                 "outcome": "ok"} for seconds in setups_s]  # fmt: skip
    stages = [{"stage": "environment_setup", "median_s": median(setups_s)}]
    nodes = [{"segments": [one]} for one in segments]
    return {"startup": {"num_nodes": len(setups_s)}, "stages": stages, "nodes": nodes}


MADE_WITH = {
    "environment.install-s": 70.0, "rest.import-s": 22.0, "rest.connect-s": 4.0, "checkpoint.stream-mb-s": 90.0,
    "processors.unpack-mb-s": 60.0, "noise.sigma": 0.05, "rest.allocate-s": 12.0,
}  # fmt: skip


def test_a_scenario_is_found_again_in_the_reports_of_its_starts(run: Run, tmp_path: Path) -> None:
    changes = [word for field, value in MADE_WITH.items() for word in ("--what-if", f"{field}={value}")]
    made = run("simulate", "--nodes", "8,40", "--arm", "today", *FEW, *changes, "--events", str(tmp_path))
    assert made.returncode == 0, made.stderr
    words = []
    for nodes in (8, 40):
        report = tmp_path / f"{nodes}.json"
        report.write_text(run("report", "--json", str(tmp_path), "--job", f"simulated-moe-today-{nodes}").stdout)
        words += ["--calibrate", str(report)]
    fitted = run("simulate", *FEW, *words)
    assert fitted.returncode == 0, fitted.stderr
    (tmp_path / "mine.toml").write_text(fitted.stdout)
    scenario = read_scenario(str(tmp_path / "mine.toml"))
    for field, value in MADE_WITH.items():
        table, _, name = field.partition(".")
        assert getattr(getattr(scenario, table), name.replace("-", "_")) == pytest.approx(value, rel=0.15), field
    assert scenario.rest.connect_s_per_1000_ranks == pytest.approx(5.0, rel=0.05)
    assert "# environment.install-s = " in fitted.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not the output of `bootseer report --json`"),
        (json.dumps({"startup": {"num_nodes": 0}, "stages": []}), "a report without nodes"),
        (json.dumps({"startup": {"num_nodes": 2}, "stages": []}), "none of the stages"),
        (json.dumps({"startup": {"num_nodes": 2}, "stages": [{"stage": "x", "median_s": "y"}]}), "median_s"),
        (json.dumps(report_of(0.05, 0.05, 0.05, 92.0)), "slow-factor"),
    ],
)
def test_an_invalid_report_is_an_error_in_one_line(run: Run, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "report.json").write_text(text)
    ran = run("simulate", "--calibrate", str(tmp_path / "report.json"))
    assert ran.returncode == 2
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


def test_one_slow_node_of_many_is_one_of_many() -> None:
    """It counted as one of the 101 points of the report's distribution."""
    document = report_of(*[60.0 + number / 1000 for number in range(1439)], 120.0)
    scenario, sources = calibrated(read_scenario("moe"), [msgspec.convert(document, Report)])
    assert scenario.noise.slow_share == pytest.approx(1 / 1440, rel=0.1)
    assert any("1 node above" in source for source in sources)


def test_what_all_nodes_load_at_once_is_no_part_of_an_install() -> None:
    """32 nodes take 64 s to load 2.5 GB each from an index with 10 Gbit/s."""
    stages = [{"stage": "environment_setup", "median_s": 109.0}]
    document = {"startup": {"num_nodes": 32}, "stages": stages}
    scenario, _ = calibrated(read_scenario("moe"), [msgspec.convert(document, Report)])
    assert scenario.environment.install_s == pytest.approx(45.0)


@pytest.mark.parametrize("by_bootseer", [False, True])
def test_what_bootseer_has_loaded_is_no_measure_of_a_start_without_it(by_bootseer: bool) -> None:
    """Images of 22 GB that were mounted in a second gave a runtime that unpacks 1 TB/s, and installs of 0 s; restores
    of 0.2 to 0.5 s gave 40 % slow nodes."""
    medians = {"image_loading": 301.0, "environment_setup": 60.0, "model_initialization.checkpoint": 90.0}
    stages = [{"stage": "connection_setup", "median_s": 5.0}]
    stages += [{"stage": stage, "median_s": seconds} for stage, seconds in medians.items()]
    modes = (
        {"images": "hot", "environments": "restored", "checkpoints": "mounted"}
        if by_bootseer
        else {"environments": "captured", "checkpoints": "plain"}
    )
    parts = {name: [{"mode": mode}] for name, mode in modes.items()}
    document = {**report_of(0.2, 0.25, 0.3, 0.5, 0.5), "stages": stages, **parts}
    _, sources = calibrated(read_scenario("moe"), [msgspec.convert(document, Report)])
    changed = {source.partition(" ")[0] for source in sources}
    loads = {"processors.unpack-mb-s", "environment.install-s", "checkpoint.stream-mb-s", "noise.sigma"}
    assert "rest.connect-s" in changed
    assert changed & loads == (set() if by_bootseer else loads)
