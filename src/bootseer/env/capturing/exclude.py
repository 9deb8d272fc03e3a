"""Rules for what is left out of environment snapshots, with reasons.

A path is left out because it is not a file of the environment (/proc), belongs to one machine (host keys), is stale
later (pid files), is a secret, or is a cache that only installers read. Lookalikes are kept: `uv.lock` is not a lock
file, and whatever a package has installed is part of the package.

Does no I/O.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from bootseer.env.changes import parents

Kind = Literal["file", "directory", "symlink", "socket", "device", "fifo"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A reason to leave paths out; folders with everything in them."""

    name: str
    reason: str
    paths: tuple[str, ...] = ()
    """Absolute paths, or paths below any home where they begin with `~/`."""
    pattern: str = ""
    """A regular expression for whole absolute paths, without links; `~` stands for any home."""
    kinds: tuple[Kind, ...] = ()
    """Kinds of files that it applies to; empty for all."""
    only_empty: bool = False
    """Applies only to empty files."""
    passthrough: bool = False
    """Captures mount the machine's own folder here, so that writes persist as they would without BootSeer."""
    warn: bool = False
    """A start without it may behave differently: the user is warned."""
    secret: bool = False
    """The command that follows the setup still sees it; the owner may keep it (`--env-keep`)."""


