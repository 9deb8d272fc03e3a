"""How long a node that has never seen the image of a PyTorch job takes until the job does useful work.

The image is that of examples/moe (six layers, 0.4 GB compressed, 1.3 GB unpacked) in a real registry behind a link of
known rate; useful work is `import torch` and one small matrix product in the container. Every start finds an empty
image cache and an empty page cache; the registry's blobs are in its memory. The ways take turns and turn their order
around from round to round.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import node
from harness import ROOT, Benchmark, Must, Outcome
from image_registry import Registry
from lazy import Lazy, convert, record
from link import THERE, Link
from peers import Containerd, ParallelPull, PlainFolder, Way

_METHOD = (
    "each start on a node with an empty image cache and an empty page cache, the registry's blobs in memory; ways take "
    "turns in each round and turn their order around every round; other programs may use the machine meanwhile, so "
    "judge by the median and compare it with the best (min)"
)
_LINKS = {"loopback": None, "1 Gbit/s": 1000, "200 Mbit/s": 200}
_CONTAINERD = "containerd"
_PARALLEL = "parallel pull"
_FOLDER = "plain folder"
_PULL = "bootseer, full pull"
_LAZY = "bootseer, not recorded"
_RECORDED = "bootseer, recorded"
_OTHER = "bootseer, recorded for other work"
_FASTER = 7.0
_STARGZ_S = 5.4 / 2
"""Half of what stargz-snapshotter takes for an image that was optimized for the very same work on such a machine."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """One cold start, and the two starts after it on the same node."""

    cold: node.Started
    link_bytes: int
    """What came over the link until the first useful work."""
    requests: int
    """That the registry had ended by then."""
    again_warm_s: float
    again_cold_page_cache_s: float


def measure(quick: bool) -> Outcome:
    if os.geteuid():
        raise RuntimeError("the image benchmark needs root: it makes mounts and a network namespace")
    cache = ROOT / ".demo-cache"
    subprocess.run([ROOT / "examples/image/build.sh", cache / "image"], check=True)
    layout = f"{cache / 'image/oci'}:latest"
    node.adopt()
    found: dict[str, list[_Sample]] = defaultdict(list)
    # Beside the image: a folder in memory would have no page cache to drop.
    with tempfile.TemporaryDirectory(dir=cache) as text, Link() as link:
        folder = Path(text)
        with Registry(folder / "registry", THERE, inside=link.inside) as registry:
            reference = registry.push(f"oci:{layout}", "moe:latest")
            convert(reference, registry.host)
            plain = PlainFolder(folder / "plain")
            plain.unpack(layout)
            lazy = Lazy(folder / "lazy", registry.host)
            record(lazy, reference, _RECORDED, node.TORCH)
            ways: dict[str, Way] = {
                _CONTAINERD: Containerd(folder / "containerd"),
                _PARALLEL: ParallelPull(folder / "parallel"),
                _PULL: Lazy(folder / "lazy", registry.host, pull=True),
                _LAZY: lazy,
                _RECORDED: lazy,
                _OTHER: lazy,
            }
            for number in range(1 if quick else 5):
                found[_FOLDER].append(_sample(plain, node.workload(node.TORCH), reference, link, registry))
                for link_name, mbit_per_s in _LINKS.items():
                    for name in ways if number % 2 else reversed(ways):
                        # A start records itself: only a label of its own is one that has no record, or a wrong one.
                        label = name if name == _RECORDED else f"{name}, {link_name}, {number}"
                        link.shape(None)
                        if name == _OTHER:
                            record(lazy, reference, label, node.OTHER)
                        link.shape(mbit_per_s)
                        command = node.workload(node.TORCH, label)
                        found[f"{name}, {link_name}"].append(_sample(ways[name], command, reference, link, registry))
    samples = {arm: [sample.cold.ready_s for sample in of_arm] for arm, of_arm in found.items()}
    return Outcome(
        parameters={"links": list(_LINKS), "image": "examples/image", "work": "import torch, 64x64 matrix product"},
        samples=samples,
        unit="s",
        baselines={arm: f"{_CONTAINERD}, {arm.rpartition(', ')[2]}" for arm in samples if arm.startswith("bootseer")},
        must_reach=_claims(found, samples),
        details={arm: _details(of_arm) for arm, of_arm in found.items()},
        method=_METHOD,
    )


def _sample(way: Way, command: Sequence[str], reference: str, link: Link, registry: Registry) -> _Sample:
    way.prepare()
    try:
        steps = way.start(reference, command)
        others = {registry.pid, *node.descendants(registry.pid)}
        node.drop_page_cache()
        registry.warm()
        mark, before = registry.mark(), link.received_bytes()

        def seen() -> tuple[int, int]:
            return link.received_bytes() - before, registry.served(mark).requests

        cold, (link_bytes, requests) = node.start(steps, way.env, others, seen)
        os.sync()  # what the first start wrote must not slow the second down
        warm, _ = node.start(way.again(reference, command), way.env, others, seen)
        node.drop_page_cache()
        from_disk, _ = node.start(way.again(reference, command), way.env, others, seen)
        return _Sample(cold, link_bytes, requests, warm.ready_s, from_disk.ready_s)
    finally:
        way.clean()


def _claims(found: Mapping[str, Sequence[_Sample]], samples: Mapping[str, Sequence[float]]) -> list[Must]:
    recorded = [f"{_RECORDED}, {link}" for link in ("loopback", "1 Gbit/s")]
    claims = [
        Must(
            f"{_CONTAINERD} / {arm}",
            median(samples[f"{_CONTAINERD}, {arm.rpartition(', ')[2]}"]) / median(samples[arm]),
            _FASTER,
            "x",
            at_least=True,
        )
        for arm in recorded
    ]
    claims.append(Must(recorded[0], median(samples[recorded[0]]), _STARGZ_S, "s"))
    # Everything is local after a full pull: what is left is the cost of the mount.
    local, plain = found[f"{_PULL}, loopback"], found[_FOLDER]
    warm = median(sample.again_warm_s for sample in local) / median(sample.again_warm_s for sample in plain)
    from_disk = median(sample.again_cold_page_cache_s for sample in local) / median(
        sample.again_cold_page_cache_s for sample in plain
    )
    claims.append(Must(f"later start, warm / {_FOLDER}", warm, 1.15, "x"))
    claims.append(Must(f"later start, cold page cache / {_FOLDER}", from_disk, 1.3, "x"))
    return claims


def _details(of_arm: Sequence[_Sample]) -> dict[str, Any]:
    """Medians of what is beside the times."""
    return {
        "link_mb": median(sample.link_bytes / 1e6 for sample in of_arm),
        "requests": median(sample.requests for sample in of_arm),
        "tools_cpu_s": median(sample.cold.tools_cpu_s for sample in of_arm),
        "tools_peak_mb": median(sample.cold.tools_peak_bytes / 1e6 for sample in of_arm),
        "again_warm_s": median(sample.again_warm_s for sample in of_arm),
        "again_cold_page_cache_s": median(sample.again_cold_page_cache_s for sample in of_arm),
    }


BENCHMARK = Benchmark("image", "How long until a PyTorch job works on a node that has never seen its image?", measure)
