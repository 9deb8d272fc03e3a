"""Programs that setup scripts call: which files they read and write, whether their working folder matters, and which
install unpinned versions.

`pip install` and `uv pip install` are parsed completely. Does no I/O; words are taken as written in the script.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from bootseer.env.keys.shell import Command

CONDA = ("conda", "mamba", "micromamba")
_WRAPPERS = frozenset(
    "sudo exec env nice ionice time nohup timeout retry stdbuf setsid builtin command xargs flock".split()  # noqa: SIM905
)
_TAKE_VALUE = {
    "sudo": "ugpChTUDR", "env": "uC", "exec": "a", "nice": "n", "ionice": "cnp", "timeout": "ks", "xargs": "nIPdLsEa",
    "flock": "wE", "stdbuf": "ioe", "time": "fo", **dict.fromkeys(CONDA, "np"),
}  # fmt: skip
_LONG_TAKE_VALUE = frozenset(
    "--user --group --chdir --unset --adjustment --kill-after --signal --timeout --name --prefix --cwd".split()  # noqa: SIM905
)
"""Options of wrappers whose value is the next word."""
_BEFORE_PROGRAM = re.compile(r"-.*|[A-Za-z_][A-Za-z0-9_]*\+?=.*|[\d.]+[smh]?", re.DOTALL)


def is_wrapper(words: Sequence[str]) -> bool:
    """Whether the command runs the program that its words name."""
    program = posixpath.basename(words[0]) if words else ""
    if program in CONDA:
        return words[1:2] == ["run"]
    return program in _WRAPPERS and words[1:2] not in (["-v"], ["-V"])  # `command -v` tells where a program is


def unwrapped(words: list[str]) -> tuple[list[str], list[str]]:
    """`sudo -E -u me env A=1 pip ...` without the words before the program, and the values of options among these."""
    program = posixpath.basename(words[0])
    taking = _TAKE_VALUE.get(program)
    rest, values = words[2 if program in CONDA else 1 :], []
    while rest and _BEFORE_PROGRAM.fullmatch(rest[0]):
        option, *rest = rest
        if option in _LONG_TAKE_VALUE or (taking and re.fullmatch(rf"-[^-{taking}]*[{taking}]", option)):
            values += rest[:1]
            rest = rest[1:]
    if program == "flock":  # a file, then a program or -c with a script
        values += rest[:1]
        rest = ["sh", *rest[1:]] if rest[1:2] == ["-c"] else rest[1:]
    return rest, values


PIP_ACTIONS = ("install", "download", "wheel", "sync", "compile")
"""Of pip and `uv pip`: those that install, or write what can be installed."""
PIP_PLACES = (
    "-t", "--target", "--prefix", "--root", "--src", "-d", "--dest", "-w", "--wheel-dir", "-o", "--output-file",
)  # fmt: skip
"""Options for folders and files that these write."""


def option_values(words: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Values of these options, as `--option value` and `--option=value`."""
    for index, word in enumerate(words):
        if word in names:
            yield from words[index + 1 : index + 2]
        else:
            option, equals, value = word.partition("=")
            if equals and option in names:
                yield value


_WRITERS = frozenset(("mkdir", "touch", "tee", "mktemp", "truncate"))
REMOVERS = frozenset(("rm", "rmdir"))
"""Programs that read nothing of what they name: `rm -rf /tmp/* /var/lib/apt/lists/*`."""
_CHANGERS = REMOVERS | {"chmod", "chown", "chgrp"}
TAKE_TEXT = frozenset(("echo", "printf", "expr", "find", "test", "[", "[["))
"""Programs to which `*` is most likely given in quotes: a line of asterisks."""
COPIERS = frozenset(("cp", "mv", "ln", "install", "rsync"))
_ENVIRONMENTS = frozenset(("venv", "virtualenv"))
_NEUTRAL = frozenset(
    """
    for select case break continue set export unset echo printf true false : test [ [[ ]] return exit trap shift local
    declare readonly typeset ulimit umask sleep wait date which command type hash alias cat ls grep egrep awk head tail
    cut sort tr wc env printenv pwd popd dirname basename readlink realpath seq expr nproc getent uname id whoami
    apt-get apt apt-cache apt-key add-apt-repository dpkg-query dpkg ldconfig locale-gen update-alternatives
    update-ca-certificates yum dnf microdnf apk conda mamba micromamba nvidia-smi shopt df du free ps kill pkill
    hostname sha256sum md5sum sysctl modprobe mount useradd usermod groupadd source . setup.py read mapfile let
    systemctl service
    """.split()  # noqa: SIM905 - a list of this length reads better as text
)
NAMES_FOLDERS = (
    frozenset(("cd", "pushd", "popd", "ls", "test", "[", "[[", "du", "df", "mount", "umount", "echo", "printf"))
    | frozenset(("git", "export", "cat"))
    | _WRITERS
    | _CHANGERS
    | _ENVIRONMENTS
)
"""Programs that name folders without reading their content."""
PROJECTS = {
    "make": "Makefile", "cmake": "CMakeLists.txt", "ninja": "build.ninja", "meson": "meson.build",
    "uv": "pyproject.toml", "poetry": "pyproject.toml", "pdm": "pyproject.toml", "hatch": "pyproject.toml",
    "pixi": "pixi.toml", "go": "go.mod", "pipenv": "Pipfile", "just": "justfile", "nox": "noxfile.py",
    "npm": "package.json", "yarn": "package.json", "pnpm": "package.json", "cargo": "Cargo.toml",
}  # fmt: skip
"""Programs that work on a project, and the file that marks one."""
_PACKAGES = {
    "apt-get": "apt-get", "apt": "apt-get", "yum": "yum", "dnf": "yum", "microdnf": "yum", "apk": "apk", "gem": "gem",
    "conda": "conda", "mamba": "conda", "micromamba": "conda", "npm": "npm", "yarn": "npm", "pnpm": "npm",
    "cargo": "cargo", "go": "go", "uv": "uv", "pipx": "pipx", "poetry": "poetry", "pdm": "pdm", "pixi": "pixi",
}  # fmt: skip
LOCKS = {"uv": "uv.lock", "poetry": "poetry.lock", "pdm": "pdm.lock", "pixi": "pixi.lock", "pipenv": "Pipfile.lock"}
"""Programs that install a project as its lock file says."""
_BRINGS = frozenset(("install", "add", "create", "upgrade", "dist-upgrade", "full-upgrade", "ci", "i"))
_DOWNLOADERS = frozenset(("curl", "wget"))
DOWNLOADERS = _DOWNLOADERS | {"aria2c", "aws", "azcopy", "gcloud", "gsutil", "hadoop", "hdfs", "rclone", "s5cmd"}
GIT_FETCHES = frozenset(("fetch", "pull", "submodule"))
_WRITE_ONLY_OUTPUTS = _NEUTRAL | _DOWNLOADERS | _WRITERS | COPIERS | _ENVIRONMENTS
_MODE_OR_OWNER = re.compile(r"[0-7]{3,4}|[\w.-]*:[\w.-]*|[ugoa]*[+=-]\w+")


