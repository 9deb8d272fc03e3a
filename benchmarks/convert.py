"""How fast are images converted?

The image: files of a Python installation with PyTorch (libraries, sources, data), as layers of gzip level 6, in an OCI
layout in the page cache. The store is a folder. All arms must create the same objects.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import site
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from harness import ROOT, Benchmark, Must, Outcome, timed

_LAYER_MIB = 96
_LAYERS = 4
_FILE_MIB = 64
"""Limit of one file, so that a layer is not a single library."""
_METHOD = (
    "one process; the layout is in the page cache, the store is a new folder for each arm; arms alternate and their"
    " order is reversed in every other round; megabytes of compressed layers per second; processor time is of all "
    "threads, with reads and writes"
)


def measure(quick: bool) -> Outcome:
    from bootseer.image.sources import decompress

    if decompress.gzip_module() is gzip:
        raise RuntimeError("the benchmark of conversions needs ISA-L: pip install 'bootseer[convert]'")
    rounds = 1 if quick else 5
    arms = [(layers, library) for layers in (1, _LAYERS) for library in ("isal", "zlib")]
    samples: dict[str, list[float]] = {_name(*arm): [] for arm in arms}
    cpu: dict[str, list[float]] = {_name(*arm): [] for arm in arms}
    objects: dict[int, set[str]] = {1: set(), _LAYERS: set()}
    with tempfile.TemporaryDirectory(dir=_folder()) as folder:
        images = {layers: _make(Path(folder) / str(layers), layers) for layers in (1, _LAYERS)}
        sizes = {layers: sum(file.stat().st_size for file in image.rglob("*")) for layers, image in images.items()}
        for number in range(rounds + 1):
            for layers, library in arms if number % 2 else reversed(arms):
                store = Path(folder) / "store"
                took_s, cpu_s = _convert(images[layers], store, library)
                objects[layers].add(_digest(store))
                shutil.rmtree(store)
                if number:  # the first round is discarded
                    samples[_name(layers, library)].append(sizes[layers] / took_s / 1e6)
                    cpu[_name(layers, library)].append(sizes[layers] / cpu_s / 1e6)
    best = {name: median(values) for name, values in cpu.items()}
    return Outcome(
        parameters={"layer_bytes": _LAYER_MIB << 20, "layers": _LAYERS, "compressed_bytes": sizes, "rounds": rounds},
        samples=samples,
        unit="MB/s",
        baselines={_name(layers, "isal"): _name(layers, "zlib") for layers in (1, _LAYERS)},
        must_reach=[
            *(
                Must(
                    f"ISA-L against zlib by processor time, {layers} layers",
                    best[_name(layers, "isal")] / best[_name(layers, "zlib")],
                    1.1,
                    "times",
                    at_least=True,
                )
                for layers in (1, _LAYERS)
            ),
            Must("different results", float(sum(map(len, objects.values())) - 2), 0.0, ""),
        ],
        details={"compressed MB for a second of processor": cpu},
        method=_METHOD,
    )


def _name(layers: int, library: str) -> str:
    return f"{layers} layer{'s' if layers > 1 else ''}, {library}"


def _folder() -> Path:
    cache = ROOT / ".demo-cache"
    cache.mkdir(exist_ok=True)
    return cache


def _convert(layout: Path, store: Path, library: str) -> tuple[float, float]:
    """Seconds, and seconds of processor time."""
    from bootseer.image.conversion.convert import convert
    from bootseer.image.reference import parse_reference
    from bootseer.image.sources import decompress
    from bootseer.image.sources.source import open_source
    from bootseer.store.open import open_store

    found = decompress.gzip_module
    try:
        if library == "zlib":
            decompress.gzip_module = lambda: gzip
        with (
            closing(open_source(parse_reference(f"oci:{layout}"))) as source,
            closing(open_store(str(store))) as opened,
        ):
            return timed(lambda: convert(source, opened))
    finally:
        decompress.gzip_module = found


def _digest(store: Path) -> str:
    """The digest of the names of all objects in the store."""
    names = sorted(path.name for path in store.rglob("*") if path.is_file() and len(path.name) == 64)
    if not names:
        raise RuntimeError(f"no objects of content in {store}")
    return hashlib.sha256(" ".join(names).encode()).hexdigest()


def _make(folder: Path, layers: int) -> Path:
    """A layout with this number of layers."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    roots = [Path(root) / name for root in site.getsitepackages() for name in ("torch", "numpy", "sympy")]
    # Shuffled, so that all layers are similar.
    files = sorted(
        (path for root in roots for path in root.rglob("*") if path.is_file()),
        key=lambda path: _sha(bytes(path.name, "utf-8")),
    )
    rows: list[dict[str, Any]] = []
    diff_ids = []
    for number in range(layers):
        plain = _tar(files[number::layers], (_LAYERS // layers) * (_LAYER_MIB << 20))
        diff_ids.append(_sha(plain))
        data = gzip.compress(plain, 6, mtime=0)
        rows.append(_blob(blobs, data, "application/vnd.oci.image.layer.v1.tar+gzip"))
    config = {"architecture": _architecture(), "os": "linux", "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    manifest = {
        "schemaVersion": 2,
        "config": _blob(blobs, json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
        "layers": rows,
    }
    entry = _blob(blobs, json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


def _tar(files: list[Path], most: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number, path in enumerate(files):
            with contextlib.suppress(OSError):
                data = path.read_bytes()[: min(_FILE_MIB << 20, most - buffer.tell())]
                member = tarfile.TarInfo(f"f/{number % 200}/{number}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
            if buffer.tell() >= most:
                break
    return buffer.getvalue()


def _blob(blobs: Path, data: bytes, kind: str) -> dict[str, Any]:
    (blobs / _sha(data).removeprefix("sha256:")).write_bytes(data)
    return {"mediaType": kind, "digest": _sha(data), "size": len(data)}


def _sha(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)


BENCHMARK = Benchmark("convert", "How fast are images converted?", measure)
