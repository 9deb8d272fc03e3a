"""What is simulated: a cluster and a job, read from a TOML file (`docs/simulation.md` explains each field)."""

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
    """How much more the nodes of a rack could send than its uplink."""
    registry_gbit: _Positive = 25.0
    registry_latency_ms: _NotNegative = 5.0
    registry_requests_per_s: _NotNegative = 0.0
    """Above them it answers 429; 0: any number."""
    peer_latency_ms: _NotNegative = 0.2
    datanodes: Annotated[int, Meta(ge=1, le=10_000)] = 64
    datanode_gbit: _Positive = 10.0
    index_gbit: _Positive = 10.0
    """Of the package index."""


class Processors(_Part, frozen=True):
    """Of one node, for its start."""

    load_mb_s: _Positive = 1000.0
    """Decompressed and verified by BootSeer, in MB of the image as stored."""
    unpack_mb_s: _Positive = 120.0
    """The same by a runtime that unpacks one layer after the other."""


class Image(_Part, frozen=True):
    """The job's image, as the registry stores it."""

    gb: _Positive
    ratio: Annotated[float, Meta(gt=0, le=1)] = 0.45
    """Bytes stored for each of the files."""
    hot_share: _Share = 0.2
    """What a start reads of it."""
    block_kib: Literal[64, 128, 256, 512, 1024, 2048, 4096] = 256
    """Of the block files: smaller ones compress less, of larger ones a start loads more that it does not read. `gb` and
    `hot_share` are those of 256 KiB."""
    fixed_s: _NotNegative = 1.0
    """A mount, or a container of an image that is there."""


class Environment(_Part, frozen=True):
    """What the job installs before it starts."""

    install_s: _NotNegative
    """Processor and disk, without the download."""
    gb: _NotNegative
    """To download, and of the snapshot."""
    hot_share: _Share = 0.35
    fixed_s: _NotNegative = 0.7
    """Finding and mounting a snapshot."""
    retry_share: _Share = 0.0
    """Nodes whose install waits for a second attempt,"""
    retry_s: _NotNegative = 30.0
    """... for so long."""


class Checkpoint(_Part, frozen=True):
    """What the nodes read before they train."""

    gb: _NotNegative
    replicated_share: _Share = 0.0
    """What each node reads whole; the rest is divided among them."""
    stream_mb_s: _Positive = 250.0
    """One client reading one file in sequence."""
    readers: Annotated[int, Meta(ge=1, le=64)] = 8
    """Of each node, that read at once: its ranks."""
    stripes: Annotated[int, Meta(ge=1, le=64)] = 4
    """Of a striped file, each on DataNodes of its own."""
    replicas: Annotated[int, Meta(ge=1, le=10)] = 3
    """Of each block."""
    in_order: bool = False
    """Whether each reader waits for one read after the other, as through the mount, and what is read ahead helps."""
    parity: bool = False
    """Whether striped files have a part more, from which a late one is rebuilt."""


class Rest(_Part, frozen=True):
    """What BootSeer does not change."""

    import_s: _NotNegative = 15.0
    """Computing between the reads of image and environment."""
    warm_import_s: _NotNegative = 0.5
    """The same in processes that are forked from one that has imported already."""
    connect_s: _NotNegative = 2.0
    connect_s_per_1000_ranks: _NotNegative = 5.0
    allocate_s: _NotNegative = 0.0
    """Before the first stage, once for the job."""


class Noise(_Part, frozen=True):
    """How nodes differ."""

    sigma: _NotNegative = 0.08
    """Of the logarithm of what each node takes for fixed parts, installs and imports."""
    slow_share: _Share = 0.002
    """Nodes that take `slow_factor` times as long."""
    slow_factor: Annotated[float, Meta(ge=1, le=1000)] = 1.5


