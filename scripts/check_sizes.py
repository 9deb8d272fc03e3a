"""Fail when a module has outgrown one idea: more than 500 lines. Called by `make check`."""

import sys
from pathlib import Path

LIMIT = 500
FOLDERS = ("src", "tests", "examples", "benchmarks", "scripts")
SUFFIXES = (".py", ".sh")


def main(root: Path) -> int:
    modules = sorted(path for name in FOLDERS for path in (root / name).rglob("*") if path.suffix in SUFFIXES)
    too_long = 0
    for path in modules:
        num_lines = len(path.read_bytes().splitlines())
        if num_lines > LIMIT:
            too_long += 1
            sys.stdout.write(f"{path.relative_to(root)}: {num_lines} lines, at most {LIMIT} are allowed; split it\n")
    sys.stdout.write(f"sizes: {len(modules)} modules, {too_long} too long\n")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1]))
