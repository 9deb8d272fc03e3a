"""The tables that the service derives from raw lines; all of them can be derived again.

The schema is the same for SQLite and PostgreSQL. Times are nanoseconds since 1970 (`_ns`), durations seconds (`_s`),
days are counted since 1970 in UTC, and are those on which a start began. `migrations` upgrades older databases.

There may be 10^7 starts and 10^4 nodes, so queries over weeks read the sums in `stage_day` and `node_day`. These are
recomputed for each day that changed, so that a start that is derived twice counts once. There is no table of spans: a
start's report has what people look at, and its raw lines have all details.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
)

metadata: Final = MetaData()

OPEN: Final = "open"
CLOSED: Final = "closed"
IMAGE: Final = "image"
ENVIRONMENT: Final = "environment"
CHECKPOINT: Final = "checkpoint"

# SQLite autoincrements only columns of exactly this type.
_ID: Final = BigInteger().with_variant(Integer, "sqlite")


def _key(name: str, *arguments: Any) -> Column[Any]:
    return Column(name, _ID, *arguments, primary_key=True)


def _text(name: str) -> Column[Any]:
    """Empty if unknown."""
    return Column(name, Text, nullable=False, server_default="")


def _count(name: str) -> Column[Any]:
    return Column(name, BigInteger, nullable=False, server_default="0")


def _sum(name: str) -> Column[Any]:
    return Column(name, Double, nullable=False, server_default="0")


stage: Final = Table("stage", metadata, _key("id"), Column("name", Text, nullable=False, unique=True))

node: Final = Table(
    "node",
    metadata,
    _key("id"),
    Column("name", Text, nullable=False, unique=True),
    _text("rack"),
)

start: Final = Table(
    "start",
    metadata,
    _key("id"),
    Column("job", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("restart", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    *map(_text, ("team", "queue", "user", "cluster")),
    Column("state", Text, nullable=False),
    _text("outcome"),
    Column("began_ns", BigInteger, nullable=False),
    Column("ended_ns", BigInteger, nullable=False),
    Column("day", Integer, nullable=False),
    # The paper's seven scales by number of GPUs, 0 to 6; -1 if unknown.
    Column("bucket", SmallInteger, nullable=False),
    Column("nodes_expected", Integer),
    Column("nodes_heard", Integer, nullable=False),
    Column("ranks", Integer, nullable=False),
    Column("gpus", Integer),
    # hit: everything was cached; mixed; miss: nothing; off: no technique is used.
    Column("cache_state", Text, nullable=False),
    _text("image"),
    # Versions, digests and sizes for comparisons, as JSON.
    _text("fingerprint"),
    _sum("overhead_s"),
    Column("queue_s", Double),
    _sum("work_s"),
    _sum("wait_s"),
    _sum("gpu_s"),
    _sum("wait_gpu_s"),
    # How much sooner training would have begun without stragglers.
    _sum("straggler_s"),
    # From the end of the queue to the end of the command, or to the next restart; null while the command runs.
    Column("run_s", Double),
    _count("cache_bytes"),
    _count("peer_bytes"),
    _count("origin_bytes"),
    _count("lines_lost"),
    Column("clock_error_s", Double),
    Column("last_node_id", BigInteger, ForeignKey("node.id")),
    Column("last_stage_id", BigInteger, ForeignKey("stage.id")),
    _count("computed_ns"),
    _count("computed_n"),
    UniqueConstraint("job", "attempt", "restart"),
    Index("start_by_day", "day", "bucket"),
    Index("start_by_state", "state", "began_ns"),
    Index("start_by_team", "team", "day"),
)

start_report: Final = Table(
    "start_report",
    metadata,
    _key("start_id", ForeignKey("start.id", ondelete="CASCADE")),
    # The output of `bootseer report --json`, compressed with zstd.
    Column("json", LargeBinary, nullable=False),
)

stage_start: Final = Table(
    "stage_start",
    metadata,
    _key("start_id", ForeignKey("start.id", ondelete="CASCADE")),
    _key("stage_id", ForeignKey("stage.id")),
    Column("day", Integer, nullable=False),
    Column("bucket", SmallInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("cache_state", Text, nullable=False),
    Column("num_nodes", Integer, nullable=False),
    Column("median_s", Double),
    Column("p99_s", Double),
    Column("max_s", Double),
    Column("max_node_id", BigInteger, ForeignKey("node.id")),
    _sum("work_s"),
    _sum("wait_s"),
    Column("gpu_s", Double),
    Index("stage_start_by_day", "day", "stage_id", "bucket"),
    sqlite_with_rowid=False,
)

node_start: Final = Table(
    "node_start",
    metadata,
    _key("start_id", ForeignKey("start.id", ondelete="CASCADE")),
    _key("node_id", ForeignKey("node.id")),
    Column("day", Integer, nullable=False),
    # Whether it was the last node.
    Column("is_last", Boolean, nullable=False),
    # The stage with its largest delay against the others' median, and the delay; null if it is not a straggler.
    Column("stage_id", BigInteger, ForeignKey("stage.id")),
    Column("delay_s", Double),
    Index("node_start_by_node", "node_id", "day"),
    Index("node_start_by_day", "day"),
    sqlite_with_rowid=False,
)

# Per start and technique (image, environment, checkpoint): hits and misses over nodes, and sources of bytes.
technique_start: Final = Table(
    "technique_start",
    metadata,
    _key("start_id", ForeignKey("start.id", ondelete="CASCADE")),
    Column("technique", Text, primary_key=True),
    Column("day", Integer, nullable=False),
    _text("digest"),
    *map(_count, ("stored_bytes", "hits", "misses", "cache_bytes", "peer_bytes", "origin_bytes")),
    _sum("saved_s"),
    Index("technique_start_by_day", "day", "technique"),
    sqlite_with_rowid=False,
)

stage_day: Final = Table(
    "stage_day",
    metadata,
    Column("day", Integer, primary_key=True),
    Column("bucket", SmallInteger, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("cache_state", Text, primary_key=True),
    _key("stage_id", ForeignKey("stage.id")),
    _count("n"),
    _sum("work_s"),
    _sum("wait_s"),
    _sum("gpu_s"),
    # Histograms in classes (`histogram.class_of`), as JSON: of the starts' medians over nodes, and of their 99th
    # percentiles.
    _text("hist"),
    _text("hist99"),
    sqlite_with_rowid=False,
)

node_day: Final = Table(
    "node_day",
    metadata,
    Column("day", Integer, primary_key=True),
    _key("node_id", ForeignKey("node.id")),
    _count("n"),
    _count("n_last"),
    _sum("delay_s"),
    Column("worst_stage_id", BigInteger, ForeignKey("stage.id")),
    sqlite_with_rowid=False,
)

storage_day: Final = Table(
    "storage_day",
    metadata,
    Column("day", Integer, primary_key=True),
    Column("technique", Text, primary_key=True),
    *map(_count, ("stored_bytes", "hits", "misses", "cache_bytes", "peer_bytes", "origin_bytes")),
    _sum("saved_s"),
)

batch: Final = Table(
    "batch",
    metadata,
    Column("raw_key", Text, primary_key=True),
    Column("day", Integer, nullable=False),
    Column("job", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    _count("received_ns"),
    Column("done", Boolean, nullable=False),
    Index("batch_by_attempt", "job", "attempt", "received_ns"),
    Index("batch_to_do", "done", "received_ns"),
)

# An attempt that is being derived: the process that has claimed it, until when, and its latest live state.
live: Final = Table(
    "live",
    metadata,
    Column("job", Text, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    _text("moment"),
    _count("updated_ns"),
    _text("owner"),
    _count("owned_until_ns"),
)

token: Final = Table(
    "token",
    metadata,
    _key("id"),
    Column("hash", Text, nullable=False, unique=True),
    Column("scope", Text, nullable=False),
    _text("team"),
    _text("note"),
    _count("created_ns"),
    _count("last_used_ns"),
    Column("revoked_ns", BigInteger),
)

alert: Final = Table(
    "alert",
    metadata,
    _key("id"),
    Column("rule", Text, nullable=False),
    _text("key"),
    _text("text"),
    _count("since_ns"),
    Column("ended_ns", BigInteger),
    Column("sent_ns", BigInteger),
    Index("alert_by_rule", "rule", "key", "since_ns"),
)
