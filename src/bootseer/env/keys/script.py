"""What a setup depends on according to its texts: scripts and requirement files that its script runs, files and folders
that it names, variables that it reads, and what it fetches without a version.

Scripts run by scripts and included requirement files are followed. In doubt an input is added: one too many costs a
start that misses its snapshot, a missing one would bring an outdated environment. Inputs that no text names (a
program's own configuration) are found by watching the setup's reads.

Does no I/O itself: `NodeFiles` does.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec import Struct, field

from bootseer.env.changes import lies_in
from bootseer.env.keys import programs, requirement, shell
from bootseer.env.keys.programs import option_values
from bootseer.env.keys.requirements import (
    EDITABLE,
    FILES,
    FIND_LINKS,
    Requirements,
    is_requirements_name,
    pip_options,
)
from bootseer.env.keys.shell import Command, Paths
from bootseer.errors import BootseerError
from bootseer.store.addresses import without_credentials

if TYPE_CHECKING:
    from bootseer.env.keys.files import NodeFiles

_SYSTEM = (
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run", "/sbin", "/sys",
    "/tmp", "/usr", "/var",  # noqa: S108 - nothing is written there
)  # fmt: skip
"""Folders of the base, and temporary ones: naming one does not make it an input. A file there is an input unless a
package owns it."""
_PACKAGED = (
    "/dev", "/proc", "/sys", "/bin", "/sbin", "/lib", "/lib64", "/usr/bin", "/usr/lib", "/usr/lib64", "/usr/sbin",
)  # fmt: skip
"""Folders whose files a package most likely owns."""

_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_CHANGE_FOLDER = ("cd", "pushd")
_PIP = re.compile(r"pip[\d.]*")
_VARIABLE = re.compile(r"\$(\{[^}]*\}|\w+)")
_MAX_WRAPPERS = 16
_WORD_OF_TEXT = re.compile(r"[^\s'\"()\[\],;=]{1,500}")
_INSTALLS = re.compile(r"\b(pip|uv|conda|mamba|apt|apt-get|npm)\b.{0,40}\b(install|sync)\b")
_BUILD_FILES = ("pyproject.toml", "setup.py", "setup.cfg")


class Inputs(Struct):
    """Inputs found in scripts and requirement files, as absolute paths."""

    requirements: Requirements = field(default_factory=Requirements)
    requirement_files: dict[str, bool] = field(default_factory=dict)
    """Requirement files to read; True for constraint files."""
    files: dict[str, bool] = field(default_factory=dict)
    """Files; True if a shell runs it."""
    folders: dict[str, None] = field(default_factory=dict)
    environments: dict[str, None] = field(default_factory=dict)
    """Python environments that the setup uses or changes."""
    conda: dict[str, bool] = field(default_factory=dict)
    """Names of conda environments; False for those that the setup creates."""
    outputs: set[str] = field(default_factory=set)
    """Paths that the setup writes: what an earlier start left there is not an input."""
    variables: set[str] = field(default_factory=set)
    """Names of variables that it may read."""
    cwd_reason: str = ""
    """A short reason why the working folder matters; empty if it does not."""


class Reader:
    """Reads one script. Relative words are tried in each folder that the script may be in."""

    def __init__(self, text: str, path: str, cwd: str, env: Mapping[str, str], look: NodeFiles, inputs: Inputs) -> None:
        """`cwd` is where the script runs, `inputs` are added to."""
        self._text = text
        self._path = path
        self._env = env
        self._look = look
        self._inputs = inputs
        self._paths = Paths(cwd, posixpath.dirname(path), env, look)
        self._functions: set[str] = set()
        self._length = 0
        """Of the text that is being read: those within it are shorter, also if `eval` expands variables."""

    def read_shell(self) -> None:
        """Add the inputs of a shell script. Scripts that it runs are added, for the caller to read."""
        self._read(self._text)

    def read_program(self) -> None:
        """Add inputs of a program in another language: quoted words that are files."""
        for found in re.finditer(r"['\"]([^'\"\n]{1,500})['\"]", self._text):
            self._add_words((found[1], *found[1].split()))
        self._note_installations(self._text)
        self._note_variables()
        self._depends_on_cwd(f"{posixpath.basename(self._path)} may write to it")

    def _note_variables(self, overwritten: Set[str] = frozenset(), commented: Iterable[str] = ()) -> None:
        """Note each word that names a variable of the start, whether or not it is read, and in whatever way: `${!X}`, a
        quoted heredoc, `os.environ["X"]`. One that is not set has no component."""
        named = Counter(shell.NAME.findall(self._text)) - Counter(commented)
        self._inputs.variables |= self._env.keys() & named.keys() - overwritten
        if not named.keys().isdisjoint(("hostname", "gethostname")):
            self._inputs.variables.add("HOSTNAME")  # that has the same value

    def _read(self, text: str) -> None:
        before, self._length = self._length, len(text)
        parsed = shell.parse(text)
        if before:
            parsed.overwritten.clear()  # text within a script may be in a branch
        else:
            self._note_variables(parsed.overwritten, parsed.commented)
        if not parsed.complete:
            self._inputs.requirements.problems.append(f"{self._path}: nested too deeply to be understood")
        self._paths.learn(parsed.assignments, parsed.overwritten)
        self._functions |= parsed.functions
        commands = [self._unwrapped(command) for command in parsed.commands]
        # Outputs first: a file may be named before the command that writes it.
        for command in commands:
            if command.program in _CHANGE_FOLDER:
                self._paths.change_folder(" ".join(command.words[1:2]))
            for word in programs.outputs(command):
                if word not in command.inputs or not is_requirements_name(word):  # which is read as well
                    self._inputs.outputs.update(self._paths.certain(word))
                if not self._paths.is_absolute(word):
                    self._depends_on_cwd(f"`{command.program or 'a redirection'}` writes to it")
        for command in commands:
            self._command(command)
        for inner in parsed.texts:
            self._add_words(_WORD_OF_TEXT.findall(inner))
            self._note_installations(inner)
        self._length = before

    def _unwrapped(self, command: Command) -> Command:
        """What wrappers such as `sudo`, and `python -m` and `uv`, run, also if variables hold them."""
        words, inputs = list(command.words), [*command.inputs]
        for _ in range(_MAX_WRAPPERS):
            if words and _VARIABLE.fullmatch(words[0]):
                inputs.append(words[0])  # its value may be a path with blanks
                words = [*self._paths.expand(words[0]).split(), *words[1:]]
            self._note_conda(words)
            if not programs.is_wrapper(words):
                break
            words, values = programs.unwrapped(words)
            inputs += values
        program = posixpath.basename(words[0]) if words else ""
        if (_PYTHON.fullmatch(program) or "$" in program) and "-m" in words[1:4]:
            inputs.append(words[0])
            words = words[words.index("-m") + 1 :]
        elif program == "uv" and words[1:2] in (["pip"], ["venv"]):
            inputs.append(".venv")  # uv installs into it if there is one
            words = words[1:]
        return Command(tuple(words), command.outputs, tuple(inputs))

    def _note_conda(self, words: Sequence[str]) -> None:
        """Note the conda environments that are named: `conda activate x`, `source activate x`, `conda install -n x`."""
        names = [name for word, name in pairwise(words) if posixpath.basename(word) == "activate"]
        if words and posixpath.basename(words[0]) in programs.CONDA:
            names += option_values(words, ("-n", "--name"))
            for path in self._paths.existing(words[0]) if "/" in words[0] else ():
                self._environment(path)
        for name in (text for word in names for text in self._paths.meanings(word)):
            self._inputs.conda[name] = "create" not in words and self._inputs.conda.get(name, True)

    def _note_installations(self, text: str) -> None:
        """Note that a text that no shell reads here may install something in any version."""
        if _INSTALLS.search(text):
            self._inputs.requirements.unpinned[f"what {posixpath.basename(self._path)} installs"] = None

    # -- words ---------------------------------------------------------------------------------------------------------

    def _add_words(self, words: Iterable[str]) -> None:
        """Add words of a text that no shell reads here, in which `*` does not mean all files (`Host *`)."""
        for word in dict.fromkeys(words):
            if word.strip(shell.ANY_NAME):
                self._add_candidate(word, folders=False)

    def _add_candidate(self, word: str, *, folders: bool, script: bool = False) -> None:
        """Add a word that may name an input. `script`: a shell reads it."""
        inputs = self._inputs
        for path in self._paths.existing(word):
            if path in inputs.outputs or self._environment(path):
                continue
            kind = self._look.kind(path)
            inside = any(path.startswith(f"{base}/") for base in self._paths.bases if base != "/")
            if kind == "file" and (inside or not lies_in(path, _PACKAGED)):
                inputs.files[path] = inputs.files.get(path, False) or script
                if is_requirements_name(path):
                    inputs.requirement_files.setdefault(path, False)
            elif kind == "folder" and folders and self._is_input_folder(path, inside):
                inputs.folders[path] = None

    def _is_input_folder(self, folder: str, inside: bool) -> bool:
        """Whether a named folder is an input: not one of the system, and not the whole home."""
        whole = ("/", self._paths.expand("~"), *self._paths.bases)
        return (inside or not lies_in(folder, _SYSTEM)) and folder not in whole

    def _environment(self, path: str) -> bool:
        """Note the Python environment that the path lies in, except the base's own."""
        folder = path
        for _ in range(8):
            if self._look.kind(f"{folder}/pyvenv.cfg") == "file" or self._look.kind(f"{folder}/conda-meta") == "folder":
                self._inputs.environments[folder] = None
                return True
            folder = posixpath.dirname(folder)
            if folder == "/":
                break
        return False

    def _depends_on_cwd(self, reason: str) -> None:
        self._inputs.cwd_reason = self._inputs.cwd_reason or reason

    # -- commands ------------------------------------------------------------------------------------------------------

    def _command(self, command: Command) -> None:
        for word in command.inputs:
            self._add_candidate(word, folders=False)
        words, program = command.words, command.program
        if _PIP.fullmatch(program) or ("$" in program and words[1:2] == ("install",)):  # `$(which pip) install`
            self._add_candidate(words[0], folders=False)
            self._pip(words)
        elif program in _CHANGE_FOLDER:
            self._paths.change_folder(" ".join(words[1:2]))
        elif program in ("source", "."):
            self._add_candidate(words[1] if len(words) > 1 else "", folders=False, script=True)
        elif shell.SHELL.fullmatch(program):
            self._shell(words)
        elif words:
            self._other(program, words)

    def _shell(self, words: Sequence[str]) -> None:
        inner = "" if words[0] != "eval" else " ".join(words[1:])
        inner = inner or next((after for word, after in pairwise(words) if re.fullmatch(r"-\w*c", word)), "")
        if inner:
            if len(inner) < self._length:
                self._read(inner)
            return
        for word in words[1:]:
            self._add_candidate(word, folders=False, script=True)

    def _pip(self, words: Sequence[str]) -> None:
        variables = [word for word in words if _VARIABLE.fullmatch(word)]
        several = [text for word in variables for text in self._paths.meanings(word) if " " in text]
        options = [*pip_options([*words[1:], *" ".join(several).split()])]
        action, *rest = [value for option, value in options if not option] or [""]
        if action not in programs.PIP_ACTIONS:
            return
        no_deps = ("--no-deps", "") in options
        for option, value in options:
            self._pip_option(action, option, value, no_deps=no_deps)
        for word in rest:
            if action in ("sync", "compile"):
                self._requirement_file(word, False)
            else:
                self._wanted_by_pip(word, editable=False, no_deps=no_deps)
        given = {option for option, _ in options}
        if not rest and given.isdisjoint((*FILES, *EDITABLE, "--group")):  # `xargs pip install`
            self._inputs.requirements.unpinned["pip install (known when the setup runs)"] = None
        if action in ("download", "wheel") and given.isdisjoint(programs.PIP_PLACES):
            self._depends_on_cwd(f"`pip {action}` writes to it")

    def _pip_option(self, action: str, option: str, value: str, *, no_deps: bool) -> None:
        if option in FILES:
            self._requirement_file(value, FILES[option])
        elif option == "--group":  # [FILE:]NAME
            self._requirement_file(value.rpartition(":")[0] or "pyproject.toml", False)
        elif option in EDITABLE:
            self._wanted_by_pip(value, editable=True, no_deps=no_deps)
        elif option in FIND_LINKS:
            folders = (path for path in self._paths.existing(value) if self._look.kind(path) == "folder")
            self._inputs.requirements.find_links += folders
        elif option in programs.PIP_PLACES:
            if not self._paths.is_absolute(value):
                self._depends_on_cwd(f"`pip {action}` writes to {value} in it")
        elif option:  # its value may name a file
            self._add_candidate(value, folders=False)

    def _wanted_by_pip(self, word: str, *, editable: bool, no_deps: bool) -> None:
        for text in self._paths.meanings(word):
            self._wanted(text, editable=editable, no_deps=no_deps)

    def _requirement_file(self, word: str, constraint: bool) -> None:
        text, outputs = self._paths.expand(word), self._inputs.outputs
        found = [path for path in self._paths.existing(word) if path not in outputs]
        if "://" in text:
            self._inputs.requirements.unpinned[f"the file {without_credentials(text)}"] = None
        elif not found:
            self._inputs.requirements.unpinned[f"{word} (known when the setup runs)"] = None
        for path in found:
            if self._look.kind(path) == "file":
                self._inputs.requirement_files[path] = constraint

    def _wanted(self, text: str, *, editable: bool, no_deps: bool) -> None:
        asked = self._inputs.requirements
        wanted = requirement.parse(text, editable=editable)
        if wanted is not None and wanted.kind == "path":
            found = self._paths.existing(wanted.target)
            found = [path for path in found if path not in self._inputs.outputs or self._look.kind(path) == "folder"]
            # Of the folders that a relative word may mean, those that something can be installed from.
            look = self._look
            projects = [
                path
                for path in found
                if look.kind(path) == "file" or any(look.kind(f"{path}/{name}") for name in _BUILD_FILES)
            ]
            for path in projects or found:
                asked.add(wanted._replace(target=path), self._look, ("/",), no_deps=no_deps)
            if not found and not self._inputs.outputs.intersection(self._paths.candidates(wanted.target)):
                asked.add(wanted, self._look, (), no_deps=no_deps)
        elif wanted is None or "$" in text:
            asked.unpinned[f"{without_credentials(text)} (known when the setup runs)"] = None
        else:
            self._add_candidate(text, folders=False)  # the value of an option that is not known here
            asked.add(wanted, self._look, self._paths.bases, no_deps=no_deps)
            if wanted.kind == "vcs" and editable and "VIRTUAL_ENV" not in self._env:
                self._depends_on_cwd("a checkout that is installed in place lies in it")

    def _other(self, program: str, words: Sequence[str]) -> None:
        """Any other program: its words are candidates, its downloads are unpinned, its outputs are unknown."""
        self._fetched(program, words)
        called = next((word for word in words[:2] if posixpath.basename(word) == "setup.py"), "")
        for path in self._paths.existing(called) if called else ():
            self._wanted(posixpath.dirname(path), editable="develop" in words, no_deps=False)
        if program in programs.CONDA:
            for word in (word.rpartition("=")[2] for word in words if word.endswith((".yml", ".yaml"))):
                self._inputs.requirement_files.update(dict.fromkeys(self._paths.existing(word), False))
        self._project(program, words)
        for index, word in enumerate(words if program not in programs.REMOVERS else words[:1]):
            if program in programs.COPIERS and 0 < index < len(words) - 1:  # perhaps `cp -r . /opt/app`
                job_folders = (path for path in self._paths.certain(word) if path in self._paths.bases and path != "/")
                self._inputs.folders.update(dict.fromkeys(job_folders))
            for part in dict.fromkeys((word, word.partition("=")[2])):
                is_text = not part.strip(shell.ANY_NAME) and (part != word or program in programs.TAKE_TEXT)
                if part not in ("", ".", "./", "..") and not is_text:
                    self._add_candidate(part, folders=index > 0 and program not in programs.NAMES_FOLDERS)
        # `python setup.py` and the like are identified by their program; the project is in the key.
        if called or program in self._functions:
            return
        if reason := programs.cwd_dependence(program, words, self._paths.is_absolute):
            self._depends_on_cwd(reason)

    def _project(self, program: str, words: Sequence[str]) -> None:
        """A project that the program works on: its folder, or only the files that list packages."""
        marker, asked = programs.PROJECTS.get(program, ""), self._inputs.requirements
        for folder in self._project_folders(words, marker) if marker else ():
            if self._look.kind(f"{folder}/CMakeCache.txt") and not self._look.kind(f"{folder}/CMakeLists.txt"):
                continue  # of an earlier start's build, which would change with each
            if marker == "pyproject.toml":
                locked = self._project_folders(words, programs.LOCKS.get(program, ""))
                asked.add_project(folder, self._look, is_locked=folder in locked)
                if program == "uv" and not locked:
                    self._inputs.files |= dict.fromkeys(asked.add_workspace(folder, self._look), False)
            with contextlib.suppress(BootseerError):
                data = self._look.read(f"{folder}/{marker}")
                if marker == "pyproject.toml" and requirement.installs_packages_alone(words, data):
                    for name in (marker, f"{program}.lock", f"{program}.toml", ".python-version"):
                        self._add_candidate(f"{folder}/{name}", folders=False)
                    continue
            self._inputs.folders[folder] = None

    def _project_folders(self, words: Sequence[str], name: str) -> list[str]:
        """Folders that a program with these words may work on, of those that have a file of this name."""
        by_variable = ["${UV_PROJECT}"] if words[0].endswith("uv") else []
        options = (*option_values(words, ("-C", "-S", "--directory", "--project")), *by_variable)
        named = [path for word in options for path in self._paths.existing(word)]
        return [base for base in named or self._paths.bases if self._look.kind(f"{base}/{name}") == "file"]

    def _fetched(self, program: str, words: Sequence[str]) -> None:
        """Downloads without a fixed version."""
        asked = self._inputs.requirements
        packages = programs.unpinned_packages(program, words)
        lock = programs.LOCKS.get(program)
        if packages and not (packages == program and lock is not None and self._project_folders(words, lock)):
            asked.unpinned[packages[:80]] = None
        if program == "git" and "clone" in words:
            self._clone(words[words.index("clone") + 1 :])
        elif program == "git" and (verb := next((word for word in words if word in programs.GIT_FETCHES), "")):
            asked.unpinned[f"git {verb}"] = None
        elif program in programs.DOWNLOADERS:
            for word in words[1:]:
                text = self._paths.expand(word)
                if "://" in text:
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


