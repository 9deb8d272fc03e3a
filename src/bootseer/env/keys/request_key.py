"""Compute the request key of a setup: everything it depends on, looked up on this node.

docs/adr/0013-request-key.md describes what is part of the key and what is not.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.artifact.places import environments_folder
from bootseer.env.capturing.exclude import Exclusions, credentials_of
from bootseer.env.changes import lies_in
from bootseer.env.keys import key_settings, node
from bootseer.env.keys.files import FactCache, NodeFiles
from bootseer.env.keys.key import FORMAT, RequestKey, difference, digest_of, key_digest
from bootseer.env.keys.script import Inputs, gather
from bootseer.env.keys.sources import commits_of, read_tree
from bootseer.errors import BootseerError
from bootseer.io import proc
from bootseer.logs import logger
from bootseer.store.addresses import without_credentials

_MAX_LISTED = 40
_log = logger(__name__)


class KeyRequest(Struct, frozen=True):
    """A setup to be run."""

    setup: str | None
    """The script, relative to `cwd` or absolute."""
    requirements: tuple[str, ...]
    cwd: str
    """Absolute."""
    env: Mapping[str, str]
    """The setup's environment."""
    image: str = ""
    """Digest of the manifest of the image that it runs in; empty: on this machine."""
    inputs: tuple[str, ...] = ()
    """Files and folders declared by the user."""
    kept: tuple[str, ...] = ()
    """The owner's options for paths that snapshots keep or leave out."""
    tenant: str = ""
    place: str = ""
    """The setup's working folder in the image, if the user has mounted it."""
    variables: tuple[str, ...] = ()
    """Variables declared by the user."""


def request_key(ask: KeyRequest, *, facts_folder: Path | None = None) -> RequestKey:
    """Compute the key.

    Obstacles become `problems`; no exception is raised for what the setup names. `facts_folder` caches facts about
    unchanged files between starts, see `facts_folder_of`.
    """
    began, facts = time.monotonic(), FactCache(facts_folder)
    key = _Collector(ask, facts).key()
    facts.save()
    _log.info("request key %s: %d components in %.2f s", key.digest, len(key.components), time.monotonic() - began)
    for problem in key.problems:
        _log.info("no snapshot for this setup: %s", problem)
    for name, value in key.components.items():
        _log.debug("component %s: %s", name, value)
    return key


def changed_inputs(ask: KeyRequest, key: RequestKey, *, facts_folder: Path | None = None) -> dict[str, str]:
    """The files and folders in the key that have changed since, by path, with words about the change. Hardware and
    repositories are not looked at again: the answers may take seconds."""
    again = _Collector(ask, FactCache(facts_folder)).key(files_only=True)
    paths = {name: path for path, name in key.accounted.items()}
    found = difference(key.components, again, key.details)
    return {paths[one.name]: one.words for one in found if one.name in paths}


def facts_folder_of(cache_root: Path) -> Path:
    """The folder for facts in the node's cache."""
    return environments_folder(cache_root) / "facts"


def _visible(ask: KeyRequest) -> Callable[[str], bool]:
    """A predicate for paths that the setup can see: in an image only the working folder and declared paths."""
    if not ask.image:
        return lambda path: True
    shown = [ask.cwd, *(posixpath.join(ask.cwd, path) for path in (*ask.inputs, *ask.requirements))]
    if ask.setup is not None:
        shown.append(posixpath.dirname(posixpath.join(ask.cwd, ask.setup)))
    folders = [posixpath.normpath(path) for path in shown if posixpath.normpath(path) != "/"]
    return lambda path: lies_in(path, folders)


