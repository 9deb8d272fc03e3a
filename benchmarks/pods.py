"""How long a pod takes until it does useful work on a node without its image, driven by kubelet's calls to containerd.

The image and the work are those of `image`. A pod's time is from the call that pulls the image, which kubelet makes
when the pod's sandbox runs, to the line that reports the work.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import node
from competitors import version
from harness import ROOT, Benchmark, Must, Outcome
from image_registry import Registry

from containerd import Containerd, containerd
from image import small_image
from registry import free_port

T = TypeVar("T")

_ROUNDS = 5
_RECORD_S = 20
_WAIT_S = 300.0
_WORKLOAD = "pod"
_OVERLAYFS = "containerd, overlayfs"
_PULLED = "snapshotter, image not converted"
_LAZY = "snapshotter, with hot set"
_RUN = "bootseer run --image, with hot set"
_METHOD = (
    "cold: containerd and caches are new, the page cache is empty, then a pod of a tiny image is started; the registry "
    "has its blobs in memory and runs on the same processors, over loopback without a limit. Time is from the pull, or "
    "from the command, until the workload reports that it has worked. The hot set is of one pod on another node, and "
    "the same for both arms. Arms alternate, in reverse order in every other round"
)


@dataclass(frozen=True, slots=True)
class _Site:
    folder: Path
    registry: Registry
    image: str
    converted: str
    small: str
    pause: str


def measure(quick: bool) -> Outcome:
    if os.geteuid():
        raise RuntimeError("the benchmark of pods needs root: it mounts")
    cache = ROOT / ".demo-cache"
    subprocess.run([ROOT / "examples/image/build.sh", cache / "image"], check=True)
    node.adopt()
    seconds: dict[str, list[float]] = defaultdict(list)
    # On the disk of the image: a folder in memory has no page cache to drop.
    with tempfile.TemporaryDirectory(dir=cache) as text:
        folder = Path(text)
        with Registry(folder / "registry", port=free_port()) as registry:
            layout, small = f"oci:{cache / 'image/oci'}:latest", f"oci:{small_image(folder / 'small')}"
            pause = small_image(folder / "pause", Cmd=["busybox", "sleep", "36000"])
            site = _Site(
                folder,
                registry,
                image=registry.push(layout, "moe:1"),
                converted=registry.push(layout, "converted:1"),
                small=registry.push(small, "small:1"),
                pause=registry.push(f"oci:{pause}", "pause:1"),
            )
            env = {**os.environ, "BOOTSEER_PLAIN_HTTP": registry.host}
            subprocess.run([_program(), "image", "convert", site.converted], env=env, check=True, capture_output=True)
            _on_new_node(site, lambda running, env: _record(site, running, env))
            arms: dict[str, Callable[[Containerd, Mapping[str, str]], float]] = {
                _OVERLAYFS: lambda running, env: _pod(site, running, site.image),
                _PULLED: lambda running, env: _pod(site, running, site.image),
                _LAZY: lambda running, env: _pod(site, running, site.converted),
                _RUN: lambda running, env: _run(site, env),
            }
            for number in range(1 if quick else _ROUNDS):
                for name in arms if number % 2 else reversed(arms):
                    seconds[name].append(
                        _on_new_node(site, arms[name], "overlayfs" if name == _OVERLAYFS else "bootseer")
                    )
                    print(f"  {name}: {seconds[name][-1]:.2f} s", flush=True)
    return Outcome(
        parameters={"image": "examples/image", "work": node.TORCH, "containerd": version("containerd")},
        samples=seconds,
        unit="s",
        baselines={_PULLED: _OVERLAYFS, _LAZY: _RUN},
        must_reach=[_claim(seconds, _LAZY, _RUN, 1.2), _claim(seconds, _PULLED, _OVERLAYFS, 1.05)],
        method=_METHOD,
    )


def _claim(seconds: Mapping[str, list[float]], name: str, other: str, limit: float) -> Must:
    return Must(f"{name} / {other}", median(seconds[name]) / median(seconds[other]), limit, "x")


def _on_new_node(site: _Site, start: Callable[[Containerd, Mapping[str, str]], T], snapshotter: str = "bootseer") -> T:
    own = site.folder / "node"
    own.mkdir()
    env = {
        "BOOTSEER_CACHE": str(own / "cache"),
        "BOOTSEER_RUNTIME": str(own / "runtime"),
        "BOOTSEER_PLAIN_HTTP": site.registry.host,
    }
    try:
        options = ["--record", str(_RECORD_S)]
        with containerd(own / "c", env, site.pause, snapshotter=snapshotter, options=options) as running:
            node.drop_page_cache()
            running.pull(site.small)
            running.ended(running.start_pod(site.small, ["busybox", "true"], "warm")[1])
            site.registry.warm()
            try:
                return start(running, {**os.environ, **env})
            finally:
                for pod in running.pods():
                    running.remove_pod(pod)
                for image in (site.image, site.converted):
                    running.remove_image(image)
    finally:
        subprocess.run(
            [_program(), "cache", "prune", "--to", "0"], env={**os.environ, **env}, capture_output=True, check=True
        )
        shutil.rmtree(own)


def _pod(site: _Site, running: Containerd, image: str) -> float:
    pod = running.start_sandbox("work")
    began = time.monotonic()
    running.pull(image)
    running.start_pod(image, node.workload(node.TORCH), "work", pod=pod)
    log = running.folder / "logs" / "work.log"
    while not (log.exists() and " ready " in log.read_text()):
        if time.monotonic() > began + _WAIT_S:
            raise RuntimeError(f"the pod does not work: {running.logs()}")
        time.sleep(0.005)
    return time.monotonic() - began


def _record(site: _Site, running: Containerd, env: Mapping[str, str]) -> None:
    """Start the work once, and wait for its hot set."""
    _pod(site, running, site.converted)
    until = time.monotonic() + _WAIT_S
    while _WORKLOAD not in _workloads(site, env):
        if time.monotonic() > until:
            raise RuntimeError(f"there is no hot set: {running.logs()}")
        time.sleep(1)


def _workloads(site: _Site, env: Mapping[str, str]) -> list[str]:
    words = [_program(), "image", "hotset", "show", "--json", site.converted]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    return [row["workload"] for row in json.loads(done.stdout)["hotsets"]]


def _run(site: _Site, env: Mapping[str, str]) -> float:
    words = [
        _program(),
        "run",
        "--spool",
        str(site.folder / "node" / "spool"),
        "--workload",
        _WORKLOAD,
        "--entrypoint",
        "none",
    ]
    words += ["--image", site.converted, "--", *node.workload(node.TORCH)]
    return node.start([words], env, set(), lambda: None)[0].ready_s


def _program() -> str:
    return str(Path(sys.executable).parent / "bootseer")


BENCHMARK = Benchmark("pods", "How long until a pod works on a node without its image?", measure)
