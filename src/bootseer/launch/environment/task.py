"""What the parts of one environment start share: what is asked for, where, and how its stages are marked.

<cache>/environments/runs/<name>/      one start's own lock, layers, logs
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bootseer.artifact.owned_folder import OwnedFolder
from bootseer.artifact.places import environments_folder
from bootseer.artifact.progress import Show, no_progress
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.launch.environment.plain import STAGE
from bootseer.launch.session import Session, staged
from bootseer.launch.supervise import in_foreground

if TYPE_CHECKING:
    from bootseer.artifact.loading import Loading
    from bootseer.env import Mode


Conflicts = Literal["refuse", "accept"]
Daemons = Literal["relaunch", "refuse"]
UNPINNED_AGE_S = 7 * 86_400.0
"""How long a snapshot serves whose setup would install other versions some day; the default."""


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
    daemons: Daemons = "relaunch"
    """What becomes of processes that the setup leaves running: a restore starts them again, or they keep the snapshot
    from being made and from being used."""
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
    """Starts of one tenant share snapshots: part of the key."""
    place: str = ""
    """Where in a container the setup runs, if that is the user's own folder: what it installs remembers that."""


def own_store(cache: Path) -> str:
    """The store of snapshots on this node itself."""
    return str(environments_folder(cache) / "store")


@dataclass
class Task:
    """One start's environment, with a folder of its own, which is to be removed.

    Raises `PermanentError` when the cache takes none. What is not said is that of a start without a job.
    """

    setup: str | None
    requirements: Sequence[str]
    wanted: EnvironmentWanted
    env: Mapping[str, str]
    """The environment that the job and its setup get."""
    own_env: Mapping[str, str] | None = None
    """The same without what we add, if that is another: what the request key may depend on."""
    session: Session | None = None
    own_group: bool = field(default_factory=lambda: not in_foreground())
    """Whether what is started leads a process group of its own (`supervise`)."""
    show: Show = no_progress
    """Shows people what is waited for."""
    outcome: dict[str, Any] = field(default_factory=dict)
    """What became of the snapshot, once that is known (`publish.tell`)."""
    folder: OwnedFolder = field(init=False)

    def __post_init__(self) -> None:
        self.folder = OwnedFolder.made(environments_folder(self.wanted.cache) / "runs", "run-")

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
        """What the job is called; empty when it is not known."""
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

    def stage(self, name: str = "") -> AbstractContextManager[dict[str, Any]]:
        """A part of the stage, or the stage itself (`session.staged`)."""
        return staged(self.session, f"{STAGE}.{name}" if name else STAGE)
