"""The part of the report about how nodes got image, environment and checkpoint, the traffic between them, and what a
restart in place did not repeat."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Restarted:
    """One more start of the attempt's processes, by `bootseer run --restarts`, by an elastic launcher, or on request
    (`bootseer restart`)."""

    restart: int
    by: str
    """`bootseer`, `launcher` or `request`."""
    exit_code: int | None
    """Of the previous start, if `bootseer` restarted it."""
    startup_s: float | None
    """From the end of the previous start to the first step; None if there was none."""
    saved_s: float
    """Duration of the stages below in the attempt's first start, on the node where they took longest in total."""
    not_repeated: dict[str, float] = field(default_factory=dict)
    """Stages of the first start that this one skipped, and their seconds there."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What one node fetched of an image or snapshot, and how good the hot set was."""

    stored_bytes: int
    """Size as stored."""
    local_bytes: int
    """Of these, already on the node."""
    demand_bytes: int
    """Fetched because a reader waited; `hot` and `cold` were prefetched."""
    hot_bytes: int
    cold_bytes: int
    requests: int
    coverage: float | None
    """Share of the blocks needed by readers that were in the hot set; None without a hot set."""
    until: str
    """When these numbers were taken: `training_began` or `end` (of the command)."""


@dataclass(frozen=True, slots=True)
class ImageStart(Fetched):
    """How one node got its container image."""

    node: str
    image: str
    """As the user named it, without credentials."""
    digest: str
    mode: str
    """`hot`: lazily with a hot set; `lazy`: lazily without one; `local`: it was already complete; `pull`: completely
    before the start, predicted to be faster; `fallback`: the same, because lazy loading was not possible."""
    reason: str
    """Why this mode, in words."""
    seconds: float | None
    """From the reference to the container's start."""
    layers: int
    wasted_blocks: int
    """Prefetched as hot and never read."""
    late_blocks: int
    """In the hot set, but not fetched yet when a reader needed them."""


@dataclass(frozen=True, slots=True)
class DataNode:
    """What one DataNode served of a checkpoint."""

    name: str
    """`host:port`."""
    bytes: int
    seconds: float | None
    """Total duration of its reads."""
    failures: int


@dataclass(frozen=True, slots=True)
class CheckpointStart:
    """How one node read its checkpoint (`bootseer run --checkpoint`)."""

    node: str
    uri: str
    mode: str
    """`mounted`, or `plain`: read directly from a folder, without the numbers below."""
    reason: str
    """Why this mode, in words; empty if there was no choice."""
    seconds: float | None
    """Until it was mounted."""
    until: str
    """When the numbers below were taken: `training_began` or `end` (of the command)."""
    read_bytes: int
    """Returned to readers, not counting reads from the kernel's page cache."""
    place_bytes: int
    """Fetched from the file system, including prefetches."""
    cache_bytes: int
    """Read from this node's cache."""
    peer_bytes: int
    """Read from the job's other nodes."""
    same_bytes: int
    """Equal to data of other checkpoints in the cache, and taken from there; only in older logs."""
    retries: int
    hedges: int
    """Reads sent to a second DataNode because the first one was slow."""
    hedges_won: int
    rebuilt: int
    """Chunks rebuilt from parity."""
    refused: int
    """Chunks that arrived with wrong bytes."""
    fallback: str
    """Why the file system is read in a slower way; empty if it is not."""
    datanodes: list[DataNode]
    """Those that served most, at most 16."""


@dataclass(frozen=True, slots=True)
class PeersStart:
    """The sources of one node's bytes, and what it sent to the job's other nodes (`bootseer run --peers`)."""

    node: str
    until: str
    peers: int
    """Nodes that serve peers, including itself."""
    unreachable: int
    """Of these, nodes that did not answer."""
    cache_bytes: int
    """Already on the node or read from its cache."""
    peer_bytes: int
    origin_bytes: int
    filled_bytes: int
    """Fetched from the origin for other nodes."""
    sent_bytes: int
    refused: int
    """Requests of peers refused because there were too many at once."""
    late_requests: int
    late_peers: str
    """Names of nodes that were late, separated by spaces."""
    wrong_peers: str
    """Names of nodes that sent a wrong block, separated by spaces."""
    interfaces: str
    """`NAME=BYTES` sent by each network interface, separated by spaces."""


@dataclass(frozen=True, slots=True)
class EnvironmentStart(Fetched):
    """How one node got its environment: from a snapshot, or by running the setup."""

    node: str
    mode: str
    """`restored`: a snapshot was mounted, the setup did not run; `captured`: it ran, and its result was published as a
    snapshot, if possible; `installed`: it ran without a snapshot; `bypassed`: the same, at the user's request."""
    code: str
    """Why this mode, as a stable word, of `env.life.decide.REASONS`: `hit`, `no-snapshot`, ..."""
    reason: str
    """Why this mode, in words."""
    key: str
    """The request key."""
    digest: str
    """Of the snapshot that was restored."""
    what: str
    """Description of the setup's files."""
    builder: str
    """Node that made the snapshot."""
    trust: str
    """`observed`, `unobserved` or `untrusted`: whether the key covers everything that the setup reads."""
    way: str
    """How the snapshot is mounted, or how the setup was observed."""
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
    """Mounted folders."""
    loose: int
    """Files outside these folders, which were copied to their paths."""
    published: bool | None
    """Whether a snapshot was published; None if there was none to publish, or it is unknown."""
    why_not: str
    """Why no snapshot was published."""
