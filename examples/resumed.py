"""Two resumes side by side, from the JSON reports that resume.sh makes in FOLDER: resumed.py FOLDER NAME NAME"""

import json
import sys
from pathlib import Path
from typing import Any

PARTS = {
    "model_initialization.checkpoint_mount": "mount",
    "model_initialization.checkpoint_copy": "copy",
    "model_initialization.checkpoint_read": "load",
}


def of(report: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Seconds until the first step's end, and of what has to do with the checkpoint."""
    stages = {row["stage"]: row["median_s"] or 0.0 for row in report["stages"]}
    return report["overhead"]["startup_s"], {word: stages[stage] for stage, word in PARTS.items() if stage in stages}


def main(folder: Path, names: list[str]) -> None:
    print("\nFrom submission to the end of the first training step, and what the checkpoint took of it:\n")
    totals = {}
    for name in names:
        report = json.loads((folder / f"{name}.json").read_text())
        total_s, parts = of(report)
        totals[name] = total_s, sum(parts.values())
        told = " + ".join(f"{word} {seconds:.1f} s" for word, seconds in parts.items())
        print(f"  {name:8} {total_s:5.1f} s in all; checkpoint {sum(parts.values()):.1f} s ({told})")
        for start in report["checkpoints"]:
            served = ", ".join(f"{node['bytes'] / 1e6:.0f} MB" for node in start["datanodes"])
            print(f"  {'':8} {start['place_bytes'] / 1e6:.0f} MB fetched{f', by DataNode: {served}' if served else ''}")
    (first_s, first), (last_s, last) = totals[names[0]], totals[names[-1]]
    faster = f"{first / last:.1f} times as fast" if last else "in no time"
    saved_s = first_s - last_s
    whole = f"{abs(saved_s):.1f} s {'sooner' if saved_s >= 0 else 'later'}"
    print(f"\n  The checkpoint came {faster}, and the first step ended {whole}. Reports: {folder}/*.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
