"""Write an OCI layout of one plain layer with folders of this machine: `gpu_layout.py OUT PATH... [-x EXCLUDED...]`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import IO

_TYPE = "application/vnd.oci.image"


class _Hashed:
    """A file that counts and hashes the written bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash, self.size = hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        self.size += len(data)
        return self._file.write(data)


def main() -> None:
    out, *paths = sys.argv[1:]
    excluded: tuple[str, ...] = ()
    if "-x" in paths:
        at = paths.index("-x")
        paths, excluded = paths[:at], tuple(paths[at + 1 :])
    blobs = Path(out, "blobs", "sha256")
    blobs.mkdir(parents=True)

    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        kind = member.isfile() or member.isdir() or member.issym() or member.islnk()
        return None if not kind or f"/{member.name}".startswith(excluded) else member

    def put(document: object) -> tuple[str, int]:
        data = json.dumps(document).encode()
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        return f"sha256:{name}", len(data)

    with Path(out, "layer").open("wb", buffering=1 << 20) as file:
        layer = _Hashed(file)
        with tarfile.open(fileobj=layer, mode="w|", bufsize=1 << 20) as tar:  # type: ignore[call-overload]
            for path in paths:
                tar.add(path, filter=wanted)
    name = layer.hash.hexdigest()
    Path(out, "layer").rename(blobs / name)
    environment = [f"PATH={os.environ['PATH']}", "LANG=C.UTF-8"]
    layers = {"type": "layers", "diff_ids": [f"sha256:{name}"]}
    config, config_bytes = put(
        {"architecture": "amd64", "os": "linux", "config": {"Env": environment}, "rootfs": layers, "history": []}
    )
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_TYPE}.manifest.v1+json",
        "config": {"mediaType": f"{_TYPE}.config.v1+json", "digest": config, "size": config_bytes},
        "layers": [{"mediaType": f"{_TYPE}.layer.v1.tar", "digest": f"sha256:{name}", "size": layer.size}],
    }
    digest, size = put(manifest)
    entry = {"mediaType": manifest["mediaType"], "digest": digest, "size": size}
    Path(out, "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    Path(out, "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


if __name__ == "__main__":
    main()