_MAX_SCRIPTS = 500
_SHELL_LINE = re.compile(rb"#!\s*\S*?(?:/env\s+(?:-\S+\s+)*)?\S*?(?:ba|da|z|k|a)?sh\b")
_PROGRAM_LINE = re.compile(rb"#!.*(python|perl|ruby|node)")
# Variables that give files to pip and uv; True for constraint files.
_FILE_VARIABLES = {"PIP_REQUIREMENT": False} | dict.fromkeys(
    ("PIP_CONSTRAINT", "UV_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE", "UV_BUILD_CONSTRAINT", "PIP_BUILD_CONSTRAINT"),
    True,
)


def gather(
    setup: str | None,
    requirements: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    files: NodeFiles,
    configured: Iterable[tuple[str, bool]] = (),
) -> Inputs:
    """The inputs of a script and of files. Unreadable files become problems, never exceptions. `configured` are the
    requirement files of pip's configuration (`key_settings.Configuration`)."""
    inputs = Inputs(Requirements(env=env))
    for path in requirements:
        inputs.requirement_files[whole := posixpath.normpath(posixpath.join(cwd, path))] = False
        inputs.requirements.given.add(whole)
    named = [(word, constraint) for name, constraint in _FILE_VARIABLES.items() for word in env.get(name, "").split()]
    for word, constraint in (*named, *configured):
        place = word if "://" in word else posixpath.normpath(posixpath.join(cwd, word))
        inputs.requirement_files.setdefault(place, constraint)
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_SRC"):
        if env.get(name) and not env[name].startswith("/"):
            inputs.cwd_reason = f"{name} is relative to it"
    if setup is not None:
        path = posixpath.normpath(posixpath.join(cwd, setup))
        inputs.files[path] = _is_run_by_shell(path, files)
    read: set[str] = set()
    while waiting := [path for path in inputs.files if path not in read]:
        for path in waiting:
            read.add(path)
            if len(read) > _MAX_SCRIPTS:
                inputs.requirements.problems.append(f"{setup}: names more than {_MAX_SCRIPTS} files; give it a folder")
                inputs.files = {name: inputs.files[name] for name in read}  # there is no key: no others are hashed
                return inputs
            _follow(path, cwd, env, files, inputs)
    _add_conda_environments(inputs, env, files)
    inputs.requirements.add_files(inputs.requirement_files.items(), files, cwd)
    inputs.requirements.close()
    inputs.variables |= inputs.requirements.variables
    if inputs.requirements.uses_cwd and "VIRTUAL_ENV" not in env:
        inputs.cwd_reason = inputs.cwd_reason or "a checkout that is installed in place lies in it"
    return inputs


