"""What never belongs to an environment snapshot, and why: a table of rules for people and for captures.

A rule leaves a path out because it is not a file of the environment (proc), belongs to one machine (host keys), is
gone or wrong later (pid files), is somebody's secret, or is a cache that only installers read. Content that merely
looks alike is kept: `uv.lock` is no lock, and whatever a package has installed is part of the package.

Who calls: `walk` and `scan` for each change; `overlay` for the folders that captures leave as they are. Decides and
touches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["file", "directory", "symlink", "socket", "device", "fifo"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason to leave paths out. A folder is left out with everything in it."""

    name: str
    reason: str
    paths: tuple[str, ...] = ()
    """Absolute, or below a home where they begin with `~/`."""
    pattern: str = ""
    """A regular expression that a whole absolute path must match, without links; `~` stands for any home."""
    kinds: tuple[Kind, ...] = ()
    """What it holds for; empty for everything."""
    empty: bool = False
    """Only for files without content."""
    real: bool = False
    """A capture shows the real folder here, so that what is written stays on the machine, as it would without us."""
    missed: bool = False
    """A start without it may go another way: whoever restores the snapshot has to know."""


RULES: tuple[Rule, ...] = (
    Rule(
        "kernel",
        "shows the running kernel and its devices, not files",
        paths=("/proc", "/sys", "/dev"),
        real=True,
    ),
    Rule(
        "temporary",
        "is emptied by a restart of the machine",
        paths=("/run", "/var/run", "/var/lock", "/tmp", "/var/tmp"),  # noqa: S108 - names, not files that we make
        real=True,
    ),
    Rule("log", "tells what happened on one machine", paths=("/var/log", "~/.npm/_logs"), real=True),
    Rule(
        "package cache",
        "is read by installers alone",
        paths=(
            "~/.cache/pip",
            "~/.cache/uv",
            "~/.cache/pypoetry/cache",
            "~/.cache/pypoetry/artifacts",
            "~/.cache/yarn",
            "~/.npm/_cacache",
            "/var/cache/apt",
            "/var/lib/apt/lists",
            "/var/cache/dnf",
            "/var/cache/yum",
            "/var/cache/apk",
            "/var/cache/pacman/pkg",
        ),
        real=True,
    ),
    Rule(
        # Not the real folder: conda makes hard links from there, which cannot leave a mount.
        "conda packages",
        "is read by conda alone; environments have their own copies or links",
        paths=("~/.conda/pkgs", "~/.mamba/pkgs"),
        pattern=r".*/(micro|mini|ana)?(conda|mamba|forge)\d*/pkgs",
    ),
    Rule("compiler cache", "is read by compilers alone", paths=("~/.ccache", "~/.cache/ccache", "~/.cache/go-build")),
    Rule("socket", "is of use only while its process runs", kinds=("socket",)),
    Rule("device", "belongs to the machine", kinds=("device",)),
    Rule("pid file", "names a process of one machine", pattern=r".*\.pid", kinds=("file",)),
    Rule(
        "lock file",
        "says that a process works; left behind it would make others wait for ever",
        pattern=r".*/(.*\.)?(lock|lck)",
        kinds=("file",),
        empty=True,
    ),
    Rule("git lock", "says that git works", pattern=r".*/\.git/.*\.lock", kinds=("file",)),
    Rule(
        "package database lock",
        "says that a package manager works",
        paths=(
            "/var/lib/dpkg/lock",
            "/var/lib/dpkg/lock-frontend",
            "/var/lib/dpkg/triggers/Lock",
            "/var/lib/rpm/.rpm.lock",
            "/usr/lib/sysimage/rpm/.rpm.lock",
            "/etc/.pwd.lock",
        ),
    ),
    Rule(
        "backup of a database",
        "is what a package manager or useradd changed last",
        pattern=r"/var/lib/dpkg/[a-z]+-old|/etc/(passwd|group|shadow|gshadow|subuid|subgid)-|/var/backups",
    ),
    Rule(
        "generated cache",
        "is made anew by whoever needs it and differs each time",
        paths=("/var/cache/ldconfig", "/var/cache/man", "/var/cache/debconf/templates.dat-old"),
        pattern=r"/var/cache/debconf/.*-old|/var/cache/apt/.*\.bin",
    ),
    Rule("core dump", "is the memory of a process that died", pattern=r".*/(vg)?core\.\d{3,}", kinds=("file",)),
    Rule("deleted on NFS", "is a deleted file that was still open", pattern=r".*/\.nfs[0-9a-f]{16,}", kinds=("file",)),
    Rule("found by fsck", "belongs to a file system", pattern=r".*/lost\+found"),
    Rule(
        "history",
        "is what somebody typed",
        pattern=r"~/(\.(bash|zsh|python|node_repl|sqlite|psql|mysql|ash|sh)_history|\.lesshst|\.viminfo|\.wget-hsts"
        r"|\.local/share/fish/fish_history|\.bash_sessions|\.zsh_sessions)",
    ),
    Rule(
        "credentials",
        "is a secret of one user; a snapshot is shared",
        paths=(
            "~/.netrc",
            "~/.git-credentials",
            "~/.config/git/credentials",
            "~/.aws/credentials",
            "~/.aws/sso/cache",
            "~/.aws/cli/cache",
            "~/.azure",
            "~/.config/gcloud",
            "~/.docker/config.json",
            "~/.kube/config",
            "~/.config/gh/hosts.yml",
            "~/.cache/huggingface/token",
            "~/.cache/huggingface/stored_tokens",
            "~/.huggingface/token",
            "~/.kaggle/kaggle.json",
            "~/.pypirc",
            "~/.gnupg",
            "~/.vault-token",
            "/etc/shadow",
            "/etc/gshadow",
            "/etc/krb5.keytab",
        ),
        pattern=r"~/\.ssh/id_[^/]*",
        missed=True,
    ),
    Rule(
        "names of machines",
        "is written by the machine or its container",
        paths=("/etc/hosts", "/etc/resolv.conf", "/etc/hostname"),
        missed=True,
    ),
    Rule("mount table", "is written by the machine", paths=("/etc/mtab",)),
    Rule(
        "machine identity",
        "is there to tell machines apart",
        paths=("/etc/machine-id", "/var/lib/dbus/machine-id", "/var/lib/systemd/random-seed"),
        pattern=r"/etc/ssh/ssh_host_[^/]*",
    ),
    Rule("container mark", "is written by what runs a container", paths=("/.dockerenv", "/run/.containerenv")),
)