def outputs(command: Command) -> list[str]:
    """Words for paths that the command writes."""
    words = command.words
    program, rest = command.program, _plain(words[1:])
    made = list(command.outputs)
    if program in _WRITERS:
        made += rest
    elif program in COPIERS and rest:
        made.append(rest[-1] if len(rest) > 1 else ".")
    elif program in _ENVIRONMENTS:
        made += rest or [".venv"]
    elif program in CONDA:
        made += option_values(words, ("-p", "--prefix"))
    elif program == "git" and "clone" in words:
        made += _checkout(_plain(words[words.index("clone") + 1 :]))
    elif (program == "wget" and not any(word.startswith(("-O", "--output-document")) for word in words)) or (
        program == "curl" and any(re.fullmatch(r"-\w*O|--remote-name", word) for word in words)
    ):
        made += [posixpath.basename(word.partition("?")[0]) for word in rest if "://" in word]
    if program in _DOWNLOADERS:
        short = r"-\w*o" if program == "curl" else r"-\w*[oO]"
        made += [following for word, following in pairwise(words) if re.fullmatch(short, word)]
        made += option_values(words, ("--output", "--output-document"))
    elif program in ("tar", "unzip", "gcc", "g++", "cc", "nvcc"):
        made += option_values(words, ("-C", "--directory", "-d", "-o"))
    return [word for word in made if word and not word.startswith(("/dev/", "-"))]


def _checkout(names: Sequence[str]) -> list[str]:
    for index, word in enumerate(names):
        if "://" in word or "/" in word or ":" in word:
            return list(names[index + 1 : index + 2]) or [posixpath.basename(word.rstrip("/")).removesuffix(".git")]
    return []


def unpinned_packages(program: str, words: Sequence[str]) -> str:
    """Packages that a package manager installs in any version, behind its name, which alone stands for those of a
    project; empty if none."""
    if "download" in words[1:4]:  # a model of `hf`, `spacy`, `kaggle datasets`
        return f"{program} download"
    rest = _plain(words[1:])
    if program == "uv" and rest[:1] == ["tool"]:
        rest = rest[1:]
    elif program in LOCKS and rest[:1] in (["install"], ["sync"], ["run"]):
        return program
    if program not in _PACKAGES or not rest or rest[0] not in _BRINGS:
        return ""
    names = [word for word in rest[1:] if "=" not in word and "/" not in word]
    return f"{_PACKAGES[program]} {' '.join(names)}".strip() if names or len(rest) == 1 else ""


def cwd_dependence(program: str, words: Sequence[str], is_absolute: Callable[[str], bool]) -> str:
    """A short reason why the working folder of the command may matter besides its `outputs`; empty if it does not."""
    rest = _plain(words[1:])
    if program in _CHANGERS:
        changed = [word for word in rest if not is_absolute(word) and not _MODE_OR_OWNER.fullmatch(word)]
        return f"`{program} {changed[0]}` writes to it" if changed else ""
    by_git = program == "git" and (rest[:1] in (["config"], ["clone"]) or rest[:2] == ["lfs", "install"])
    if program in _WRITE_ONLY_OUTPUTS or by_git or "--version" in words or "]]" in words:  # `[[ a && b ]]` is two
        return ""
    return f"`{program}` may write to it"


def _plain(words: Sequence[str]) -> list[str]:
    return [word for word in words if not word.startswith("-")]
