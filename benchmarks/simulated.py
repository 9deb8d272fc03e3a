"""The figures of `docs/evaluation.md`: shipped scenarios, simulated and drawn as one page and a PNG of each figure.

Results of simulations are cached next to the figures, by parameters and program version, so that an interrupted run can
be continued, and several runs with different seeds can share the work. After a change of the program, give another
folder. Starts of the scenario `moe` are also written as `moe.json`. One seed takes about ten minutes of one processor.
Without a browser (chromium, google-chrome) on PATH there are no PNGs.

    python benchmarks/simulated.py docs/simulated --seeds 3
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, Final

from bootseer import __version__
from bootseer.errors import PermanentError
from bootseer.sim import figures
from bootseer.sim.figures import Document, Figure, Series, by_nodes, lines, origin_of
from bootseer.sim.job_start import ARMS, Outcome, simulate
from bootseer.sim.month import Times, policies, simulate_month
from bootseer.sim.scenario import Month, Scenario, read_scenario

_NODES: Final = (2, 4, 8, 16, 32, 64, 128)
_FOLD: Final = "fold=32"
_SEEDS: Final = 25
"""Minimum number of seeds for results that depend only on the slowest of many nodes."""
PAPER_S: Final = {
    1: ("1-10", 44.0), 4: ("10-100", 127.0), 28: ("100-500", 334.0), 88: ("500-1000", 314.0),
    177: ("1000-2000", 409.0), 306: ("2000-3000", 431.0), 625: ("> 3000", 501.0),
}  # fmt: skip
"""By number of nodes (the bucket's geometric mean): the bucket in GPUs, and the paper's median."""
_BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
_IMAGE: Final = ("image_loading", "model_initialization.imports")
_ENVIRONMENT: Final = ("environment_setup", "model_initialization.imports")
_CHECKPOINT: Final = "model_initialization.checkpoint"
_CONNECT: Final = "connection_setup"


class Runs:
    """Runs the simulations for figures, each once."""

    def __init__(self, folder: Path, seeds: range, progress: Callable[[str], None]) -> None:
        """`progress` is called with the name of each simulation before it runs."""
        self.parameters: dict[str, str] = {}
        """The parameters of each scenario so far, by its name and digest."""
        self.made: dict[str, dict[str, dict[str, Any]]] = {}
        """All starts so far, by the digest of their parameters and by name."""
        self._kept, self._seeds, self._progress = folder / "simulated", seeds, progress

    def starts(
        self, name: str, arms: Sequence[str], nodes: Sequence[int] = (), changes: Sequence[str] = (), least: int = 1
    ) -> Document:
        """The document of `bootseer simulate --json`, with at least `least` seeds."""
        seeds = range(self._seeds[0], self._seeds[0] + max(len(self._seeds), least))
        scenario = self._scenario(name, [*changes, _FOLD])
        starts = {
            (name := f"{scenario.digest}-{number}-{arm.replace(' ', '-')}-{seed}"):
            self._once(name, partial(simulate, scenario, number, arm, seed))
            for number in nodes or scenario.nodes for arm in arms for seed in seeds
        }  # fmt: skip
        self.made.setdefault(scenario.digest, {}).update(starts)
        return {"scenario": scenario.name, "parameters": scenario.digest, "starts": [*starts.values()]}

    def months(self, name: str) -> Document:
        """The results of all policies of a month."""
        scenario, times = self._scenario(name, []), Times()
        month = scenario.month or Month()
        found = [
            self._once(f"{scenario.digest}-{policy.cache_gb:g}-{policy.max_age_days:g}-{seed}",
                       partial(simulate_month, scenario, month, policy, times, seed))
            for policy in policies(month) for seed in self._seeds
        ]  # fmt: skip
        return {"scenario": scenario.name, "parameters": scenario.digest, "starts": found}

    def _scenario(self, name: str, changes: Sequence[str]) -> Scenario:
        scenario = read_scenario(name, changes)
        self.parameters[f"{scenario.name} ({scenario.digest})"] = scenario.text
        return scenario

    def _once(self, name: str, make: Callable[[], Outcome | dict[str, Any]]) -> dict[str, Any]:
        path = self._kept / f"{__version__}-{name}.json"
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            self._progress(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            made = make()
            found = made.as_json() if isinstance(made, Outcome) else made
            path.write_text(json.dumps(found))
        return found


def write(folder: Path, seeds: range, progress: Callable[[str], None]) -> list[Path]:
    """Write all figures as `index.html`, and each as PNG if there is a browser; and `moe.json`. Raises
    `PermanentError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        runs = Runs(folder, seeds, progress)
        drawn = list(_figures(runs))
        written = [folder / "index.html", folder / "moe.json"]
        written[0].write_text(figures.page("Simulated starts: evaluation", drawn, runs.parameters))
        digest = read_scenario("moe", [_FOLD]).digest
        moe = {"schema": "bootseer.simulation/1", "simulated": True, "scenario": "moe", "parameters": digest}
        written[1].write_text(json.dumps({**moe, "starts": [*runs.made[digest].values()]}) + "\n")
        browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
        if browser is not None:
            written += [_photographed(browser, figure, folder) for figure in drawn]
    except OSError as error:
        raise PermanentError(f"{folder}: {error.strerror or error}") from error
    return written


def _photographed(browser: str, figure: Figure, folder: Path) -> Path:
    """A PNG of one figure with its caption, in light colours."""
    svg_height = float(figure.svg.split('viewBox="0 0 ')[1].split('"')[0].split()[1])
    height = ceil(105 + svg_height + 19 * (len(figure.note + figure.origin) // 115))
    with tempfile.TemporaryDirectory(prefix="bootseer-figure-") as temporary:
        page, png = Path(temporary) / "page.html", Path(temporary) / "page.png"
        page.write_text(figures.page("", [figure], {}).replace("<h1></h1>", ""))
        words = (browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                 f"--user-data-dir={temporary}/profile", f"--window-size=920,{height}", f"--screenshot={png}",
                 page.as_uri())  # fmt: skip
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False)
        except subprocess.TimeoutExpired as error:
            raise PermanentError(f"{browser} did not draw {figure.name} within 120 s") from error
        if not png.exists():
            reasons = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
            raise PermanentError(f"{browser} did not draw {figure.name}: {reasons[-1]}")
        target = folder / f"{figure.name}.png"
        target.write_bytes(png.read_bytes())
    return target


def _figures(runs: Runs) -> Iterator[Figure]:
    yield _buckets(runs)
    ablation = runs.starts("moe", [*ARMS], _NODES)
    rows = {
        f"{8 * nodes:,} GPUs, {arm}": _chosen(ablation, arm, nodes) for nodes in _NODES for arm in ("lazy", "bootseer")
    }
    yield Figure("stages", "Where the time of a start goes, by number of GPUs", figures.stages(rows),
                 "The median node's stages, and its wait for the last node. Lazy: the paper's baseline.",
                 origin_of(ablation))  # fmt: skip
    yield from _parts(runs)
    yield Figure("ablation", "Every technique, and all but one, on 16 to 1,024 GPUs",
                 lines(by_nodes(ablation["starts"], "startup_s"), y="s", x="nodes of 8 GPUs"),
                 "From the allocation until all nodes are ready and connected. Today: pulled images, installs, one "
                 "stream.", origin_of(ablation))  # fmt: skip
    yield _stragglers(runs)
    yield _connections(runs)
    yield from _months(runs)


def _buckets(runs: Runs) -> Figure:
    by_ratio = runs.starts("buckets", ["today"], least=_SEEDS)
    changes = ["environment.install-s=66", "noise.sigma=0.66"]
    by_seconds = runs.starts("buckets", ["today"], (), changes, least=_SEEDS)
    series: dict[str, Sequence[tuple[float, Sequence[float]]]] = {
              "paper": [(nodes, [seconds]) for nodes, (_, seconds) in PAPER_S.items()],
              "relative fit": by_nodes(by_ratio["starts"], "startup_s")["today"],
              "fit in seconds": by_nodes(by_seconds["starts"], "startup_s")["today"]}  # fmt: skip
    return Figure(
        "buckets", "Start-up overhead by number of GPUs, against the paper's medians",
        lines(series, y="s", x="GPUs", text=[label for label, _ in PAPER_S.values()]),
        "The slowest of log-normal installs, fitted to the first four medians of the paper; the last three are "
        "predicted.", origin_of(by_ratio, by_seconds),
    )  # fmt: skip


def _parts(runs: Runs) -> Iterator[Figure]:
    """Image, environment and checkpoint separately."""
    image = runs.starts("moe", ["today", "lazy", "only image", "image and peers"], _NODES)
    names = {"today": "pull", "lazy": "lazy", "only image": "recorded", "image and peers": "and peers"}
    yield Figure("image", "Image loading and imports", _lines(image, names, lambda start: _stages(start, _IMAGE)),
                 "The slowest node's image loading and imports, which wait for missing blocks. Recorded blocks are "
                 "prefetched while the environment is installed.",
                 origin_of(image))  # fmt: skip
    yield Figure("registry", "Sent by the registry", _lines(image, names, lambda start: start["registry_gb"], "GB"),
                 "Image blocks or whole images, to all nodes together.", origin_of(image))  # fmt: skip
    arms = {"today": "install", "only environment": "snapshot", "environment and peers": "and peers"}
    environment = runs.starts("moe", [*arms], _NODES)
    yield Figure("environment", "Environment and imports, with pulled images",
                 _lines(environment, arms, lambda start: _stages(start, _ENVIRONMENT)),
                 "The slowest node's installs or mounts, and imports, which wait for blocks of the snapshot.",
                 origin_of(environment))  # fmt: skip
    yield Figure("environment-spread", "Environment and imports: the slowest node to the median one",
                 _lines(environment, arms, lambda start: _stages(start, _ENVIRONMENT)
                        / _stages(start, _ENVIRONMENT, "median_s"), "Max/Median"),
                 "Installs differ by a log-normal factor (sigma 0.08) and a few slow nodes.",
                 origin_of(environment))  # fmt: skip
    series: dict[str, Sequence[tuple[float, Sequence[float]]]] = {}
    documents = []
    for slow in ("", ", one slow"):
        fault = ["fault=[{datanode=0, upload-factor=0.05}]"] if slow else []
        for label, arm, more in (("one stream", "today", []), ("striped", "only checkpoint", []),
                                ("parity", "only checkpoint", ["checkpoint.parity=true"])):  # fmt: skip
            documents.append(found := runs.starts("moe", [arm], (8, 32, 128), [*fault, *more]))
            series[label + slow] = by_nodes(found["starts"], "stages", _CHECKPOINT, "max_s")[arm]
    yield Figure("checkpoint", "Reading the checkpoint (413 GB)", lines(series, y="s", x="nodes of 8 GPUs"),
                 "The slowest node. One slow: one of 64 DataNodes sends at a twentieth of its rate.",
                 origin_of(*documents))  # fmt: skip


def _stragglers(runs: Runs) -> Figure:
    series: dict[str, list[tuple[float, list[float]]]] = {}
    documents = []
    for slow in (0, 1, 14):
        faults = ", ".join(f"{{node={100 * at}, work-factor=2}}" for at in range(slow))
        documents.append(found := runs.starts("install-1440", ["today", "bootseer"], (),
                                              ["environment.retry-share=0", f"fault=[{faults}]"]))  # fmt: skip
        for start in found["starts"]:
            points = series.setdefault(start["arm"], [])
            if not points or points[-1][0] != slow:
                points.append((slow, []))
            points[-1][1].append(start["startup_s"])
    return Figure("stragglers", "Slow nodes of 1,440", lines(series, y="s", x="nodes that take twice as long"),
                  "All nodes wait for the last one. The more slow nodes, the more likely one of them is also slow by "
                  "chance.",
                  origin_of(*documents))  # fmt: skip


def _connections(runs: Runs) -> Figure:
    nodes = (16, 64, 125, 250, 500, 1000, 1440)
    found = {
        name: runs.starts("install-1440", ["bootseer"], nodes,
                          [f"rest.connect-s={seconds}", "rest.connect-s-per-1000-ranks=3.8"])
        for name, seconds in (("DNS is silent", 10.2), ("names", 0.1))
    }  # fmt: skip
    series = {name: by_nodes(one["starts"], "stages", _CONNECT, "max_s")["bootseer"] for name, one in found.items()}
    return Figure("connections", "Setting up connections, with and without the nodes' names",
                  lines(series, y="s", x="GPUs", text=[f"{8 * number:,}" for number in nodes]),
                  "A line through measurements with 100 and 1,000 TCPStore clients on one machine, extrapolated.",
                  origin_of(*found.values()))  # fmt: skip


def _months(runs: Runs) -> Iterator[Figure]:
    month, restarts = runs.months("month"), runs.months("restarts-26")
    rows: dict[str, dict[str, float]] = {}
    for document, name in ((month, "30 days, 512 GPUs"), (restarts, "26 starts, 5,000 GPUs")):
        for arm, label in (("today", "without BootSeer"), ("bootseer", "BootSeer")):
            hours = median(one["gpu_hours"][arm] for one in document["starts"])
            rows[f"{name}, {label}"] = {"GPU-hours of starts": hours}
    yield Figure("gpu-hours", "GPU-hours of starts", figures.bars(rows, "h"),
                 "Medians over all policies and seeds.",
                 origin_of(month, restarts))  # fmt: skip
    for path, title, y in (("hit_rate", "Hit rate: share of needed blocks that are already on the nodes", "share"),
                           ("cache_gb_per_node", "Cache of a node", "GB")):  # fmt: skip
        yield Figure(path.split("_gb")[0].replace("_", "-"), title,
                     lines(_days(month, "cache_gb", path, "GB"), y=y, x="day", log=False),
                     "By the size limit of a node's cache. Snapshots of any age.", origin_of(month))  # fmt: skip
    yield Figure("store", "Snapshots in the store",
                 lines(_days(month, "snapshot_days", "store_gb", "days"), y="GB", x="day", log=False),
                 "By the age at which snapshots are pruned; 0: never.", origin_of(month))  # fmt: skip


def _days(document: Document, by: str, path: str, unit: str) -> Series:
    """A value by day, for each value of one policy parameter, and the last value of the other."""
    other = "snapshot_days" if by == "cache_gb" else "cache_gb"
    last = document["starts"][-1][other]
    series: dict[str, dict[float, list[float]]] = {}
    for one in document["starts"]:
        if one[other] == last:
            points = series.setdefault(f"{one[by]:g} {unit}", {})
            for day in one["days"]:
                points.setdefault(day["day"], []).append(day[path])
    return {name: sorted(points.items()) for name, points in series.items()}


def _chosen(document: Document, arm: str, nodes: int) -> list[Mapping[str, Any]]:
    return [start for start in document["starts"] if (start["arm"], start["nodes"]) == (arm, nodes)]


def _stages(start: Mapping[str, Any], stages: Sequence[str], which: str = "max_s") -> float:
    return sum(float(start["stages"][stage][which]) for stage in stages)


def _lines(
    document: Document, names: Mapping[str, str], value: Callable[[Mapping[str, Any]], float], y: str = "s"
) -> str:
    starts = [{"arm": names[one["arm"]], "nodes": one["nodes"], "value": value(one)} for one in document["starts"]]
    return lines(by_nodes(starts, "value"), y=y, x="nodes of 8 GPUs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the figures of docs/evaluation.md.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    for drawn in write(given.folder, range(given.seeds), lambda name: print(f"simulating {name}", file=sys.stderr)):
        print(drawn)
