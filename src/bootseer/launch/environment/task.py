"""The context that the parts of one environment start share: options, folder, session.

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

from msgspec import Struct

from bootseer.artifact.owned_folder import OwnedFolder
from bootseer.artifact.places import environments_folder
from bootseer.artifact.progress import Show, no_progress
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.launch.environment.plain import STAGE
from bootseer.launch.session import Session, Unmeasured, session_stage

if TYPE_CHECKING:
    from bootseer.artifact.loading import Loading
    from bootseer.env import Mode
    from bootseer.env.capturing.walk import LeftOut
    from bootseer.env.snapshot.secret_check import SecretCheck
    from bootseer.store.store import Store


Conflicts = Literal["refuse", "accept"]
Daemons = Literal["relaunch", "refuse"]
UNPINNED_AGE_S = 7 * 86_400.0
"""Default age limit of a snapshot with unpinned versions."""


class EnvironmentOptions(Struct, frozen=True):
    """Options of environment snapshots."""

    cache: Path
    """The node's cache."""
    runtime: Path
    """Folder for the state of mounts."""
    mode: Mode = "auto"
    store: str | None = None
    """URI of the store of snapshots; None: the node's own, which other nodes do not see."""
    plain_http: bool = False
    signatures: Signatures = UNSIGNED
    loading: Loading = "auto"
    inputs: tuple[str, ...] = ()
    """Additional files and folders that the setup depends on."""
    variables: tuple[str, ...] = ()
    """Names of additional variables that it depends on."""
    imports: tuple[str, ...] = ()
    """Modules that must be importable before a snapshot is published."""
    daemons: Daemons = "relaunch"
    """Processes that the setup leaves running: a restore starts them again, or they prevent making and using the
    snapshot."""
    conflicts: Conflicts = "refuse"
    """Whether a snapshot is published although `pip check` finds new conflicts."""
    leave_out: tuple[str, ...] = ()
    """Patterns of paths to leave out of snapshots (`Exclusions`)."""
    keep: tuple[str, ...] = ()
    """Patterns of paths to keep although they look secret."""
    secret_rules: tuple[str, ...] = ()
    """Files with additional rules for secrets."""
    max_age_s: float | None = None
    """Age limit of usable snapshots; None: depends on whether versions are pinned; infinite: no limit."""
    wait_s: float = 600.0
    """How long to wait for another node that builds the snapshot."""
    publish_s: float = 600.0
    """How long the end of the run waits for the publication."""
    tenant: str = ""
    """Snapshots are shared only within a tenant: part of the key."""
    place: str = ""
    """The setup's working folder in a container, if the user has mounted it: installed packages may contain its
    path."""


def own_store(cache: Path) -> str:
    """The store of snapshots on this node itself."""
    return str(environments_folder(cache) / "store")


@dataclass
class Task:
    """One environment start, with its own folder, which the caller removes.

    Raises `PermanentError` if the folder cannot be created. The defaults are those of a start without a job.
    """

    setup: str | None
    requirements: Sequence[str]
    options: EnvironmentOptions
    env: Mapping[str, str]
    """The environment of the job and its setup."""
    own_env: Mapping[str, str] | None = None
    """The same without BootSeer's additions, for the request key; None: it is the same."""
    session: Session = field(default_factory=lambda: Unmeasured(os.environ))
    show: Show = no_progress
    """Displays progress while a start waits."""
    outcome: dict[str, Any] = field(default_factory=dict)
    """Outcome of the publication, set by `publish.report_outcome`."""
    unsafe: str = ""
    """Why the setup is not snapshot-safe, whenever it runs; set by `publish.report_unsafe`."""
    folder: OwnedFolder = field(init=False)

    def __post_init__(self) -> None:
        self.folder = OwnedFolder.made(environments_folder(self.options.cache) / "runs", "run-")

    @cached_property
    def cwd(self) -> str:
        return os.getcwd()  # noqa: PTH109 - a name

    @property
    def what(self) -> str:
        return ", ".join(Path(path).name for path in (self.setup, *self.requirements) if path)

    @property
    def node(self) -> str:
        return self.session.tracer.identity.node

    @property
    def job(self) -> str:
        """Name of the job; empty if unknown."""
        return self.session.tracer.identity.job

    @property
    def store_uri(self) -> str:
        return self.options.store or own_store(self.options.cache)

    @property
    def signatures(self) -> Signatures:
        """Signatures of the store. This node's own store needs none, as only this node writes it."""
        return self.options.signatures if self.options.store else UNSIGNED

    @property
    def store_folder(self) -> tuple[str, ...]:
        """The store's folder, if it is one: other starts write into it while a setup runs."""
        scheme, separator, path = self.store_uri.partition("://")
        return (path,) if separator and scheme == "file" else () if separator else (scheme,)

    def open_store(self) -> Store:
        """The store of snapshots, to be closed. Raises what the store raises."""
        from bootseer.store.open import open_store

        return open_store(self.store_uri, plain_http=self.options.plain_http)

    def secret_check(self, left_out: LeftOut) -> SecretCheck:
        """The check of all that goes to the store. Raises what `SecretCheck` raises."""
        from bootseer.env.snapshot.secret_check import SecretCheck

        exclusions, withheld = left_out.exclusions, left_out.withheld.values()
        rules, cache = self.options.secret_rules, environments_folder(self.options.cache) / "secret-rules"
        return SecretCheck(exclusions, withheld=withheld, variables=self.env, rules=rules, cache=cache)

    @property
    def changes(self) -> Path:
        """Folder for jobs' changes to their environments."""
        return environments_folder(self.options.cache) / "changes"

    def stage(self, name: str = "") -> AbstractContextManager[dict[str, Any]]:
        """A sub-stage, or the stage itself (`session_stage`)."""
        return session_stage(self.session, f"{STAGE}.{name}" if name else STAGE)
