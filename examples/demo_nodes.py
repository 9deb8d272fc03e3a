"""Start one image on one, two and four nodes behind one origin: pulled, lazily, and with peers.

    demo_nodes.py [FOLDER]        FOLDER, by default demo-out/ of the checkout, gets nodes.svg, nodes.png and nodes.html

Needs root: the nodes are namespaces of this machine, with links of 400 Mbit/s each, and the registry is behind one of
200 Mbit/s. The job repeats the reads of a recorded start. Takes about three minutes, and longer the first time, when
the image is built.
"""

from __future__ import annotations

import html
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).absolute().parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests")]

from compare import photograph  # noqa: E402
from nodes_arms import Techniques, bootseer, today  # noqa: E402
from nodes_claims import Row  # noqa: E402
from nodes_origin import Sizes  # noqa: E402
from nodes_rows import Arm, Lab, Rates, rows  # noqa: E402

NUMBERS = (1, 2, 4)
ORIGIN_MBIT, NODE_MBIT = 200, 400
COLOURS = {"pull": "#c2410c", "lazy": "#1d4ed8", "peers": "#15803d"}
EXPLAINED = {
    "pull": "containerd downloads all of the image on each node and unpacks it, and then the job starts.",
    "lazy": "BootSeer starts the job at once; the blocks that earlier starts needed come ahead of it, on each node "
    "from the registry.",
    "peers": "The same, and the registry sends each block to one node, from which the others get it.",
}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 900, 520, 70, 70, 430
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>One image on several nodes</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c1917 }}
svg {{ width: 100%; height: auto }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: right; padding: .2rem .6rem; border-bottom: 1px solid #e7e5e4 }}
th:first-child, td:first-child {{ text-align: left }}
</style>
<h1>One image on several nodes</h1>
{picture}
<ul>{explained}</ul>
<table><tr><th>start</th><th>nodes</th><th>slowest</th><th>median</th><th>registry sent</th><th>nodes sent</th>
<th>processors busy</th></tr>{table}</table>
<p>Each node is a set of namespaces of one machine with its own link; all share the machine's processors. Rows in which
these were busy for more than 0.9 of the time were bound by them, not by the links.</p>
</html>
"""


def arms(lab: Lab) -> list[Arm]:
    ways = {
        "pull": today,
        "lazy": partial(bootseer, techniques=Techniques()),
        "peers": partial(bootseer, techniques=Techniques(peers=True)),
    }
    return [Arm(name, number, way) for name, way in ways.items() for number in NUMBERS]


def sentence(found: dict[tuple[str, int], Row]) -> str:
    most = NUMBERS[-1]
    parts = []
    for name in COLOURS:
        row = found[name, most]
        parts.append(f"{name} {row.slowest_s:.1f} s ({row.traffic.origin / 1e6:.0f} MB from the registry)")
    return f"Until the last of {most} nodes has read what its job needs: {', '.join(parts)}."


def picture(found: dict[tuple[str, int], Row]) -> str:
    """Seconds of the slowest node over the number of nodes, as self-contained SVG."""
    top_s = max(row.slowest_s for row in found.values()) * 1.08
    x = {number: LEFT + (WIDTH - LEFT - 170) * (number - 1) / (NUMBERS[-1] - 1) for number in NUMBERS}
    step_s = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10_000) if top_s / step <= 8)
    parts = []
    for tick in range(0, int(top_s) + 1, step_s):
        y = BOTTOM - (BOTTOM - TOP) * tick / top_s
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 150}" stroke="#e7e5e4"/>')
        parts.append(f'<text x="{LEFT - 10}" y="{y + 5:.1f}" text-anchor="end" font-size="13">{tick} s</text>')
    for number in NUMBERS:
        words = "1 node" if number == 1 else f"{number} nodes"
        parts.append(f'<text x="{x[number]:.1f}" y="{BOTTOM + 24}" text-anchor="middle" font-size="13">{words}</text>')
    labels_y: list[float] = []
    for name, colour in sorted(COLOURS.items(), key=lambda pair: found[pair[0], NUMBERS[-1]].slowest_s, reverse=True):
        points = [(x[n], BOTTOM - (BOTTOM - TOP) * found[name, n].slowest_s / top_s) for n in NUMBERS]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="3"/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5" fill="{colour}"/>' for px, py in points]
        # Labels of lines that end close to each other are moved apart.
        label_y = max([points[-1][1] + 5, *(at + 20 for at in labels_y)])
        labels_y.append(label_y)
        parts.append(f'<text x="{points[-1][0] + 14:.1f}" y="{label_y:.1f}" fill="{colour}" font-weight="bold">{name} '
                     f"{found[name, NUMBERS[-1]].slowest_s:.1f} s</text>")  # fmt: skip
    words = sentence(found)
    middle = words.index(": ") + 1
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="16" fill="#1c1917"><rect width="100%" height="100%" '
        'fill="#fff"/><text x="20" y="32" font-size="19">From the first command until the slowest node has read what '
        f'its job needs</text><text x="20" y="52" font-size="13">The registry\'s link carries {ORIGIN_MBIT} Mbit/s, '
        f"each node's {NODE_MBIT}.</text>{''.join(parts)}"
        f'<text x="20" y="{BOTTOM + 58}" font-size="14">{html.escape(words[:middle])}</text>'
        f'<text x="20" y="{BOTTOM + 78}" font-size="14">{html.escape(words[middle:].strip())}</text></svg>\n'
    )


def page(found: dict[tuple[str, int], Row]) -> str:
    table = "".join(
        f"<tr><td>{name}</td><td>{number}</td><td>{row.slowest_s:.1f} s</td><td>{row.median_s:.1f} s</td>"
        f"<td>{row.traffic.origin / 1e6:.0f} MB</td><td>{sum(row.traffic.sent) / 1e6:.0f} MB</td>"
        f"<td>{row.busy:.2f}</td></tr>"
        for (name, number), row in found.items()
    )
    explained = "".join(f"<li><b>{name}</b>: {html.escape(text)}</li>" for name, text in EXPLAINED.items())
    return PAGE.format(picture=picture(found), explained=explained, table=table)


def main(folder: Path) -> None:
    *_, found = rows(Rates(ORIGIN_MBIT, NODE_MBIT), Sizes(0, cut=True), NUMBERS[-1], arms)
    once = {key: of_arm[0] for key, of_arm in found.items()}
    folder.mkdir(exist_ok=True)
    # `make demo` empties only folders with this file.
    (folder / ".bootseer-demo").touch()
    (folder / "nodes.svg").write_text(picture(once))
    photograph(folder / "nodes.svg")
    (folder / "nodes.html").write_text(page(once))
    print(f"\n{sentence(once)}\n{folder / 'nodes.html'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "demo-out")