class Fault(_Part, frozen=True):
    """What happens to a node or a DataNode during the start."""

    node: Annotated[int, Meta(ge=0, lt=MAX_NODES)] | None = None
    datanode: Annotated[int, Meta(ge=0, lt=10_000)] | None = None
    at_s: _NotNegative = 0.0
    upload_factor: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Its upload from then on; 0: it answers no more."""
    work_factor: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    """So much longer it takes, from the beginning, for fixed parts, installs and imports."""


class Month(_Part, frozen=True):
    """What a cluster does for some time, and the policies of keeping that are compared."""

    nodes: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 64
    days: Annotated[float, Meta(gt=0, le=366)] = 30.0
    starts_per_day: Annotated[float, Meta(gt=0, le=1000)] = 30.0
    even: bool = False
    """At equal intervals; otherwise by chance."""
    jobs: Annotated[int, Meta(ge=1, le=1000)] = 12
    job_nodes: Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_NODES)], ...], Meta(min_length=1)] = (1, 2, 4, 8, 16)
    draws: Annotated[int, Meta(ge=1, le=100)] = 2
    """So many starts on each number of nodes are simulated; the others take as long as one of them."""
    again_share: _Share = 0.6
    """Starts of the job that was started last: it failed, or is being worked on."""
    image_days: _Positive = 3.0
    """So often a job's image changes, but for its base, which changes each month."""
    environment_days: _Positive = 2.0
    base_share: _Share = 0.7
    """Of the image, which all jobs have."""
    cold_loaded: _Share = 1.0
    """Of what no start reads: how much of it comes to the nodes meanwhile."""
    cache_gb: Annotated[tuple[_Positive, ...], Meta(min_length=1, max_length=16)] = (25, 50, 100)
    """Limits of a node's cache,"""
    snapshot_days: Annotated[tuple[_NotNegative, ...], Meta(min_length=1, max_length=16)] = (1, 7, 0)
    """... and ages of snapshots, that are compared; 0: any age."""


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
    """Nodes of a rack are simulated as one, two, four or more together, so long as so many remain."""

    @property
    def digest(self) -> str:
        """Of all parameters but the numbers of nodes: starts of the same digest, arm, nodes and seed are the same."""
        return hashlib.sha256(self._alone).hexdigest()[:12]

    @property
    def text(self) -> str:
        """What the digest is of, for people."""
        return msgspec.json.format(self._alone, indent=1).decode()

    @property
    def _alone(self) -> bytes:
        fields = msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(self, nodes=[])))
        if self.month is None:  # it plays no part in starts
            del fields["month"]
        return msgspec.json.encode(fields)


def shipped() -> list[str]:
    """Names of the scenarios that come with the program."""
    folder = resources.files(__package__) / "scenarios"
    return sorted(one.name.removesuffix(".toml") for one in folder.iterdir() if one.name.endswith(".toml"))


def read_scenario(name: str, changes: Iterable[str] = ()) -> Scenario:
    """A file, or a shipped scenario by its name. `changes`: `links.node-gbit=100` and the like. Raises `UsageError`."""
    try:
        if name in shipped():
            text = (resources.files(__package__) / "scenarios" / f"{name}.toml").read_bytes()
        else:
            with Path(name).open("rb") as file:
                text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise UsageError(f"{name}: larger than {_MAX_BYTES >> 20} MiB")
        fields = tomllib.loads(text.decode())
        for change in changes:
            _change(fields, change)
        return msgspec.convert(fields, Scenario)
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}; shipped scenarios: {', '.join(shipped())}") from error
    except (ValueError, msgspec.ValidationError) as error:
        raise UsageError(f"{name}: {error}") from error


def _change(fields: dict[str, Any], change: str) -> None:
    path, separator, value = change.partition("=")
    *tables, last = path.strip().split(".")
    if not separator or not last:
        raise UsageError(f"{change!r}: say TABLE.FIELD=VALUE, for example links.node-gbit=100")
    for table in tables:
        fields = fields.setdefault(table, {})
        if not isinstance(fields, dict):
            raise UsageError(f"{change!r}: {table} is no table")
    fields[last] = tomllib.loads(f"value = {value}")["value"]
