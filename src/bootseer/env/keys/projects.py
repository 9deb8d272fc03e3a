"""Files besides pip's own that say what to install: which is which, and what counts of one in a request key.

    pyproject.toml     the dependencies of a project, without the project itself
    uv.lock            all of them as uv has resolved them, with the pyproject.toml beside it
    pylock.toml        a lock that any program has written (PEP 751)
    environment.yml    what conda is to install

They are not read here for what they ask for: uv and conda do that (`installing.choose`). Decides and touches nothing;
called by `requirements` and the launcher.
"""

from __future__ import annotations

import json
import posixpath
import re
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from bootseer.env.keys.requirement import Requirement, normalised
from bootseer.errors import UsageError
from bootseer.store.addresses import without_credentials

Kind = Literal["requirements", "pyproject", "uv.lock", "pylock", "conda"]

MAX_BYTES = 16 << 20
_PIPENV = "pipenv requirements > requirements.txt"
_PROJECT = "write `.` or `-e .` into a requirements file"
_OTHERS = {
    "poetry.lock": "poetry export -o requirements.txt",
    "pdm.lock": "pdm export -o requirements.txt",
    "Pipfile": _PIPENV,
    "Pipfile.lock": _PIPENV,
    "conda-lock.yml": "conda-lock render --kind env",
    "setup.py": _PROJECT,
    "setup.cfg": _PROJECT,
}
_DEPENDENCIES = re.compile(rb"^dependencies[ \t]*:", re.MULTILINE)
_OF_PIP = re.compile(r"^\s+-\s+(-[a-zA-Z-]+[ =]\S+|\.{0,2}/\S+)", re.MULTILINE)
_OF_PROJECT = ("dependencies", "optional-dependencies", "requires-python", "dynamic")


def kind_of(path: str, data: bytes) -> Kind:
    """What a file of `--requirements` is, by its name and its content. Raises `UsageError` for what cannot be used."""
    name = posixpath.basename(path)
    if name in _OTHERS:
        raise UsageError(f"{path}: files of this kind cannot be installed from", hint=_OTHERS[name])
    if name.endswith((".yml", ".yaml")):
        if not _DEPENDENCIES.search(data):
            raise UsageError(f"{path}: no environment for conda: it has no dependencies", hint="give environment.yml")
        return "conda"
    if name != "uv.lock" and not name.endswith(".toml"):
        if b"\n[[package]]" in data:
            raise UsageError(f"{path}: a lock by another name", hint="call it uv.lock, beside its pyproject.toml")
        return "requirements"
    table = _table(path, data)
    if name == "uv.lock":
        return "uv.lock"
    if "lock-version" in table:
        return "pylock"
    _check_project(path, table)
    return "pyproject"


def _table(path: str, data: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path}: not TOML: {error}", hint="is the file complete? it must be as its tool wrote it"
        ) from error


def _check_project(path: str, table: dict[str, Any]) -> None:
    project = _at(table, "project")
    if not project:
        raise UsageError(f"{path}: has no table [project]", hint="export a lock or requirements with its own tool")
    if "dependencies" in project.get("dynamic", ()):
        why = f"{path}: its dependencies are dynamic: its build backend alone knows them"
        raise UsageError(why, hint="uv lock, and give uv.lock; or write `.` into a requirements file")
    if any(source.get("workspace") for source in _sources(table)):
        raise UsageError(f"{path}: depends on members of its workspace", hint="uv lock, and give uv.lock")


def counted(kind: Kind, path: str, data: bytes) -> tuple[str, ...]:
    """The parts of a pyproject.toml that decide what is installed; nothing where all bytes count."""
    if kind != "pyproject":
        return ()
    table = _table(path, data)
    project = _at(table, "project")
    parts = {name: project.get(name) for name in _OF_PROJECT}
    parts |= {"build-system": table.get("build-system"), "groups": table.get("dependency-groups")}
    parts["uv"] = _at(table, "tool", "uv")
    return tuple(f"{name} {json.dumps(part, sort_keys=True, default=str)}" for name, part in parts.items() if part)


def asked(kind: Kind, path: str, data: bytes) -> Iterator[Requirement]:
    """What it takes from this machine or from repositories, and holds no digest of."""
    if kind == "conda":
        return
    table = _table(path, data)
    if kind != "pyproject":
        yield from _places(table)
        return
    yield from _places(list(_sources(table)))
    for name, found in _at(table, "tool", "uv", "sources").items():
        for source in found if isinstance(found, list) else [found]:
            if isinstance(source, dict) and isinstance(source.get("git"), str):
                reference = next((str(source[key]) for key in ("rev", "tag", "branch") if key in source), "")
                yield Requirement("vcs", normalised(name), f"git+{without_credentials(source['git'])}", reference)


def lines_of_pip(data: bytes) -> str:
    """What an environment for conda names besides packages: files and folders for pip, one a line."""
    return "\n".join(_OF_PIP.findall(data.decode("utf-8", "replace")))


def grouped(files: Sequence[tuple[str, bytes]]) -> list[tuple[Kind, list[str]]]:
    """What is installed one after the other: conda's first, each lock by itself, all else at once.

    Raises `UsageError` as `kind_of`.
    """
    found: list[tuple[Kind, list[str]]] = [(kind_of(path, data), [path]) for path, data in files]
    alone = sorted(
        (one for one in found if one[0] in ("conda", "uv.lock", "pylock")), key=lambda one: one[0] != "conda"
    )
    together = [one for one in found if one not in alone]
    kind: Kind = "pyproject" if any(kind == "pyproject" for kind, _ in together) else "requirements"
    return alone + ([(kind, [path for _, paths in together for path in paths])] if together else [])


def _sources(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for found in _at(table, "tool", "uv", "sources").values():
        yield from (one for one in (found if isinstance(found, list) else [found]) if isinstance(one, dict))


def _at(table: Any, *names: str) -> dict[str, Any]:
    for name in names:
        table = table.get(name) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}


def _places(value: Any) -> Iterator[Requirement]:
    """Every local file or folder that is named without a digest."""
    if isinstance(value, dict):
        editable = value.get("editable")
        if isinstance(value.get("path"), str) and not value.keys() & {"hash", "hashes"}:
            yield Requirement("path", "", value["path"], editable=editable is True)
        for target in (editable, value.get("directory")):
            if isinstance(target, str) and target != ".":
                yield Requirement("path", "", target, editable=target == editable)
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _places(one)
