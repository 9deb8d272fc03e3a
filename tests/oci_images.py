"""Build images from Python: tar layers of given entries, OCI layouts and docker archives around them.

    base = layer(directory("usr"), file("usr/a", b"text", uid=5), symlink("lib", "usr/lib"))
    write_layout(tmp_path / "layout", [base, layer(whiteout("usr/a"))])

Times and order are fixed, so that the same calls give the same digests.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar"
Entry = tuple[tarfile.TarInfo, bytes]


def _entry(name: str, kind: bytes, content: bytes = b"", **fields: Any) -> Entry:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.size = len(content)
    member.mode = fields.pop("mode", 0o755 if kind == tarfile.DIRTYPE else 0o644)
    member.mtime = fields.pop("mtime", 1_600_000_000)
    xattrs: Mapping[str, bytes] = fields.pop("xattrs", {})
    pax = dict(fields.pop("pax", {}))
    for key, value in xattrs.items():
        pax["SCHILY.xattr." + key] = value.decode("utf-8", "surrogateescape")
    member.pax_headers = pax
    for key, value in fields.items():
        setattr(member, key, value)
    return member, content


def file(name: str, content: bytes = b"", **fields: Any) -> Entry:
    """A regular file; optional fields: `mode`, `uid`, `gid`, `mtime`, `xattrs` (by full name) and `pax`."""
    return _entry(name, tarfile.REGTYPE, content, **fields)


def directory(name: str, **fields: Any) -> Entry:
    """A directory."""
    return _entry(name, tarfile.DIRTYPE, **fields)


def symlink(name: str, target: str, **fields: Any) -> Entry:
    """A symbolic link."""
    return _entry(name, tarfile.SYMTYPE, linkname=target, **fields)


def hard_link(name: str, target: str, **fields: Any) -> Entry:
    """Another name of an earlier entry."""
    return _entry(name, tarfile.LNKTYPE, linkname=target, **fields)


def device(name: str, major: int, minor: int, *, block: bool = False, **fields: Any) -> Entry:
    """A device."""
    kind = tarfile.BLKTYPE if block else tarfile.CHRTYPE
    return _entry(name, kind, devmajor=major, devminor=minor, **fields)


def fifo(name: str, **fields: Any) -> Entry:
    """A named pipe."""
    return _entry(name, tarfile.FIFOTYPE, **fields)


def whiteout(path: str) -> Entry:
    """A whiteout, which removes a file of a lower layer."""
    folder, _, name = path.rpartition("/")
    return file(f"{folder}/.wh.{name}" if folder else f".wh.{name}")


def opaque(path: str) -> Entry:
    """An opaque whiteout, which removes the content of a directory in lower layers."""
    return file(f"{path}/.wh..wh..opq" if path else ".wh..wh..opq")


def layer(*entries: Entry, dialect: int = tarfile.PAX_FORMAT) -> bytes:
    """An uncompressed layer."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=dialect, errors="surrogateescape") as archive:
        for member, content in entries:
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def compress(data: bytes, how: str) -> bytes:
    """`how`: `gzip`, `xz`, `zstd`, or "" for no compression."""
    if how == "gzip":
        return gzip.compress(data, 6, mtime=0)
    if how == "xz":
        return lzma.compress(data, preset=1)
    return zstandard.ZstdCompressor().compress(data) if how == "zstd" else data


def digest_of(data: bytes) -> str:
    """The digest in OCI's form."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def config_of(layers: Sequence[bytes], architecture: str = "amd64", **config: Any) -> dict[str, Any]:
    """The configuration of an image of these layers; `config` is the container's part (`Cmd`, `Env`, …)."""
    return {
        "architecture": architecture,
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [digest_of(layer) for layer in layers]},
    }


def write_layout(
    folder: Path,
    layers: Sequence[bytes],
    *,
    tag: str = "latest",
    compression: str = "gzip",
    docker: bool = False,
    **config: Any,
) -> str:
    """Create an OCI layout with one image, or add an image to an existing one. Returns the manifest's digest.

    `docker` writes Docker's media types (schema 2).
    """
    vendor = "application/vnd.docker." if docker else "application/vnd.oci."
    suffix = {"gzip": ".gzip" if docker else "+gzip", "": ""}.get(compression, f"+{compression}")
    descriptors = [
        add_blob(folder, compress(layer, compression), (DOCKER_LAYER if docker else OCI_LAYER) + suffix)
        for layer in layers
    ]
    manifest = {
        "schemaVersion": 2,
        "mediaType": vendor + ("distribution.manifest.v2+json" if docker else "image.manifest.v1+json"),
        "config": add_blob(
            folder,
            json.dumps(config_of(layers, **config), sort_keys=True).encode(),
            vendor + ("container.image.v1+json" if docker else "image.config.v1+json"),
        ),
        "layers": descriptors,
    }
    return add_to_index(folder, manifest, tag)


def add_blob(folder: Path, data: bytes, media_type: str) -> dict[str, Any]:
    """Add a blob to a layout; returns its descriptor."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    digest = digest_of(data)
    (blobs / digest.removeprefix("sha256:")).write_bytes(data)
    return {"mediaType": media_type, "digest": digest, "size": len(data)}


def add_to_index(folder: Path, manifest: Mapping[str, Any], tag: str) -> str:
    """Add a manifest or an index to `index.json`. Returns its digest."""
    entry = add_blob(folder, json.dumps(manifest, sort_keys=True).encode(), manifest["mediaType"])
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    path = folder / "index.json"
    index = json.loads(path.read_text()) if path.exists() else {"schemaVersion": 2, "manifests": []}
    index["manifests"].append({**entry, "annotations": {"org.opencontainers.image.ref.name": tag}})
    path.write_text(json.dumps(index))
    return str(entry["digest"])


def write_docker_archive(path: Path, layers: Sequence[bytes], *, names: Sequence[str] = (), **config: Any) -> None:
    """Write an archive like `docker save`."""
    data = json.dumps(config_of(layers, **config), sort_keys=True).encode()
    entries = [file("config.json", data)]
    paths: list[str] = []
    for content in layers:
        name = digest_of(content).removeprefix("sha256:") + "/layer.tar"
        if name in paths:  # like docker
            entries.append(symlink(f"again{len(paths)}/layer.tar", "../" + name))
            name = f"again{len(paths)}/layer.tar"
        else:
            entries.append(file(name, content))
        paths.append(name)
    rows = [{"Config": "config.json", "RepoTags": list(names), "Layers": paths}]
    entries.append(file("manifest.json", json.dumps(rows).encode()))
    path.write_bytes(layer(*entries))
