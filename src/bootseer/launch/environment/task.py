"""What the parts of one environment start share: what is asked for, where, and how its stages are marked.

Made by whoever runs a setup or shows a snapshot: `environment_stage`, `environment_make`, `environment_look` and
`image_stage`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bootseer.artifact.places import CACHE, environments_folder, own_folder
from bootseer.artifact.progress import Show, no_progress
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.errors import PermanentError
from bootseer.launch.environment.plain import STAGE
from bootseer.launch.session import Session
from bootseer.launch.supervise import in_foreground
from bootseer.mounts.kernel import is_mounted_anywhere

if TYPE_CHECKING:
    from bootseer.artifact.loading import Loading
    from bootseer.env.modes import Mode


Conflicts = Literal["refuse", "accept"]
UNPINNED_AGE_S = 7 * 86_400.0
"""How long a snapshot serves whose setup would install other versions some day, if nobody says."""


@dataclass(frozen=True, slots=True)
class EnvironmentWanted:
    """How the environment is to come."""

    cache: Path
    """The node's cache."""
    runtime: Path
    """Where the state of mounts lies."""
    mode: Mode = "auto"
    store: str | None = None
    """URI of the store of snapshots; None: the node's own, which other nodes do not see."""
    plain_http: bool = False
    signatures: Signatures = UNSIGNED
    loading: Loading = "auto"
    inputs: tuple[str, ...] = ()
    """Further files and folders that the setup depends on."""
    variables: tuple[str, ...] = ()
    """Names of further variables that it depends on."""
    imports: tuple[str, ...] = ()
    """Modules that must be importable before a snapshot is published."""
    conflicts: Conflicts = "refuse"
    """Whether a snapshot is published although `pip check` finds a conflict that was not there before."""
    leave_out: tuple[str, ...] = ()
    """Patterns of paths that no snapshot keeps (`Exclusions`)."""
    keep: tuple[str, ...] = ()
    """Patterns of paths that are kept although they look secret."""
    secret_rules: tuple[str, ...] = ()
    """Files with further rules for what looks secret."""
    max_age_s: float | None = None
    """A snapshot older than this is not used; None: by whether versions are pinned; infinite: never."""
    wait_s: float = 600.0
    """How long to wait for another node that makes the snapshot."""
    publish_s: float = 600.0
    """How long the end of the command is held up for the snapshot's sake."""
    tenant: str = ""
    """Who shares snapshots: part of the key."""
    place: str = ""
    """Where in a container the setup runs, if that is the user's own folder: what it installs remembers that."""


def own_store(cache: Path) -> str:
    """The store of snapshots on this node itself."""
    return str(environments_folder(cache) / "store")


_LOCK = "lock"
_PREFIX, _NEW = "run-", "new-"
_LEFT_OVER_S = 3600.0


class RunFolder:
    """One such folder. `lock` is a descriptor that children may keep."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock

    @classmethod
    def made(cls, root: Path) -> RunFolder:
        """A new folder below `root`. Raises `PermanentError` when it cannot be made, or others could change it."""
        try:
            root = own_folder(root)
            clean_up(root)
            new = Path(tempfile.mkdtemp(prefix=_NEW, dir=root))
            lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Nobody cleans it up before it has this name, and then it is locked.
            path = new.rename(root / (_PREFIX + new.name.removeprefix(_NEW)))
        except OSError as error:
            raise PermanentError(f"{root}: {error.strerror}; set {CACHE} to another folder") from error
        return cls(path, lock)

    def remove(self) -> None:
        """Delete the folder with everything in it. What cannot be deleted now is tried again by a later start."""
        try:
            with contextlib.suppress(OSError):
                _delete(self.path)
        finally:
            os.close(self.lock)


def clean_up(root: Path) -> None:
    """Delete the folders that nobody holds. What cannot be deleted now is tried again by the next start."""
    for path in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _delete(path)
            finally:
                os.close(lock)
    for path in root.glob(f"{_NEW}*"):  # whoever made it was killed before it had a name and a lock
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFT_OVER_S:
                shutil.rmtree(path, ignore_errors=True)


def _delete(path: Path) -> None:
    """All but the lock first: until the last file is gone it says whose folder this is.

    Nothing while something in it is mounted: what the setup or the command left running still works on these layers.
    """
    if is_mounted_anywhere(f"/{path.name}/"):
        return
    for entry in list(path.iterdir()):
        if entry.name != _LOCK:
            if entry.is_dir() and not entry.is_symlink():
                _open_up(entry)
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _open_up(top: Path) -> None:
    """The kernel's own folders in a layer may be entered by nobody, and setups make folders read-only."""
    for folder, folders, _ in os.walk(top):
        for name in ("", *folders):
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                mode = path.lstat().st_mode
                if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
                    path.chmod(0o700)


