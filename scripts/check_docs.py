"""Check the links and commands in the documentation. Called by `make docs`.

In every Markdown file, local links and their headings must exist, and so must the `make` targets and `bootseer` verbs
in code blocks and code spans.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

_SKIPPED = {".venv", ".git", ".tools", "node_modules", "build", "demo-out", ".demo-cache", ".hadoop"}
_FENCE = re.compile(r"^( *)(```+|~~~+).*?^ *\2 *$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_DEFINITION = re.compile(r"^ *\[[^\]]+\]: *<?(\S+?)>?\s*$", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#* *$", re.MULTILINE)
_TARGET = re.compile(r"^([a-z][a-z0-9_-]*):", re.MULTILINE)
# A command is at the start of a line or span, after a prompt, or after `&&`.
_COMMAND = re.compile(r"(?:^|&&)\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(make|bootseer) +([a-z][a-z0-9_-]*)", re.MULTILINE)


def main(root: Path) -> int:
    files = [path for path in sorted(root.rglob("*.md")) if _SKIPPED.isdisjoint(path.relative_to(root).parts)]
    problems = [f"{path.relative_to(root)}: {problem}" for path in files for problem in _problems(path, root)]
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    sys.stdout.write(f"docs: {len(files)} files, {len(problems)} problems\n")
    return 1 if problems else 0


def _problems(path: Path, root: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    prose = _FENCE.sub("", text)
    without_code = _SPAN.sub("", prose)
    for link in [*_LINK.findall(without_code), *_DEFINITION.findall(without_code)]:
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        target, _, heading = unquote(link).partition("#")
        file = (path.parent / target) if target else path
        if not file.exists():
            yield f"the link {link} leads nowhere"
        elif heading and file.suffix == ".md" and heading not in _headings(file):
            yield f"the link {link} names a heading that is not there"
    code = [match[0] for match in _FENCE.finditer(text)] + _SPAN.findall(prose)
    code += [line for line in prose.splitlines() if line.startswith("    ")]
    for program, word in dict.fromkeys(found for piece in code for found in _COMMAND.findall(piece)):
        if program == "make" and word not in _make_targets(root):
            yield f"the Makefile has no target {word}"
        elif program == "bootseer" and not _has_verb(word):
            yield f"bootseer has no verb {word}"


def _headings(path: Path) -> set[str]:
    """The anchors of headings in web views of repositories."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(text)}


@cache
def _make_targets(root: Path) -> frozenset[str]:
    return frozenset(_TARGET.findall((root / "Makefile").read_text(encoding="utf-8")))


@cache
def _has_verb(verb: str) -> bool:
    """Run the installed program, so that the documents are checked against its actual verbs."""
    program = Path(sys.executable).with_name("bootseer")
    return subprocess.run([program, verb, "--help"], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1]))
