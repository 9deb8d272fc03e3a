"""Startups side by side, from the JSON reports that starts.sh makes in FOLDER.

compare.py FOLDER NAME          one line: how long this one took, and what for
compare.py FOLDER NAME NAME...  bars in the terminal, and the page FOLDER/index.html
"""

import html
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXPLAINED = {
    "full-pull": "What nodes do today: containerd downloads every layer of the image and unpacks it, and only then the "
    "job starts.",
    "lazy": "The job starts on an image whose bytes are still in the registry: image_loading is nearly nothing. Each "
    "block is fetched when it is first read, so PyTorch's imports wait for the network again and again, and "
    "model_initialization grows. BootSeer writes down which blocks those were: the hot blocks.",
    "recorded": "The same on another new node, which finds that record beside the image. The hot blocks come in the "
    "order in which they were needed, ahead of the program and several requests at a time. The rest of the image "
    "follows when the job is running.",
    "hot-update": "The same node again, as after a change of the code: what the job reads is here.",
}
WITH_SETUP = {
    "full-pull": "Before that, pip installs what the job needs besides, at every start.",
    "lazy": "pip installs as before, and BootSeer keeps the files that it made beside the image: the environment's "
    "snapshot.",
    "recorded": "The environment's snapshot is mounted as one more layer: nothing is installed.",
    "hot-update": "The requirements are the same, so that the snapshot is, too.",
}
"""Where the job installs something when it starts."""
STAGES = {
    "image_loading": ("█", "#c2410c", "until the container can be started"),
    "environment_setup": ("▓", "#a16207", "what the job needs besides the image"),
    "model_initialization": ("▒", "#1d4ed8", "imports, process group, model"),
    "first_step": ("░", "#15803d", "the first training step"),
    "other": ("·", "#78716c", "the rest"),
}
WIDTH = 50

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Four starts of one job</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c1917 }}
h2 {{ margin: 2rem 0 0; font-size: 1.2rem }}
p {{ margin: .3rem 0 }}
.bar {{ display: flex; height: 1.7rem; margin: .6rem 0 }}
.bar span {{ box-sizing: border-box; color: #fff; font-size: .8rem; line-height: 1.7rem; text-indent: .3rem }}
.bar span {{ overflow: hidden; white-space: nowrap }}
.key span {{ color: #fff; padding: .1rem .4rem; margin-right: .3rem; font-size: .8rem }}
.key {{ font-size: .9rem }}
.facts {{ color: #57534e; font-size: .9rem }}
</style>
<h1>Four starts of one job</h1>
<p>The same container image and the same command, three times on a node that has never seen the image, then once more on
the last of them: from submission to the end of the first training step. All bars have one scale.</p>
<p class="key">{key}</p>
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
    """How the image came; None where BootSeer did not load it."""
    environment: dict[str, Any] | None
    """How the environment came; None where BootSeer did not bring it."""

    @property
    def fetched(self) -> str:
        """What was fetched until training began, in a sentence; empty when nobody counted."""
        if self.image is None:
            return ""
        hot, demand = self.image["hot_bytes"], self.image["demand_bytes"]
        total = (hot + demand + self.image["cold_bytes"]) / 1e6
        if total < 1:
            return "The image: what the job read was here, and next to nothing was fetched."
        ahead = f", {hot / 1e6:.0f} MB of them ahead of the program" if hot else ", each when it was read"
        return (
            f"The image: {total:.0f} MB of {self.image['stored_bytes'] / 1e6:.0f} MB were fetched until then, "
            f"in {self.image['requests']} requests{ahead}."
        )

    @property
    def installed(self) -> str:
        """What the environment took, in a sentence; empty when nobody knows."""
        if self.environment is None:
            return ""
        mode, parts = self.environment["mode"], self.parts
        if mode == "restored":
            files, size = self.environment["num_files"], self.environment["size_bytes"] / 1e6
            return (
                f"The environment's snapshot ({files:,} files, {size:.0f} MB) was found and mounted in "
                f"{self.environment['seconds']:.1f} s."
            )
        known = (("pip", "install"), ("bytecode", "compile"), ("making a layer of what they wrote", "capture"))
        told = [f"{words} {parts[part]:.1f} s" for words, part in known if part in parts]
        kept = "; a snapshot was kept while the job ran" if self.environment["published"] else ""
        return f"The environment: {', '.join(told)}{kept}."


def read(folder: Path, name: str) -> Start:
    report = json.loads((folder / f"{name}.json").read_text())
    total_s = report["overhead"]["startup_s"]
    stages = {row["stage"]: row["median_s"] or 0.0 for row in report["stages"] if row["depth"] == 0}
    known = {stage: stages.get(stage, 0.0) for stage in STAGES}
    known["other"] = max(total_s - sum(known.values()), 0.0)
    parts = {
        row["stage"].removeprefix("environment_setup."): row["median_s"] or 0.0
        for row in report["stages"]
        if row["depth"] == 1 and row["stage"].startswith("environment_setup.")
    }
    image, environment = (report[kind][0] if report[kind] else None for kind in ("images", "environments"))
    return Start(name, total_s, known, parts, image, environment)


def print_one(start: Start) -> None:
    parts = [f"{seconds:.1f} s {stage}" for stage, seconds in start.stages.items() if seconds >= 0.1]
    print(f"    {start.total_s:.1f} s from submission to the first step's end: {', '.join(parts)}.")
    for line in (start.installed, start.fetched):
        if line:
            print(f"    {line}")


def print_all(starts: list[Start]) -> None:
    first, scale_s = starts[0], max(start.total_s for start in starts)
    print("\nFrom submission to the end of the first training step:\n")
    for start in starts:
        line = "".join(STAGES[stage][0] * round(s / scale_s * WIDTH) for stage, s in start.stages.items())
        print(f"  {start.name:10} {line:{WIDTH + 2}} {start.total_s:5.1f} s{faster(start, first)}")
    print(f"\n  {'':10} {'   '.join(f'{sign} {stage}' for stage, (sign, _, _) in STAGES.items())}")


def faster(start: Start, first: Start) -> str:
    return "" if start is first else f", {first.total_s / start.total_s:.1f} times as fast"


def explained(start: Start) -> str:
    more = WITH_SETUP.get(start.name, "") if start.stages["environment_setup"] else ""
    return f"{EXPLAINED.get(start.name, '')} {more}"


def page(starts: list[Start]) -> str:
    scale_s = max(start.total_s for start in starts)
    parts = []
    for start in starts:
        boxes = [
            f'<span style="background: {STAGES[stage][1]}; width: {100 * seconds / scale_s:.2f}%" '
            f'title="{stage}: {seconds:.2f} s">{f"{seconds:.1f} s" if seconds > scale_s / 20 else ""}</span>'
            for stage, seconds in start.stages.items()
        ]
        name = html.escape(start.name)
        parts.append(
            f'<h2><a href="{name}.html">{name}</a>: {start.total_s:.1f} s{faster(start, starts[0])}</h2>\n'
            f'<div class="bar">{"".join(boxes)}</div>\n<p>{explained(start)}</p>\n'
            f'<p class="facts">{"<br>".join(filter(None, (start.installed, start.fetched)))}</p>'
        )
    key = " ".join(f'<span style="background: {color}">{name}</span>{tip}' for name, (_, color, tip) in STAGES.items())
    return PAGE.format(key=key, starts="\n".join(parts))


def main(folder: Path, names: list[str]) -> None:
    starts = [read(folder, name) for name in names]
    if len(starts) == 1:
        print_one(starts[0])
        return
    print_all(starts)
    (folder / "index.html").write_text(page(starts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
