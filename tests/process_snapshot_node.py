"""Nodes with a cache each, which keep, share and fetch process snapshots."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from bootseer.artifact.places import processes_folder
from bootseer.artifact.process_snapshots import ProcessSnapshot, machine_key, process_name
from bootseer.artifact.signatures import UNSIGNED, Signatures

DIGEST = "sha256:" + "ab" * 32
WORKLOAD = "train.py-0123456789ab"
NAME = process_name(DIGEST, f"{WORKLOAD}-{machine_key()}")


class Node:
    """A node with a cache of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: list[str] = []
        self.path = processes_folder(root) / WORKLOAD
        self.into = root / "restored"
        self.snapshot = ProcessSnapshot(self.path, self.into, self.said.append)

    def fetch(self, uri: str, signatures: Signatures = UNSIGNED, **changes: Any) -> ProcessSnapshot:
        usual = {"digest": DIGEST, "workload": WORKLOAD, "publish": True}
        self.snapshot.fetch(store_uri=uri, plain_http=False, signatures=signatures, **{**usual, **changes})
        return self.snapshot

    def unpacked(self) -> dict[str, bytes] | None:
        self.root.mkdir(exist_ok=True, parents=True)
        if not self.snapshot.unpack():
            return None
        found = {path.name: path.read_bytes() for path in self.into.iterdir()}
        shutil.rmtree(self.into)
        return found


def folder_of(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder
