"""What is known of the programs that setup scripts call: which files they write, whether the folder matters in which
they run, and which of them bring whatever version there is.

Decides and touches nothing; called by `script`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence

from bootseer.env.keys.installs import option_values
from bootseer.env.keys.shell import Command

_WRITERS = frozenset(("mkdir", "touch", "tee", "mktemp", "truncate"))
_CHANGERS = frozenset(("rm", "rmdir", "chmod", "chown", "chgrp"))
_COPIERS = frozenset(("cp", "mv", "ln", "install", "rsync"))
_ENVIRONMENTS = frozenset(("venv", "virtualenv"))
_NEUTRAL = frozenset(
    """
    set export unset echo printf true false : test [ [[ ]] return exit trap shift local declare readonly typeset ulimit
    umask sleep wait date which command type hash alias cat ls grep egrep awk head tail cut sort tr wc env pwd dirname
    basename readlink realpath nproc getent uname id whoami apt-get apt apt-cache apt-key add-apt-repository dpkg-query
    dpkg ldconfig locale-gen update-alternatives update-ca-certificates yum dnf microdnf apk conda mamba micromamba
    nvidia-smi shopt df du free ps kill pkill hostname sha256sum md5sum sysctl modprobe mount useradd usermod groupadd
    source . setup.py
    """.split()  # noqa: SIM905 - a list of this length reads better as text
)
NAMES_FOLDERS = (
    frozenset(("cd", "pushd", "popd", "ls", "test", "[", "[[", "du", "df", "find", "mount", "umount", "echo", "printf"))
    | frozenset(("git", "export", "cat"))
    | _WRITERS
    | _CHANGERS
    | _ENVIRONMENTS
)
"""They name folders without reading what is in them."""
PROJECTS = {
    "make": "Makefile", "cmake": "CMakeLists.txt", "ninja": "build.ninja", "meson": "meson.build",
    "uv": "pyproject.toml", "poetry": "pyproject.toml", "pdm": "pyproject.toml", "hatch": "pyproject.toml",
    "pixi": "pixi.toml", "go": "go.mod",
    "npm": "package.json", "yarn": "package.json", "pnpm": "package.json", "cargo": "Cargo.toml",
}  # fmt: skip
"""Programs that work on a whole project, and the file by which it is known."""
_PACKAGES = {
    "apt-get": "apt-get", "apt": "apt-get", "yum": "yum", "dnf": "yum", "microdnf": "yum", "apk": "apk", "gem": "gem",
    "conda": "conda", "mamba": "conda", "micromamba": "conda", "npm": "npm", "yarn": "npm", "pnpm": "npm",
    "cargo": "cargo", "go": "go",
}  # fmt: skip
_BRINGS = frozenset(("install", "add", "create", "upgrade", "dist-upgrade", "full-upgrade", "ci", "i"))
_DOWNLOADERS = frozenset(("curl", "wget"))
_MODE_OR_OWNER = re.compile(r"[0-7]{3,4}|[\w.-]*:[\w.-]*|[ugoa]*[+=-]\w+")


def outputs(command: Command) -> list[str]:
    """Words for what the command writes."""
    words = command.words
    program, rest = command.program, _plain(words[1:])
    made = list(command.outputs)
    if program in _WRITERS:
        made += rest
    elif program in _COPIERS and len(rest) > 1:
        made.append(rest[-1])
    elif program in _ENVIRONMENTS or (program != "cd" and "venv" in words[1:3]):
        made += [word for word in rest if word not in ("venv", "virtualenv")][-1:]
    elif program == "git" and "clone" in words:
        made += _checkout(_plain(words[words.index("clone") + 1 :]))
    elif (program == "wget" and not any(word.startswith(("-O", "--output-document")) for word in words)) or (
        program == "curl" and any(re.fullmatch(r"-\w*O|--remote-name", word) for word in words)
    ):
        made += [posixpath.basename(word.partition("?")[0]) for word in rest if "://" in word]
    if program in _DOWNLOADERS:
        made += option_values(words, ("-o", "--output", "--output-document"))
        made += option_values(words, ("-O",)) if program == "wget" else ()
    elif program in ("tar", "unzip", "gcc", "g++", "cc", "nvcc"):
        made += option_values(words, ("-C", "--directory", "-d", "-o"))
    return [word for word in made if word and not word.startswith(("/dev/", "-"))]


def _checkout(names: Sequence[str]) -> list[str]:
    """The folder that `git clone` makes."""
    for index, word in enumerate(names):
        if "://" in word or "/" in word or ":" in word:
            return list(names[index + 1 : index + 2]) or [posixpath.basename(word.rstrip("/")).removesuffix(".git")]
    return []


def open_packages(program: str, words: Sequence[str]) -> str:
    """Packages that a package manager brings in whatever version it finds; empty for none."""
    rest = _plain(words[1:])
    if program not in _PACKAGES or not rest or rest[0] not in _BRINGS:
        return ""
    names = [word for word in rest[1:] if "=" not in word and "/" not in word]
    return f"{_PACKAGES[program]} {' '.join(names)}".strip() if names or len(rest) == 1 else ""


def writes_here(program: str, words: Sequence[str], is_absolute: Callable[[str], bool]) -> str:
    """Why the folder in which the command runs may matter, in a few words; empty when it does not."""
    rest = _plain(words[1:])
    if program in _NEUTRAL or program in _DOWNLOADERS:  # where they write is told by `outputs`
        return ""
    if program in _WRITERS or program in _CHANGERS or program in _ENVIRONMENTS:
        written = [word for word in rest if not is_absolute(word) and not _MODE_OR_OWNER.fullmatch(word)]
    elif program in _COPIERS:
        written = [word for word in rest[-1:] if not is_absolute(word)]
    elif (program == "git" and rest[:1] in (["config"], ["clone"], ["lfs"])) or "--version" in words:
        written = []
    else:
        return f"`{program}` may write to it"
    return f"`{program} {written[0]}` writes to it" if written else ""


def _plain(words: Sequence[str]) -> list[str]:
    return [word for word in words if not word.startswith("-")]
