"""What do Kerberos and protected data transfer cost a read from HDFS?

Three clusters run at the same time: one without security, and two that require Kerberos, with 4 KiB (Hadoop's default)
and 128 KiB as the DataNodes' `io.file.buffer.size`. Each has the same file. Every arm is a process that reads it with
one protection, by BootSeer or by hdfs-native.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from checkpoint_child import MIB, Job
from checkpoint_cluster import run
from harness import ROOT, Benchmark, Left, Must, Outcome

import hadoop
from bootseer.hdfs.sasl import AUTHENTICATION, PRIVACY, PROTECTIONS
from hdfs_cluster import HdfsCluster
from kdc import REALM, Kdc, java_options, kdc_missing, secured

_BYTES = 384 * MIB
_BLOCK_BYTES = 16 * MIB
_ROUNDS = 7
_PATH = "/file"
_USER = "nn/localhost"
_OPEN = "no protection"
_DEFAULT, _LARGE = "4 KiB", "128 KiB"
_METHOD = (
    "three clusters of two DataNodes each, on loopback, share the processors with the reader; the file's blocks are in "
    "the page cache; arms alternate, in reverse order in every other round, and each is a process that connects before "
    "its time begins; one round is discarded, in which Java compiles what its servers do often"
)


def measure(quick: bool, rounds: int | None) -> Iterator[Outcome]:
    """All arms, in rounds."""
    if missing := kdc_missing():
        raise RuntimeError(missing)
    num_rounds = rounds or (2 if quick else _ROUNDS)
    rates: dict[str, list[float]] = defaultdict(list)
    cpu_s: dict[str, list[float]] = defaultdict(list)
    digests: set[str] = set()
    cache = ROOT / ".demo-cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as text, ExitStack() as stack:
        arms = _arms(Path(text), stack)
        left = Left([float(len(arms))] * (num_rounds + 1))
        for number in range(-1, num_rounds):
            print(f"  {left}", flush=True)
            for name in arms if number % 2 else reversed(arms):
                kind, job, environment = arms[name]
                module = "checkpoint_plain" if kind.startswith("native") else "checkpoint_arms"
                done = run(module, kind, [job], environment)
                digests.update(done.digests)
                if len(digests) > 1:
                    raise RuntimeError(f"{name} read other bytes")
                if number >= 0:
                    rates[name].append(_BYTES / MIB / done.seconds)
                    cpu_s[name].append(done.cpu_s)
                    print(f"  {name}: {rates[name][-1]:.0f} MiB/s", flush=True)
            left.made_one()
            if number >= 0:
                yield Outcome(
                    parameters={"bytes": _BYTES, "block_bytes": _BLOCK_BYTES, "datanodes": 2, "rounds": number + 1},
                    samples=rates,
                    unit="MiB/s",
                    baselines={name: _OPEN for name in rates if name != _OPEN},
                    must_reach=[_claim(rates, buffer) for buffer in (_DEFAULT, _LARGE)],
                    details={"reader_cpu_s": {name: median(values) for name, values in cpu_s.items()}},
                    method=_METHOD,
                )


def _claim(rates: Mapping[str, list[float]], buffer: str) -> Must:
    ratio = median(rates[f"{AUTHENTICATION}, {buffer}"]) / median(rates[_OPEN])
    return Must(f"{AUTHENTICATION}, {buffer} / {_OPEN}", ratio, 0.97, "x", at_least=True)


def _arms(folder: Path, stack: ExitStack) -> dict[str, tuple[str, Job, Mapping[str, str]]]:
    """By name: the arm of `checkpoint_arms` or `checkpoint_plain`, its job and its environment. Starts the clusters."""
    source = folder / "source"
    source.write_bytes(os.urandom(_BYTES))
    kdc = stack.enter_context(Kdc(folder, (_USER, "dn/localhost", "HTTP/localhost")))
    kdc.log_in(_USER)

    def started(name: str, settings: Mapping[str, str]) -> HdfsCluster:
        own = folder / name.replace(" ", "-")
        own.mkdir()
        return stack.enter_context(HdfsCluster(own, num_datanodes=2, settings=settings, is_brief=False))

    def job(cluster: HdfsCluster) -> Job:
        return Job(
            uri=cluster.uri,
            path=_PATH,
            paths=[_PATH],
            length=_BYTES,
            local=str(source),
            block_bytes=_BLOCK_BYTES,
            replication=1,
        )

    unsecured = started(_OPEN, {})
    run("checkpoint_plain", "native_write", [job(unsecured)])
    arms: dict[str, tuple[str, Job, Mapping[str, str]]] = {_OPEN: ("direct", job(unsecured), {})}
    arms[f"{_OPEN}, hdfs-native"] = ("native_ranges", job(unsecured), {})
    os.environ["JAVA_TOOL_OPTIONS"] = java_options(kdc)
    stack.callback(os.environ.pop, "JAVA_TOOL_OPTIONS")
    for buffer, size in ((_DEFAULT, 4096), (_LARGE, 131072)):
        cluster = started(buffer, {**secured(kdc), "io.file.buffer.size": str(size)})
        for protection in PROTECTIONS:
            conf = folder / f"conf-{protection}-{size}"
            settings = {
                "fs.defaultFS": cluster.uri,
                "hadoop.security.authentication": "kerberos",
                "hadoop.rpc.protection": protection,
                "dfs.data.transfer.protection": protection,
                "dfs.namenode.kerberos.principal": f"nn/_HOST@{REALM}",
            }
            hadoop.write_conf(conf, {"hdfs-site.xml": settings})
            environment = {**kdc.environment, "HADOOP_CONF_DIR": str(conf)}
            if protection == AUTHENTICATION:
                run("checkpoint_plain", "native_write", [job(cluster)], environment)
            arms[f"{protection}, {buffer}"] = ("direct", job(cluster), environment)
            if protection in (AUTHENTICATION, PRIVACY):
                arms[f"{protection}, {buffer}, hdfs-native"] = ("native_ranges", job(cluster), environment)
    return arms


BENCHMARK = Benchmark(
    "secured_hdfs", "What do Kerberos and protected data transfer cost a read from HDFS?", by_rounds=measure
)