RULES: tuple[Rule, ...] = (
    Rule(
        "kernel",
        "shows the running kernel and its devices, not files",
        paths=("/proc", "/sys", "/dev"),
        passthrough=True,
    ),
    Rule(
        "temporary",
        "is emptied by a restart of the machine",
        paths=("/run", "/var/run", "/var/lock", "/tmp", "/var/tmp"),  # noqa: S108 - names, not files that we make
        passthrough=True,
    ),
    Rule("log", "records what happened on one machine", paths=("/var/log", "~/.npm/_logs"), passthrough=True),
    Rule(
        "package cache",
        "is read only by installers",
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
        passthrough=True,
    ),
    Rule(
        # Not passthrough: conda makes hard links from there, which cannot cross mounts.
        "conda packages",
        "is read only by conda; environments have their own copies or links",
        paths=("~/.conda/pkgs", "~/.mamba/pkgs"),
        pattern=r".*/(micro|mini|ana)?(conda|mamba|forge)\d*/pkgs",
    ),
    Rule("compiler cache", "is read only by compilers", paths=("~/.ccache", "~/.cache/ccache", "~/.cache/go-build")),
    Rule("socket", "works only while its process runs", kinds=("socket",)),
    Rule("device", "belongs to the machine", kinds=("device",)),
    Rule("pid file", "names a process of one machine", pattern=r".*\.pid", kinds=("file",)),
    Rule(
        "lock file",
        "exists while a process runs; left behind, it would make others wait forever",
        pattern=r".*/(.*\.)?(lock|lck)",
        kinds=("file",),
        only_empty=True,
    ),
    Rule("git lock", "exists while git runs", pattern=r".*/\.git/.*\.lock", kinds=("file",)),
    Rule(
        "package database lock",
        "is locked while a package manager runs",
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
        "is a copy from before the last change by a package manager or useradd",
        pattern=r"/var/lib/dpkg/[a-z]+-old|/etc/(passwd|group|shadow|gshadow|subuid|subgid)-|/var/backups",
    ),
    Rule(
        "generated cache",
        "is generated when it is needed, and differs each time",
        # The last two are rewritten by each job with CUDA or conda: they would be in the way of a restore.
        paths=("/var/cache/ldconfig", "/var/cache/man", "~/.nv/ComputeCache", "~/.conda/environments.txt"),
        pattern=r"/var/cache/debconf/.*-old|/var/cache/apt/.*\.bin",
    ),
    Rule("core dump", "is the memory of a crashed process", pattern=r".*/(vg)?core\.\d{3,}", kinds=("file",)),
    Rule("deleted on NFS", "is a deleted file that was still open", pattern=r".*/\.nfs[0-9a-f]{16,}", kinds=("file",)),
    Rule("found by fsck", "belongs to a file system", pattern=r".*/lost\+found"),
    Rule(
        "history",
        "is a history of typed commands",
        pattern=r"~/(\.(bash|zsh|python|node_repl|sqlite|psql|mysql|ash|sh)_history|\.lesshst|\.viminfo|\.wget-hsts"
        r"|\.local/share/fish/fish_history|\.bash_sessions|\.zsh_sessions)",
    ),
    Rule(
        "credentials",
        "is a secret of one user; a snapshot is shared",
        paths=tuple(
            """
            ~/.netrc ~/_netrc ~/.authinfo ~/.pgpass ~/.my.cnf ~/.mylogin.cnf ~/.s3cfg ~/.boto ~/.git-credentials
            ~/.config/git/credentials ~/.config/gh/hosts.yml ~/.config/hub ~/.config/glab-cli
            ~/.cache/git/credential ~/.git-credential-cache ~/.aws/credentials ~/.aws/sso/cache ~/.aws/cli/cache
            ~/.azure ~/.config/gcloud ~/.oci ~/.config/doctl ~/.config/linode-cli ~/.aliyun/config.json ~/.bluemix
            ~/.mc ~/.mcli ~/.passwd-s3fs ~/.config/rclone/rclone.conf ~/.rclone.conf ~/.config/s3cmd ~/.lakectl.yaml
            ~/.docker/config.json ~/.dockercfg ~/.config/containers/auth.json ~/.singularity/docker-config.json
            ~/.apptainer/docker-config.json ~/.apptainer/remote.yaml ~/.config/enroot/.credentials ~/.kube/config
            ~/.kube/cache ~/.minikube ~/.config/helm/registry ~/.vault-token ~/.terraformrc
            ~/.terraform.d/credentials.tfrc.json ~/.pulumi/credentials.json ~/.config/op ~/.config/sops/age
            ~/.cache/huggingface/token ~/.cache/huggingface/stored_tokens ~/.huggingface/token ~/.ngc/config
            ~/.kaggle/kaggle.json ~/.kaggle/access_token ~/.config/kaggle/kaggle.json ~/.comet.config
            ~/.neptune/credentials ~/.mlflow/credentials ~/.databrickscfg ~/.modal.toml ~/.config/dagshub
            ~/.snowflake ~/.config/snowflake ~/.clearml.conf ~/clearml.conf ~/.config/replicate
            ~/.runpod/config.toml ~/.lambda_cloud ~/.cdsapirc ~/.ecmwfapirc ~/.pypirc ~/.gem/credentials
            ~/.cargo/credentials ~/.cargo/credentials.toml ~/.conda/token ~/.continuum/anaconda-client/tokens
            ~/.anaconda/keyring ~/.config/pypoetry/auth.toml ~/.smbcredentials
            ~/.local/share/uv/credentials ~/.m2/settings-security.xml ~/.gnupg ~/.password-store
            ~/.local/share/keyrings ~/.local/share/python_keyring ~/.config/chromium ~/.mozilla
            /etc/shadow /etc/gshadow /etc/krb5.keytab /etc/apt/auth.conf /etc/apt/auth.conf.d
            """.split()  # noqa: SIM905 - a list of this length reads better as text
        ),
        pattern=r"~/\.ssh/(id_[^/]*|[^/]*\.(pem|key))(?<!\.pub)|.*\.keytab",
        warn=True,
        secret=True,
    ),
    Rule(
        "names of machines",
        "is written by the machine or its container",
        paths=("/etc/hosts", "/etc/resolv.conf", "/etc/hostname"),
        warn=True,
    ),
    Rule("mount table", "is written by the machine", paths=("/etc/mtab",)),
    Rule(
        "machine identity",
        "identifies one machine",
        paths=("/etc/machine-id", "/var/lib/dbus/machine-id", "/var/lib/systemd/random-seed"),
        pattern=r"/etc/ssh/ssh_host_[^/]*",
    ),
    Rule("container mark", "is written by what runs a container", paths=("/.dockerenv", "/run/.containerenv")),
)

