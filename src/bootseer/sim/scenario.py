"""Scenarios: a cluster and a job, read from a TOML file (`docs/simulation.md` explains each field)."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from bootseer.errors import UsageError

_Positive = Annotated[float, Meta(gt=0, le=1e12)]
_NotNegative = Annotated[float, Meta(ge=0, le=1e12)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_MAX_BYTES = 1 << 20
MAX_NODES = 4096


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    pass


class Links(_Part, frozen=True):
    """Speeds of links, each in both directions."""

    node_gbit: _Positive = 25.0
    rack_nodes: Annotated[int, Meta(ge=0, le=1024)] = 32
    """0: no racks."""
    rack_oversubscription: _Positive = 4.0
    """Total bandwidth of a rack's nodes divided by that of its uplink."""
    registry_gbit: _Positive = 25.0
    registry_latency_ms: _NotNegative = 5.0
    registry_requests_per_s: _NotNegative = 0.0
    """Above this rate it answers 429; 0: unlimited."""
    peer_latency_ms: _NotNegative = 0.2
    datanodes: Annotated[int, Meta(ge=1, le=10_000)] = 64
    datanode_gbit: _Positive = 10.0
    index_gbit: _Positive = 10.0
    """Link of the package index."""


class Processors(_Part, frozen=True):
    """Processing rates of one node."""

    load_mb_s: _Positive = 1000.0
    """Decompression and verification by BootSeer, in MB of the image as stored."""
    unpack_mb_s: _Positive = 120.0
    """The same for a runtime that unpacks one layer after the other."""


class Image(_Part, frozen=True):
    """The job's image, as the registry stores it."""

    gb: Annotated[float, Meta(gt=0, le=1000)]
    ratio: Annotated[float, Meta(gt=0, le=1)] = 0.45
    """Stored bytes per byte of the files."""
    hot_share: _Share = 0.2
    """Share that a start reads."""
    block_kib: Literal[64, 128, 256, 512, 1024, 2048, 4096] = 256
    """Block size: smaller blocks compress less, with larger ones a start loads more that it does not read. `gb` and
    `hot_share` are for 256 KiB."""
    fixed_s: _NotNegative = 1.0
    """Time for a mount, or for a container of a local image."""


class Environment(_Part, frozen=True):
    """What the job installs before it starts."""

    install_s: _NotNegative
    """Time for processor and disk, without the download."""
    gb: Annotated[float, Meta(ge=0, le=1000)]
    """Size of the download, and of the snapshot."""
    hot_share: _Share = 0.35
    fixed_s: _NotNegative = 0.7
    """Time to find and mount a snapshot."""
    retry_share: _Share = 0.0
    """Share of nodes whose install needs a second attempt."""
    retry_s: _NotNegative = 30.0
    """Delay of that second attempt."""


class Checkpoint(_Part, frozen=True):
    """The checkpoint that nodes read before training."""

    gb: Annotated[float, Meta(ge=0, le=100_000)]
    replicated_share: _Share = 0.0
    """Share that every node reads; the rest is divided among the nodes."""
    stream_mb_s: _Positive = 250.0
    """Rate of one client reading one file sequentially."""
    readers: Annotated[int, Meta(ge=1, le=64)] = 8
    """Parallel readers per node: its ranks."""
    stripes: Annotated[int, Meta(ge=1, le=64)] = 4
    """Stripes of a file, on different DataNodes."""
    replicas: Annotated[int, Meta(ge=1, le=10)] = 3
    """Replicas of each block."""
    in_order: bool = False
    """Whether each reader reads sequentially, as through the mount, with read-ahead."""
    parity: bool = False
    """Whether striped files have a parity part, from which a late part is rebuilt."""


class Rest(_Part, frozen=True):
    """Times that BootSeer does not change."""

    import_s: _NotNegative = 15.0
    """Computation between the reads of image and environment."""
    warm_import_s: _NotNegative = 0.5
    """The same in processes forked from one that has already imported."""
    connect_s: _NotNegative = 2.0
    connect_s_per_1000_ranks: _NotNegative = 5.0
    allocate_s: _NotNegative = 0.0
    """Time before the first stage, once for the job."""


class Noise(_Part, frozen=True):
    """Differences between nodes."""

    sigma: Annotated[float, Meta(ge=0, le=5)] = 0.08
    """Standard deviation of the logarithm of a node's fixed times, installs and imports."""
    slow_share: _Share = 0.002
    """Share of nodes that take `slow_factor` times as long."""
    slow_factor: Annotated[float, Meta(ge=1, le=1000)] = 1.5


