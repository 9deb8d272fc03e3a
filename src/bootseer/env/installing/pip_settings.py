"""The settings that `pip install` would find: its configuration files, its variables, options in requirement files.

Read without starting pip, in the order that pip documents: global, user, environment, the file in `PIP_CONFIG_FILE`,
then the variables; the section `[install]` before `[global]`. Reading is an argument. Called by `choose`; what the
settings mean to uv is `uv_settings`.
"""

from __future__ import annotations

import configparser
import os.path
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

Read = Callable[[str], str | None]
"""The text of a file as the job sees it; None if it is not there or may not be read."""

_MAX_FILES = 1000
_SECTIONS = ("global", "install")
_NOT_OPTIONS = {"config-file", "version", "help"}
_ALIASES = {"default-timeout": "timeout", "pypi-url": "index-url", "i": "index-url", "f": "find-links", "U": "upgrade"}
_TAKES_FILE = {"-r": "requirement", "--requirement": "requirement", "-c": "constraint", "--constraint": "constraint"}
_COMMENT = re.compile(r"(^|\s+)#.*$")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")


@dataclass(frozen=True, slots=True)
class Setting:
    """One option of pip's as somebody set it."""

    name: str
    """The long option without its hyphens."""
    value: str
    where: str
    """The file or variable, for people."""


def settings(env: Mapping[str, str], prefix: str, home: str, read: Read) -> list[Setting]:
    """What is in force before any requirement file: one value for each name."""
    found: dict[str, Setting] = {}
    for section in _SECTIONS:
        for path in _files(env, prefix, home, read):
            parser = configparser.RawConfigParser()
            try:
                parser.read_string(read(path) or "")
                items = parser.items(section) if parser.has_section(section) else []
            except configparser.Error:
                # pip stops at a file that it cannot read; so does whoever asks us, by a name that nobody knows.
                return [Setting("unreadable", "", path)]
            found |= {name: Setting(name, value, path) for key, value in items if (name := _plain(key)) and value}
    for variable, value in env.items():
        name = _plain(variable[4:])
        if variable.startswith("PIP_") and name not in _NOT_OPTIONS and value:
            found[name] = Setting(name, value, variable)
    return list(found.values())


def _files(env: Mapping[str, str], prefix: str, home: str, read: Read) -> list[str]:
    """pip's configuration files, the weakest first."""
    named = env.get("PIP_CONFIG_FILE", "")
    if named == os.devnull:
        return []
    shared = [f"{folder}/pip/pip.conf" for folder in (env.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":") if folder]
    files = [*shared, "/etc/pip.conf"]
    if not named or read(named) is None:
        files += [f"{home}/.pip/pip.conf", f"{env.get('XDG_CONFIG_HOME') or home + '/.config'}/pip/pip.conf"]
    return [*files, f"{prefix}/pip.conf", *([named] if named else [])]


def _plain(name: str) -> str:
    name = name.lower().replace("_", "-").removeprefix("--")
    return _ALIASES.get(name, name)


@dataclass(slots=True)
class Requirements:
    """What requirement files ask for besides names and versions, closed over the files that they include."""

    options: list[Setting] = field(default_factory=list)
    """In the order of the lines; names of files are absolute."""
    local: list[str] = field(default_factory=list)
    """Requirements that are folders here, or come from version control: their content may change under one name."""
    editable_remote: bool = False
    """One is to be checked out from version control and installed as an editable."""
    hashes: bool = False
    """One has a digest: pip then demands one of each."""
    own_options: list[Setting] = field(default_factory=list)
    """Options of single requirements that are no digests."""
    unread: list[str] = field(default_factory=list)
    """Files that cannot be read here: missing ones, and addresses."""


def requirement_files(paths: Iterable[str], cwd: str, env: Mapping[str, str], read: Read) -> Requirements:
    """Read the requirement files and all that they include."""
    found = Requirements()
    waiting = [(os.path.join(cwd, path), "requirement") for path in paths]  # noqa: PTH118 - an absolute path stays
    seen: set[str] = set()
    while waiting and len(seen) < _MAX_FILES:
        path, kind = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        text = None if "://" in path else read(path)
        if text is None:
            found.unread.append(path)
            continue
        for line in _lines(text):
            waiting += _take(_expanded(line, env), path, kind, cwd, found)
    return found


def _lines(text: str) -> Iterable[str]:
    """Logical lines without comments."""
    joined = re.sub(r"\\\r?\n", "", text.removeprefix("\ufeff"))
    for line in joined.splitlines():
        bare = _COMMENT.sub("", line).strip()
        if bare:
            yield bare


def _expanded(line: str, env: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: env.get(found[1]) or found[0], line)


def _take(line: str, path: str, kind: str, cwd: str, found: Requirements) -> list[tuple[str, str]]:
    """Enter what one line says; returns the files that it includes."""
    folder = os.path.dirname(path)  # noqa: PTH120 - names are text here
    if not line.startswith("-"):
        if kind == "requirement":
            _take_requirement(line, path, cwd, found)
        return []
    try:
        words = shlex.split(line)
    except ValueError:
        found.options.append(Setting("unreadable", line, path))
        return []
    included = []
    while words:
        word, equals, value = words.pop(0).partition("=")
        if not word.startswith("--") and len(word) > 2:
            word, value, equals = word[:2], word[2:] + equals + value, "="
        if word in ("--no-index", "--pre", "--prefer-binary", "--require-hashes"):
            found.options.append(Setting(word[2:], "true", path))
            continue
        if not equals:
            value = words.pop(0) if words else ""
        if word in _TAKES_FILE:
            place = value if "://" in value else os.path.normpath(os.path.join(folder, value))  # noqa: PTH118
            included.append((place, _TAKES_FILE[word]))
        elif word in ("-e", "--editable"):
            found.editable_remote |= "://" in value and not value.startswith("file:")
            found.local.append(value)
        else:
            found.options.append(Setting(_plain(word.lstrip("-")), value, path))
    return included


def _take_requirement(line: str, path: str, cwd: str, found: Requirements) -> None:
    bare, *options = re.split(r"\s+(?=--\w)", line)
    for option in options:
        name, _, value = option[2:].replace(" ", "=", 1).partition("=")
        if name == "hash":
            found.hashes = True
        else:
            found.own_options.append(Setting(name, value, path))
    target = bare.partition(" @ ")[2] or bare
    if re.match(r"(git|hg|svn|bzr)\+|file:|[./]", target) and not re.search(r"\.(whl|zip|tar\.\w+|tgz)\b", target):
        found.local.append(os.path.join(cwd, target) if target.startswith(".") else target)  # noqa: PTH118
