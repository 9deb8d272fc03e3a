"""The workload key: which starts of an image read the same blocks, so that one's record serves the others.

A hot set belongs to an image and a workload. Two starts have the same workload when they run the same program in the
same way, whatever the values of its options. The rule, on the words of the command:

- The program counts by its base name without version digits (`/usr/bin/python3.11` is `python`).
- Plain words directly behind a program, script or module count too (`accelerate launch`, `mytool train`): at most two,
  of letters, `-` and `_` only.
- `-m MODULE` counts, and every word that is the name of a script (`train.py`), with the folder above it and digits
  in that folder as `#` (`job-123/train.py` is `job-#/train.py`).
- `-c TEXT` counts: of a shell's text the commands in it, by the same rule; any other text as it stands.
- Nothing else does: options, their values, paths of data and outputs, `NAME=value` words.

The setup key (what was installed before the command) and the role (torchelastic's ROLE_NAME) count as they are. The
image's digest is the other half of a hot set's name.

Decides and touches nothing.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise

_VERSION = "bootseer.workload/1"
_PUBLISHERS = 4
_SCRIPT = re.compile(r"[^=]+\.(?:py|pyz|sh|bash|pl|rb|js|lua|jl|R|jar)")
_VERB = re.compile(r"[A-Za-z][A-Za-z_-]*")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_MODULE = re.compile(r"[A-Za-z_][\w.]*")
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "busybox"})
_MAX_VERBS = 2
_MAX_DEPTH = 3
_PUNCTUATION = ";|&()<>"


def workload_key(command: Sequence[str], *, setup: str = "", role: str = "") -> str:
    """The workload of this command: a readable name and 12 hex digits, safe in object names.

    `setup` is a digest of what was installed before the command, `role` the kind of process within the job. Both may
    be empty.
    """
    parts = list(_parts(command, 0))
    text = "\0".join([_VERSION, setup, role, *parts])
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return f"{_label(parts)}-{digest}"


def _parts(words: Sequence[str], depth: int) -> Iterator[str]:
    words = [*words]
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words.pop(0)
    if not words:
        return
    program = _program(words[0])
    yield f"program {program}"
    verbs = 0  # how many more plain words may follow; options end it
    if program not in _SHELLS:
        verbs = _MAX_VERBS
    for before, word in pairwise(words):
        if before == "-m" and _MODULE.fullmatch(word):
            yield f"module {word}"
            verbs = _MAX_VERBS
        elif before == "-c":
            yield from _text(program, word, depth)
            verbs = 0
        elif not word.startswith("-") and _SCRIPT.fullmatch(word):
            yield f"script {_script(word)}"
            verbs = _MAX_VERBS
        elif verbs and _VERB.fullmatch(word):
            yield f"verb {word}"
            verbs -= 1
        else:
            verbs = 0


def _program(word: str) -> str:
    name = word.rstrip("/").rpartition("/")[2]
    return name if _SCRIPT.fullmatch(name) else name.rstrip("0123456789.") or name


def _script(word: str) -> str:
    *folders, name = [part for part in word.split("/") if part not in ("", ".")]
    return "/".join([*(re.sub(r"\d+", "#", folder) for folder in folders[-1:]), name])


def _text(program: str, text: str, depth: int) -> Iterator[str]:
    if program not in _SHELLS or depth >= _MAX_DEPTH:
        yield f"text {text}"
        return
    try:
        lexer = shlex.shlex(text.replace("\n", " ; "), posix=True, punctuation_chars=_PUNCTUATION)
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:  # an unclosed quote: the shell will report it
        yield f"text {text}"
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if word and all(letter in _PUNCTUATION for letter in word):
            yield from _parts(command, depth + 1)
            command = []
        else:
            command.append(word)


def _label(parts: Sequence[str]) -> str:
    """The readable part: the last script or module, else the first program."""
    kinds = [part.partition(" ")[::2] for part in parts]
    scripts = [name for kind, name in kinds if kind in ("script", "module")]
    programs = [name for kind, name in kinds if kind == "program"]
    # Of a shell's text the first program that is not a shell.
    names = scripts[-1:] or [name for name in programs if name not in _SHELLS] or programs
    name = names[0].rpartition("/")[2] if names else ""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:40].strip(".-") or "command"


def is_publisher(node: str, num_nodes: int | None) -> bool:
    """Whether this node of a job publishes its record: about four nodes do, to limit the load on the store."""
    return zlib.crc32(node.encode()) % max((num_nodes or 1) // _PUBLISHERS, 1) == 0
