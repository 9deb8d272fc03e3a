"""What do Kerberos and protected data transfer cost a read from HDFS?

Three clusters run at the same time: one without security, and two that require Kerberos, with 4 KiB (Hadoop's default)
and 128 KiB as the DataNodes' `io.file.buffer.size`. Each has the same file. Every arm is a process that reads it with
one protection, by BootSeer or by hdfs-native. All are in a network namespace whose loopback has a limit for some arms.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import link
from checkpoint_child import MIB, Job
from checkpoint_cluster import run
from harness import ROOT, Benchmark, Left, Must, Outcome

from bootseer.hdfs.sasl import AUTHENTICATION, PRIVACY, PROTECTIONS
from hdfs_cluster import HdfsCluster
from kdc import Kdc, java_options, kdc_missing, secured, write_client_conf

_BYTES = 384 * MIB
_BLOCK_BYTES = 16 * MIB
_ROUNDS = 7
_PATH = "/file"
_USER = "nn/localhost"
_OPEN = "no protection"
_DEFAULT, _LARGE = "4 KiB", "128 KiB"
_MBIT = 2000
_LIMITED = "2 Gbit/s"
_CLONE_NEWNET = 0x40000000
_METHOD = (
    "three clusters of two DataNodes each, on loopback (with a limit, or without), share the processors with the "
    "reader; the file's blocks are in the page cache; arms alternate, in reverse order in every other round, and each "
    "is a process that connects before its time begins; one round is discarded, in which Java compiles what its "
    "servers do often"
)


@dataclass(frozen=True, slots=True)
class _Arm:
    kind: str
    """A function of `checkpoint_arms` or `checkpoint_plain`."""
    job: Job
    environment: Mapping[str, str]
    mbit: int | None = None
    """Limit of the loopback interface."""


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
    with _loopback(), tempfile.TemporaryDirectory(dir=cache) as text, ExitStack() as stack:
        arms = _arms(Path(text), stack)
        left = Left([float(len(arms))] * (num_rounds + 1))
        for number in range(-1, num_rounds):
            print(f"  {left}", flush=True)
            for name in arms if number % 2 else reversed(arms):
                arm = arms[name]
                _shape(arm.mbit)
                module = "checkpoint_plain" if arm.kind.startswith("native") else "checkpoint_arms"
                done = run(module, arm.kind, [arm.job], arm.environment)
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
                    baselines={name: _baseline(name) for name in rates if name != _baseline(name)},
                    must_reach=[
                        _claim(rates, f"{AUTHENTICATION}, {words}")
                        for words in (_DEFAULT, _LARGE, f"{_DEFAULT}, {_LIMITED}")
                    ],
                    details={"reader_cpu_s": {name: median(values) for name, values in cpu_s.items()}},
                    method=_METHOD,
                )


def _baseline(name: str) -> str:
    return f"{_OPEN}, {_LIMITED}" if name.endswith(_LIMITED) else _OPEN


def _claim(rates: Mapping[str, list[float]], name: str) -> Must:
    ratio = median(rates[name]) / median(rates[_baseline(name)])
    return Must(f"{name} / {_OPEN}", ratio, 0.97, "x", at_least=True)


@contextmanager
def _loopback() -> Iterator[None]:
    """Run this thread, and what it starts, in a new network namespace with a loopback interface of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as before:
        if libc.unshare(_CLONE_NEWNET):
            raise RuntimeError(f"no network namespace: {os.strerror(ctypes.get_errno())}")
        try:
            link.run("ip", "link", "set", "lo", "up")
            yield
        finally:
            libc.setns(before.fileno(), _CLONE_NEWNET)


def _shape(mbit: int | None) -> None:
    limit = ["tbf", "rate", f"{mbit}mbit", "burst", "512kb", "latency", "50ms"] if mbit else ["pfifo_fast"]
    link.run("tc", "qdisc", "replace", "dev", "lo", "root", *limit)


def _arms(folder: Path, stack: ExitStack) -> dict[str, _Arm]:
    """The arms by name. Starts the clusters."""
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
    arms = {
        _OPEN: _Arm("direct", job(unsecured), {}),
        f"{_OPEN}, hdfs-native": _Arm("native_ranges", job(unsecured), {}),
    }
    os.environ["JAVA_TOOL_OPTIONS"] = java_options(kdc)
    stack.callback(os.environ.pop, "JAVA_TOOL_OPTIONS")
    for buffer, size in ((_DEFAULT, 4096), (_LARGE, 131072)):
        cluster = started(buffer, {**secured(kdc), "io.file.buffer.size": str(size)})
        for protection in PROTECTIONS:
            conf = folder / f"conf-{protection}-{size}"
            write_client_conf(conf, cluster.uri, protection)
            environment = {**kdc.environment, "HADOOP_CONF_DIR": str(conf)}
            if protection == AUTHENTICATION:
                run("checkpoint_plain", "native_write", [job(cluster)], environment)
            arms[f"{protection}, {buffer}"] = _Arm("direct", job(cluster), environment)
            if protection in (AUTHENTICATION, PRIVACY):
                arms[f"{protection}, {buffer}, hdfs-native"] = _Arm("native_ranges", job(cluster), environment)
    for name in (_OPEN, f"{AUTHENTICATION}, {_DEFAULT}", f"{PRIVACY}, {_DEFAULT}"):
        arms[f"{name}, {_LIMITED}"] = replace(arms[name], mbit=_MBIT)
    return arms


BENCHMARK = Benchmark(
    "secured_hdfs", "What do Kerberos and protected data transfer cost a read from HDFS?", by_rounds=measure
)
