"""Which of the files that a setup read are in nobody's account.

A file is accounted for when the request key holds its content, when the base covers it (the image, or the host's
fingerprint), when the setup made or changed it, or when its content does not decide what gets installed. Each one that
is left makes a snapshot untrusted: it could change without the key noticing. The list of what never counts is kept
short of surprises: what a plain `pip install -r` or `uv pip install -r` opens must not be on the answer.

Decides and touches nothing. Who calls: whoever runs a setup in a capture, with what `watch` saw.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Sequence

from bootseer.env.capturing.exclude import RULES

SYSTEM = (
    "/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/opt", "/sbin", "/snap", "/usr",
    "/var/cache", "/var/lib", "/var/log", "/var/spool",
)  # fmt: skip
"""The base: packages of the system and what they configure."""
PASSING = ("/dev", "/proc", "/run", "/sys", "/tmp", "/var/run", "/var/tmp")  # noqa: S108 - nothing is written
"""State of the running system, and scratch space."""
AT_HOME = (
    # Programs and packages of the user's own: what /usr/local is for the machine. The packages are in the key.
    ".local/bin", ".local/lib", ".local/share/mise", ".local/share/uv", ".asdf", ".cargo", ".nvm", ".pyenv", ".rustup",
    # Caches, whose entries are named by what they hold.
    ".cache", ".ccache", ".conda/pkgs", ".local/share/pnpm/store", ".m2", ".npm", ".nv",
    # Settings of installers: in the key by what they say.
    ".conda/environments.txt", ".condarc", ".config/pip", ".config/uv", ".npmrc", ".pip", ".pydistutils.cfg", ".pypirc",
    # Who somebody is, not what is installed; credentials besides.
    ".aws", ".config/git", ".config/gh", ".gitconfig", ".ssh",
    # How a terminal looks.
    ".bash_history", ".bash_login", ".bash_logout", ".bash_profile", ".bashrc", ".config/fish", ".editrc", ".inputrc",
    ".profile", ".python_history", ".terminfo", ".vimrc", ".wget-hsts", ".wgetrc", ".curlrc", ".zlogin", ".zprofile",
    ".zshenv", ".zshrc",
)  # fmt: skip
"""Below a home folder."""
CREDENTIALS_AT_HOME = tuple(path[2:] for rule in RULES if rule.secret for path in rule.paths if path.startswith("~/"))
_HOME = re.compile(r"/home/[^/]+(?=/)")


def unaccounted(
    reads: Collection[str],
    accounted: Sequence[str],
    captured: Collection[str],
    base: Sequence[str] = (),
    homes: Sequence[str] = (),
    inside: Sequence[str] = (),
    *,
    host: bool = True,
) -> tuple[str, ...]:
    """The reads that nobody accounts for, sorted.

    `accounted` are the files and folders whose content is in the key; `captured` the paths that the setup changed: what
    was there before is in the manifest, and a restore looks at it; `base` the folders that the base covers besides the
    system's (prefixes of Python, BootSeer's own code); `homes` folders of users besides /root and those in /home;
    `inside` folders that are captured although they lie in scratch space. Not `host`: the setup ran in an image, and
    these are files of this machine that were mounted into it; the base is no part of it. All paths are absolute,
    without symbolic links.
    """
    covered = {*(SYSTEM if host else ()), *(posixpath.normpath(path) for path in (*accounted, *base))}
    homes = [*homes, "/root", *{found[0] for path in reads if (found := _HOME.match(path)) is not None}]
    at_home = (*(AT_HOME if host else ()), *CREDENTIALS_AT_HOME)
    covered.update(posixpath.join(home, name) for home in homes for name in at_home)
    # A base of "/" would cover everything.
    covered.discard("/")
    made = captured if isinstance(captured, (set, frozenset, dict)) else frozenset(captured)
    return tuple(
        sorted(
            path
            for path in reads
            if path not in made
            and not _is_covered(path, covered)
            and (not host or _below(path, inside) or not _below(path, PASSING))
        )
    )


def _is_covered(path: str, covered: Collection[str]) -> bool:
    if _below(path, covered):
        return True
    # Bytecode follows from its source, which the interpreter looks at.
    folder, name = posixpath.split(path)
    above, cache = posixpath.split(folder)
    if cache == "__pycache__" and name.endswith(".pyc"):
        return posixpath.join(above, f"{name.partition('.')[0]}.py") in covered
    return False


def _below(path: str, covered: Collection[str]) -> bool:
    """Whether a path is one of these or lies below one."""
    while path not in covered:
        path, _, name = path.rpartition("/")
        if not name or not path:
            return False
    return True
