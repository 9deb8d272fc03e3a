"""The origin of `nodes`: the image in a registry, the job's packages in an index, its checkpoint in HDFS; and the
record of one start, which nodes replay."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import node
import package_index
from harness import ROOT
from image_registry import Registry
from nodes_arms import REQUIREMENTS, Origin, Start, Techniques, bootseer
from nodes_replay import __file__ as replay_file
from nodes_site import BOOTSEER, PYTHON, Script, Site, nodes, start, wait_until_ready

from bootseer.cache.cache import Cache
from bootseer.erofs.reader import ErofsReader
from bootseer.errors import BootseerError
from bootseer.fetch.hotset import Block, parse_hot_set
from hdfs_cluster import HdfsCluster
from registry import free_port

_BLOCK = 4096
_RECORD_S = 300.0
_PLAN = "plan"
"""Not the workload of the replay, which reads whole blocks and so more than the job."""
_IMPORTS = (
    "absl, einops, humanize, jsonschema, msgpack, numpy, omegaconf, psutil, regex, safetensors, tabulate, tqdm, yaml"
)
_CUT = "pandas, scipy.stats"
"""The imports of the smaller image's job, instead of PyTorch."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a start loads."""

    checkpoint_mb: int
    """0: no checkpoint and no environment."""
    cut: bool = False
    """Whether the image lacks PyTorch's layer."""


@contextmanager
def origin(site: Site, folder: Path, sizes: Sizes) -> Iterator[tuple[Origin, set[int]]]:
    """Start and fill the servers, and record a start; also yields the servers' process ids."""
    cache = ROOT / ".demo-cache"
    subprocess.run([ROOT / "examples/image/build.sh", cache / "image"], check=True)
    layout = _without_torch(cache / "image/oci", folder / "oci") if sizes.cut else cache / "image/oci"
    bench = folder / "bench"
    bench.mkdir()
    shutil.copy(replay_file, bench)
    shutil.copy(REQUIREMENTS, bench)
    bench.chmod(0o755)
    with ExitStack() as stack:
        registry = stack.enter_context(Registry(folder / "registry", site.here, free_port()))
        servers = [registry.pid]
        image = registry.push(f"oci:{layout}:latest", "team/job:1")
        here = Origin(registry.host, "", image, "", "", str(folder / "meet"), bench, layout)
        environ = {**os.environ, "BOOTSEER_PLAIN_HTTP": registry.host}
        _run([BOOTSEER, "image", "convert", image], environ)
        if sizes.checkpoint_mb:
            checkpoints = _checkpoints(cache / "image", sizes.checkpoint_mb)
            hdfs = stack.enter_context(HdfsCluster(folder, num_datanodes=4, is_brief=False, address=site.here))
            port = free_port()
            index_pid = stack.enter_context(package_index.serving(cache / "image/wheels", site.here, port))
            servers += [index_pid, *(one.pid for one in (*hdfs.datanodes, hdfs.namenode) if one is not None)]
            striped, plain, meet = (f"{hdfs.uri}/{name}" for name in ("striped", "plain", "meet"))
            index = f"http://{site.here}:{port}/simple"
            here = replace(here, index=index, striped=striped, plain=plain, meet=meet)
            put_checkpoints(checkpoints, here)
        more = f", {_IMPORTS}" if sizes.checkpoint_mb else ""
        work = f"import {_CUT}{more}" if sizes.cut else f"import torch{more}; {node.TORCH}"
        (bench / "plan").write_text(_plan(site, folder, here, work))
        registry.warm()
        yield here, set(servers)


def put_checkpoints(folder: Path, here: Origin) -> None:
    """Store the newest of a folder of checkpoints in HDFS, in all layouts."""
    newest = folder / (folder / "latest").read_text().strip()
    for stripes, place in (("4", here.striped), ("4", here.unrecorded), ("1", here.plain)):
        _run([BOOTSEER, "ckpt", "put", "--stripes", stripes, str(newest), place], os.environ)


