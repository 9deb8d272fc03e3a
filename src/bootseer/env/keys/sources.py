"""Inputs from folders and repositories: a folder's content as one digest, the commit of a branch or tag.

For folders, names, kinds, execute bits, link targets and bytes count, but not times, owners and other modes, which
differ between checkouts. Excluded are files that tools leave in a source tree and no build reads: version control's own
files, bytecode, caches, build results, virtual environments, logs. Otherwise the first run of a setup, or each job,
would change its key.

A moved branch gives another key: `git ls-remote` is called, with a deadline and without password prompts.
"""

from __future__ import annotations

import base64
import contextlib
import glob
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import unquote

from bootseer.env.keys.files import MAX_FILES, NodeFiles
from bootseer.env.keys.key import digest_of
from bootseer.env.keys.requirement import Requirement
from bootseer.errors import PermanentError, os_errors_as
from bootseer.io.tasks import Tasks
from bootseer.machine import child

_JUNK_FOLDERS = frozenset(
    """
    .git .hg .svn __pycache__ .mypy_cache .pytest_cache .ruff_cache .tox .nox .eggs .ipynb_checkpoints .hypothesis
    .venv .idea .vscode node_modules _skbuild mlruns lightning_logs
    """.split()  # noqa: SIM905 - a list of this length reads better as text
)
_JUNK = re.compile(r".*\.(swp|egg-info|log)|slurm-[\d_]+\.out|nohup\.out|\.DS_Store|\.coverage|\.nfs[0-9a-f]+")
# Build folders of setuptools, scikit-build and meson-python, and wandb's runs; other content of such folders counts.
_BUILT = {
    "build": re.compile(r"lib([.-].*)?|(temp|bdist)\..*|scripts-\d.*|__editable__\..*|(cp|pp|py)\d.*"),
    "dist": re.compile(r".*\.(whl|tar\.gz|zip|egg)"),
    "wandb": re.compile(r"(offline-)?run-.*|latest-run|debug.*\.log|settings"),
}
_BUILD_FOLDER = ("CMakeCache.txt", "meson-info", "pyvenv.cfg", "conda-meta", "CACHEDIR.TAG")
"""A folder with one of these entries was made from something else, unless it has sources of CMake itself."""
_MAX_LINES = 500
_VERSIONED = re.compile(
    rb"setuptools[_-]scm|hatch-vcs|versioneer|\bpbr\b|vcs-versioning|dunamai|versioningit|git describe|rev-parse"
)


class Tree(NamedTuple):
    """A folder's content."""

    digest: str
    num_files: int
    lines: tuple[str, ...]
    """The first files, each with the beginning of its digest."""


def read_tree(path: str, files: NodeFiles) -> Tree:
    """The digest of a folder. Raises `PermanentError` if it is too large or unreadable."""
    # Extension modules that setuptools has built in place, by way of this folder, in which others are only copies.
    folders = glob.glob(f"{glob.escape(path)}/build/lib.*")  # noqa: PTH207 - strings
    built = {name for folder in folders for name in glob.glob("**/*.*.so", root_dir=folder, recursive=True)}  # noqa: PTH207
    parts: list[str] = []
    lines: list[str] = []
    num_files = 0
    for num_entries, (name, kind, whole) in enumerate(_walk(path, ())):
        if num_entries > 2 * MAX_FILES:
            raise PermanentError(f"{path}: more than {MAX_FILES:,} files; name the ones that count with --env-input")
        if name.removeprefix("src/") in built:
            continue
        parts += (name, kind)
        if kind.startswith("file"):
            digest, _ = files.digest(whole)
            parts.append(digest)
            num_files += 1
            if len(lines) < _MAX_LINES:
                lines.append(f"{name} {digest[:8]}")
    state = _version_control(path, files)
    if state:
        parts += ("version control", state)
        lines.append(f"version-control {state[:8]}")
    return Tree(digest_of(parts), num_files, tuple(lines))


