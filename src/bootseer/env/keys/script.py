"""What a setup script depends on, as far as its text tells: scripts and requirement files that it runs, files and
folders that it names, variables that it reads, and what it fetches without naming a version.

Rather too much than too little: a file too many costs a start that does not find its snapshot, one that is missing
would bring yesterday's environment. What no text can tell (a program that reads its own configuration) is found when
the setup runs and its reads are watched. Decides and touches nothing: `Look` does. Called by `inputs`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bootseer.env.keys import installs, programs, requirement, shell
from bootseer.env.keys.installs import option_values
from bootseer.env.keys.requirements import Requirements, is_requirements_name
from bootseer.env.keys.script_paths import Look, Paths, is_of_system, is_packaged
from bootseer.env.keys.shell import Command
from bootseer.env.keys.variables import looks_secret
from bootseer.store.addresses import without_credentials

_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_PIP = re.compile(r"pip[\d.]*")
_SHELL = re.compile(r"(ba|da|z|k)?sh")
_BUILD_FILES = ("pyproject.toml", "setup.py", "setup.cfg")


@dataclass(slots=True)
class Inputs:
    """What scripts and requirement files were found to depend on. Absolute paths."""

    requirements: Requirements = field(default_factory=Requirements)
    requirement_files: dict[str, bool] = field(default_factory=dict)
    """To be read; with whether it is a constraint file."""
    files: dict[str, bool] = field(default_factory=dict)
    """With whether a shell reads it as a script."""
    folders: dict[str, None] = field(default_factory=dict)
    environments: dict[str, None] = field(default_factory=dict)
    """Python environments that the setup uses or changes."""
    outputs: set[str] = field(default_factory=set)
    """What the setup writes: what lies there from an earlier start is no input."""
    variables: set[str] = field(default_factory=set)
    assigned: set[str] = field(default_factory=set)
    place: str = ""
    """Why the working folder matters, in a few words; empty when it does not."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text and where it runs."""

    text: str
    path: str
    cwd: str
    env: Mapping[str, str]


def read_script(script: Script, look: Look, inputs: Inputs) -> None:
    """Add to `inputs` what this script names. What it runs is added for the caller to read."""
    _Reader(script, look, inputs).read(script.text)


def read_program(script: Script, look: Look, inputs: Inputs) -> None:
    """The same for a program in another language: quoted words that are files, and variables by their usual idioms."""
    reader = _Reader(script, look, inputs)
    for found in re.finditer(r"(?:environ(?:\.get)?\s*[\[(]|getenv\s*\()\s*['\"](\w+)['\"]", script.text):
        inputs.variables.add(found[1])
    for found in re.finditer(r"['\"]([^'\"\n]{1,500})['\"]", script.text):
        reader.candidate(found[1], folders=False)
    inputs.place = inputs.place or f"{posixpath.basename(script.path)} may write to it"