REAL_FILES = ("/etc/hosts", "/etc/resolv.conf")
"""A capture shows the host's own, so that a change stays there as it would without us."""

OWN = Rule("own folder", "is where BootSeer itself keeps files", real=True)
CACHE_OF_SETTINGS = Rule("package cache", "is read by installers alone: settings say so", real=True)

# What a package has installed is content, whatever it is called.
_INSTALLED = re.compile(r".*/(site-packages|dist-packages|node_modules)/.*")
_NOT_IN_PACKAGES = ("pid file", "lock file", "core dump")


class Exclusions:
    """The rules, for given folders. Make it once; asking takes microseconds."""

    def __init__(
        self, *, homes: Iterable[str] = ("/root",), own: Iterable[str] = (), caches: Iterable[str] = ()
    ) -> None:
        """`homes` besides those in /home, `own` folders of BootSeer, `caches` of installers by their settings."""
        self._homes = tuple(dict.fromkeys(home.rstrip("/") for home in homes if home.strip("/")))
        home = "|".join([*map(re.escape, self._homes), "/home/[^/]+"])
        self._home = re.compile(f"(?:{home})(?=/)")
        self._folders = {path: rule for rule in RULES for path in rule.paths}
        self._folders.update((path, CACHE_OF_SETTINGS) for path in caches if path.strip("/"))
        self._folders.update((path, OWN) for path in own if path.strip("/"))
        self._patterns = [
            (re.compile(rule.pattern.replace("~", f"(?:{home})"), re.DOTALL), rule)
            for rule in RULES
            if rule.pattern or not rule.paths
        ]

    @property
    def real_folders(self) -> list[str]:
        """Where captures show the real folder."""
        real = [path for path, rule in self._folders.items() if rule.real]
        return sorted(
            {home + path[1:] for path in real if path.startswith("~") for home in self._homes}
            | {path for path in real if not path.startswith("~")}
        )

    def rule_for(self, path: str, *, kind: Kind = "file", size: int | None = None) -> Rule | None:
        """Why this path is left out, or None when it is not. Its folders must have been asked for before: a walk does
        not go into a folder that is left out; `why` asks for all of them. `size` in bytes, None if not known."""
        found = self._folders.get(path)
        if found is None and (home := self._home.match(path)):
            found = self._folders.get(f"~{path[home.end() :]}")
        if found is not None:
            return found
        for pattern, rule in self._patterns:
            if rule.kinds and kind not in rule.kinds:
                continue
            if rule.empty and size != 0:
                continue
            if rule.pattern and not pattern.fullmatch(path):
                continue
            if rule.name in _NOT_IN_PACKAGES and _INSTALLED.fullmatch(path):
                continue
            return rule
        return None

    def why(self, path: str, *, kind: Kind = "file", size: int | None = None) -> Rule | None:
        """The same for any path: by a rule for itself or for one of its folders."""
        end = path.find("/", 1)
        while end != -1:
            found = self.rule_for(path[:end], kind="directory")
            if found is not None:
                return found
            end = path.find("/", end + 1)
        return self.rule_for(path, kind=kind, size=size)


def caches_of(env: Mapping[str, str]) -> list[str]:
    """Package caches that the environment moves away from their usual place."""
    found = [
        env[name]
        for name in ("PIP_CACHE_DIR", "UV_CACHE_DIR", "npm_config_cache", "YARN_CACHE_FOLDER")
        if env.get(name)
    ]
    if shared := env.get("XDG_CACHE_HOME"):
        found += [f"{shared.rstrip('/')}/{name}" for name in ("pip", "uv", "yarn")]
    return [path.rstrip("/") for path in found if path.startswith("/") and path.strip("/")]
