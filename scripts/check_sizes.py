"""Fail if a module has more than 500 lines, or src more lines or modules than allowed. Called by `make check`."""

import sys
from pathlib import Path

LIMIT = 500
# Limits for src. A change that needs more raises them, with the reason in its commit message; one that removes code
# lowers them.
SRC_LINES = 95_314
SRC_FILES = 483
FOLDERS = ("src", "tests", "examples", "benchmarks", "scripts")
SUFFIXES = (".py", ".sh")


def main(root: Path) -> int:
    modules = sorted(path for name in FOLDERS for path in (root / name).rglob("*") if path.suffix in SUFFIXES)
    too_long = src_lines = 0
    for path in modules:
        num_lines = len(path.read_bytes().splitlines())
        src_lines += num_lines if path.is_relative_to(root / "src") else 0
        if num_lines > LIMIT:
            too_long += 1
            sys.stdout.write(f"{path.relative_to(root)}: {num_lines} lines, at most {LIMIT} are allowed; split it\n")
    src_files = sum(path.is_relative_to(root / "src") for path in modules)
    too_many = False
    for what, number, limit in (("lines", src_lines, SRC_LINES), ("files", src_files, SRC_FILES)):
        if number > limit:
            too_many = True
            sys.stdout.write(f"src: {number} {what}, at most {limit} are allowed; see SRC_{what.upper()}\n")
    totals = f"src: {src_lines} lines in {src_files} files"
    sys.stdout.write(f"sizes: {len(modules)} modules, {too_long} too long; {totals}\n")
    return 1 if too_long or too_many else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1]))
