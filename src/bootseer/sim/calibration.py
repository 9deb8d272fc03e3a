"""Fits a scenario's parameters to reports of real starts.

Only parameters that reports determine are changed: fixed times come from the times of stages, noise from their spread
between nodes, and times that grow with the number of ranks from a line through the medians. Links and sizes are kept,
because they are not in a report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import linear_regression, median, pstdev
from typing import Any, Final

import msgspec

from bootseer.errors import UsageError, os_errors_as
from bootseer.report.analysis.starts import BYPASSED, CAPTURED, INSTALLED, PLAIN
from bootseer.sim.scenario import Scenario
from bootseer.units import plural

_SLOW: Final = 1.3
"""A node above this multiple of the median is slow, not noisy."""
_MAX_BYTES: Final = 256 << 20
_CHECKPOINT: Final = "model_initialization.checkpoint"
_PLAIN: Final = (INSTALLED, CAPTURED, BYPASSED, PLAIN)
"""How a part of a start is loaded if its time is that of a start without BootSeer."""


class _Stage(msgspec.Struct):
    stage: str
    median_s: float | None = None


class _Segment(msgspec.Struct):
    stage: str
    start_s: float
    end_s: float
    kind: str
    outcome: str


class _Node(msgspec.Struct):
    segments: list[_Segment]


class _Startup(msgspec.Struct):
    num_nodes: int = 0
    num_ranks: int = 0


class Report(msgspec.Struct):
    """The parts of `bootseer report --json` that calibration uses."""

    startup: _Startup
    stages: list[_Stage]
    nodes: list[_Node] = []
    images: list[dict[str, Any]] = []
    environments: list[dict[str, Any]] = []
    checkpoints: list[dict[str, Any]] = []

    def median_s(self, *stages: str) -> float | None:
        """The median of the first of these stages that was observed; None if BootSeer did its work."""
        parts = {"image_loading": self.images, "environment_setup": self.environments, _CHECKPOINT: self.checkpoints}
        if any(part.get("mode") not in _PLAIN for stage in stages for part in parts.get(stage, ())):
            return None
        found = {stage.stage: stage.median_s for stage in self.stages}
        return next((value for stage in stages if (value := found.get(stage)) is not None), None)


def read_report(path: Path) -> Report:
    """Read a report. Raises `UsageError` if the file is not one."""
    with os_errors_as(UsageError, path), path.open("rb") as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise UsageError(f"{path}: larger than {_MAX_BYTES >> 20} MiB")
    try:
        report = msgspec.json.decode(text, type=Report)
    except (ValueError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path}: not the output of `bootseer report --json`: {error}") from error
    if report.startup.num_nodes < 1:
        raise UsageError(f"{path}: a report without nodes")
    return report


def calibrated(scenario: Scenario, reports: Sequence[Report]) -> tuple[Scenario, list[str]]:
    """The scenario fitted to the reports, and the source of each changed number. Raises `UsageError` if they do not
    determine any, or determine one that no scenario may have."""
    sources: list[str] = []
    table: dict[str, dict[str, float]] = {}

    def put(field: str, value: float, source: str) -> None:
        name, _, key = field.partition(".")
        table.setdefault(name, {})[key] = round(max(value, 0.0), 4)
        sources.append(f"{field} = {table[name][key]:g}: {source}")

    def of(name: str, *stages: str) -> None:
        if values := _medians(reports, *stages):
            put(name, median(values), f"{stages[0]}, median of {plural(len(values), 'start')}")

    of("rest.allocate-s", "allocation", "scheduler")
    of("rest.import-s", "model_initialization.imports")
    links, installs, downloads = scenario.links, [], []
    for report in reports:
        if (seconds := report.median_s("environment_setup.install", "environment_setup")) is not None:
            rate = min(links.node_gbit, links.index_gbit / report.startup.num_nodes)  # all nodes load at once
            downloads.append(scenario.environment.gb * 8 / rate)
            installs.append(seconds - downloads[-1])
    if installs:
        source = (
            f"environment_setup, median of {plural(len(installs), 'start')}, less the download"
            f" ({median(downloads):.1f} s by links.node-gbit and links.index-gbit)"
        )
        put("environment.install-s", median(installs), source)
    pulls = _medians(reports, "image_loading.pull", "image_loading")
    if pulls and median(pulls) > scenario.image.fixed_s:
        rate = scenario.image.gb * 1000 / (median(pulls) - scenario.image.fixed_s)
        put("processors.unpack-mb-s", rate, f"image_loading, median of {plural(len(pulls), 'start')}, as a full pull")
    rates = [
        _share_gb(scenario, report.startup.num_nodes) * 1000 / scenario.checkpoint.readers / seconds
        for report in reports
        if (seconds := report.median_s(_CHECKPOINT))
    ]
    if rates and scenario.checkpoint.gb:
        source = f"{_CHECKPOINT}, median of {plural(len(rates), 'start')}"
        put("checkpoint.stream-mb-s", median(rates), source)
    connects = [
        (report.startup.num_ranks or report.startup.num_nodes * scenario.gpus_per_node, seconds)
        for report in reports
        if (seconds := report.median_s("connection_setup", "model_initialization.process_group")) is not None
    ]
    if connects:
        base, slope = line(connects)
        put("rest.connect-s", base, f"connection_setup, line through {plural(len(connects), 'start')}")
        put("rest.connect-s-per-1000-ranks", slope * 1000, "the same")
    plain = [report for report in reports if report.median_s("environment_setup") is not None]
    factors = [factor for report in plain for factor in _factors(report)]
    usual = [math.log(factor) for factor in factors if factor < _SLOW]
    slow = [factor for factor in factors if factor >= _SLOW]
    if len(usual) > 2:
        put("noise.sigma", pstdev(usual), f"environment_setup of {plural(len(usual), 'node')} against their medians")
        put("noise.slow-share", len(slow) / len(factors), f"{plural(len(slow), 'node')} above {_SLOW} times the median")
        if slow:
            put("noise.slow-factor", median(slow), "their median")
    if not sources:
        raise UsageError("the reports have none of the stages of a scenario; see docs/simulation.md")
    fields = msgspec.to_builtins(scenario)
    for name, values in table.items():
        fields[name] |= values
    try:
        return msgspec.convert(fields, Scenario), sources
    except msgspec.ValidationError as error:
        raise UsageError(f"the reports are those of no cluster that can be simulated: {error}") from error


def _share_gb(scenario: Scenario, nodes: int) -> float:
    checkpoint = scenario.checkpoint
    shared = checkpoint.gb * checkpoint.replicated_share
    return shared + (checkpoint.gb - shared) / nodes


def _medians(reports: Iterable[Report], *stages: str) -> list[float]:
    return [seconds for report in reports if (seconds := report.median_s(*stages)) is not None]


def _factors(report: Report) -> list[float]:
    """Duration of the environment setup of each node, relative to the median node."""
    times = []
    for node in report.nodes:
        setup = [part for part in node.segments if part.stage.partition(".")[0] == "environment_setup"]
        if all(part.outcome not in ("failed", "truncated") for part in setup):
            times.append(sum(part.end_s - part.start_s for part in setup if part.kind != "wait"))
    times = [seconds for seconds in times if seconds > 0]
    return [seconds / median(times) for seconds in times] if len(times) > 2 else []


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Base and slope of a least-squares line; flat through the median if y does not grow, or all x are equal."""
    xs, ys = zip(*points, strict=True)
    slope, base = linear_regression(xs, ys) if len(set(xs)) > 1 else (0.0, 0.0)
    return (base, slope) if slope > 0 else (median(ys), 0.0)


def toml(scenario: Scenario, comments: Iterable[str]) -> str:
    """The scenario as a TOML file for `simulate`, with the comments at its top."""
    plain: dict[str, Any] = msgspec.to_builtins(scenario)
    plain = {key: value for key, value in plain.items() if value is not None}
    tables = {key: value for key, value in plain.items() if isinstance(value, dict)}
    faults = plain.pop("fault")
    lines = [f"# {comment}" for comment in comments]
    lines += [f"{key} = {_value(value)}" for key, value in plain.items() if key not in tables]
    for name, values in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in values.items() if value is not None)]
    for fault in faults:
        lines += ["", "[[fault]]", *(f"{key} = {_value(value)}" for key, value in fault.items() if value is not None)]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    return msgspec.json.encode(value).decode()
