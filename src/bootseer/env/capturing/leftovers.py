"""Judge the files that a setup opened: reads that the request key does not cover, and files left in places that are not
captured.

*Reads.* A file is accounted for if the request key holds its content, the base covers it (the image, or the host's
fingerprint), the setup made or changed it, or its content has no influence on what is installed. Any other file keeps a
snapshot from being made: it could change without changing the key. The files that a plain `pip install -r` or
`uv pip install -r` opens are all accounted for.

*Leftovers* in a scratch folder are of three kinds: garbage that no later start can rely on (a random name, a log, the
source of an installation); files that the job is known to use; and files that it may use. The last two make a setup not
snapshot-safe, as a restored node would lack them.

Does no I/O.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Sequence

from bootseer.env.capturing.exclude import RULES, Exclusions
from bootseer.env.changes import lies_in, nearest
from bootseer.units import listed

SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - names, not files that we make
# Random names, which no later start can find again.
_RANDOM = re.compile(
    r"tmp\.[A-Za-z0-9]{6,}|tmp[a-z0-9_]{8}|\.tmp\w{6}|cc[A-Za-z0-9]{6}(\..*)?|[\w-]+\.(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{10}"
)
_TOOL_FILES = re.compile(
    r"(pip|npm|pymp|ssh|gpg|matplotlib|systemd-private)-.*|fileutl\.message\..*|go-build\d+|_MEI\w+|hsperfdata_.*"
    r"|uv-[0-9a-f]+\.lock|(node|v8)-compile-cache.*|\.X.*|sem\..*|torch_\d+_\d+.*"
)
# Files to install from, and logs about it.
_MATERIAL = re.compile(
    r".*\.(tar(\.\w+)?|tgz|tbz2?|txz|zip|whl|deb|rpm|run|sh|log|out|err|pid|lock|sock|asc|gpg|key|sig|sha\d+|md5|list"
    r"|diff|patch|swp|c|cc|cpp|cu|o|s)|(get-pip|install\w*|setup)\.py|.*(requirements|constraints).*\.(txt|in)",
    re.IGNORECASE,
)
# Files that mark a source tree.
_SOURCE = re.compile(
    r"setup\.(py|cfg)|pyproject\.toml|configure(\.ac)?|CMakeLists\.txt|[Mm]akefile|meson\.build|Cargo\.toml|go\.mod"
    r"|package\.json|build\.ninja|WORKSPACE|install(\.sh)?"
)
_PREFIX = re.compile(r"(.*?)/(pyvenv\.cfg|conda-meta/history)")


def left_in_scratch(written: Iterable[str], mentions: Sequence[str]) -> list[str]:
    """Problems with files that were left in scratch folders, as messages.

    `written` are files that still exist; `mentions` are texts that name what the job will use: its command and working
    folder, the setup's exports, targets of links and `.pth` files of the snapshot.
    """
    entries: dict[str, list[str]] = {}
    for path in written:
        if (entry := _scratch_entry(path)) is not None:
            entries.setdefault(entry, []).append(path[len(entry) + 1 :])
    return [reason for entry, files in sorted(entries.items()) if (reason := _problem(entry, files, mentions))]


def left_elsewhere(written: Iterable[str], exclusions: Exclusions) -> list[str]:
    """Files written to local disks that are not captured, as messages, without those that the rules exclude."""
    lost = [path for path in written if _scratch_entry(path) is None and exclusions.rule_on_path(path) is None]
    return [f"it wrote {listed(lost)}, which is not captured"] if lost else []


def is_mentioned(path: str, mentions: Iterable[str]) -> bool:
    """Whether a text names this path or one below it."""
    name = re.compile(rf"(?<![\w/.-]){re.escape(path)}(?![\w.-])")
    return any(name.search(text) for text in mentions)


def has_random_name(path: str) -> bool:
    """Whether a path lies in a scratch folder under a random name."""
    entry = _scratch_entry(path)
    return entry is not None and _RANDOM.fullmatch(entry.rpartition("/")[2]) is not None


def _scratch_entry(path: str) -> str | None:
    """The topmost name in a scratch folder; None for a path elsewhere."""
    for folder in SCRATCH:
        if path.startswith(f"{folder}/"):
            return f"{folder}/{path[len(folder) + 1 :].partition('/')[0]}"
    return None


def _problem(entry: str, files: Sequence[str], mentions: Sequence[str]) -> str:
    """The problem with an entry of a scratch folder; empty for none. `files` are its files, relative to it: one empty
    name if it is a file itself."""
    if is_mentioned(entry, mentions):
        return f"it left {entry}, which is used later but not kept: use another folder"
    name = entry.rpartition("/")[2]
    if _RANDOM.fullmatch(name):
        return ""
    prefix = next(filter(None, (_PREFIX.fullmatch(f"{entry}/{file}") for file in files)), None)
    if prefix is not None:
        return f"it installed into {prefix[1]}, which is not kept: use another folder"
    if _TOOL_FILES.fullmatch(name) or _is_source(files):
        return ""
    if all(_MATERIAL.fullmatch(file.rpartition("/")[2] or name) for file in files):
        return ""
    return f"it left {entry}, which is not kept: use another folder, or remove it"


def _is_source(files: Iterable[str]) -> bool:
    """Whether a source tree lies here, or one level deeper."""
    return any(file.count("/") <= 1 and _SOURCE.fullmatch(file.rpartition("/")[2]) for file in files)


SYSTEM = (
    "/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/opt", "/sbin", "/snap", "/usr",
    "/var/cache", "/var/lib", "/var/log", "/var/spool",
)  # fmt: skip
"""The base: system packages and their configuration."""
EMPTIED = ("/run", "/var/run", *SCRATCH)
"""Folders that a restart of the machine may empty; those of daemons first, as searches in large ones are limited."""
TRANSIENT = (*EMPTIED, "/dev", "/proc", "/sys")
"""The same, and what shows the state of the kernel."""
AT_HOME = (
    # The user's own programs and packages, as /usr/local is the machine's. The packages are in the key.
    ".local/bin", ".local/lib", ".local/share/mise", ".local/share/uv", ".asdf", ".cargo", ".nvm", ".pyenv", ".rustup",
    # Caches, whose entries are named by their content.
    ".cache", ".ccache", ".conda/pkgs", ".local/share/pnpm/store", ".m2", ".npm", ".nv",
    # Settings of installers: their effective values are in the key.
    ".conda/environments.txt", ".condarc", ".config/pip", ".config/uv", ".npmrc", ".pip", ".pydistutils.cfg", ".pypirc",
    # Identities and credentials of the user, not what is installed.
    ".aws", ".config/git", ".config/gh", ".gitconfig", ".ssh",
    # Shell and terminal settings.
    ".bash_history", ".bash_login", ".bash_logout", ".bash_profile", ".bashrc", ".config/fish", ".editrc", ".inputrc",
    ".profile", ".python_history", ".terminfo", ".vimrc", ".wget-hsts", ".wgetrc", ".curlrc", ".zlogin", ".zprofile",
    ".zshenv", ".zshrc",
)  # fmt: skip
"""Below a home folder."""
CREDENTIALS_AT_HOME = tuple(path[2:] for rule in RULES if rule.secret for path in rule.paths if path.startswith("~/"))
_HOME = re.compile(r"/home/[^/]+(?=/)")


def unaccounted(
    reads: Collection[str],
    accounted: Iterable[str],
    captured: Collection[str],
    base: Iterable[str] = (),
    inside: Sequence[str] = (),
    *,
    project: str = "",
    host: bool = True,
) -> tuple[str, ...]:
    """The reads that are not accounted for, sorted. All paths are absolute, without symbolic links.

    `accounted` are the files and folders whose content is in the key; `captured` the paths that the setup changed,
    whose previous state is in the manifest and checked by a restore; `base` folders of the base besides the system's
    (Python's prefixes, BootSeer's own code, `AT_HOME` of a home that is neither /root nor in /home); `inside` captured
    folders that lie in scratch space. A folder of the base does not cover a `project` (the job's working folder) that
    lies in it. Without `host` the setup ran in an image, and the reads are files of this machine that were mounted into
    it, so that the host's base does not cover them.
    """
    known = {posixpath.normpath(path) for path in accounted}
    homes = ["/root", *{found[0] for path in reads if (found := _HOME.match(path)) is not None}]
    at_home = (*(AT_HOME if host else ()), *CREDENTIALS_AT_HOME)
    folders = {*(SYSTEM if host else ()), *base, *(posixpath.join(home, name) for home in homes for name in at_home)}
    everywhere, in_project = known | folders, known | {one for one in folders if not project.startswith(f"{one}/")}
    return tuple(
        sorted(
            path
            for path in reads
            if path not in captured
            and not _is_covered(path, in_project if lies_in(path, [project]) else everywhere)
            and (not host or nearest(path, inside) or not nearest(path, TRANSIENT))
        )
    )


def _is_covered(path: str, covered: Collection[str]) -> bool:
    if nearest(path, covered):
        return True
    # Bytecode is covered if its source is: the interpreter compares the two.
    folder, name = posixpath.split(path)
    above, cache = posixpath.split(folder)
    if cache == "__pycache__" and name.endswith(".pyc"):
        return posixpath.join(above, f"{name.partition('.')[0]}.py") in covered
    return False