class _Collector:
    """Collects the components of one key with their details."""

    def __init__(self, ask: KeyRequest, facts: FactCache) -> None:
        self._ask = ask
        self._files = NodeFiles(facts, _visible(ask))
        self._facts = facts
        self._components: dict[str, str] = {}
        self._details: dict[str, tuple[str, ...]] = {}
        self._accounted: dict[str, str] = {}
        self._problems: dict[str, None] = {}
        self._unpinned: dict[str, None] = {}
        self._platform: dict[str, Any] = {"format": FORMAT}
        home = ask.env.get("HOME") or "/root"
        homes = ["/root", home, os.path.realpath(home)]  # the working folder has no links
        self._secrets = Exclusions(homes=homes, credentials=credentials_of(ask.env))

    def key(self, *, files_only: bool = False) -> RequestKey:
        ask = self._ask
        prefix = self._base()
        if not files_only:
            with self._noting_problems():
                self._node()
        configured = key_settings.configuration(ask.env, ask.cwd, prefix, self._files)
        inputs = gather(
            ask.setup, ask.requirements, ask.cwd, ask.env, self._files, configured=configured.requirement_files
        )
        self._inputs(inputs)
        if not files_only:
            self._repositories(inputs)
        for path in ask.inputs:
            if self._files.kind(whole := self._absolute(path)):
                self._place("input", whole)
            else:
                self._problems[f"{path}: a declared input that does not exist or is not a file or folder"] = None
        self._settings(inputs, configured)
        self._variables(inputs)
        if inputs.cwd_reason:
            self._add("working folder", ask.cwd, [inputs.cwd_reason])
        if ask.kept:
            self._add("kept", f"sha256:{digest_of(sorted(ask.kept))}", ask.kept)
        for name, value in (("tenant", ask.tenant), ("place in the image", ask.place)):
            if value:
                self._add(name, value)
        self._unpinned.update(inputs.requirements.unpinned)
        self._problems.update(dict.fromkeys(inputs.requirements.problems))
        return RequestKey(
            digest=key_digest(self._components),
            components=self._components,
            details=self._details,
            accounted=dict(sorted(self._accounted.items())),
            unpinned=tuple(self._unpinned)[:_MAX_LISTED],
            problems=tuple(self._problems)[:_MAX_LISTED],
            platform=self._platform,
        )

    def _add(self, name: str, value: str, lines: Iterable[str] = (), *, path: str = "") -> None:
        """Add a component; `path` is the file or folder that it covers."""
        self._components[name] = value
        if path:
            self._accounted[path] = name
        if found := tuple(lines):
            self._details[name] = found

    @contextlib.contextmanager
    def _noting_problems(self) -> Iterator[None]:
        """A component that cannot be computed prevents a snapshot, not the setup."""
        try:
            yield
        except BootseerError as error:
            self._problems[str(error)] = None

    # -- base ----------------------------------------------------------------------------------------------------------

    def _base(self) -> str:
        """Add the base; returns the prefix of the job's Python if it is known."""
        if self._ask.image:
            self._add("base", f"image {self._ask.image}")
            self._platform["base"] = f"image {self._ask.image}"
            return ""
        prefix = ""
        folders: list[str] = []
        path = node.find_python(self._ask.env)
        if path is None:
            self._add("python", "none")
        else:
            with self._noting_problems():
                python = node.ask_python(path, self._ask.env, self._facts)
                prefix = python.prefix
                self._add("python", python.name, [path])
                self._add("prefix", prefix)
                self._platform |= {"python": python.name, "prefix": prefix}
                folders = [*python.own_folders, *self._more_folders(python)]
                if self._files.kind(f"{prefix}/conda-meta") == "folder":  # it has packages of other languages, too
                    self._environment(prefix)
        with self._noting_problems():
            self._fingerprint(folders)
        self._add("user", f"{os.geteuid()}:{os.getegid()} umask {proc.status().get('Umask', '')}")
        return prefix

    def _more_folders(self, python: node.Interpreter) -> list[str]:
        """Folders of distributions that the user adds to Python's own."""
        env = self._ask.env
        user = env.get("PYTHONUSERBASE") or (f"{env['HOME']}/.local" if env.get("HOME") else "")
        version = ".".join(python.version.split(".")[:2])
        search = [
            path for path in key_settings.search_path(env.get("PYTHONPATH", "")).split(":") if path.startswith("/")
        ]
        return [f"{user}/lib/python{version}/site-packages", *search] if user else search

    def _fingerprint(self, folders: list[str]) -> None:
        system = node.system(self._files, self._facts)
        installed = node.distributions(folders, self._facts)
        self._add("system", f"sha256:{system.digest}", system.lines)
        self._add("distributions", f"sha256:{installed.digest} {len(installed.lines)} entries", installed.lines)
        uv = shutil.which("uv", path=self._ask.env.get("PATH"))
        self._add("uv", f"sha256:{self._files.digest(uv)[0]}" if uv else "none")
        self._platform["base"] = f"host {digest_of([system.digest, installed.digest])}"

    def _node(self) -> None:
        gpus = node.accelerators(self._ask.env)
        facts = {"architecture": os.uname().machine, "cpu": node.cpu_level()}
        if not self._ask.image:
            facts["libc"] = node.libc()
        for name, value in facts.items():
            self._add(name, value)
        self._add("gpus", ", ".join(gpus.gpus) or "none")
        # The branch decides which code can run, and the newest CUDA; its minor versions differ between equal nodes and
        # are checked by the gate.
        self._add("driver", gpus.driver.partition(".")[0] or "none")
        self._platform |= facts | {"gpus": list(gpus.gpus), "driver": gpus.driver}

    # -- inputs --------------------------------------------------------------------------------------------------------

    def _inputs(self, inputs: Inputs) -> None:
        asked = inputs.requirements
        setup = self._absolute(self._ask.setup) if self._ask.setup is not None else ""
        if setup:
            self._file("setup", setup, "")
        for path, lines in asked.files.items():
            if lines and path not in inputs.files:  # the script may do more with it than install it
                value = f"sha256:{digest_of(map(without_credentials, lines))} {len(lines):,} lines"
                self._add(f"requirements {self._display_name(path)}", value, [path], path=path)
            else:
                self._file("requirements", path)
        self._accounted |= {path: "" for path in (*inputs.files, *inputs.folders) if self._is_secret(path)}
        for path in inputs.files:
            if path != setup and path not in asked.files and not self._is_secret(path):
                self._file("file", path)
        for path, editable in asked.locals.items():
            self._place("package", path, [f"{'editable, ' if editable else ''}installed from here"])
        for path in dict.fromkeys(inputs.folders):
            if not self._is_secret(path):
                self._place("folder", path)
        for path in dict.fromkeys(asked.find_links):
            self._place("find-links", path)
        for path in inputs.environments:
            self._environment(path)

    def _is_secret(self, path: str) -> bool:
        """Whether these are credentials: they do not decide what is installed, and a digest helps to guess them."""
        rule = self._secrets.forbidding_rule(path)
        return rule is not None and rule.secret

    def _absolute(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._ask.cwd, path))

    def _display_name(self, path: str) -> str:
        """A name that does not depend on where the job's files lie."""
        folders = [(self._ask.cwd, "")]
        if self._ask.setup is not None:
            folders.append((posixpath.dirname(self._absolute(self._ask.setup)), "beside the setup: "))
        for folder, words in folders:
            if f"{path}/".startswith(f"{folder.rstrip('/')}/"):
                return words + posixpath.relpath(path, folder)
        return path

    def _file(self, kind: str, path: str, called: str | None = None) -> None:
        with self._noting_problems():
            digest, status = self._files.digest(path)
            name = f"{kind} {self._display_name(path) if called is None else called}".rstrip()
            program = ", executable" if status.st_mode & 0o111 else ""  # by any user, which copies keep
            self._add(name, f"sha256:{digest} {status.st_size:,} bytes{program}", [path], path=path)

    def _place(self, kind: str, path: str, lines: Iterable[str] = ()) -> None:
        """Add a file or folder. A folder's own path counts, as distributions installed from it record it."""
        if self._files.kind(path) == "file":
            self._file(kind, path)
            return
        with self._noting_problems():
            tree = read_tree(path, self._files)
            value = f"sha256:{tree.digest} {tree.num_files:,} files"
            name = f"{kind} {path if kind == 'package' else self._display_name(path)}"
            self._add(name, value, (*lines, *tree.lines), path=path)

    def _environment(self, path: str) -> None:
        with self._noting_problems():
            part = node.environment(path, self._files, self._facts)
            value = f"sha256:{part.digest} {len(part.lines)} entries"
            self._add(f"environment {path}", value, part.lines, path=path)

    def _repositories(self, inputs: Inputs) -> None:
        wanted = inputs.requirements.repositories
        commits = commits_of(wanted.values(), self._ask.env, inputs.requirements.logins) if wanted else {}
        for (address, reference), item in wanted.items():
            name = f"repository {address}{f'@{reference}' if reference else ''}"
            commit = commits.get((address, reference))
            self._add(name, commit or "unknown commit")
            if commit is None:
                self._unpinned[f"{item.words} (its commit is unknown)"] = None
            elif address.startswith("git+file://"):
                # The commit identifies the content.
                place = address.removeprefix("git+file://")
                self._accounted.setdefault(f"{place}/.git" if self._files.kind(f"{place}/.git") else place, "")

    # -- variables and tools -------------------------------------------------------------------------------------------

    def _settings(self, inputs: Inputs, found: key_settings.Configuration) -> None:
        if found.lines:
            self._add("installer settings", f"sha256:{digest_of(found.lines)} {len(found.lines)} settings", found.lines)
        self._accounted = dict.fromkeys(found.files, "") | self._accounted
        self._problems.update(dict.fromkeys(found.problems))
        for path in found.find_links:
            if path not in inputs.requirements.find_links:
                self._place("find-links", path)

    def _variables(self, inputs: Inputs) -> None:
        env = self._ask.env
        if self._ask.setup is None:  # installers behave the same in all languages
            language = key_settings.LANGUAGE.difference(inputs.variables, self._ask.variables)
            env = {name: value for name, value in env.items() if name not in language}
        chosen = key_settings.choose_variables(env, referenced=inputs.variables, declared=self._ask.variables)
        for name, value in chosen.values.items():
            self._add(f"variable {name}", value)
        if chosen.notes:
            self._details["variables left out"] = chosen.notes