class _Reader:
    """Reads one script. Relative words are looked for in each folder that the script may be in."""

    def __init__(self, script: Script, look: Look, inputs: Inputs) -> None:
        self._script = script
        self._look = look
        self._inputs = inputs
        self._paths = Paths(script.cwd, posixpath.dirname(script.path), look)

    def read(self, text: str) -> None:
        parsed = shell.parse(text)
        if not parsed.complete:
            self._inputs.requirements.problems.append(f"{self._script.path}: nested too deeply to be understood")
        self._inputs.variables |= parsed.variables
        self._inputs.assigned |= parsed.given
        env = self._script.env
        names = ("HOME", "VIRTUAL_ENV", "CONDA_PREFIX", *parsed.variables)
        known = {name: env[name] for name in names if name in env}
        values = {**known, **self._paths.values, **parsed.assignments, "PWD": self._script.cwd}
        # What a secret is worth must not get into an address, a file name or a message.
        self._paths.values = {name: value for name, value in values.items() if not looks_secret(name) or name == "PWD"}
        # Outputs first: a file may be named before the text says that the script makes it.
        for command in parsed.commands:
            for word in programs.outputs(command):
                self._inputs.outputs.update(self._paths.places(word))
                if not self._paths.is_absolute(word):
                    self._runs_here(f"`{command.program or 'a redirection'}` writes to it")
        for command in parsed.commands:
            self._command(command)

    # -- words ---------------------------------------------------------------------------------------------------------

    def candidate(self, word: str, *, folders: bool, script: bool = False) -> None:
        """A word that may name an input. `script`: a shell reads it."""
        inputs = self._inputs
        for path in self._paths.existing(word):
            if path in inputs.outputs or self._environment(path):
                continue
            kind = self._look.kind(path)
            inside = any(path.startswith(f"{base}/") for base in self._paths.bases if base != "/")
            if kind == "file" and (inside or not is_packaged(path)):
                inputs.files[path] = inputs.files.get(path, False) or script
                if is_requirements_name(path):
                    inputs.requirement_files.setdefault(path, False)
            elif kind == "folder" and folders and self._counts(path, inside):
                inputs.folders[path] = None

    def _counts(self, folder: str, inside: bool) -> bool:
        """Whether a folder that is named is an input: not the system's, and not all that the user has."""
        return (inside or not is_of_system(folder)) and folder not in (
            "/",
            self._paths.values.get("HOME"),
            *self._paths.bases,
        )

    def _environment(self, path: str) -> bool:
        """Note the Python environment that the path lies in; the base's own is not asked for."""
        folder = path
        for _ in range(8):
            if self._look.kind(f"{folder}/pyvenv.cfg") == "file" or self._look.kind(f"{folder}/conda-meta") == "folder":
                self._inputs.environments[folder] = None
                return True
            folder = posixpath.dirname(folder)
            if folder == "/":
                break
        return False

    def _runs_here(self, why: str) -> None:
        self._inputs.place = self._inputs.place or why

    # -- commands ------------------------------------------------------------------------------------------------------

    def _command(self, command: Command) -> None:
        for word in command.inputs:
            self.candidate(word, folders=False)
        words, program = list(command.words), command.program
        if _PYTHON.fullmatch(program) and len(words) > 2 and "-m" in words[1:4]:
            self.candidate(words[0], folders=False)
            words = words[words.index("-m") + 1 :]
            program = words[0] if words else ""
        elif program == "uv" and len(words) > 2 and words[1] in ("pip", "venv"):
            words = words[1:]
            program = words[0]
        if _PIP.fullmatch(program):
            self.candidate(command.words[0], folders=False)
            self._pip(words)
        elif program in ("cd", "pushd"):
            self._change_folder(words)
        elif program in ("source", "."):
            self.candidate(words[1] if len(words) > 1 else "", folders=False, script=True)
        elif _SHELL.fullmatch(program):
            self._shell(words)
        elif words:
            self._other(program, words)

    def _change_folder(self, words: Sequence[str]) -> None:
        for path in self._paths.existing(words[1]) if len(words) > 1 else ():
            if self._look.kind(path) == "folder" and path not in self._paths.bases:
                self._paths.bases.insert(0, path)

    def _shell(self, words: Sequence[str]) -> None:
        for index, word in enumerate(words[1:], 1):
            if re.fullmatch(r"-\w*c", word):
                for inner in words[index + 1 : index + 2]:
                    if len(inner) < len(self._script.text):
                        self.read(inner)
                return
        for word in words[1:]:
            self.candidate(word, folders=False, script=True)

    def _pip(self, words: Sequence[str]) -> None:
        install = installs.read(words[1:])
        if install is None:
            return
        asked = self._inputs.requirements
        for option, value in install.settings:
            asked.settings.append(f"{option} {without_credentials(self._paths.expand(value))}".strip())
            if option == "--find-links":
                asked.find_links += [path for path in self._paths.existing(value) if self._look.kind(path) == "folder"]
        for word, constraint in install.files:
            self._requirement_file(word, constraint)
        for word, editable in install.wanted:
            self._wanted(word, editable=editable, no_deps=install.no_deps)
        for place in install.places:
            if not self._paths.is_absolute(place):
                self._runs_here(f"`pip {install.action}` writes to {place} in it")

    def _requirement_file(self, word: str, constraint: bool) -> None:
        text, asked = self._paths.expand(word), self._inputs.requirements
        if "://" in text:
            asked.unpinned[f"the file {without_credentials(text)}"] = None
        for path in self._paths.existing(word):
            if path in self._inputs.outputs:
                asked.unpinned[f"{word} (written when the setup runs)"] = None
            elif self._look.kind(path) == "file":
                self._inputs.requirement_files[path] = constraint

    def _wanted(self, word: str, *, editable: bool, no_deps: bool) -> None:
        text, asked = self._paths.expand(word), self._inputs.requirements
        wanted = requirement.parse(text, editable=editable)
        if wanted is not None and wanted.kind == "path":
            found = self._paths.existing(wanted.target)
            for path in self._projects(found) or found:
                asked.add(wanted._replace(target=path), self._look, ("/",), no_deps=no_deps)
            if not found and not self._inputs.outputs.intersection(self._paths.places(wanted.target)):
                asked.add(wanted, self._look, (), no_deps=no_deps)
        elif wanted is None or "$" in text:
            asked.unpinned[f"{word} (known when the setup runs)"] = None
        else:
            asked.add(wanted, self._look, self._paths.bases, no_deps=no_deps)
            if wanted.kind == "vcs" and editable and "VIRTUAL_ENV" not in self._script.env:
                self._runs_here("a checkout that is installed in place lies in it")

    def _projects(self, paths: Sequence[str]) -> list[str]:
        """Of folders that a relative word may mean, those that something can be installed from; files stay."""
        look = self._look
        return [
            path
            for path in paths
            if look.kind(path) == "file" or any(look.kind(f"{path}/{name}") for name in _BUILD_FILES)
        ]

    def _other(self, program: str, words: Sequence[str]) -> None:
        """Any other program: its words are candidates; what it fetches is open; what it writes is not known."""
        self._fetched(program, words)
        called = next((word for word in words[:2] if posixpath.basename(word) == "setup.py"), "")
        for path in self._paths.existing(called) if called else ():
            self._wanted(posixpath.dirname(path), editable="develop" in words, no_deps=False)
        marker = programs.PROJECTS.get(program)
        if marker is not None:
            named = [
                path
                for word in option_values(words, ("-C", "-S", "--directory", "--project"))
                for path in self._paths.existing(word)
            ]
            for base in named or self._paths.bases:
                if self._look.kind(f"{base}/{marker}") == "file":
                    self._inputs.folders[base] = None
        for index, word in enumerate(words):
            for part in dict.fromkeys((word, word.partition("=")[2])):
                if part not in ("", ".", "./", ".."):
                    self.candidate(part, folders=index > 0 and program not in programs.NAMES_FOLDERS)
        # `python setup.py` and the like is told by its program; its project is in the key.
        if not called and (why := programs.writes_here(program, words, self._paths.is_absolute)):
            self._runs_here(why)

    def _fetched(self, program: str, words: Sequence[str]) -> None:
        """Things that come in whatever version there is."""
        asked = self._inputs.requirements
        if packages := programs.open_packages(program, words):
            asked.unpinned[packages[:80]] = None
        if program == "git" and "clone" in words:
            self._clone(words[words.index("clone") + 1 :])
        elif program in ("curl", "wget", "aria2c"):
            for word in words[1:]:
                text = self._paths.expand(word)
                if text.startswith(("http://", "https://", "ftp://")):
                    asked.unpinned[f"download of {without_credentials(text)[:80]}"] = None

    def _clone(self, words: Sequence[str]) -> None:
        branch = next(option_values(words, ("-b", "--branch")), "")
        for word in words:
            text = self._paths.expand(word)
            local = [path for path in self._paths.existing(text) if self._look.kind(path) == "folder"]
            if word != branch and (local or "://" in text or re.match(r"[\w.-]+@[\w.-]+:", text)):
                address = f"git+file://{local[0]}" if local else f"git+{without_credentials(text)}"
                wanted = requirement.Requirement("vcs", "", address, self._paths.expand(branch))
                self._inputs.requirements.repositories[address, wanted.reference] = wanted
                return
