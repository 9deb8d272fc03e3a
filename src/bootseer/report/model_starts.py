"""The part of the report that tells how nodes got image, environment and checkpoint, what they sent each other, and
what a restart in place did not repeat."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Restarted:
    """One more start of the attempt's processes, by `bootseer run --restarts` or by an elastic launcher."""

    restart: int
    by: str
    """`bootseer` or `launcher`."""
    exit_code: int | None
    """Of the start before, where `bootseer` restarted it."""
    startup_s: float | None
    """From the end of the start before to the first step; None: there was none."""
    saved_s: float
    """What the stages below took in the attempt's first start, on the node where they took longest together."""
    not_repeated: dict[str, float] = field(default_factory=dict)
    """Stages of the first start that this one did without, and their seconds there."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What one node fetched of an image or snapshot, and how well that was foreseen."""

    stored_bytes: int
    """Size as stored."""
    local_bytes: int
    """Of these, on the node already."""
    demand_bytes: int
    """Fetched because a reader waited; `hot` and `cold` are ahead of any reader."""
    hot_bytes: int
    cold_bytes: int
    requests: int
    coverage: float | None
    """Share of the blocks that readers needed which the hot set had named; None without a hot set."""
    until: str
    """When these numbers were taken: `training_began` or `end` (of the command)."""


@dataclass(frozen=True, slots=True)
class ImageStart(Fetched):
    """How one node got its container image: which way, what was fetched until then, and how well it was foreseen."""

    node: str
    image: str
    """As the user named it, without credentials."""
    digest: str
    mode: str
    """`hot`: lazily with a hot set; `lazy`: lazily without one; `local`: all of it was there; `pull`: everything first,
    as predicted to be faster; `fallback`: everything first, because lazily was not possible."""
    reason: str
    """Why this mode, in words."""
    seconds: float | None
    """From the reference to the container's start."""
    layers: int
    wasted_blocks: int
    """Fetched as hot and never read."""
    late_blocks: int
    """Named by the hot set, and not there yet when a reader came."""


@dataclass(frozen=True, slots=True)
class DataNode:
    """What one node of the file system served of a checkpoint."""

    name: str
    """`host:port`."""
    bytes: int
    seconds: float | None
    """That its reads took, all together."""
    failures: int


@dataclass(frozen=True, slots=True)
class CheckpointStart:
    """How one node read its checkpoint, which `bootseer run --checkpoint` brought."""

    node: str
    uri: str
    mode: str
    """`mounted`, or `plain`: as it lies in a folder of the node, where nothing below is known."""
    reason: str
    """Why this mode, in words; empty when there was no choice."""
    seconds: float | None
    """Until it was mounted."""
    until: str
    """When the numbers below were taken: `training_began` or `end` (of the command)."""
    read_bytes: int
    """Handed to readers; what the kernel had already does not count."""
    place_bytes: int
    """Fetched from the file system, ahead of readers too."""
    cache_bytes: int
    """Read from this node's cache; then from the job's other nodes."""
    peer_bytes: int
    same_bytes: int
    """Equal to what the cache has of other checkpoints, and taken from there."""
    retries: int
    hedges: int
    """Asked of a second node because the first one was late."""
    hedges_won: int
    rebuilt: int
    """Chunks that were made from parity; then those that arrived with wrong bytes."""
    refused: int
    fallback: str
    """Why the file system is read in a slower way; empty when it is not."""
    datanodes: list[DataNode]
    """Those that served most, at most 16."""


@dataclass(frozen=True, slots=True)
class PeersStart:
    """Where one node's bytes came from, and what it sent to the job's other nodes (`bootseer run --peers`)."""

    node: str
    until: str
    peers: int
    """Nodes that serve, itself too; `unreachable` ones did not answer, `refused` ones were too many at once."""
    unreachable: int
    cache_bytes: int
    """On the node already or read from its cache; then from other nodes, from the origin, and that for other nodes."""
    peer_bytes: int
    origin_bytes: int
    filled_bytes: int
    sent_bytes: int
    refused: int
    late_requests: int
    late_peers: str
    """Names of nodes that were late; of `wrong_peers` that sent a wrong block. Separated by spaces."""
    wrong_peers: str
    interfaces: str
    """`NAME=BYTES` of what each network interface sent, separated by spaces."""


@dataclass(frozen=True, slots=True)
class EnvironmentStart(Fetched):
    """How one node got what its environment setup makes: from a snapshot, or by running the setup."""

    node: str
    mode: str
    """`restored`: a snapshot was mounted, the setup did not run; `captured`: it ran, and what it did was kept as a
    snapshot, if possible; `installed`: it ran as it would without us; `bypassed`: the same, as the user asked."""
    code: str
    """Why this mode, as a stable word: `miss`, `hit`, `driver`, `store`, ..."""
    reason: str
    """Why this mode, in words."""
    key: str
    """The request key."""
    digest: str
    """Of the snapshot that was restored."""
    what: str
    """The setup's files, for people."""
    builder: str
    """Node that made the snapshot."""
    trust: str
    """`observed`, `unobserved` or `untrusted`: whether the key knows all that the setup reads."""
    way: str
    """How the snapshot is shown, or the setup was watched."""
    seconds: float | None
    """From the beginning of the stage until the command could start."""
    age_s: float | None
    """Of the snapshot."""
    saved_s: float | None
    """How long the setup took when the snapshot was made, less `seconds`."""
    num_files: int
    size_bytes: int
    """Of the snapshot's files."""
    roots: int
    """Folders that are shown by a mount."""
    loose: int
    """Files outside of them, which were written as the setup would."""
    published: bool | None
    """Whether a snapshot was kept; None when there was none to keep, or nothing tells."""
    why_not: str
    """Why no snapshot was kept."""