def _add_conda_environments(inputs: Inputs, env: Mapping[str, str], files: NodeFiles) -> None:
    """Add the conda environments that the setup uses by name, wherever conda may have them."""
    home, search = env.get("HOME", ""), [*env.get("PATH", "").split(":"), posixpath.dirname(env.get("CONDA_EXE", ""))]
    roots = [*inputs.environments, *map(posixpath.dirname, search), env.get("MAMBA_ROOT_PREFIX", ""), f"{home}/.conda"]
    folders = [f"{root}/envs" for root in roots]
    folders += f"{env.get('CONDA_ENVS_PATH', '')}:{env.get('CONDA_ENVS_DIRS', '')}".split(":")
    for name in (name for name, is_used in inputs.conda.items() if is_used):
        for path in roots if name == "base" else [f"{folder}/{name}" for folder in folders]:
            if files.kind(f"{path}/conda-meta") == "folder":
                inputs.environments[path] = None


def _is_run_by_shell(path: str, files: NodeFiles) -> bool:
    """Whether a shell runs it: without execute permission whatever its first line says, with it if there is no `#!`."""
    try:
        return not files.may_execute(path) or not files.read(path).startswith((b"#!", b"\x7fELF"))
    except BootseerError:
        return False


def _follow(path: str, cwd: str, env: Mapping[str, str], files: NodeFiles, inputs: Inputs) -> None:
    """Read a named file that may name others."""
    if path in inputs.requirement_files:
        return
    try:
        head = files.read(path)
    except BootseerError:
        return  # too large or unreadable: the caller adds its digest if there is one
    if b"\0" in head[:8192] or b"# Generated by GNU Autoconf" in head[:1024]:  # long, about files beside it alone
        return
    reader = Reader(head.decode("utf-8", "replace"), path, cwd, env, files, inputs)
    is_bare = "." not in posixpath.basename(path) and files.may_execute(path) and not head.startswith(b"#!")
    if inputs.files[path] or is_bare:  # a shell runs it if it names no other program
        reader.read_shell()
    elif _PROGRAM_LINE.match(head) or path.endswith(".py"):
        reader.read_program()
    elif _SHELL_LINE.match(head) or path.endswith((".sh", ".bash")):
        reader.read_shell()
