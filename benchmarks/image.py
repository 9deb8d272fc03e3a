"""How long a node that has never seen the image of a PyTorch job takes until the job does useful work.

The image is that of examples/moe (five layers, 0.4 GB compressed, 1.3 GB unpacked) in a real registry behind a link of
known rate; useful work is `import torch` and one small matrix product in the container. `_METHOD`, which is part of the
result file, describes the method; `image_claims` has the goals.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import node
from competitors import Containerd, ParallelPull, PlainFolder, Way, version
from harness import ROOT, Benchmark, Outcome
from image_claims import LINKS, Names, Sample, claims
from image_registry import Registry
from lazy import Lazy, convert
from link import THERE, Link

from oci_images import directory, file, layer, write_layout

_ROUNDS = 3
_METHOD = (
    "cold: a node without the image (empty image cache, empty page cache); the registry has its blobs in memory and"
    " runs on the same processors. Tools are warm: after the page cache is emptied, each way first starts a "
    "container of another, tiny image, as on a node in use, except for 'cold tools'. containerd's daemon runs "
    "already. Loopback is the same link without a limit. Time is from the first command until the workload in the "
    "container reports that it has worked. 'recorded' uses the record of one start on another node, and of earlier "
    "rounds; 'recorded for other work' that of importing pandas and scipy.stats. On loopback the node starts the "
    "image again, warm, and once more with an empty page cache; 'recorded' does so after the rest of the image was "
    "fetched. Ways alternate in each round, in reverse order in every other round. Other programs may use the "
    "machine, so use the median and compare it with the best (min)"
)


@dataclass(frozen=True, slots=True)
class _Arm:
    """One way to start, with one link."""

    name: str
    way: Way
    link: str
    warm_tools: bool = True
    streamed: bool = False
    """Whether the first container runs until the whole image is on the node."""

    @property
    def later(self) -> bool:
        """Whether two more starts on the same node are measured, which do not use the link."""
        return self.link == "loopback" and self.warm_tools


@dataclass(frozen=True, slots=True)
class _Lab:
    """Shared by all arms."""

    link: Link
    registry: Registry
    folder: Path
    image: str
    """The image's name in the registry."""
    small: str
    """The name of the tiny image."""


def measure(quick: bool) -> Outcome:
    if os.geteuid():
        raise RuntimeError("the image benchmark needs root: it makes mounts and a network namespace")
    cache = ROOT / ".demo-cache"
    subprocess.run([ROOT / "examples/image/build.sh", cache / "image"], check=True)
    layout = f"{cache / 'image/oci'}:latest"
    node.adopt()
    found: dict[str, list[Sample]] = defaultdict(list)
    # On the disk of the image: a folder in memory has no page cache to drop.
    with tempfile.TemporaryDirectory(dir=cache) as text, Link() as link:
        folder = Path(text)
        with Registry(folder / "registry", THERE, inside=link.inside) as registry:
            small_layout = small_image(folder / "small")
            image, small = registry.push(f"oci:{layout}", "moe:1"), registry.push(f"oci:{small_layout}", "small:1")
            for reference in (image, small):
                convert(reference, registry.host)
            plain = PlainFolder(folder / "plain")
            plain.unpack(image, layout)
            plain.unpack(small, small_layout)
            lab = _Lab(link, registry, folder, image, small)
            _lazy(lab, "recorded").record(image, node.TORCH)
            for number in range(1 if quick else _ROUNDS):
                arms = list(_arms(lab, plain, number))
                for arm in arms if number % 2 else reversed(arms):
                    sample = _sample(arm, lab)
                    print(f"  {arm.name}: {sample.cold.ready_s:.2f} s", flush=True)
                    found[arm.name].append(sample)
    samples = {name: [sample.cold.ready_s for sample in of_arm] for name, of_arm in found.items()}
    return Outcome(
        parameters={
            "links": list(LINKS),
            "image": "examples/image",
            "work": "import torch, 64x64 matrix product",
            "versions": [version("containerd"), version("curl").splitlines()[0]],
        },
        samples=samples,
        unit="s",
        baselines={
            name: f"{Names.CONTAINERD}, {name.rpartition(', ')[2]}" for name in samples if name.startswith("bootseer")
        },
        must_reach=claims(found),
        details={name: _details(of_arm) for name, of_arm in found.items()},
        method=_METHOD,
    )


