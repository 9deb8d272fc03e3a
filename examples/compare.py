"""Compare startups, from the JSON reports that starts.sh writes into FOLDER.

compare.py FOLDER NAME          the duration of this start and of its stages
compare.py FOLDER NAME NAME...  bars and a summary in the terminal and in FOLDER/picture.svg, FOLDER/picture.png (if
                                there is a browser) and FOLDER/index.html
"""

import contextlib
import html
import json
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXPLAINED = {
    "full-pull": "Without BootSeer: containerd downloads and unpacks all layers of the image before the job starts.",
    "lazy": "The job starts before the image is on the node, so image_loading is short. Blocks are fetched when first "
    "read, so PyTorch's imports wait for the network, and model_initialization is longer. BootSeer records which "
    "blocks these were: the hot set.",
    "recorded": "The hot set is in the registry. Its blocks are prefetched by concurrent requests, in the order in "
    "which they are needed. The rest of the image follows while the job runs.",
    "again": "The blocks of the image that the job reads are in the node's cache.",
    "hot-update": "The running job is restarted in its container by bootseer restart, as after a change of the code. "
    "The warm parent continues, so nothing is imported again.",
}
WITH_SETUP = {
    "full-pull": "Then pip installs the job's other packages, at every start.",
    "lazy": "pip installs the packages once more, and BootSeer stores the files that it created as the environment's "
    "snapshot.",
    "recorded": "The environment's snapshot is mounted as another layer, and nothing is installed.",
    "again": "The snapshot is mounted again, because the requirements are the same.",
}
"""If the job installs packages when it starts."""
WITH_CHECKPOINT = {
    "full-pull": "One client copies the checkpoint from HDFS, file after file, and the job loads the copy.",
    "lazy": "The checkpoint is mounted. It is stored in HDFS as four stripes, which are read concurrently, beginning "
    "before Python starts.",
    "recorded": "The checkpoint is read from four DataNodes concurrently, as before.",
    "again": "The checkpoint is in the node's cache, too.",
}
"""If the job resumes from a checkpoint."""
STAGES = {
    "image_loading": ("█", "#c2410c", "until the container can be started"),
    "environment_setup": ("▓", "#a16207", "packages that are not in the image"),
    "checkpoint": ("▚", "#7e22ce", "copied or mounted, and loaded"),
    "model_initialization": ("▒", "#1d4ed8", "imports, process group, model"),
    "first_step": ("░", "#15803d", "the first training step"),
    "other": ("·", "#78716c", "the rest"),
}
TECHNIQUES = {
    "loading the image and the imports from it": ("image_loading", "model_initialization"),
    "the environment": ("environment_setup",),
    "the checkpoint": ("checkpoint",),
    "everything else": ("first_step", "other"),
}
"""The stages that each technique changes. Imports are longer if the image is loaded lazily."""
TITLES = {
    "full-pull": "without BootSeer",
    "lazy": "with BootSeer, first start",
    "recorded": "with BootSeer, on a new node",
    "again": "with BootSeer, on the same node again",
    "hot-update": "with BootSeer, new code in the same container",
}
MORE = {"environment_setup": WITH_SETUP, "checkpoint": WITH_CHECKPOINT}
WIDTH = 50
SIZE = 900

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Starts of one job</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c1917 }}
h2 {{ margin: 2rem 0 0; font-size: 1.2rem }}
p {{ margin: .3rem 0 }}
svg {{ width: 100%; height: auto }}
.facts {{ color: #57534e; font-size: .9rem }}
</style>
<h1>Starts of one job</h1>
<p>The same container image and command, three times on a node without the image, then again on the last of these nodes.
Time is from the submission, or from the request of the hot update, to the end of the first training step.</p>
{picture}
<p class="facts">{key}</p>
{starts}
</html>
"""


@dataclass(frozen=True)
class Start:
    """One startup."""

    name: str
    total_s: float
    stages: dict[str, float]
    """Seconds by the names of `STAGES`."""
    parts: dict[str, float]
    """Seconds by the parts of environment_setup."""
    image: dict[str, Any] | None
    """How the image was loaded; None without BootSeer."""
    environment: dict[str, Any] | None
    """How the environment was provided; None without BootSeer."""
    checkpoint: dict[str, Any] | None
    """How the checkpoint was read; None without BootSeer."""

    @property
    def fetched(self) -> str:
        """A sentence about the blocks fetched until training began; empty if unknown."""
        if self.image is None:
            return ""
        hot, demand = self.image["hot_bytes"], self.image["demand_bytes"]
        total = (hot + demand + self.image["cold_bytes"]) / 1e6
        if total < 1:
            return "The image: what the job read was on this node already."
        ahead = f", {hot / 1e6:.0f} MB of them prefetched" if hot else ", when the job read them"
        return (
            f"The image: {total:.0f} MB of {self.image['stored_bytes'] / 1e6:.0f} MB were fetched before training, "
            f"in {self.image['requests']} requests{ahead}."
        )

    @property
    def resumed(self) -> str:
        """A sentence about the checkpoint; empty if unknown."""
        if self.checkpoint is None:
            return ""
        place, cache, nodes = (self.checkpoint[key] for key in ("place_bytes", "cache_bytes", "datanodes"))
        if place < 1e6:
            return f"The checkpoint: {cache / 1e6:.0f} MB were read from this node's cache."
        return f"The checkpoint: {place / 1e6:.0f} MB were read from {len(nodes)} DataNodes."

    @property
    def installed(self) -> str:
        """A sentence about the environment; empty if unknown."""
        if self.environment is None:
            return ""
        mode, parts = self.environment["mode"], self.parts
        if mode == "restored":
            files, size = self.environment["num_files"], self.environment["size_bytes"] / 1e6
            return (
                f"The environment's snapshot ({files:,} files, {size:.0f} MB) was found and mounted in "
                f"{self.environment['seconds']:.1f} s."
            )
        known = (("pip", "install"), ("bytecode", "compile"), ("creating a layer from the written files", "capture"))
        shown = [f"{words} {parts[part]:.1f} s" for words, part in known if part in parts]
        kept = "; the snapshot was stored while the job ran" if self.environment["published"] else ""
        return f"The environment: {', '.join(shown)}{kept}."


def read(folder: Path, name: str) -> Start:
    report = json.loads((folder / f"{name}.json").read_text())
    total_s = report["overhead"]["startup_s"]
    stages = {row["stage"]: row["median_s"] or 0.0 for row in report["stages"] if row["depth"] == 0}
    known = {stage: stages.get(stage, 0.0) for stage in STAGES}
    known["checkpoint"] = sum(
        row["median_s"] or 0.0
        for row in report["stages"]
        if row["depth"] == 1 and row["stage"].startswith("model_initialization.checkpoint_")
    )
    known["model_initialization"] = max(known["model_initialization"] - known["checkpoint"], 0.0)
    known["other"] = max(total_s - sum(known.values()), 0.0)
    parts = {
        row["stage"].removeprefix("environment_setup."): row["median_s"] or 0.0
        for row in report["stages"]
        if row["depth"] == 1 and row["stage"].startswith("environment_setup.")
    }
    kinds = ("images", "environments", "checkpoints")
    return Start(name, total_s, known, parts, *(report[kind][0] if report[kind] else None for kind in kinds))


def print_one(start: Start) -> None:
    parts = [f"{seconds:.1f} s {stage}" for stage, seconds in start.stages.items() if seconds >= 0.1]
    print(f"    {start.total_s:.1f} s from submission to the end of the first step: {', '.join(parts)}.")
    for line in filter(None, (start.installed, start.fetched, start.resumed)):
        print(f"    {line}")


def used(starts: list[Start]) -> list[str]:
    """The stages that occur in any start."""
    return [stage for stage in STAGES if any(start.stages[stage] >= 0.05 for start in starts)]


def print_all(starts: list[Start]) -> None:
    first, scale_s = starts[0], max(start.total_s for start in starts)
    print("\nFrom submission to the end of the first training step:\n")
    for start in starts:
        line = "".join(STAGES[stage][0] * round(s / scale_s * WIDTH) for stage, s in start.stages.items())
        print(f"  {start.name:10} {line:{WIDTH + 2}} {start.total_s:5.1f} s{faster(start, first)}")
    print(f"\n  {'':10} {'   '.join(f'{STAGES[stage][0]} {stage}' for stage in used(starts))}\n")
    print(textwrap.fill(sentence(starts), 100, initial_indent="  ", subsequent_indent="  "))


def faster(start: Start, first: Start) -> str:
    return "" if start is first else f", {first.total_s / start.total_s:.1f} times as fast"


def sentence(starts: list[Start]) -> str:
    """The first start compared with the recorded one, by technique."""
    before, after = starts[0], next((start for start in starts if start.name == "recorded"), starts[-1])
    gains = []
    for words, stages in TECHNIQUES.items():
        gain_s = sum(before.stages[stage] - after.stages[stage] for stage in stages)
        if any(stage in used([before, after]) for stage in stages):
            gains.append(f"{words} {abs(gain_s):.1f} s {'less' if gain_s >= 0 else 'more'}")
    missing = "" if "checkpoint" in used(starts) else "; resuming from a checkpoint was not measured"
    return (
        f"Without BootSeer, the first training step ends {before.total_s:.1f} s after the submission; with BootSeer "
        f"{after.total_s:.1f} s after it on a new node{faster(after, before)}: {', '.join(gains)}{missing}."
    )


def explained(start: Start) -> str:
    more = [texts.get(start.name, "") for stage, texts in MORE.items() if start.stages[stage]]
    return " ".join([EXPLAINED.get(start.name, ""), *more])


def picture(starts: list[Start]) -> str:
    """Bars and the summary, as self-contained SVG."""
    scale_s = max(start.total_s for start in starts)
    parts, y = [], 64
    for start in starts:
        x = 0.0
        name = f'<tspan font-weight="bold">{html.escape(start.name)}</tspan>, {TITLES.get(start.name, "")}'
        parts.append(f'<text x="20" y="{y}">{name}: {start.total_s:.1f} s{faster(start, starts[0])}</text>')
        for stage, seconds in start.stages.items():
            width = 860 * seconds / scale_s
            label = f"{seconds:.1f} s" if width > 44 else ""
            parts.append(f'<g><title>{stage}: {seconds:.2f} s</title><rect x="{20 + x:.1f}" y="{y + 8}" height="26" '
                         f'width="{width:.1f}" fill="{STAGES[stage][1]}"/><text x="{26 + x:.1f}" y="{y + 26}" '
                         f'font-size="13" fill="#fff">{label}</text></g>')  # fmt: skip
            x += width
        y += 66
    x = 20
    for stage in used(starts):
        parts.append(f'<rect x="{x}" y="{y - 16}" width="12" height="12" fill="{STAGES[stage][1]}"/>'
                     f'<text x="{x + 17}" y="{y - 5}" font-size="13">{stage}</text>')  # fmt: skip
        x += 40 + 7 * len(stage)
    for line in textwrap.wrap(sentence(starts), 96):
        y += 24
        parts.append(f'<text x="20" y="{y}">{html.escape(line)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIZE}" height="{y + 20}" viewBox="0 0 {SIZE} {y + 20}" '
        'font-family="system-ui, sans-serif" font-size="16" fill="#1c1917">'
        '<rect width="100%" height="100%" fill="#fff"/>'
        '<text x="20" y="30" font-size="19">From submission to the end of the first training step</text>'
        f"{''.join(parts)}</svg>\n"
    )


def photograph(svg: Path) -> None:
    """Save the picture as PNG, if there is a browser."""
    found = re.search(r'width="(\d+)" height="(\d+)"', svg.read_text())
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is not None and found is not None:
        size = f"--window-size={found[1]},{found[2]}"
        how = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", size)
        words = (browser, *how, f"--screenshot={svg.with_suffix('.png')}", svg.absolute().as_uri())
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60, check=False)


def page(starts: list[Start]) -> str:
    parts = []
    for start in starts:
        name = html.escape(start.name)
        parts.append(
            f'<h2><a href="{name}.html">{name}</a>: {start.total_s:.1f} s{faster(start, starts[0])}</h2>\n'
            f"<p>{explained(start)}</p>\n"
            f'<p class="facts">{"<br>".join(filter(None, (start.installed, start.fetched, start.resumed)))}</p>'
        )
    key = "; ".join(f"{stage}: {STAGES[stage][2]}" for stage in used(starts))
    return PAGE.format(picture=picture(starts), key=key, starts="\n".join(parts))


def main(folder: Path, names: list[str]) -> None:
    starts = [read(folder, name) for name in names]
    if len(starts) == 1:
        print_one(starts[0])
        return
    print_all(starts)
    (folder / "picture.svg").write_text(picture(starts))
    photograph(folder / "picture.svg")
    (folder / "index.html").write_text(page(starts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
