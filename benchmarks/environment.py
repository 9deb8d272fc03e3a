"""How long until a job with a large Python environment can run on a node that does not have it.

The environment is that of environment.lock.txt (115 packages with PyTorch), served by an index behind a network link.
`_METHOD`, which is part of the result file, describes the method; `environment_claims` has the goals.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import package_index
from competitors import version
from environment_claims import SLOW, Names, claims, daemons_claim
from environment_daemons import StartsWithDaemons
from environment_node import BOOTSEER, WORK, Node, Sample
from environment_tools import LOCK, PORT, Tools
from harness import ROOT, Benchmark, Outcome, alternate
from image_registry import Registry
from link import THERE, Link
from node import drop_page_cache

from bootseer.env.document import EnvironmentDocument
from bootseer.store.open import open_store
from hdfs_cluster import HdfsCluster

_ROUNDS = 2
_GBIT = 1000
_METHOD = (
    "a cold node has only an interpreter in a new venv: no package cache, no snapshot, an empty page cache. The "
    "index (wheels with their metadata, like a public one), HDFS and the registry run on the same processors, with "
    "their files in memory; the link to the index has no limit unless the arm names one. Tools are warm, as on a "
    "node in use: after the page cache is emptied, pip and uv print their versions, and BootSeer restores an "
    "environment of one small package. Time is from the first command until the job's Python runs (usable), then "
    "for two runs of the same imports; the samples are the sum of the first two. 'installed' has the environment on"
    " its disk, with an empty page cache; arms that install have just written it, so it is in memory. 'uv, warm "
    "cache' has uv's cache on the same file system. 'tar.zst' unpacks an archive (zstd -3) on the disk. 'capture' "
    "is the first start on any node; all other 'bootseer' arms are starts on cold nodes with the record of one "
    "start on another node, except 'again': a later start on the same node, which has the whole snapshot, with an "
    "empty page cache. 'three daemons' is another job: its setup leaves three servers running, one of which builds an "
    "index for 10 s; the samples are the time until the job has connected to all three, from a snapshot on a new node "
    "and by running the setup. The order of the arms is reversed in every other round. Other programs may use the "
    "machine, so use the median"
)


@dataclass(frozen=True, slots=True)
class _Arm:
    """One way to provide the environment."""

    name: str
    steps: Callable[[Node], Sequence[Sequence[str]]]
    """Commands on the node. The job replaces `{job}`, or is run after them."""
    ahead: Callable[[Node], None] = lambda there: None
    """Prepares the node."""
    mbit_per_s: int | None = None


def measure(quick: bool) -> Outcome:
    if os.geteuid():
        raise RuntimeError("the environment benchmark needs root: it makes mounts and a network namespace")
    cache = ROOT / ".demo-cache"
    tools = Tools(cache / "environment")
    tools.bring()
    found: dict[str, list[Sample]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=cache) as text, ExitStack() as stack:
        folder = Path(text)
        link = stack.enter_context(Link())
        stack.enter_context(package_index.serving(tools.wheels, THERE, PORT, link.inside))
        registry = stack.enter_context(Registry(folder / "registry", THERE, inside=link.inside))
        hdfs = stack.enter_context(HdfsCluster(folder, num_datanodes=2, is_brief=False))
        stores = {
            Names.LOCAL: str(folder / "store"),
            Names.HDFS: f"{hdfs.uri}/environments",
            Names.LINK: f"oci://{registry.host}/environments",
        }
        there = Node(folder / "node", tools, registry.host)
        archive = folder / "environment.tar.zst"
        _pack(there, archive)
        _start(there, stores[Names.LOCAL])
        for name, store in stores.items():
            if name != Names.LOCAL:
                _copy(stores[Names.LOCAL], store, registry.host)
            _start(there, store)
        there.prepare()
        there.warm(folder / "small")
        there.clean()
        for number in range(1 if quick else _ROUNDS):
            arms = _arms(there, archive, stores, folder / f"new-{number}")
            arms = [arm for arm in arms if not (quick and arm.name in SLOW)]
            for arm in arms if number % 2 else reversed(arms):
                there.prepare()
                try:
                    link.shape(None)
                    arm.ahead(there)
                    drop_page_cache()
                    there.warm(folder / "small")
                    tools.warm()
                    registry.warm()
                    link.shape(arm.mbit_per_s)
                    sample = there.start(arm.steps(there), link.received_bytes)
                finally:
                    there.clean()
                found[arm.name].append(sample)
                times = f"{sample.usable_s:.2f} s, {sample.first_s:.2f} s, {sample.second_s:.2f} s"
                print(f"  {arm.name}: {times}", flush=True)
        left = StartsWithDaemons(folder / "daemons", BOOTSEER)
        daemons = alternate({Names.DAEMONS: left.restored, Names.DAEMONS_SETUP: left.set_up}, 1 if quick else 5)
    samples = {name: [sample.imported_s for sample in of_arm] for name, of_arm in found.items()} | daemons
    return Outcome(
        parameters={
            "packages": len(tools.lines),
            "work": WORK,
            "link_mbit_per_s": _GBIT,
            "versions": [version(tools.uv), version(tools.uv.with_name("pip")).partition(" from ")[0]],
        },
        samples=samples,
        unit="s",
        baselines={name: Names.UV_COLD for name in found if name.startswith("bootseer")}
        | {Names.DAEMONS: Names.DAEMONS_SETUP},
        must_reach=[*claims(found), daemons_claim(daemons)],
        details={name: _details(of_arm) for name, of_arm in found.items()},
        method=_METHOD,
    )


def _arms(there: Node, archive: Path, stores: Mapping[str, str], new_store: Path) -> list[_Arm]:
    pip = [f"{there.venv}/bin/pip", "install", "--quiet", "--no-cache-dir", "-r", str(LOCK)]
    unpack = ["tar", "--use-compress-program", "zstd -d", "-xf", str(archive), "-C", str(there.venv)]

    def again(there: Node) -> None:
        there.start([[*_with_uv(there), *there.bootseer(stores[Names.LOCAL], "--loading", "pull")]])

    return [
        _Arm(Names.INSTALLED, lambda there: [], Node.install),
        _Arm(Names.PIP, lambda there: [pip]),
        _Arm(Names.PIP_NO_COMPILE, lambda there: [[*pip, "--no-compile"]]),
        _Arm(Names.UV_COLD, lambda there: [there.uv()]),
        _Arm(Names.UV_WARM, lambda there: [there.uv()], Node.fill_uv_cache),
        _Arm(Names.TAR, lambda there: [unpack]),
        _Arm(Names.CAPTURE, lambda there: [there.bootseer(f"{new_store}-pip")]),
        _Arm(Names.CAPTURE_UV, lambda there: [[*_with_uv(there), *there.bootseer(f"{new_store}-uv")]]),
        *(
            _Arm(name, lambda there, store=store: [[*_with_uv(there), *there.bootseer(store)]], mbit_per_s=_mbit(name))
            for name, store in stores.items()
        ),
        _Arm(Names.AGAIN, lambda there: [[*_with_uv(there), *there.bootseer(stores[Names.LOCAL])]], again),
        _Arm(Names.UV_LINK, lambda there: [there.uv()], mbit_per_s=_GBIT),
    ]


def _mbit(name: str) -> int | None:
    return _GBIT if name == Names.LINK else None


def _pack(there: Node, archive: Path) -> None:
    """Create the archive of the arm `tar.zst`."""
    there.prepare()
    try:
        there.install()
        compress = ["--use-compress-program", f"zstd -3 -T{os.cpu_count()}"]
        subprocess.run(["tar", *compress, "-cf", archive, "-C", there.venv, "."], check=True)
    finally:
        there.clean()


def _start(there: Node, store: str) -> None:
    """A start on a new node: the first one captures, the second one uses its record."""
    there.prepare()
    try:
        there.start([[*_with_uv(there), *there.bootseer(store)]])
    finally:
        there.clean()


def _copy(source: str, target: str, plain_http: str) -> None:
    """Copy a store, which is faster than another capture."""
    os.environ["BOOTSEER_PLAIN_HTTP"] = plain_http
    with closing(open_store(source)) as here, closing(open_store(target)) as there:
        for stored in here.list("environments/"):
            if stored.name.endswith("/document"):
                data = b"".join(here.read(stored.name))
                objects = EnvironmentDocument.parse(data).objects
                for name in [*(each.name for each in objects), stored.name]:
                    upload = there.upload()
                    for piece in here.read(name):
                        upload.write(piece)
                    upload.commit(name, refs=objects if name == stored.name else ())


def _with_uv(there: Node) -> list[str]:
    """Prefix of a command, with uv on PATH."""
    return ["env", f"PATH={there.venv}/bin:{there.tools.uv.parent}:{os.environ['PATH']}"]


def _details(of_arm: Sequence[Sample]) -> Mapping[str, float]:
    """Medians of the other figures."""
    return {
        "usable_s": median(sample.usable_s for sample in of_arm),
        "first_run_s": median(sample.first_s for sample in of_arm),
        "second_run_s": median(sample.second_s for sample in of_arm),
        "link_mb": median(sample.link_bytes for sample in of_arm) / 1e6,
        "disk_mb": median(sample.disk_bytes for sample in of_arm) / 1e6,
        **_said(of_arm),
    }


def _said(of_arm: Sequence[Sample]) -> Mapping[str, float]:
    """Figures from BootSeer's reports of its starts."""
    names = ("size_bytes", "stored_bytes", "num_files", "demand_bytes", "hot_bytes", "cold_bytes")
    known = {name: [sample.said[name] for sample in of_arm if sample.said.get(name) is not None] for name in names}
    return {name: float(median(values)) for name, values in known.items() if values}


BENCHMARK = Benchmark(
    "environment", "How long until a job can import what it needs on a node that does not have it?", measure
)
