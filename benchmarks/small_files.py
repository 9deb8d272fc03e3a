"""Are thousands of small files read and written through a mount as fast as HDFS itself permits?

A new HDFS of four DataNodes, without link limits; files of 16 KiB with three replicas. Every arm is a process that
writes or reads them, in one thread and in eight. The result has the processor time of HDFS's servers per file: with C
cores and X ms per file, no client can exceed C / X, and its own time is added.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from checkpoint_child import Job
from checkpoint_cluster import run
from checkpoint_libhdfs import Libhdfs
from harness import ROOT, Benchmark, Left, Must, Outcome
from node import cpu_s

from hdfs_cluster import HdfsCluster

_FILE_BYTES = 16 << 10
_THREADS = (1, 8)
_ROUNDS = 3
_WARM_UP = 4
"""Java compiles what its servers do often: a cold DataNode takes three times as long for a file."""
_WRITERS = ("fuse_write", "native_write", "pyarrow_write")
_READERS = ("fuse_read", "fuse_list_read", "native_read", "pyarrow_read")
_METHOD = (
    "arms alternate, in reverse order in every other round; each is a process that connects or mounts before its "
    "time begins, and writes its own files; all read the same files, which are new to the mount and in the "
    "DataNodes' memory. The servers are warmed up by other files."
)


@dataclass(frozen=True, slots=True)
class _Arm:
    kind: str
    threads: int

    @property
    def does(self) -> str:
        return self.kind.rpartition("_")[2]

    @property
    def name(self) -> str:
        return f"{self.kind.replace('_', ' ')}, {self.threads} thread{'s' * (self.threads > 1)}"


def measure(quick: bool, rounds: int | None) -> Iterator[Outcome]:
    """All arms, in rounds."""
    if os.geteuid():
        raise RuntimeError("the benchmark of small files needs root: it mounts")
    num_files = {"write": 100 if quick else 400, "read": 500 if quick else 2000}
    libhdfs = Libhdfs(ROOT / ".hadoop" / "libhdfs")
    left_out = libhdfs.bring()
    kinds = [kind for kind in (*_WRITERS, *_READERS) if not (left_out and kind.startswith("pyarrow"))]
    arms = [_Arm(kind, threads) for kind in kinds for threads in _THREADS]
    num_rounds = rounds or (1 if quick else _ROUNDS)
    left = Left([sum(num_files[arm.does] / (60 if arm.does == "write" else 600) for arm in arms)] * num_rounds)
    rates: dict[str, list[float]] = defaultdict(list)
    servers: dict[str, list[float]] = defaultdict(list)
    clients: dict[str, list[float]] = defaultdict(list)
    cache = ROOT / ".demo-cache"
    cache.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=cache) as folder,
        HdfsCluster(Path(folder), num_datanodes=4, replication=3, is_brief=False) as cluster,
    ):
        environment = libhdfs.environment(cluster.folder / "conf") if not left_out else {}
        _warm_up(cluster, num_files["read"])
        for number in range(num_rounds):
            print(f"  {left}", flush=True)
            for arm in arms if number % 2 else reversed(arms):
                files = num_files[arm.does]
                seconds, servers_s, own_s = _run(cluster, arm, number, files, environment)
                rates[arm.name].append(files / seconds)
                servers[arm.name].append(servers_s / files * 1e3)
                clients[arm.name].append(own_s / files * 1e3)
                print(f"  {arm.name}: {rates[arm.name][-1]:.0f} files/s", flush=True)
            left.made_one()
            yield Outcome(
                parameters={
                    "files_written": num_files["write"], "files_read": num_files["read"], "file_bytes": _FILE_BYTES,
                    "copies": 3, "datanodes": 4,
                    "rounds": number + 1, "of_rounds": num_rounds,
                },
                samples=rates,
                unit="files/s",
                must_reach=_claims(rates),
                details={
                    "left_out": left_out,
                    "servers_cpu_ms_for_a_file": {name: median(values) for name, values in servers.items()},
                    "client_cpu_ms_for_a_file": {name: median(values) for name, values in clients.items()},
                    "cores": os.cpu_count(),
                },
                method=_METHOD,
            )  # fmt: skip


def _run(
    cluster: HdfsCluster, arm: _Arm, number: int, num_files: int, environment: Mapping[str, str]
) -> tuple[float, float, float]:
    """Seconds, and the processor seconds of the servers and of the arm."""
    folder = "/read" if arm.does == "read" else f"/{arm.kind}-{arm.threads}-{number}"
    _make(cluster, folder)
    before_s = _servers_s(cluster)
    done = run("small_files_arms", arm.kind, [_job(cluster, folder, num_files, arm.threads)], environment)
    mount_s = float(done.facts[0].get("cpu_s", 0.0))
    return done.seconds, _servers_s(cluster) - before_s, done.cpu_s + mount_s


def _warm_up(cluster: HdfsCluster, num_files: int) -> None:
    """Create the files to be read, and read them."""
    _make(cluster, "/read")
    for kind in ("native_write", *["native_read"] * _WARM_UP):
        run("small_files_arms", kind, [_job(cluster, "/read", num_files, 8)])


def _make(cluster: HdfsCluster, folder: str) -> None:
    from hdfs_native import Client

    Client(cluster.uri).mkdirs(folder, 0o755, True)


def _job(cluster: HdfsCluster, folder: str, num_files: int, threads: int) -> Job:
    paths = [f"{folder}/{i:05}" for i in range(num_files)]
    return Job(uri=cluster.uri, path=folder, paths=paths, length=_FILE_BYTES, threads=threads, replication=3)


def _servers_s(cluster: HdfsCluster) -> float:
    """Processor time of the NameNode and the DataNodes so far."""
    return sum(cpu_s(process.pid) for process in (cluster.namenode, *cluster.datanodes) if process is not None)


def _claims(rates: Mapping[str, Sequence[float]]) -> list[Must]:
    """The rate relative to the fastest other client in the same rounds."""
    musts = []
    for threads in _THREADS:
        for ours, others, part in (
            ("fuse_write", _WRITERS, 0.9),
            ("fuse_read", _READERS, 0.5),
        ):
            plain = {kind: _Arm(kind, threads).name for kind in others if not kind.startswith("fuse")}
            best = max((name for name in plain.values() if name in rates), key=lambda name: median(rates[name]))
            mine = _Arm(ours, threads).name
            ratio = median(a / b for a, b in zip(rates[mine], rates[best], strict=True))
            musts.append(Must(f"{mine} / {best}", ratio, part, "x", at_least=True))
    return musts


BENCHMARK = Benchmark(
    "small_files",
    "Are thousands of small files read and written through a mount as fast as HDFS permits?",
    by_rounds=measure,
)