PASSTHROUGH_FILES = ("/etc/hosts", "/etc/resolv.conf")
"""Files that captures mount from the machine, so that changes persist as they would without BootSeer."""

OWN = Rule("own folder", "is where BootSeer itself keeps files", passthrough=True)
CACHE_OF_SETTINGS = Rule("package cache", "is set as a cache of an installer", passthrough=True)

LEFT_OUT = Rule("left out by the owner", "is named by --env-leave-out", warn=True, secret=True)
_CREDENTIALS = next(rule for rule in RULES if rule.name == "credentials")

# What a package has installed is content, whatever it is called.
_INSTALLED = re.compile(r".*/(site-packages|dist-packages|node_modules)/.*")
_NOT_IN_PACKAGES = ("pid file", "lock file", "core dump")


_CREDENTIALS_FILES = (
    *("NETRC", "AWS_SHARED_CREDENTIALS_FILE", "GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "AZURE_CONFIG_DIR"),
    *("RCLONE_CONFIG", "HF_TOKEN_PATH", "PGPASSFILE", "REGISTRY_AUTH_FILE", "GNUPGHOME", "DATABRICKS_CONFIG_FILE"),
)
_CREDENTIALS_FOLDERS = {
    "HF_HOME": ("token", "stored_tokens"),
    "DOCKER_CONFIG": ("config.json",),
    "KAGGLE_CONFIG_DIR": ("kaggle.json",),
    "XDG_CACHE_HOME": ("huggingface/token", "huggingface/stored_tokens"),
    "XDG_CONFIG_HOME": ("gcloud", "gh/hosts.yml", "git/credentials", "rclone/rclone.conf", "pypoetry/auth.toml"),
    "CARGO_HOME": ("credentials", "credentials.toml"),
}


class Exclusions:
    """The rules for given folders. Compiled once; a query takes microseconds."""

    def __init__(
        self,
        *,
        homes: Iterable[str] = ("/root",),
        own: Iterable[str] = (),
        caches: Iterable[str] = (),
        credentials: Iterable[str] = (),
        leave_out: Iterable[str] = (),
        keep: Iterable[str] = (),
    ) -> None:
        """`homes` besides those in /home, `own` folders of BootSeer, `caches` and `credentials` of settings.

        `leave_out` and `keep` are shell patterns of the owner, whose `*` matches slashes, too; `~/` is any home. They
        apply to everything below a matching folder. `keep` overrides only rules about secrets.
        """
        # The longest first: a home may lie in another one, and users without a name have "/".
        found = {home.rstrip("/") for home in homes if home.startswith("/")}
        self._homes = tuple(sorted(found, key=lambda home: (-len(home), home)))
        home = "|".join([*(re.escape(home) for home in self._homes if home), "/home/[^/]+"])
        home += "|" if "" in self._homes else ""
        self._home = re.compile(f"(?:{home})(?=/)")
        self._folders = {path: rule for rule in RULES for path in rule.paths}
        self._folders.update((path, _CREDENTIALS) for path in credentials if path.strip("/"))
        self._folders.update((path, CACHE_OF_SETTINGS) for path in caches if path.strip("/"))
        self._folders.update((path, OWN) for path in own if path.strip("/"))
        self._left_out = _compile(leave_out, home)
        self._kept = _compile(keep, home)
        self._patterns = [
            (re.compile(rule.pattern.replace("~", f"(?:{home})"), re.DOTALL), rule)
            for rule in RULES
            if rule.pattern or not rule.paths
        ]

    def places(self, is_wanted: Callable[[Rule], bool]) -> list[str]:
        """The paths that such rules name."""
        found = [path for path, rule in self._folders.items() if is_wanted(rule)]
        at_home = {home + path[1:] for path in found if path.startswith("~") for home in self._homes}
        return sorted(at_home | {path for path in found if not path.startswith("~")})

    def rule_for(self, path: str, *, kind: Kind = "file", size: int | None = None) -> Rule | None:
        """The rule that leaves this path out, if any, without its parent folders: for a walk, which does not enter
        folders that are left out. `size` in bytes, None if not known."""
        found = self._rule_for(path, kind, size)
        if found is not None and not found.secret:
            return found
        if self._left_out is not None and self._left_out.fullmatch(path):
            return LEFT_OUT
        return None if found is None or self.is_kept(path) else found

    def is_kept(self, path: str) -> bool:
        """Whether the owner keeps this path although it looks like a secret."""
        return self._kept is not None and self._kept.fullmatch(path) is not None

    def _rule_for(self, path: str, kind: Kind, size: int | None) -> Rule | None:
        found = self._folders.get(path)
        if found is None and (home := self._home.match(path)):
            found = self._folders.get(f"~{path[home.end() :]}")
        if found is not None:
            return found
        for pattern, rule in self._patterns:
            if rule.kinds and kind not in rule.kinds:
                continue
            if rule.only_empty and size != 0:
                continue
            if rule.pattern and not pattern.fullmatch(path):
                continue
            if rule.name in _NOT_IN_PACKAGES and _INSTALLED.fullmatch(path):
                continue
            return rule
        return None

    def rule_on_path(self, path: str, *, kind: Kind = "file") -> Rule | None:
        """The rule that leaves out this path or one of its parent folders, if any."""
        above = (self.rule_for(folder, kind="directory") for folder in parents(path))
        return next(filter(None, above), None) or self.rule_for(path, kind=kind)

    def forbidding_rule(self, path: str, *, kind: Kind = "file", size: int | None = None) -> Rule | None:
        """The rule that forbids this path in a snapshot: a rule for itself, or for credentials in a parent folder.
        Other rules for parent folders do not count: a capture may include a folder below a scratch folder."""
        above = (self.rule_for(folder, kind="directory") for folder in parents(path))
        return next((rule for rule in above if rule and rule.secret), None) or self.rule_for(path, kind=kind, size=size)


def _compile(patterns: Iterable[str], home: str) -> re.Pattern[str] | None:
    """An expression for the paths that match one of the patterns, and everything below them."""
    forms = []
    for pattern in patterns:
        text = pattern.rstrip("/")
        begin, rest = (f"(?:{home})/", text[2:]) if text.startswith("~/") else ("", text)
        forms += [f"{begin}{fnmatch.translate(form)}" for form in (rest, f"{rest}/*")]
    return re.compile("|".join(forms), re.DOTALL) if forms else None


def credentials_of(env: Mapping[str, str]) -> list[str]:
    """Credentials whose location is set by the environment."""
    found = [env.get(name, "") for name in _CREDENTIALS_FILES]
    found += [
        f"{env[name].rstrip('/')}/{file}"
        for name, files in _CREDENTIALS_FOLDERS.items()
        if env.get(name)
        for file in files
    ]
    found += env.get("KUBECONFIG", "").split(":")
    return [path.rstrip("/") for path in found if path.startswith("/") and path.strip("/")]


def caches_of(env: Mapping[str, str]) -> list[str]:
    """Package caches whose location is set by the environment."""
    found = [
        env[name]
        for name in ("PIP_CACHE_DIR", "UV_CACHE_DIR", "npm_config_cache", "YARN_CACHE_FOLDER")
        if env.get(name)
    ]
    if shared := env.get("XDG_CACHE_HOME"):
        found += [f"{shared.rstrip('/')}/{name}" for name in ("pip", "uv", "yarn")]
    return [path.rstrip("/") for path in found if path.startswith("/") and path.strip("/")]
