"""Write FOLDER/index.html: startups side by side, from the JSON reports that demo.sh made. compare.py FOLDER NAME..."""

import html
import json
import sys
from pathlib import Path
from typing import Any

EXPLAINED = {
    "full-pull": "What a container runtime does: every layer is downloaded and unpacked before the container starts.",
    "lazy": "The container starts on an image whose blocks are still in the registry. Each is fetched when it is first "
    "read, so the program waits for the network again and again. BootSeer records which blocks those are.",
    "recorded": "The same on another new node, which knows that record: the blocks come in the order in which they "
    "were needed, several requests at a time and ahead of the program. The rest follows in the background.",
}
COLORS = {"image_loading": "#c2410c", "model_initialization": "#1d4ed8", "first_step": "#15803d"}

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Three starts of one job</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c1917 }}
h2 {{ margin: 2rem 0 0 }}
.bar {{ display: flex; height: 1.6rem; margin: .5rem 0 }}
.bar span {{ color: #fff; font-size: .8rem; padding: .1rem .3rem; overflow: hidden; white-space: nowrap }}
.bar span {{ box-sizing: border-box }}
.key span {{ color: #fff; padding: .1rem .4rem; margin-right: .5rem; font-size: .8rem }}
</style>
<h1>Three starts of one job</h1>
<p>Each on a node that has never seen the container image, from submission to the end of the first training step.
Bars have one scale.</p>
<p class="key">{key}</p>
{starts}
</html>
"""


def stages(report: dict[str, Any]) -> dict[str, float]:
    """Seconds of each stage, those inside of another left out."""
    return {row["stage"]: row["median_s"] for row in report["stages"] if row["depth"] == 0 and row["median_s"]}


def bar(seconds: dict[str, float], scale_s: float) -> str:
    """A row of boxes."""
    boxes = [
        f'<span style="background: {COLORS.get(stage, "#78716c")}; width: {100 * value / scale_s:.2f}%" '
        f'title="{html.escape(stage)}: {value:.2f} s">{value:.1f} s</span>'
        for stage, value in seconds.items()
    ]
    return f'<div class="bar">{"".join(boxes)}</div>'


def main(folder: Path, names: list[str]) -> int:
    reports = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    total_s = {name: report["overhead"]["startup_s"] for name, report in reports.items()}
    scale_s = max(total_s.values())
    first = total_s[names[0]]
    parts = []
    for name, report in reports.items():
        faster = "" if name == names[0] else f", {first / total_s[name]:.1f} times as fast as {names[0]}"
        parts.append(
            f'<h2><a href="{name}.html">{name}</a>: {total_s[name]:.1f} s{faster}</h2>\n'
            f"<p>{EXPLAINED[name]}</p>\n{bar(stages(report), scale_s)}"
        )
    key = "".join(f'<span style="background: {color}">{stage}</span>' for stage, color in COLORS.items())
    (folder / "index.html").write_text(PAGE.format(key=key, starts="\n".join(parts)))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