class Fault(_Part, frozen=True):
    """A fault of a node or a DataNode during the start."""

    node: Annotated[int, Meta(ge=0, lt=MAX_NODES)] | None = None
    datanode: Annotated[int, Meta(ge=0, lt=10_000)] | None = None
    at_s: _NotNegative = 0.0
    upload_factor: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Factor of its upload rate from then on; 0: it no longer answers."""
    work_factor: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    """Factor of its fixed times, installs and imports, from the beginning."""

    def __post_init__(self) -> None:
        if self.node is None and self.datanode is None:
            raise ValueError("a fault needs a node or a datanode")


class Month(_Part, frozen=True):
    """The starts of a cluster over some time, and the cache and snapshot policies to compare."""

    nodes: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 64
    days: Annotated[float, Meta(gt=0, le=366)] = 30.0
    starts_per_day: Annotated[float, Meta(gt=0, le=1000)] = 30.0
    even: bool = False
    """Starts at equal intervals; otherwise at random."""
    jobs: Annotated[int, Meta(ge=1, le=1000)] = 12
    job_nodes: Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_NODES)], ...], Meta(min_length=1)] = (1, 2, 4, 8, 16)
    draws: Annotated[int, Meta(ge=1, le=100)] = 2
    """Number of simulated starts for each number of nodes; other starts take as long as one of them."""
    again_share: _Share = 0.6
    """Share of starts that repeat the previous job, because it failed or is under development."""
    image_days: _Positive = 3.0
    """Mean time between changes of a job's image, except for its base, which changes each month."""
    environment_days: _Positive = 2.0
    base_share: _Share = 0.7
    """Share of the image that all jobs have in common."""
    cold_loaded: _Share = 1.0
    """Share of the blocks that no start reads which is nevertheless loaded."""
    cache_gb: Annotated[tuple[_Positive, ...], Meta(min_length=1, max_length=16)] = (25, 50, 100)
    """Limits of a node's cache to compare."""
    snapshot_days: Annotated[tuple[_NotNegative, ...], Meta(min_length=1, max_length=16)] = (1, 7, 0)
    """Maximum ages of snapshots to compare; 0: any age."""

    def __post_init__(self) -> None:
        if max(self.job_nodes) > self.nodes:
            raise ValueError(f"job-nodes: a job of {max(self.job_nodes)} nodes on a cluster of {self.nodes}")


class Scenario(_Part, frozen=True):
    """A cluster, and a job on different numbers of its nodes."""

    name: str
    nodes: Annotated[list[Annotated[int, Meta(ge=1, le=MAX_NODES)]], Meta(min_length=1, max_length=32)]
    image: Image
    environment: Environment
    checkpoint: Checkpoint
    gpus_per_node: Annotated[int, Meta(ge=1, le=64)] = 8
    links: Links = Links()
    processors: Processors = Processors()
    rest: Rest = Rest()
    noise: Noise = Noise()
    fault: list[Fault] = []
    month: Month | None = None
    fold: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 64
    """Several nodes of a rack (a power of two) are simulated as one, as long as this many groups remain."""

    def __post_init__(self) -> None:
        nodes = max((*self.nodes, *(self.month.job_nodes if self.month is not None else ())))
        datanodes = self.links.datanodes
        for fault in self.fault:
            if (fault.node or 0) >= nodes or (fault.datanode or 0) >= datanodes:
                raise ValueError(f"fault: there are {nodes} nodes and {datanodes} DataNodes, numbered from 0")

    @property
    def digest(self) -> str:
        """Digest of all parameters except the numbers of nodes: equal digest, arm, nodes and seed give equal starts."""
        return hashlib.sha256(self._encoded).hexdigest()[:12]

    @property
    def text(self) -> str:
        """The parameters of the digest as text."""
        return msgspec.json.format(self._encoded, indent=1).decode()

    @property
    def _encoded(self) -> bytes:
        fields = {**msgspec.json.decode(msgspec.json.encode(self)), "nodes": []}
        if self.month is None:  # irrelevant for starts
            del fields["month"]
        return msgspec.json.encode(fields)


def shipped() -> list[str]:
    folder = resources.files(__package__) / "scenarios"
    return sorted(one.name.removesuffix(".toml") for one in folder.iterdir() if one.name.endswith(".toml"))


def read_scenario(name: str, changes: Iterable[str] = ()) -> Scenario:
    """Read a file, or a shipped scenario by name. `changes`: such as `links.node-gbit=100`. Raises `UsageError`."""
    try:
        path = resources.files(__package__) / "scenarios" / f"{name}.toml" if name in shipped() else Path(name)
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise UsageError(f"{name}: larger than {_MAX_BYTES >> 20} MiB")
        fields = tomllib.loads(text.decode())
        for change in changes:
            _change(fields, change)
        return msgspec.convert(fields, Scenario)
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}; shipped scenarios: {', '.join(shipped())}") from error
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise UsageError(f"{name}: {error}", hint="docs/simulation.md lists all fields") from error


def _change(fields: dict[str, Any], change: str) -> None:
    path, separator, value = change.partition("=")
    *tables, last = path.strip().split(".")
    if not separator or not last:
        raise UsageError(f"{change!r}: expected TABLE.FIELD=VALUE, for example links.node-gbit=100")
    for table in tables:
        fields = fields.setdefault(table, {})
        if not isinstance(fields, dict):
            raise UsageError(f"{change!r}: {table} is not a table")
    try:
        fields[last] = tomllib.loads(f"value = {value}")["value"]
    except ValueError as error:
        raise UsageError(f'{change!r}: the value must be a number, true, false, "text" or [a list]') from error
