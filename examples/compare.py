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
    "full-pull": "What nodes do today: containerd downloads every layer of the image and unpacks it, pip installs what "
    "the job needs besides, and only then the job starts.",
    "lazy": "The job starts on an image whose bytes are still in the registry: image_loading is nearly nothing. Each "
    "block is fetched when it is first read, so PyTorch's imports wait for the network again and again, and "
    "model_initialization grows. BootSeer writes down which blocks those were: the hot blocks. pip installs as before, "
    "and BootSeer keeps the files that it made: the environment's snapshot.",
    "recorded": "The same on another new node, which finds that record beside the image. The hot blocks come in the "
    "order in which they were needed, ahead of the program and several requests at a time. The rest of the image "
    "follows when the job is running. The snapshot is mounted as one more layer: nothing is installed.",
    "hot-update": "The same node again, as after a change of the code: image and environment are here.",
}
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
    image: dict[str, Any] | None
    """How the image came; None where BootSeer did not load it."""

    @property
    def fetched(self) -> str:
        """What was fetched until training began, in a sentence; empty when nobody counted."""
        if self.image is None:
            return ""
        hot, demand = self.image["hot_bytes"], self.image["demand_bytes"]
        total = (hot + demand + self.image["cold_bytes"]) / 1e6
        ahead = f", {hot / 1e6:.0f} MB of them ahead of the program" if hot else ", each when it was read"
        return (
            f"{total:.0f} MB of {self.image['stored_bytes'] / 1e6:.0f} MB were fetched until then, "
            f"in {self.image['requests']} requests{ahead}."
        )


def read(folder: Path, name: str) -> Start:
    report = json.loads((folder / f"{name}.json").read_text())
    total_s = report["overhead"]["startup_s"]
    stages = {row["stage"]: row["median_s"] or 0.0 for row in report["stages"] if row["depth"] == 0}
    known = {stage: stages.get(stage, 0.0) for stage in STAGES}
    known["other"] = max(total_s - sum(known.values()), 0.0)
    return Start(name, total_s, known, report["images"][0] if report["images"] else None)


def print_one(start: Start) -> None:
    parts = [f"{seconds:.1f} s {stage}" for stage, seconds in start.stages.items() if seconds >= 0.1]
    print(f"    {start.total_s:.1f} s from submission to the first step's end: {', '.join(parts)}.")
    if start.fetched:
        print(f"    {start.fetched}")


def print_all(starts: list[Start]) -> None:
    first, scale_s = starts[0], max(start.total_s for start in starts)
    print("\nFrom submission to the end of the first training step:\n")
    for start in starts:
        line = "".join(STAGES[stage][0] * round(s / scale_s * WIDTH) for stage, s in start.stages.items())
        print(f"  {start.name:10} {line:{WIDTH + 2}} {start.total_s:5.1f} s{faster(start, first)}")
    print(f"\n  {'':10} {'   '.join(f'{sign} {stage}' for stage, (sign, _, _) in STAGES.items())}")


def faster(start: Start, first: Start) -> str:
    return "" if start is first else f", {first.total_s / start.total_s:.1f} times as fast"


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
            f'<div class="bar">{"".join(boxes)}</div>\n<p>{EXPLAINED.get(start.name, "")}</p>\n'
            f'<p class="facts">{start.fetched}</p>'
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