def _walk(folder: str, above: tuple[tuple[int, int], ...], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Relative name, kind with relevant attributes, and path of each entry, in a fixed order."""
    with os_errors_as(PermanentError, folder):
        status = os.stat(folder)  # noqa: PTH116 - many calls, no object for each
        own = (status.st_dev, status.st_ino)
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
    if own in above or len(above) > 100:
        return  # a link to a folder above
    names = {entry.name for entry in entries}
    below = os.path.basename(prefix.rstrip("/"))  # noqa: PTH119 - a string; empty for the tree itself, whose name is nothing
    for entry in entries:
        name = f"{prefix}{entry.name}"
        try:  # no context manager: many calls
            mode = entry.stat(follow_symlinks=False).st_mode
            target = os.readlink(entry.path) if stat.S_ISLNK(mode) else ""  # noqa: PTH115 - the text, not a path
            # A build takes the target of a link for the link itself.
            mode = entry.stat().st_mode if target and os.path.exists(entry.path) else mode  # noqa: PTH110
        except OSError as error:
            raise PermanentError(f"{entry.path}: {os.strerror(error.errno or 0)}") from error
        link = f" -> {target}" if target else ""
        if stat.S_ISDIR(mode):
            if not _is_junk(below, entry.name, entry.path):
                yield name, f"folder{link}", entry.path
                yield from _walk(entry.path, (*above, own), f"{name}/")
        elif _JUNK.fullmatch(entry.name) or _is_built(below, entry.name):
            continue
        elif entry.name.endswith((".pyc", ".pyo")) and entry.name[:-1] in names:
            continue  # bytecode without a source is a module itself
        elif stat.S_ISREG(mode):
            yield name, f"file{' x' if mode & 0o111 else ''}{link}", entry.path
        else:
            yield name, f"{stat.S_IFMT(mode):o}{link}", entry.path


def _is_junk(folder: str, name: str, path: str) -> bool:
    if name in _JUNK_FOLDERS or _JUNK.fullmatch(name) or _is_built(folder, name):
        return True
    is_source = os.path.lexists(f"{path}/CMakeLists.txt")
    if not is_source and any(os.path.lexists(f"{path}/{mark}") for mark in _BUILD_FOLDER):
        return True
    if name in _BUILT:
        with contextlib.suppress(OSError):  # found by the walk
            return all(_is_built(name, child) for child in os.listdir(path))  # noqa: PTH208 - names
    return False


def _is_built(folder: str, name: str) -> bool:
    """Whether an entry is a build result, judged by the name of its folder."""
    built = _BUILT.get(folder)
    return built is not None and built.fullmatch(name) is not None


def _version_control(path: str, files: NodeFiles) -> str:
    """Commit, and the tags in its history, if the project takes its version from them; otherwise they do not affect the
    content."""
    build = b"".join(
        files.read(f"{path}/{name}")
        for name in ("pyproject.toml", "setup.py", "setup.cfg")
        if files.kind(f"{path}/{name}")
    )
    if not _VERSIONED.search(build):
        return ""
    folder = path
    while not files.kind(f"{folder}/.git") and folder != "/":
        folder = os.path.dirname(folder)  # noqa: PTH120 - a string
    git = f"{folder}/.git"
    if not files.kind(git):  # no repository that the setup can see
        return ""
    # Build tools ask about the project's folder, whatever these variables name.
    env = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    # All tags: the last one may have a form that the project does not take for a version.
    tags = ("for-each-ref", "--merged=HEAD", "--format=%(objectname) %(refname)", "refs/tags")
    told = []
    for question in (("rev-parse", "HEAD"), tags):
        words = ["git", "-c", "safe.directory=*", "-C", path, *question]
        answer = child.run(words, deadline_s=_TAGS_DEADLINE_S, env=env, max_bytes=_MAX_TAGS_BYTES)
        if answer.code is None and answer.started:  # a fast node would get another key
            raise PermanentError(f"{path}: the tags of its commit are not known: git: {answer.error}")
        if answer.code != 0:
            return _references(git, files)
        told.append(answer.stdout)
    return digest_of(told)


_MAX_TAGS_BYTES = 16 << 20
_TAGS_DEADLINE_S = 60.0
"""For the whole history of a large repository on a file server."""


def _references(git: str, files: NodeFiles) -> str:
    """The files of branches and tags, for a node on which git fails: the setup may install git, or make it trust this
    folder."""
    names = ["HEAD", "packed-refs"]
    for kind in ("heads", "tags"):
        names += sorted(glob.glob(f"refs/{kind}/**", root_dir=git, recursive=True))  # noqa: PTH207
    parts: list[str] = []
    for name in names:
        if files.kind(f"{git}/{name}") == "file":
            parts += (name, files.digest(f"{git}/{name}")[0])
    return digest_of(parts) if parts else ""


DEADLINE_S = 5.0
_MAX_ASKED = 32
_COMMIT = re.compile(r"([0-9a-f]{40}|[0-9a-f]{64})\t(\S+)")


def commits_of(
    wanted: Iterable[Requirement], env: Mapping[str, str], logins: Mapping[str, str]
) -> dict[tuple[str, str], str]:
    """The commit for each address and reference; those not found are missing. `logins` is that of `Requirements`."""
    asked = list(wanted)
    found = {(item.target, item.reference): item.reference for item in asked if item.pinned}
    open_ones = [item for item in asked if not item.pinned and item.target.startswith("git+")][:_MAX_ASKED]
    program = shutil.which("git", path=env.get("PATH"))
    if program is None or not open_ones:
        return found
    quiet = {**env, "GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "SSH_ASKPASS": "true", "LC_ALL": "C"}
    quiet.setdefault("GIT_SSH_COMMAND", f"ssh -o BatchMode=yes -o ConnectTimeout={DEADLINE_S:.0f}")
    with Tasks("bootseer-git", min(8, len(open_ones))) as pool:
        answers = list(pool.map(lambda item: _ask(program, item, quiet, logins.get(item.target, "")), open_ones))
    for item, commit in zip(open_ones, answers, strict=True):
        if commit:
            found[item.target, item.reference] = commit
    return found


def _ask(program: str, item: Requirement, env: Mapping[str, str], address_with_login: str) -> str:
    address, reference = item.target.removeprefix("git+"), item.reference or "HEAD"
    if address.startswith("-") or reference.startswith("-"):
        return ""
    with_login, login = env, address_with_login.partition("://")[2].partition("/")[0].rpartition("@")[0]
    if login and "$" not in login:  # by variables (git 2.31), as every user of the machine can read arguments
        words = base64.b64encode(unquote(login if ":" in login else f"{login}:").encode()).decode()
        number = int(count) if (count := env.get("GIT_CONFIG_COUNT", "")).isdecimal() else 0
        names = ("COUNT", f"KEY_{number}", f"VALUE_{number}")
        values = (f"{number + 1}", f"http.{address}.extraHeader", f"Authorization: Basic {words}")
        with_login = {**env, **{f"GIT_CONFIG_{name}": value for name, value in zip(names, values, strict=True)}}
    # The patterns match suffixes of names: `main` would also find `feature/main`.
    answer = child.run(
        [program, "ls-remote", "--", address, reference, f"{reference}^{{}}"], deadline_s=DEADLINE_S, env=with_login
    )
    if answer.code != 0:  # a server may refuse a login that has expired, and need none
        return _ask(program, item, env, "") if with_login is not env else ""
    lines: dict[str, str] = {name: commit for commit, name in _COMMIT.findall(answer.output)}
    for name in (reference, f"refs/tags/{reference}^{{}}", f"refs/tags/{reference}", f"refs/heads/{reference}"):
        if name in lines:
            return lines[name]
    return ""
