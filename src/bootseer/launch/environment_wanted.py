"""What the user said about the environment's snapshot: a value, made by the command line, read by the stages.

Touches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bootseer.artifact.places import environments_folder
from bootseer.artifact.signatures import UNSIGNED, Signatures

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