def _arms(lab: _Lab, plain: PlainFolder, number: int) -> Iterator[_Arm]:
    """All arms of a round."""
    yield _Arm(Names.FOLDER, plain, "loopback")
    recorded = _lazy(lab, "recorded")
    for link in LINKS:
        # A start records itself, so only a new workload name has no record, or a wrong one.
        new = f"{link.replace(' ', '-').replace('/', '-')}-{number}"
        ways: dict[str, Way] = {
            Names.CONTAINERD: Containerd(lab.folder / "containerd"),
            Names.PARALLEL: ParallelPull(lab.folder / "parallel"),
            Names.PULL: Lazy(lab.folder / "lazy", lab.registry.host, loading="pull"),
            Names.LAZY: _lazy(lab, f"new-{new}"),
            Names.RECORDED: recorded,
            Names.OTHER: _lazy(lab, f"other-{new}"),
        }
        for name, way in ways.items():
            yield _Arm(f"{name}, {link}", way, link, streamed=name == Names.RECORDED and link == "loopback")
    yield _Arm(f"{Names.COLD_TOOLS}, loopback", recorded, "loopback", warm_tools=False)


def _lazy(lab: _Lab, workload: str) -> Lazy:
    return Lazy(lab.folder / "lazy", lab.registry.host, workload=workload)


def small_image(folder: Path, **config: object) -> str:
    """An OCI layout with a small image (a shell), and more values of its configuration."""
    program = shutil.which("busybox")
    if program is None:
        raise RuntimeError("there is no busybox; run make setup first")
    content = layer(directory("bin"), file("bin/busybox", Path(program).read_bytes(), mode=0o755))
    write_layout(folder, [content], tag="1", Env=["PATH=/bin"], **config)
    return f"{folder}:1"


def _sample(arm: _Arm, lab: _Lab) -> Sample:
    way, link, registry = arm.way, lab.link, lab.registry
    link.shape(None)
    hot_bytes = None
    if isinstance(way, Lazy) and arm.name.startswith((Names.RECORDED, Names.OTHER)):
        if arm.name.startswith(Names.OTHER):
            way.record(lab.image, node.OTHER)
        hot_bytes = _hot_bytes(way, lab.image)
    way.prepare()
    try:
        steps = way.start(lab.image, node.workload(node.TORCH))
        others = {registry.pid, *node.descendants(registry.pid)}
        node.drop_page_cache()
        if arm.warm_tools:
            node.start(way.start(lab.small, node.NOTHING), way.env, others, lambda: None)
        registry.warm()
        link.shape(LINKS[arm.link])
        mark, before = registry.mark(), link.received_bytes()

        def seen() -> tuple[int, int]:
            return link.received_bytes() - before, registry.requests_since(mark)

        linger = way.wait_until_streamed if arm.streamed and isinstance(way, Lazy) else lambda: None
        cold, (link_bytes, requests) = node.start(steps, way.env, others, seen, linger)
        again = _again(way, lab.image, others) if arm.later else None
    finally:
        way.clean()
    return Sample(cold, link_bytes, requests, again, hot_bytes)


def _again(way: Way, image: str, others: set[int]) -> tuple[node.Started, node.Started]:
    """A second start on the node, and a third one with an empty page cache."""
    os.sync()  # write back what the first start wrote
    warm, _ = node.start(way.again(image, node.workload(node.TORCH)), way.env, others, lambda: None)
    node.drop_page_cache()
    from_disk, _ = node.start(way.again(image, node.workload(node.TORCH)), way.env, others, lambda: None)
    return warm, from_disk


def _hot_bytes(way: Lazy, image: str) -> int:
    """Stored size of the hot set that a start on a new node uses."""
    way.prepare()
    try:
        return int(way.hot_set(image)["stored_bytes"])
    finally:
        way.clean()


def _details(of_arm: Sequence[Sample]) -> Mapping[str, float]:
    """Medians of the other figures."""
    columns: dict[str, list[float | None]] = {
        "link_mb": [sample.link_bytes / 1e6 for sample in of_arm],
        "requests": [sample.requests for sample in of_arm],
        "tools_cpu_s": [sample.cold.tools_cpu_s for sample in of_arm],
        "tools_peak_mb": [sample.cold.tools_peak_bytes / 1e6 for sample in of_arm],
        "work_s": [sample.cold.work_s for sample in of_arm],
        "again_warm_s": [sample.again[0].ready_s if sample.again else None for sample in of_arm],
        "again_warm_work_s": [sample.again[0].work_s if sample.again else None for sample in of_arm],
        "again_cold_page_cache_s": [sample.again[1].ready_s if sample.again else None for sample in of_arm],
        "again_cold_page_cache_work_s": [sample.again[1].work_s if sample.again else None for sample in of_arm],
        "hot_mb": [sample.hot_bytes / 1e6 if sample.hot_bytes is not None else None for sample in of_arm],
    }
    known = {name: [value for value in values if value is not None] for name, values in columns.items()}
    return {name: median(values) for name, values in known.items() if values}


BENCHMARK = Benchmark("image", "How long until a PyTorch job works on a node without its image?", measure)
