"""What the words of a script mean as paths: known variables are put in, relative ones are tried in each folder that the
script may be in, patterns are matched. Decides and touches nothing: `Look` does. Called by `script`.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from bootseer.env.keys import shell
from bootseer.env.keys.requirements import Files

_SYSTEM = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run", "/sbin", "/sys",
    "/tmp", "/usr", "/var",  # noqa: S108 - nothing is written there
)  # fmt: skip
"""Folders whose content is the base's, or nobody's: naming one does not make it an input. A file there does count,
unless a package brought it."""
_PACKAGED = (
    "/dev",
    "/proc",
    "/sys",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/usr/bin",
    "/usr/lib",
    "/usr/lib64",
    "/usr/sbin",
)
_OWN_FOLDER = re.compile(r"\$\{(0|BASH_SOURCE(\[0\])?)%/\*\}")
_MAX_WORD = 4096


class Look(Files, Protocol):
    """`Files` that can also list a folder."""

    def names(self, path: str) -> Sequence[str]:
        """The names in a folder, sorted; nothing when it cannot be read."""


class Paths:
    """The paths of one script."""

    def __init__(self, cwd: str, folder: str, look: Look) -> None:
        """`cwd` is where the script runs, `folder` where it lies."""
        self.bases = list(dict.fromkeys((cwd, folder)))
        """Folders that relative words may start from, the likeliest first."""
        self.values: Mapping[str, str] = {}
        """Variables, as far as they are known."""
        self._folder = folder
        self._look = look

    def expand(self, word: str) -> str:
        """The word with what is known put in."""
        word = _OWN_FOLDER.sub(lambda _: self._folder, shell.expanded(word, self.values))
        if word == "~" or word.startswith("~/"):
            word = self.values.get("HOME", "~") + word[1:]
        return word.removeprefix("file://")

    def is_absolute(self, word: str) -> bool:
        """Whether it does not matter where the script runs."""
        return self.expand(word).startswith("/")

    def places(self, word: str) -> list[str]:
        """Absolute paths that a word may mean. A variable at its beginning that is not known stands for some folder."""
        word = self.expand(word)
        while "$" in word.partition("/")[0] and "/" in word:
            word = word.partition("/")[2]
        if (
            not word
            or len(word) > _MAX_WORD
            or "://" in word
            or word[0] == "-"
            or any(sign in word for sign in "$\0\n")
        ):
            return []
        return list(dict.fromkeys(posixpath.normpath(posixpath.join(base, word)) for base in self.bases))

    def existing(self, word: str) -> list[str]:
        """Those of them that are there; a pattern means all that match."""
        found = []
        for path in self.places(word):
            folder, _, last = path.rpartition("/")
            if any(letter in last for letter in "*?["):
                found += [f"{folder}/{name}" for name in self._look.names(folder) if fnmatch.fnmatchcase(name, last)]
            elif self._look.kind(path):
                found.append(path)
        return found


def is_of_system(folder: str) -> bool:
    """Whether a folder is the base's, or nobody's."""
    return _below(folder, _SYSTEM)


def is_packaged(path: str) -> bool:
    """Whether a package most likely brought the file."""
    return _below(path, _PACKAGED)


def _below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
