"""What the files that a setup opened say about its snapshot: reads that nothing accounts for, and files left where no
capture keeps them.

*Reads.* A file is accounted for when the request key holds its content, when the base covers it (the image, or the
host's fingerprint), when the setup made or changed it, or when its content does not decide what gets installed. Each
one that is left makes a snapshot untrusted: it could change without the key noticing. The list of what never counts is
kept short of surprises: what a plain `pip install -r` or `uv pip install -r` opens must not be on the answer.

*Leftovers* in a scratch folder are one of three things: rubbish, which no later start can count on (a random name, a
log, the source of something that was installed from it); something that the job is known to use; or something that it
may use. The last two make a setup not snapshot-safe: a node that is restored would miss them.

Decides and touches nothing.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Sequence

from bootseer.env.capturing.exclude import RULES, Exclusions

SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - names, not files that we make
# No later start can find these again: their names are made by chance.
_RANDOM = re.compile(
    r"tmp\.[A-Za-z0-9]{6,}|tmp[a-z0-9_]{8}|\.tmp\w{6}|cc[A-Za-z0-9]{6}(\..*)?|[\w-]+\.(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{10}"
)
_OF_TOOLS = re.compile(
    r"(pip|npm|pymp|ssh|gpg|matplotlib|systemd-private)-.*|fileutl\.message\..*|go-build\d+|_MEI\w+|hsperfdata_.*"
    r"|uv-[0-9a-f]+\.lock|(node|v8)-compile-cache.*|\.X.*|sem\..*|torch_\d+_\d+.*"
)
# What is downloaded or written to install from, and what tells of it.
_MATERIAL = re.compile(
    r".*\.(tar(\.\w+)?|tgz|tbz2?|txz|zip|whl|deb|rpm|run|sh|log|out|err|pid|lock|sock|asc|gpg|key|sig|sha\d+|md5|list"
    r"|diff|patch|swp|c|cc|cpp|cu|o|s)|(get-pip|install\w*|setup)\.py|.*(requirements|constraints).*\.(txt|in)",
    re.IGNORECASE,
)
# What a folder has in which something was built or installed from.
_SOURCE = re.compile(
    r"setup\.(py|cfg)|pyproject\.toml|configure(\.ac)?|CMakeLists\.txt|[Mm]akefile|meson\.build|Cargo\.toml|go\.mod"
    r"|package\.json|build\.ninja|WORKSPACE|install(\.sh)?"
)
_PREFIX = re.compile(r"(.*?)/(pyvenv\.cfg|conda-meta/history)")
_MAX_NAMED = 3


def left_in_scratch(written: Iterable[str], mentions: Sequence[str]) -> list[str]:
    """What was left in scratch folders and matters, for people.

    `written` are files that are still there; `mentions` texts of what the job will use: its command and working folder,
    what the setup exports, where links and `.pth` files of the snapshot lead.
    """
    entries: dict[str, list[str]] = {}
    for path in written:
        if (entry := _entry(path)) is not None:
            entries.setdefault(entry, []).append(path[len(entry) + 1 :])
    return [reason for entry, files in sorted(entries.items()) if (reason := _why(entry, files, mentions))]


def left_elsewhere(written: Iterable[str], exclusions: Exclusions) -> list[str]:
    """What was written to local disks that are not captured, for people, without what no snapshot keeps anyway."""
    lost = [path for path in written if _entry(path) is None and exclusions.why(path) is None]
    found = [f"it wrote {path}, which is not captured" for path in lost[:_MAX_NAMED]]
    if len(lost) > _MAX_NAMED:
        found.append(f"it wrote {len(lost) - _MAX_NAMED:,} more files that are not captured")
    return found


def is_mentioned(path: str, mentions: Iterable[str]) -> bool:
    """Whether a text names this path or one below it."""
    name = re.compile(rf"(?<![\w/.-]){re.escape(path)}(?![\w.-])")
    return any(name.search(text) for text in mentions)


def is_made_by_chance(path: str) -> bool:
    """Whether a path lies in a scratch folder under a name that no other run would choose."""
    entry = _entry(path)
    return entry is not None and _RANDOM.fullmatch(entry.rpartition("/")[2]) is not None


def _entry(path: str) -> str | None:
    """The topmost name in a scratch folder; None for a path elsewhere."""
    for folder in SCRATCH:
        if path.startswith(f"{folder}/"):
            return f"{folder}/{path[len(folder) + 1 :].partition('/')[0]}"
    return None


def _why(entry: str, files: Sequence[str], mentions: Sequence[str]) -> str:
    """Empty when it does not matter. `files` are relative to `entry`, one empty name if it is a file itself."""
    if is_mentioned(entry, mentions):
        return f"it left {entry}, which is used later but not kept: use another folder"
    name = entry.rpartition("/")[2]
    if _RANDOM.fullmatch(name):
        return ""
    prefix = next(filter(None, (_PREFIX.fullmatch(f"{entry}/{file}") for file in files)), None)
    if prefix is not None:
        return f"it installed into {prefix[1]}, which is not kept: use another folder"
    if _OF_TOOLS.fullmatch(name) or _is_source(files):
        return ""
    if all(_MATERIAL.fullmatch(file.rpartition("/")[2] or name) for file in files):
        return ""
    return f"it left {entry}, which is not kept: use another folder, or remove it"


def _is_source(files: Iterable[str]) -> bool:
    """Whether a source tree lies here, or one folder deeper."""
    return any(file.count("/") <= 1 and _SOURCE.fullmatch(file.rpartition("/")[2]) for file in files)


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
    # Identities and credentials of the user, not what is installed.
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
    """The reads that nothing accounts for, sorted.

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