def torchrun(script: Path, *words: str) -> None:
    """Run a training script on this machine."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    _run([PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), *words], environ)


def _plan(site: Site, folder: Path, here: Origin, work: str) -> str:
    """Record a start without link limits, twice: the pauses of the second one are not due to the registry."""
    text = ""
    program = f"import sys\n{work}\nprint('ready 0', flush=True)\nsys.stdin.readline()"
    for number in range(2):
        one = Start(here, folder / "node0", 0, 1, f"record{number}", workload=_PLAN)
        script = bootseer(one, Techniques())
        # The job's own reads, and then all layers, to know which file a block belongs to.
        lazily = [*script.steps[-1][: script.steps[-1].index("--")], "--", "python3", "-c", program]
        whole = ["pull" if word == "lazy" else word for word in lazily[: lazily.index("--")]]
        steps = [lazily, *([[*whole, "--", "true"]] if number else []), ["sh", "-c", "echo ready 0; read _"]]
        with nodes(site, folder, [Script(script.prepare, steps, script.env)]) as running:
            start(running)
            wait_until_ready(running, _RECORD_S)
            text = "".join(_reads(running[0].folder / "cache")) if number else ""
    return text


def _reads(cache: Path) -> Iterator[str]:
    """The lines of the plan, from the newest record and the complete layers in a node's cache."""
    kinds: dict[str, str] = {}
    needs: list[tuple[float, Block]] = []
    for path in sorted((cache / "hotsets").rglob("*")):
        if not path.is_file():
            continue
        with contextlib.suppress(BootseerError):
            newest = parse_hot_set(path.read_bytes()).records[-1]
            kind = "image" if path.name == _PLAN else "environment"
            kinds |= {file: kind for file, _ in newest.needs}
            needs += [(newest.started_s + t_ms / 1000, block) for block, t_ms in newest.needs.items()]
    files = dict(_files(Cache(cache / "blocks"), {file for _, (file, _) in needs}))
    before = min((at for at, _ in needs), default=0.0)
    for at, (file, block) in sorted(needs, key=lambda pair: pair[0]):
        extents, size = files[file]
        for path, offset, length in _parts(extents, block * size, size):
            yield f"{kinds[file]} {(at - before) * 1000:.0f} {offset} {length} {path}\n"
            before = at


def _files(cache: Cache, wanted: Container[str]) -> Iterator[tuple[str, tuple[list[tuple[int, int, str]], int]]]:
    """For each block file in the cache its identity, its files (first byte, length, path), and its block size."""
    for entry in cache.entries():
        if entry.identity not in wanted:  # such as a checkpoint's
            continue
        with contextlib.closing(cache.open_existing(entry.identity)) as file:
            reader = ErofsReader(file.read)
            extents = [
                (
                    inode.first_block * _BLOCK,
                    inode.size if inode.tail_at is None else inode.size // _BLOCK * _BLOCK,
                    path,
                )
                for path, inode in ((os.fsdecode(name), inode) for name, inode in reader.walk())
                if stat.S_ISREG(inode.mode)
            ]
        yield entry.identity, (sorted(each for each in extents if each[1]), file.index.block_size)


def _parts(extents: list[tuple[int, int, str]], start: int, size: int) -> Iterator[tuple[str, int, int]]:
    """The parts of files in a block: path, offset, length."""
    for at, length, path in extents:
        low, high = max(at, start), min(at + length, start + size)
        if low < high:
            yield f"/{path}", low - at, high - low


def _checkpoints(folder: Path, megabytes: int) -> Path:
    """A folder of checkpoints written by the example job, created once."""
    target = folder / f"checkpoints-{megabytes}"
    if not (target / "latest").exists():
        sizes = ["--steps", "1", "--checkpoint-mb", str(megabytes), "--checkpoint-dir", str(target)]
        torchrun(ROOT / "examples/moe/train.py", *sizes)
    return target


def _without_torch(layout: Path, target: Path) -> Path:
    """The image without its largest layer, as another OCI layout."""
    shutil.copytree(layout, target, copy_function=os.link)
    blobs = target / "blobs/sha256"

    def load(digest: str) -> dict[str, object]:
        return json.loads((blobs / digest.removeprefix("sha256:")).read_text())  # type: ignore[no-any-return]

    def put(document: object) -> dict[str, object]:
        data = json.dumps(document).encode()
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        return {"digest": f"sha256:{name}", "size": len(data)}

    index = json.loads((target / "index.json").read_text())
    manifest = load(index["manifests"][0]["digest"])
    config, layers = load(manifest["config"]["digest"]), manifest["layers"]
    largest = max(range(len(layers)), key=lambda number: layers[number]["size"])
    (blobs / layers[largest]["digest"].removeprefix("sha256:")).unlink()
    del layers[largest], config["rootfs"]["diff_ids"][largest]
    config.pop("history", None)
    manifest["config"] |= put(config)
    index["manifests"][0] |= put(manifest)
    # The layout shares its files with the whole image.
    (target / "index.json").unlink()
    (target / "index.json").write_text(json.dumps(index))
    return target


def _run(words: Sequence[str], environ: Mapping[str, str]) -> None:
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[:4])}: {done.stderr.strip()[-1000:]}")