@dataclass(frozen=True)
class Task:
    """One start's environment."""

    setup: str | None
    requirements: tuple[str, ...]
    wanted: EnvironmentWanted
    env: Mapping[str, str]
    """The environment that the job and its setup get."""
    own_env: Mapping[str, str]
    """The same without what we add: what the request key may depend on."""
    session: Session | None
    own_group: bool
    """Whether what is started leads a process group of its own (`supervise`)."""
    folder: RunFolder
    show: Show = no_progress
    """Shows people what is waited for."""
    outcome: dict[str, Any] = field(default_factory=dict)
    """What became of the snapshot, once that is known (`environment_publish.tell`)."""

    @classmethod
    def made(
        cls,
        setup: str | None,
        requirements: Sequence[str],
        wanted: EnvironmentWanted,
        env: Mapping[str, str],
        *,
        own_env: Mapping[str, str] | None = None,
        session: Session | None = None,
        own_group: bool | None = None,
        show: Show = no_progress,
    ) -> Task:
        """With a folder of its own, which is to be removed. Raises `PermanentError` when the cache takes none.

        What is not said is that of a start without a job.
        """
        return cls(
            setup=setup,
            requirements=tuple(requirements),
            wanted=wanted,
            env=env,
            own_env=env if own_env is None else own_env,
            session=session,
            own_group=not in_foreground() if own_group is None else own_group,
            folder=RunFolder.made(environments_folder(wanted.cache) / "runs"),
            show=show,
        )

    @cached_property
    def cwd(self) -> str:
        """The job's working folder, by name."""
        return os.getcwd()  # noqa: PTH109 - a name

    @property
    def what(self) -> str:
        """The setup, for people."""
        return ", ".join(Path(path).name for path in (self.setup, *self.requirements) if path)

    @property
    def node(self) -> str:
        """What this machine is called."""
        return self.session.tracer.identity.node if self.session is not None else os.uname().nodename

    @property
    def job(self) -> str:
        """What the job is called; empty when nobody knows."""
        return self.session.tracer.identity.job if self.session is not None else ""

    @property
    def store_uri(self) -> str:
        """The store of snapshots."""
        return self.wanted.store or own_store(self.wanted.cache)

    @property
    def signatures(self) -> Signatures:
        """What is signed in the store of snapshots. This node's own store holds nothing but what this node made."""
        return self.wanted.signatures if self.wanted.store else UNSIGNED

    @property
    def store_folder(self) -> tuple[str, ...]:
        """The store's folder, where it is one: starts write into it meanwhile, here and on other nodes."""
        scheme, separator, path = self.store_uri.partition("://")
        return (path,) if separator and scheme == "file" else () if separator else (scheme,)

    @property
    def changes(self) -> Path:
        """Where what jobs change in their environments goes."""
        return environments_folder(self.wanted.cache) / "changes"

    @contextmanager
    def stage(self, name: str = "") -> Iterator[dict[str, Any]]:
        """A part of the stage, or the stage itself; facts that are put into what it yields go into its end.

        A fact named `error` makes it a failed one.
        """
        if self.session is None:
            yield {}
            return
        with self.session.tracer.span(f"{STAGE}.{name}" if name else STAGE) as span:
            yield span.attrs
            if "error" in span.attrs:
                span.fail(str(span.attrs["error"]))
