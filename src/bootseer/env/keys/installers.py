"""How pip, uv and conda are configured on this node: index addresses in their order, and the settings that decide what
is installed. Never a password: of `.netrc` only its presence is told, where an index is
set; addresses lose theirs.

Called by `request_key`. Variables (`PIP_*`, `UV_*`) are in the key by themselves, see `variables`.
"""

from __future__ import annotations

import configparser
import posixpath
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bootseer.env.keys.files import NodeFiles
from bootseer.env.keys.variables import is_irrelevant, looks_secret
from bootseer.errors import BootseerError
from bootseer.store.addresses import without_credentials

_MAX_LINES = 500


class Settings(NamedTuple):
    """`lines` are in the key, in order; `files` were read for them, also those that say nothing about installers: of a
    `pyproject.toml` above the working folder uv and pip read no more than we do."""

    lines: tuple[str, ...]
    files: tuple[str, ...]
    find_links: tuple[str, ...]
    """Local folders that are searched for distributions."""
    problems: tuple[str, ...]


def settings(env: Mapping[str, str], cwd: str, prefix: str, files: NodeFiles) -> Settings:
    """What the configuration files of this user and node say. `prefix` is the job's Python's, or empty."""
    home = env.get("HOME", "")
    lines: list[str] = []
    read: list[str] = []
    problems: list[str] = []
    links: list[str] = []
    for path, reader in _places(env, cwd, home, prefix):
        if files.kind(path) != "file":
            continue
        try:
            found = list(reader(files.read(path), posixpath.basename(path)))
        except BootseerError as error:
            problems.append(str(error))
            continue
        read.append(path)
        for section, name, value in found:
            lines.append(f"{section} {name} = {without_credentials(value)}")
            if name == "find-links":
                links += [word.removeprefix("file://") for word in value.split()]
    if env.get("PIP_FIND_LINKS"):
        links += [word.removeprefix("file://") for word in env["PIP_FIND_LINKS"].split()]
    if env.get("UV_FIND_LINKS"):
        links += [word.removeprefix("file://") for word in env["UV_FIND_LINKS"].replace(",", " ").split()]
    netrc = env.get("NETRC") or f"{home}/.netrc"
    said = [line.lower() for line in lines] + [name.lower().replace("_", "-") for name, value in env.items() if value]
    indexes = any("index" in words and "no-index" not in words for words in said)
    if indexes and files.kind(netrc) == "file":  # without it, an index may answer that it has no such package
        lines.append("netrc is there")
    folders = tuple(dict.fromkeys(path for word in links if files.kind(path := posixpath.join(cwd, word)) == "folder"))
    return Settings(tuple(lines[:_MAX_LINES]), tuple(read), folders, tuple(problems))


def _places(env: Mapping[str, str], cwd: str, home: str, prefix: str) -> Iterator[tuple[str, Any]]:
    """Configuration files and who reads them; for pip a later one outranks those before."""
    own = env.get("PIP_CONFIG_FILE")
    config = env.get("XDG_CONFIG_HOME") or f"{home}/.config"
    if own != "/dev/null":
        for folder in (env.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":"):
            yield f"{folder}/pip/pip.conf", _pip
        yield "/etc/pip.conf", _pip
        if home:
            yield f"{home}/.pip/pip.conf", _pip
            yield f"{config}/pip/pip.conf", _pip
        if prefix:
            yield f"{prefix}/pip.conf", _pip
        if own:
            yield posixpath.join(cwd, own), _pip
    if env.get("UV_NO_CONFIG", "") in ("", "0", "false"):
        if env.get("UV_CONFIG_FILE"):
            yield posixpath.join(cwd, env["UV_CONFIG_FILE"]), _uv
        else:
            yield "/etc/uv/uv.toml", _uv
            yield f"{config}/uv/uv.toml", _uv
            folder = cwd
            for _ in range(40):  # uv takes the first that it meets on the way up
                yield f"{folder}/uv.toml", _uv
                yield f"{folder}/pyproject.toml", _uv
                if folder == "/":
                    break
                folder = posixpath.dirname(folder)
    for path in ("/etc/conda/.condarc", f"{home}/.condarc", env.get("CONDARC", "")):
        if path:
            yield path, _conda
    yield f"{home}/.pydistutils.cfg", _pip


def _pip(data: bytes, name: str) -> Iterator[tuple[str, str, str]]:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(data.decode("utf-8-sig", "replace"))
    except configparser.Error:
        yield "pip", "unreadable", "yes"
        return
    for section in parser.sections():
        for option, value in parser.items(section):
            key = option.replace("_", "-")
            if not is_irrelevant(f"PIP_{key.replace('-', '_').upper()}"):
                yield (
                    f"pip {section}",
                    key,
                    "a secret" if looks_secret(key.replace("-", "_")) else " ".join(value.split()),
                )


def _uv(data: bytes, name: str) -> Iterator[tuple[str, str, str]]:
    try:
        found: Any = tomllib.loads(data.decode())
    except ValueError:
        yield "uv", "unreadable", "yes"
        return
    if name == "pyproject.toml":
        tool = found.get("tool")
        found = tool.get("uv") if isinstance(tool, dict) else None
    if isinstance(found, dict):
        for key, value in _flat(found, "", 0):
            if not is_irrelevant(f"UV_{key.rpartition('.')[2].replace('-', '_').upper()}"):
                yield "uv", key, value


def _flat(value: Any, name: str, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and depth < 8:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(value, list) and depth < 8:
        for item in value:
            yield from _flat(item, name, depth + 1)
    elif looks_secret(name.rpartition(".")[2].replace("-", "_")):
        yield name, "a secret"
    else:
        yield name, str(value)


def _conda(data: bytes, name: str) -> Iterator[tuple[str, str, str]]:
    """Its lines as they are, but comments: YAML, whose order is the channels' order."""
    for line in data.decode("utf-8", "replace").splitlines():
        text = line.partition(" #")[0].rstrip()
        if text and not text.startswith("#"):
            key = text.partition(":")[0].strip(" -")
            yield "conda", key, "a secret" if looks_secret(key) else text.strip()
