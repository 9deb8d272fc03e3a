"""One requirement as pip and uv parse it, and files besides pip's own that list what to install.

    pyproject.toml     the dependencies of a project, without the project itself
    uv.lock            all of them as uv has resolved them, with the pyproject.toml beside it
    pylock.toml        a lock that any program has written (PEP 751)
    environment.yml    what conda is to install

Files are not read here for what they ask for: uv and conda do that (`installing.choose`). Nothing is said about which
versions exist. Does no I/O.
"""

from __future__ import annotations

import importlib
import json
import posixpath
import re
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from bootseer.errors import UsageError
from bootseer.store.addresses import without_credentials

Kind = Literal["name", "path", "vcs", "url"]

_VCS = re.compile(r"(git|hg|svn|bzr)\+", re.IGNORECASE)
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*@\s*(\S.*)", re.DOTALL)
_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*(.*)", re.DOTALL)
_EXACT = re.compile(r"\(?\s*={2,3}\s*(?!.*\*)[^\s,;()]+\s*\)?")
ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tbz", ".tar.xz", ".txz", ".tar")
_HASH_IN_URL = re.compile(r"[#&](?:sha256|sha384|sha512)=[0-9a-fA-F]{64,128}(?:&|$)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_SHOWN = 100


class Requirement(NamedTuple):
    """One parsed requirement."""

    kind: Kind
    name: str
    """Normalised name of the distribution; empty if only the location is known."""
    target: str
    """For a `path`: as written, without `file:`; for `vcs` and `url`: the address without credentials; for a `name`:
    the specifier."""
    reference: str = ""
    """`vcs`: branch, tag or commit; empty for the default branch."""
    editable: bool = False
    hashed: bool = False
    """Has `--hash`. pip then requires a digest of all that is installed, also of what this depends on."""

    @property
    def pinned(self) -> bool:
        """Whether it determines one version by itself. Branches do not; the content of paths is hashed elsewhere."""
        if self.kind == "name":
            return self.hashed or bool(_EXACT.fullmatch(self.target))
        if self.kind == "vcs":
            return bool(_COMMIT.fullmatch(self.reference))
        return self.kind == "path" or self.hashed or bool(_HASH_IN_URL.search(self.target))

    @property
    def words(self) -> str:
        """A short description, on one line."""
        text = f"{self.name}{self.target}" if self.kind == "name" else (self.name or self.target)
        return " ".join(text.split())[:_MAX_SHOWN]


def normalised(name: str) -> str:
    """The name normalised as in PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(text: str, *, editable: bool = False, hashed: bool = False) -> Requirement | None:
    """Parse one requirement without options; None if it is invalid."""
    text = text.strip().strip("'\"").strip()
    if not text:
        return None
    named = _NAMED.fullmatch(text)
    if named and not _VCS.match(text) and "://" not in text.partition("@")[0]:
        name, place = normalised(named[1]), named[2]
        return _at(place, name, editable, hashed)
    if editable or "://" in text or text.startswith("file:") or _looks_like_path(text):
        return _at(text, "", editable, hashed)
    found = _NAME.fullmatch(text.partition(";")[0].strip())
    return Requirement("name", normalised(found[1]), found[2].strip(), hashed=hashed) if found is not None else None


def _at(place: str, name: str, editable: bool, hashed: bool) -> Requirement:
    whole = place.strip()
    # A marker after an address is preceded by a blank; addresses contain none.
    place = whole.split(maxsplit=1)[0]
    if _VCS.match(place):
        address, reference = split_revision(place.partition("#")[0])
        return Requirement("vcs", name or _egg(place), without_credentials(address), reference, editable, hashed)
    if place.startswith("file:"):
        path = re.sub(r"^file:(//(localhost)?/*(?=/))?", "", place.partition("#")[0])
        return Requirement("path", name, _decoded(path), "", editable, hashed)
    if "://" in place:
        return Requirement("url", name or _egg(place), without_credentials(place), "", editable, hashed)
    path = re.sub(r"\s*(\[[^\]/]*\])?\s*$", "", re.split(r";|#|\s-", whole, maxsplit=1)[0])  # may contain blanks
    return Requirement("path", name, path, "", editable, hashed)


def split_revision(address: str) -> tuple[str, str]:
    """Address and the revision after the last `@` of its path."""
    scheme, _, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    path, at, reference = path.rpartition("@")
    return (f"{scheme}://{host}{slash}{path}", reference) if at else (address, "")


def _decoded(path: str) -> str:
    """The path of an address with `%20` and the like decoded."""
    data = re.sub(
        rb"%([0-9A-Fa-f]{2})", lambda found: bytes.fromhex(found[1].decode()), path.encode("utf-8", "replace")
    )
    return data.decode("utf-8", "surrogateescape")


def _egg(address: str) -> str:
    found = re.search(r"[#&]egg=([A-Za-z0-9._-]+)", address)
    return normalised(found[1]) if found else ""


def _looks_like_path(text: str) -> bool:
    word = text.partition(";")[0].strip()
    return word.startswith((".", "/", "~")) or posixpath.sep in word.partition("[")[0] or word.endswith(ARCHIVES)


FileKind = Literal["requirements", "pyproject", "uv.lock", "pylock", "conda"]

MAX_BYTES = 16 << 20
_PIPENV = "pipenv requirements > requirements.txt"
_PROJECT = "write `.` or `-e .` into a requirements file"
_OTHERS = {
    "poetry.lock": "poetry export -o requirements.txt",
    "pdm.lock": "pdm export -o requirements.txt",
    "Pipfile": _PIPENV,
    "Pipfile.lock": _PIPENV,
    "conda-lock.yml": "conda-lock render --kind env",
    **dict.fromkeys(("pixi.lock", "pixi.toml"), "pixi workspace export conda-environment environment.yml"),
    "setup.py": _PROJECT,
    "setup.cfg": _PROJECT,
}
_DEPENDENCIES = re.compile(rb"^dependencies[ \t]*:", re.MULTILINE)
_OF_PROJECT = ("dependencies", "optional-dependencies", "requires-python", "dynamic")


def kind_of(path: str, data: bytes) -> FileKind:
    """The kind of a file given by `--requirements`, by its name and content. Raises `UsageError` for unusable ones."""
    name = posixpath.basename(path)
    if name in _OTHERS:
        raise UsageError(f"{path}: files of this kind are not supported", hint=_OTHERS[name])
    if name.endswith((".yml", ".yaml")):
        if not _DEPENDENCIES.search(data):
            raise UsageError(
                f"{path}: not an environment file of conda: it has no dependencies", hint="give environment.yml"
            )
        return "conda"
    if name != "uv.lock" and not name.endswith(".toml"):
        if b"\n[[package]]" in data:
            raise UsageError(
                f"{path}: a uv lock file under another name", hint="rename it to uv.lock, beside its pyproject.toml"
            )
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
    project = _table_at(table, "project")
    if not project:
        raise UsageError(f"{path}: has no table [project]", hint="export a lock or requirements with its own tool")
    dynamic = project.get("dynamic")
    if isinstance(dynamic, list) and "dependencies" in dynamic:
        reason = f"{path}: its dependencies are dynamic: only its build backend can compute them"
        raise UsageError(reason, hint="uv lock, and give uv.lock; or write `.` into a requirements file")
    if any(source.get("workspace") for _, source in _sources(table)):
        raise UsageError(f"{path}: depends on members of its workspace", hint="uv lock, and give uv.lock")


def relevant_parts(kind: FileKind, path: str, data: bytes) -> tuple[str, ...]:
    """The parts of a pyproject.toml that decide what is installed; empty if all bytes count."""
    if kind != "pyproject":
        return ()
    table = _table(path, data)
    project = _table_at(table, "project")
    parts = {name: project.get(name) for name in _OF_PROJECT}
    parts |= {"build-system": table.get("build-system"), "groups": table.get("dependency-groups")}
    parts["uv"] = _table_at(table, "tool", "uv")
    return tuple(f"{name} {json.dumps(part, sort_keys=True, default=str)}" for name, part in parts.items() if part)


_LOCAL_SOURCE = re.compile(rb"""\b(editable|directory|path)\s*=\s*+(?!["']\.["'])""")
_OF_FOLDER = re.compile(rb"\b(path|workspace|dynamic|find-links)\b|file:|[\"'@]\s*\.{1,2}/")
_WITHOUT_PROJECT = frozenset(("--no-install-project", "--no-root", "--no-self"))


def installs_packages_alone(words: Sequence[str], data: bytes) -> bool:
    """Whether `uv sync`, `poetry install` and the like install nothing from the folder of this pyproject.toml: then
    only it and its lock count, and not the project's code."""
    if words[1:2] not in (("sync",), ("install",)) or _OF_FOLDER.search(data):
        return False
    if not _WITHOUT_PROJECT.isdisjoint(words):
        return True
    try:
        table = tomllib.loads(data.decode())
    except (ValueError, RecursionError):
        return False
    if words[0].endswith("uv"):
        return _table_at(table, "tool", "uv").get("package", "build-system" in table) is False
    return _table_at(table, "tool", "poetry").get("package-mode") is False


def unhashed_sources(kind: FileKind, path: str, data: bytes) -> Iterator[Requirement]:
    """Its inputs from this machine or from repositories that have no digest in the file."""
    if kind == "conda" or (kind != "pyproject" and not _LOCAL_SOURCE.search(data)):  # a lock takes long to parse
        return
    table = _table(path, data)
    if kind != "pyproject":
        yield from _local_places(table)
        return
    for name, source in _sources(table):
        yield from _local_places(source)
        if isinstance(source.get("git"), str):
            reference = next((str(source[key]) for key in ("rev", "tag", "branch") if key in source), "")
            yield Requirement("vcs", normalised(name), f"git+{without_credentials(source['git'])}", reference)
    yield from _local_places(_table_at(table, "tool", "poetry"))
    project = _table_at(table, "project")
    groups = (_table_at(project, "optional-dependencies"), _table_at(table, "dependency-groups"))
    lists = (project.get("dependencies"), *(each for group in groups for each in group.values()))
    for text in (text for each in lists if isinstance(each, list) for text in each if isinstance(text, str)):
        wanted = parse(text.replace("${PROJECT_ROOT}", posixpath.dirname(path)))
        if wanted is not None and wanted.kind in ("path", "vcs"):
            yield wanted


def lines_of_pip(data: bytes) -> str:
    """What a conda environment has pip install, one item a line."""
    yaml: Any = importlib.import_module("yaml")  # only files of conda need it

    try:
        found = yaml.safe_load(data.decode("utf-8", "replace"))
    except (yaml.YAMLError, ValueError, RecursionError):  # conda reports it
        return ""
    items = found.get("dependencies") if isinstance(found, dict) else None
    lists = [item.get("pip") for item in items or () if isinstance(item, dict)] if isinstance(items, list) else []
    return "\n".join(str(item) for each in lists if isinstance(each, list) for item in each)


def grouped(files: Sequence[tuple[str, bytes]]) -> list[tuple[FileKind, list[str]]]:
    """Files installed together, in order: conda's first, each lock by itself, the rest at once. Raises `UsageError`."""
    found: list[tuple[FileKind, list[str]]] = [(kind_of(path, data), [path]) for path, data in files]
    alone = sorted(
        (one for one in found if one[0] in ("conda", "uv.lock", "pylock")), key=lambda one: one[0] != "conda"
    )
    together = [one for one in found if one not in alone]
    kind: FileKind = "pyproject" if any(kind == "pyproject" for kind, _ in together) else "requirements"
    return alone + ([(kind, [path for _, paths in together for path in paths])] if together else [])


def _sources(table: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, found in _table_at(table, "tool", "uv", "sources").items():
        yield from ((name, one) for one in (found if isinstance(found, list) else [found]) if isinstance(one, dict))


def _table_at(table: Any, *names: str) -> dict[str, Any]:
    for name in names:
        table = table.get(name) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}


def _local_places(value: Any) -> Iterator[Requirement]:
    """Every local file or folder named without a digest."""
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
            yield from _local_places(one)
